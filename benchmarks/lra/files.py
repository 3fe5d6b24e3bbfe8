"""Readers of the Long-Range Arena's standard files: Image, Pathfinder, Retrieval and Text.

Image is CIFAR-10 in its binary version (``data_batch_1.bin`` to ``data_batch_5.bin``, ``test_batch.bin``). Each picture
is 1,024 gray pixels in reading order. CIFAR-10's Python version is not used: it consists of pickles, which can run code
when they are loaded.

Pathfinder is the folder ``pathfinder32/curv_contour_length_14`` of the arena's release: PNG images of 32 x 32 pixels,
and lists of them with their labels (``metadata/*.npy``). The lists are plain text in spite of their name. They are
never given to ``np.load``.

Retrieval is the folder ``tsv_data`` of the release, with pairs of papers of the ACL Anthology Network. Text is the IMDb
reviews as published (``train/pos/*.txt`` and so on). Both have one token per byte.
"""

import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator
from io import BytesIO
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from benchmarks.batches import Sequences
from benchmarks.images.data import central_view, load_splits

__all__ = ["MAX_BYTES", "TRAINING_FILES", "load_image", "load_pathfinder", "load_retrieval", "load_text"]

SIDE = 32
PIXELS = SIDE * SIDE
IMAGE_CLASSES, PICTURE_BYTES = 10, 3 * PIXELS
TRAINING_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
VALIDATION_PICTURES = 5_000
GRAY = np.array([0.299, 0.587, 0.114])
"""Weights of red, green and blue (ITU-R BT.601)."""
MAX_BYTES = 4_000
"""Published length of a document in bytes. The rest of a longer one is cut off."""
TEXT_CLASSES = ("neg", "pos")
PAIR_FILES = {
    split: f"new_aan_pairs.{name}.tsv" for split, name in (("train", "train"), ("validation", "eval"), ("test", "test"))
}
PAIR_FIELDS = ("label", "id1", "id2", "text1", "text2")
CONTOURS = "curv_contour_length_14"
BINARY_LABELS = {b"0": 0, b"0.0": 0, b"1": 1, b"1.0": 1}

Parsed = TypeVar("Parsed")


def _sequences(tokens: Iterable[np.ndarray], labels: np.ndarray) -> Sequences:
    return Sequences([torch.from_numpy(one) for one in tokens], torch.from_numpy(labels))


