"""What training minimizes: ``mean |a - a_hat|^2 + eta * sum_l mean(J_l^2)``.

Axes: B batch, K context steps, A action.
"""

from typing import NamedTuple

from torch import Tensor

from primal_dt.data.sampler import Batch
from primal_dt.model.transformer import ModelOutput

__all__ = ["LossTerms", "loss_terms"]


class LossTerms(NamedTuple):
    """The loss and what it is made of: scalars, on the device."""

    total: Tensor
    """``action_mse + eta * penalty``."""
    action_mse: Tensor
    """Mean squared error over the entries of valid actions."""
    penalty: Tensor
    """``sum_l mean(J_l^2)``, the mean over sequences; zero if no layer has a J."""
    objectives: dict[int, Tensor]
    """Layer -> mean of J."""


def loss_terms(
    output: ModelOutput,
    batch: Batch,
    *,
    eta: float,
    num_valid: Tensor | None = None,
    num_sequences: int | None = None,
) -> LossTerms:
    """The loss of a batch, or the share of a part of it.

    Args:
        output: what the model says, with objectives unless eta is zero.
        batch: what it was asked.
        eta: weight of the KSVD penalty.
        num_valid: how many steps of the *whole* batch are valid, if this is a part of one: then the terms of all parts
            add up to those of the whole.
        num_sequences: how many sequences the whole batch has.
    """
    steps = batch.valid.sum() if num_valid is None else num_valid
    sequences = len(batch.valid) if num_sequences is None else num_sequences
    # Padding is left out of the sum and of its denominator. It is replaced, not multiplied: it may be anything.
    error = (output.actions - batch.actions).masked_fill(~batch.valid[..., None], 0.0)  # (B, K, A)
    action_mse = error.square().sum() / (steps * batch.actions.shape[-1])
    penalty = action_mse.new_zeros(())
    for objective in output.objectives.values():
        penalty = penalty + objective.square().sum() / sequences
    means = {layer: objective.detach().sum() / sequences for layer, objective in output.objectives.items()}
    return LossTerms(action_mse + eta * penalty, action_mse, penalty, means)
