"""WikiText's standard files as streams of words, and the blocks of a stream that a language model trains on.

Words are what stands between white space. As in fairseq's preprocessing, each line ends with ``<eos>``, so an empty
line is one ``<eos>``. The vocabulary is ``<eos>``, ``<unk>``, and all words of the training split, the most frequent
first; words that are equally frequent are in the order of their first appearance. Other words of the other splits are
``<unk>``. (fairseq's vocabulary has two more symbols that no text contains, and fillers up to a multiple of 8.)

Axes: B blocks, L tokens.
"""

import hashlib
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.batches import LabeledBatch
from envs.datasets.cache import cache_folder
from primal_dt.system.files import atomic_write, file_digest
from primal_dt.system.records import dump_record, parse_record

__all__ = ["EOS", "FILES", "SPLITS", "UNK", "Blocks", "Corpus", "fingerprint", "load_corpus"]

SPLITS = ("train", "valid", "test")
FILES = {split: f"wiki.{split}.tokens" for split in SPLITS}
"""Split -> its file."""
EOS, UNK = "<eos>", "<unk>"
TOKENS, INDEX = "tokens.npy", "index.json"
"""The cached files of a corpus: all tokens, and what they mean. The second is written last."""
VERSION = 1
"""Changes when the same files give other tokens."""


@dataclass(frozen=True)
class Corpus:
    """The splits of a text."""

    vocabulary: Sequence[str]
    """The words. A token is the index of its word."""
    streams: dict[str, Tensor]
    """Split -> its tokens in reading order, (number of tokens,) int32."""
    fingerprint: str
    """Identifies the files that it was read from."""

    @cached_property
    def _tokens(self) -> dict[str, int]:
        return {word: token for token, word in enumerate(self.vocabulary)}

    def encode(self, text: str) -> list[int]:
        """The tokens of the words of a text. Unknown words are ``<unk>``."""
        unknown = self._tokens[UNK]
        return [self._tokens.get(word, unknown) for word in text.split()]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some tokens: words with spaces between them, and line breaks instead of ``<eos>``."""
        words = ("\n" if self.vocabulary[token] == EOS else self.vocabulary[token] for token in tokens)
        return " ".join(words).replace(" \n", "\n").replace("\n ", "\n")


@dataclass(frozen=True)
class Blocks:
    """Blocks of consecutive tokens, which a model predicts from the tokens before them.

    Block i has tokens ``i L`` to ``(i + 1) L - 1`` as labels. Its input are the tokens before each of them; before the
    first token of the split, that is ``<eos>``. A shorter block at the end of the split is left out.
    """

    stream: Tensor
    length: int
    """L."""

    def __len__(self) -> int:
        return len(self.stream) // self.length

    def batch(self, rows: Sequence[int], device: torch.device) -> LabeledBatch:
        """Make a batch of some blocks: inputs and labels (B, L)."""
        spans = [(row * self.length, (row + 1) * self.length) for row in rows]
        inputs = torch.stack([inputs_of(self.stream, *span) for span in spans])
        labels = torch.stack([self.stream[first:last] for first, last in spans])
        return LabeledBatch(inputs.to(device).long(), None, labels.to(device).long())


def inputs_of(stream: Tensor, first: int, last: int) -> Tensor:
    """The tokens before those from ``first`` to ``last - 1``. Before the first one of a stream is ``<eos>``."""
    if first > 0:
        return stream[first - 1 : last - 1]
    return torch.cat((stream.new_zeros(1), stream[: last - 1]))  # token 0 is <eos>


def load_corpus(folder: Path) -> Corpus:
    """Load the three splits from WikiText's standard files, or from the cache if they have been read before.

    Raises:
        ValueError: if the folder or a file is missing or empty, or if a file is not UTF-8.
    """
    digest = fingerprint(folder)
    cache = cache_folder() / "language" / digest
    corpus = _read_cache(cache, digest)
    if corpus is None:
        corpus = _read_files(folder, digest)
        _write_cache(cache, corpus)
    return corpus


def fingerprint(folder: Path) -> str:
    """A digest of the contents of the three files.

    Raises:
        ValueError: if the folder or a file is missing.
    """
    names = ", ".join(FILES.values())
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder: --data must be a folder with {names}")
    paths = [folder / name for name in FILES.values()]
    for path in paths:
        if not path.is_file():
            raise ValueError(f"{path} is missing: the folder must contain {names}")
    return hashlib.sha256(f"{VERSION} {[file_digest(path) for path in paths]}".encode()).hexdigest()[:16]


def _read_files(folder: Path, digest: str) -> Corpus:
    numbers: defaultdict[str, int] = defaultdict()  # word -> number in the order of first appearance
    numbers.default_factory = numbers.__len__
    special = [numbers[EOS], numbers[UNK]]
    training = _read(folder / FILES["train"], numbers.__getitem__)
    counts = np.bincount(training, minlength=len(numbers))
    counts[special] = len(training) + 1  # they come first
    order = np.argsort(-counts, kind="stable")
    tokens = np.empty(len(order), np.int32)
    tokens[order] = np.arange(len(order))  # number -> token
    known, unknown = dict(numbers), numbers[UNK]
    others = {split: _read(folder / FILES[split], lambda word: known.get(word, unknown)) for split in SPLITS[1:]}
    words = list(known)
    return Corpus(
        [words[number] for number in order],
        {split: torch.from_numpy(tokens[found]) for split, found in {"train": training, **others}.items()},
        digest,
    )


def _read(path: Path, number_of: Callable[[str], int]) -> np.ndarray:
    """The numbers of the words of a file, with one line of text in memory at a time."""
    numbers, empty = array("i"), True
    with path.open("rb") as file:
        for words in _lines(file, path):
            empty = empty and not words
            words.append(EOS)
            numbers.extend(map(number_of, words))
    if empty:
        raise ValueError(f"{path} is empty: it must contain text")
    return np.frombuffer(numbers, np.intc)


def _lines(file: Iterable[bytes], path: Path) -> Iterator[list[str]]:
    """The words of each line."""
    for number, line in enumerate(file, 1):
        try:
            words = line.decode().split()
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}, line {number}: it is not UTF-8 text ({error.reason})") from error
        yield words


def _write_cache(folder: Path, corpus: Corpus) -> None:
    with atomic_write(folder / TOKENS) as file:
        np.save(file, torch.cat(list(corpus.streams.values())).numpy(), allow_pickle=False)
    index = {
        "vocabulary": list(corpus.vocabulary),
        "lengths": {split: len(stream) for split, stream in corpus.streams.items()},
        "digest": file_digest(folder / TOKENS),
    }
    with atomic_write(folder / INDEX) as file:
        file.write(dump_record(index))


def _read_cache(folder: Path, digest: str) -> Corpus | None:
    """Read a cached corpus; None if there is none, or if a file of it is damaged."""
    if not (folder / INDEX).is_file() or not (folder / TOKENS).is_file():
        return None
    index = parse_record((folder / INDEX).read_bytes(), has_checksum=True)
    if index is None or index["digest"] != file_digest(folder / TOKENS):
        return None
    tokens = torch.from_numpy(np.load(folder / TOKENS, allow_pickle=False))
    parts = tokens.split([index["lengths"][split] for split in SPLITS])
    return Corpus(index["vocabulary"], dict(zip(SPLITS, parts, strict=True)), digest)
