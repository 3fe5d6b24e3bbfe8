"""Perplexity of a language model on a stream of tokens.

Axes: B blocks, L tokens, D width, V words.
"""

from collections.abc import Iterator
from itertools import groupby, islice
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.language.data import inputs_of
from benchmarks.language.model import LanguageModel
from benchmarks.step import ONE_PROCESS, total_over
from primal_dt.training.distributed import Processes

__all__ = ["perplexity"]

BATCH_TOKENS = 8_192
"""Tokens that are evaluated together."""
SLICE_SCORES = 1 << 24
"""Scores of words that are in memory at once."""


class Span(NamedTuple):
    """A block of a stream, and its past."""

    first: int
    """The first token that the model sees."""
    scored: int
    """The first token that is scored."""
    end: int
    """One after the last token."""

    @property
    def lengths(self) -> tuple[int, int]:
        """Number of tokens that are seen and that are scored."""
        return self.end - self.first, self.end - self.scored


def spans(number: int, length: int, window: int) -> Iterator[Span]:
    """Blocks that score each of ``number`` tokens once, as fairseq's ``--context-window`` does.

    Each has at most ``length`` tokens. Its first ``window`` ones are the end of the block before and are not scored.
    """
    for scored in range(0, number, length - window):
        yield Span(max(0, scored - window), scored, min(scored + length - window, number))


@torch.inference_mode()
def perplexity(
    model: LanguageModel, stream: Tensor, *, length: int, window: int = 0, processes: Processes = ONE_PROCESS
) -> float:
    """``exp`` of the mean negative log-likelihood of all tokens, ``<eos>`` included. Processes take batches in turn.

    Args:
        model: the language model.
        stream: (number of tokens,), the tokens in reading order.
        length: the number of tokens of a block.
        window: how many of them are not scored, because they repeat the end of the block before. So each token is
            predicted from ``window + 1`` to ``length`` tokens before it, from fewer at the start of the stream.
        processes: the processes that share the work.
    """
    model.eval()
    size = max(1, BATCH_TOKENS // length)
    batches = islice(_batches(stream, length, window, size), processes.rank, None, processes.count)
    sums = [torch.zeros((), device=processes.device)]
    sums += [_loss(model, inputs.to(processes.device), labels.to(processes.device)) for inputs, labels in batches]
    model.train()
    return float((total_over(sums, processes).double() / len(stream)).exp())


def _batches(stream: Tensor, length: int, window: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Blocks of one length together: inputs (B, L), and the labels of the last tokens of each."""
    for _, group in groupby(spans(len(stream), length, window), key=lambda span: span.lengths):
        while chosen := list(islice(group, size)):
            inputs = torch.stack([inputs_of(stream, span.first, span.end) for span in chosen])
            labels = torch.stack([stream[span.scored : span.end] for span in chosen])
            yield inputs.long(), labels.long()


def _loss(model: LanguageModel, inputs: Tensor, labels: Tensor) -> Tensor:
    """The negative log-likelihood of the labels, summed. The scores of only some tokens are in memory at once."""
    features = model.features(inputs)[0][:, -labels.shape[1] :].flatten(0, 1)
    rows = max(1, SLICE_SCORES // model.shape.num_words)
    parts = zip(features.split(rows), labels.flatten().split(rows), strict=True)
    return torch.stack([F.cross_entropy(model.score(part), label, reduction="sum") for part, label in parts]).sum()
