"""Labeled batches of sequences, and the order in which a training sees its data.

Axes: B batch, L tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from primal_dt.training.trainer import mixed_seed

__all__ = ["EpochOrder", "LabeledBatch", "Sequences"]


class LabeledBatch(NamedTuple):
    """A batch of sequences, padded to one length, and what a model should say of them."""

    x: Tensor
    """(B, L, ...), the input of the model's embedding; (2B, L, ...) for pairs, the first of each pair first."""
    valid: Tensor | None
    """(B, L) or (2B, L) bool, True for real tokens; None if all tokens are real."""
    labels: Tensor
    """int64: the class of each sequence (B,) or of each token (B, L). Floating point: the classes' shares (B, C)."""


@dataclass(frozen=True)
class Sequences:
    """Sequences and their classes."""

    tokens: Sequence[Tensor]
    """One tensor per sequence: (L,) uint8 for symbols, (L, channels) for a time series."""
    labels: Tensor
    """(number of sequences,) int64."""
    others: Sequence[Tensor] | None = None
    """The second sequence of each pair, if the task is to compare two sequences."""

    def batch(self, rows: Sequence[int], device: torch.device) -> LabeledBatch:
        """Make a batch of the sequences at ``rows``, padded on the right to the longest of them.

        Pairs take two rows of the batch: all first sequences come before all second ones.
        """
        chosen = [self.tokens[row] for row in rows]
        if self.others is not None:
            chosen += [self.others[row] for row in rows]
        lengths = torch.tensor([len(tokens) for tokens in chosen])
        x = nn.utils.rnn.pad_sequence(chosen, batch_first=True)
        x = x if x.is_floating_point() else x.long()
        valid = None if bool((lengths == x.shape[1]).all()) else torch.arange(x.shape[1]) < lengths[:, None]
        return LabeledBatch(
            x.to(device), None if valid is None else valid.to(device), self.labels[list(rows)].to(device)
        )

    def batches(self, size: int, device: torch.device, order: Sequence[int] | None = None) -> Iterator[LabeledBatch]:
        """Iterate over all sequences in batches of ``size``, in the given order or as stored."""
        order = range(len(self.tokens)) if order is None else order
        for first in range(0, len(order), size):
            yield self.batch(order[first : first + size], device)

    @property
    def longest(self) -> int:
        """Length of the longest sequence, in tokens."""
        return max(len(tokens) for tokens in (*self.tokens, *(self.others or ())))


@dataclass
class EpochOrder:
    """The rows of each training step: every epoch is a new permutation, a function of the seed and the epoch."""

    number: int
    """Number of rows."""
    size: int
    """Rows per step, over all processes. At most ``number`` are used."""
    seed: int
    keep_last: bool = False
    """Whether an epoch ends with an incomplete batch. Otherwise its rows are left out."""
    _epoch: tuple[int, list[int]] = field(default=(-1, []), init=False, repr=False)

    def __post_init__(self) -> None:
        if self.number < 1:
            raise ValueError("there is nothing to train on: the training split is empty")
        self.size = min(self.size, self.number)

    @property
    def steps_per_epoch(self) -> int:
        """Number of batches in an epoch."""
        return -(-self.number // self.size) if self.keep_last else self.number // self.size

    def rows(self, step: int) -> list[int]:
        """The rows of a step."""
        epoch, place = divmod(step, self.steps_per_epoch)
        if self._epoch[0] != epoch:
            generator = torch.Generator().manual_seed(mixed_seed(self.seed, epoch))
            self._epoch = epoch, torch.randperm(self.number, generator=generator).tolist()
        return self._epoch[1][place * self.size : (place + 1) * self.size]

    def shares(self, step: int, rank: int = 0, count: int = 1) -> Iterator[list[int]]:
        """The rows of one of ``count`` processes, from a step on, without end."""
        while True:
            yield self.rows(step)[rank::count]
            step += 1