def load_image(folder: Path) -> dict[str, Sequences]:
    """Load CIFAR-10's training files, with the last 5,000 pictures as the validation split, and its test file.

    Or folders of pictures, train/CLASS and test/CLASS, with a tenth of the training pictures as the validation split.

    Raises:
        ValueError: if a file is missing or in another format.
    """
    if (folder / "train").is_dir():
        return _picture_folders(folder)
    training = [_pictures(folder / name) for name in TRAINING_FILES]
    pixels = np.concatenate([pixels for pixels, _ in training])
    labels = np.concatenate([labels for _, labels in training])
    first = len(labels) - min(VALIDATION_PICTURES, len(labels) // 10)  # the first validation picture
    test_pixels, test_labels = _pictures(folder / "test_batch.bin")
    return {
        "train": _sequences(pixels[:first], labels[:first]),
        "validation": _sequences(pixels[first:], labels[first:]),
        "test": _sequences(test_pixels, test_labels),
    }


def _picture_folders(folder: Path) -> dict[str, Sequences]:
    splits = load_splits(folder)
    if len(splits[0].classes) != IMAGE_CLASSES:
        raise ValueError(
            f"{folder / 'train'} must have CIFAR-10's {IMAGE_CLASSES} classes, not {len(splits[0].classes)}"
        )
    training, test = (
        (
            np.stack([np.asarray(central_view(split.image(row), SIDE)) for row in range(len(split.paths))]),
            split.labels.numpy(),
        )
        for split in splits
    )
    pixels, test_pixels = (_gray(colors.reshape(-1, PIXELS, 3).transpose(0, 2, 1)) for colors, _ in (training, test))
    order = np.random.default_rng(0).permutation(len(pixels))  # the files are sorted by class
    first = len(order) - max(1, len(order) // 10)
    chosen = {"train": order[:first], "validation": order[first:]}
    found = {split: _sequences(pixels[rows], training[1][rows]) for split, rows in chosen.items()}
    return {**found, "test": _sequences(test_pixels, test[1])}


def _gray(colors: np.ndarray) -> np.ndarray:
    """Colors (number, 3, 1024) uint8 -> gray (number, 1024) uint8."""
    return np.rint(np.einsum("c,ncp->np", GRAY, colors)).astype(np.uint8)


def _pictures(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read gray pixels, (number, 1024) uint8, and classes."""
    if not path.is_file():
        raise ValueError(f"{path} is missing: the folder must contain the .bin files of CIFAR-10's binary version")
    data = np.fromfile(path, np.uint8)
    if len(data) == 0 or len(data) % (1 + PICTURE_BYTES):
        raise ValueError(
            f"{path} is not one of CIFAR-10's binary files: it has {len(data):,} bytes, not a multiple of 3,073"
        )
    rows = data.reshape(-1, 1 + PICTURE_BYTES)
    labels = rows[:, 0].astype(np.int64)
    if labels.max() >= IMAGE_CLASSES:
        raise ValueError(f"{path} is not one of CIFAR-10's binary files: it has a class {labels.max()}, not 0 to 9")
    return _gray(rows[:, 1:].reshape(-1, 3, PIXELS)), labels


def load_text(folder: Path) -> dict[str, Sequences]:
    """Load the IMDb reviews: 25,000 for training, a tenth of which is the validation split, and 25,000 for testing.

    Each review is cut to 4,000 bytes.

    Raises:
        ValueError: if a folder of reviews is missing or empty.
    """
    (tokens, labels), test = _reviews(folder / "train"), _reviews(folder / "test")
    order = np.random.default_rng(0).permutation(len(labels))  # the files are sorted by class
    held_back = max(1, len(order) // 10)

    def choose(rows: np.ndarray) -> Sequences:
        return _sequences([tokens[row] for row in rows], labels[rows])

    return {"train": choose(order[held_back:]), "validation": choose(order[:held_back]), "test": _sequences(*test)}


def _reviews(folder: Path) -> tuple[list[np.ndarray], np.ndarray]:
    """Read the bytes of the reviews of a split, and their labels: 1 for positive."""
    tokens: list[np.ndarray] = []
    labels: list[int] = []
    for number, name in enumerate(TEXT_CLASSES):
        paths = sorted((folder / name).glob("*.txt"))
        if not paths:
            raise ValueError(
                f"{folder / name} has no reviews: --folder must be the folder that the IMDb archive unpacks to"
            )
        for path in paths:
            tokens.append(np.frombuffer(_cut(path.read_bytes()), np.uint8).copy())
            labels.append(number)
    return tokens, np.array(labels, np.int64)


def _cut(text: bytes) -> bytes:
    """Cut a document to the published length. An empty document becomes a space: a sequence has at least one token."""
    return text[:MAX_BYTES] or b" "


def load_retrieval(folder: Path) -> dict[str, Sequences]:
    """Load pairs of papers and whether one cites the other: 147,086 for training, 18,090 to validate, 17,437 to test.

    Each paper is cut to 4,000 bytes. The text is taken as it stands in the file, where it looks like ``b'...'``.
    A paper occurs in many pairs, and all of them share its tensor.

    Args:
        folder: ``tsv_data`` of the release, with ``new_aan_pairs.train.tsv``, ``.eval.tsv`` and ``.test.tsv``.

    Raises:
        ValueError: if a file is missing, empty or in another format.
    """
    paths = {split: folder / name for split, name in PAIR_FILES.items()}
    for path in paths.values():
        if not path.is_file():
            raise ValueError(f"{path} is missing: the folder must contain {', '.join(PAIR_FILES.values())}")
    papers: dict[bytes, Tensor] = {}
    return {split: _pairs(path, papers) for split, path in paths.items()}


def _pairs(path: Path, papers: dict[bytes, Tensor]) -> Sequences:
    """Read the pairs of a split.

    Args:
        path: the split's file.
        papers: text -> its tokens. Papers that are not in it are added.
    """
    labels: list[int] = []
    documents: tuple[list[Tensor], list[Tensor]] = [], []  # the first and the second of each pair
    for label, *texts in _parse_lines(path, _parse_pair):
        labels.append(label)
        for text, column in zip(texts, documents, strict=True):
            if text not in papers:
                papers[text] = torch.from_numpy(np.frombuffer(text, np.uint8).copy())
            column.append(papers[text])
    if not labels:
        raise ValueError(f"{path} has no pairs: each line must be one pair")
    return Sequences(documents[0], torch.tensor(labels), documents[1])


def _parse_pair(line: bytes) -> tuple[int, bytes, bytes]:
    """Parse a line of a file of pairs: label, first document, second document."""
    fields = line.rstrip(b"\r\n").split(b"\t")  # raw fields: a quote is an ordinary character
    if len(fields) != len(PAIR_FIELDS):
        raise ValueError(
            f"the number of tab-separated fields ({len(fields)}) must be {len(PAIR_FIELDS)}: {', '.join(PAIR_FIELDS)}"
        )
    label, _, _, first, second = fields
    return _parse_label(label), _cut(first), _cut(second)


def load_pathfinder(folder: Path) -> dict[str, Sequences]:
    """Load Pathfinder: the first 80 % of the images for training, the next 10 % to validate, the last 10 % to test.

    These are the shares of the arena's own pipeline. The images are in the order of their lists, and the lists in the
    order of their numbers. Image files of 0 bytes are skipped, as in the pipeline: the release has at least one.

    Args:
        folder: ``pathfinder32`` of the release, or ``curv_contour_length_14`` in it.

    Raises:
        ValueError: if the folder has no lists or fewer than 10 images, or if a list or an image cannot be read.
    """
    if importlib.util.find_spec("PIL") is None:
        raise ValueError("reading PNG images needs pillow: pip install -c constraints.txt -e '.[benchmarks]'")
    folder = folder / CONTOURS if (folder / CONTOURS).is_dir() else folder
    pixels, labels = bytearray(), []
    for path in _metadata_files(folder):
        for label, image in _parse_lines(path, lambda line: _parse_image(line, folder)):
            if image is not None:
                pixels += image
                labels.append(label)
    number = len(labels)
    if number < 10:
        raise ValueError(f"{folder}: the number of images ({number}) must be at least 10, so that no split is empty")
    tokens, classes = np.frombuffer(pixels, np.uint8).reshape(number, PIXELS), np.array(labels, np.int64)
    first, second = number * 8 // 10, number * 9 // 10  # the first images to validate and to test
    rows = {"train": slice(first), "validation": slice(first, second), "test": slice(second, number)}
    return {split: _sequences(tokens[part], classes[part]) for split, part in rows.items()}


def _metadata_files(folder: Path) -> list[Path]:
    """Lists of images in a folder, sorted by their numbers."""
    paths = list((folder / "metadata").glob("*.npy"))
    if not paths:
        raise ValueError(
            f"{folder / 'metadata'} has no .npy files: the folder must be pathfinder32 of the release, or {CONTOURS}"
        )
    if wrong := [path for path in paths if not path.stem.isdecimal()]:
        raise ValueError(f"{wrong[0]} must have a number as its name: the lists are read in the order of their numbers")
    return sorted(paths, key=lambda path: int(path.stem))


def _parse_image(line: bytes, folder: Path) -> tuple[int, bytes | None]:
    """Parse a line of a list and read its image: label, and 1,024 pixels or None if the image's file is empty."""
    fields = line.split()
    if len(fields) < 4:
        raise ValueError(
            f"the number of fields ({len(fields)}) must be at least 4: folder, file name, number, label (as text)"
        )
    label, place = _parse_label(fields[3]), Path(os.fsdecode(fields[0]), os.fsdecode(fields[1]))
    if place.anchor or ".." in place.parts:
        raise ValueError(
            f"the image's path ({str(place)!r}) must be relative, without '..': images are inside the folder"
        )
    path = folder / place
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): each line must name an image") from error
    return label, _decode_png(content, path) if content else None


def _decode_png(content: bytes, path: Path) -> bytes:
    """Decode a PNG image to gray pixels in reading order."""
    from PIL import Image

    try:
        with Image.open(BytesIO(content), formats=("PNG",)) as image:
            size, pixels = image.size, image.convert("L").tobytes() if image.size == (SIDE, SIDE) else b""
    except Exception as error:  # PIL raises exceptions of many types for a damaged file
        raise ValueError(f"{path} cannot be read as a PNG image: {error}") from error
    if not pixels:
        raise ValueError(f"{path} has {size[0]} x {size[1]} pixels, not {SIDE} x {SIDE}")
    return pixels


def _parse_label(text: bytes) -> int:
    if text not in BINARY_LABELS:
        raise ValueError(f"the label ({os.fsdecode(text[:20])!r}) must be 0 or 1")
    return BINARY_LABELS[text]


def _parse_lines(path: Path, parse: Callable[[bytes], Parsed]) -> Iterator[Parsed]:
    """Parse a file line by line, with one line at a time in memory. Errors name the file and the line."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                parsed = parse(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
            yield parsed
