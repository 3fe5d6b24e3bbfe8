"""Training and testing of a classifier of sequences, whatever the sequences are.

Axes: B batch, L tokens.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.encoder import Encoder, classification_loss

__all__ = ["LabelledBatch", "Losses", "accuracy", "update"]


class LabelledBatch(NamedTuple):
    """Sequences of one length, padded, and their classes."""

    x: Tensor
    """(B, L, ...), what the encoder's embedding takes."""
    valid: Tensor | None
    """(B, L) bool, True for real tokens; None if all are."""
    labels: Tensor
    """(B,) int64."""


class Losses(NamedTuple):
    """Of one update, on the device."""

    total: Tensor
    penalty: Tensor
    """``sum_l mean(J_l^2)``."""
    correct: Tensor
    """How many of the batch were classified as they should be."""


def update(
    model: Encoder,
    optimizer: torch.optim.Optimizer,
    batch: LabelledBatch,
    *,
    eta: float,
    after_step: Callable[[], object] = lambda: None,
) -> Losses:
    """One step of training."""
    output = model(batch.x, batch.valid, with_objective=eta > 0)
    loss = classification_loss(output, batch.labels, eta=eta)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    after_step()
    penalty = sum((objective.detach().square().mean() for objective in output.objectives), loss.new_zeros(()))
    correct = (output.logits.detach().argmax(-1) == batch.labels).sum()
    return Losses(loss.detach(), penalty, correct)


CLIP = 4.0
"""The gradient's norm is kept at or below it: far above what is usual, against accidents."""


@torch.inference_mode()
def accuracy(model: Encoder, batches: Iterable[LabelledBatch]) -> float:
    """The share of sequences that get their class, in percent."""
    model.eval()
    correct = total = 0
    for batch in batches:
        correct += int((model(batch.x, batch.valid).logits.argmax(-1) == batch.labels).sum())
        total += len(batch.labels)
    model.train()
    return 100 * correct / total
