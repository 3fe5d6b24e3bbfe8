"""The training loss: ``mean |a - a_hat|^2 + eta * sum_l mean(J_l^2)``.

Axes: B batch, K context steps, A action.
"""

from typing import NamedTuple

from torch import Tensor

from primal_dt.data.sampler import Batch
from primal_dt.model.transformer import ModelOutput

__all__ = ["LossTerms", "loss_terms"]


class LossTerms(NamedTuple):
    """The loss and its terms, as scalars on the device."""

    total: Tensor
    """``action_mse + eta * penalty``."""
    action_mse: Tensor
    """Mean squared error over the entries of valid actions."""
    penalty: Tensor
    """``sum_l mean(J_l^2)``, with means over sequences; zero if no layer has a J."""
    objectives: dict[int, Tensor]
    """Layer index -> mean of J over sequences."""


def loss_terms(
    output: ModelOutput,
    batch: Batch,
    *,
    eta: float,
    num_valid: Tensor | None = None,
    num_sequences: int | None = None,
) -> LossTerms:
    """Compute the loss of a batch, or the contribution of a part of a batch.

    Args:
        output: the model's output, with objectives unless eta is zero.
        batch: the model's input, with the actions to predict.
        eta: weight of the KSVD penalty.
        num_valid: number of valid steps in the *whole* batch, if ``batch`` is a part of it. The terms of all parts then
            add up to those of the whole batch.
        num_sequences: number of sequences in the whole batch, if ``batch`` is a part of it.
    """
    steps = batch.valid.sum() if num_valid is None else num_valid
    sequences = len(batch.valid) if num_sequences is None else num_sequences
    # Padding counts neither in the sum nor in its denominator. It is replaced, not multiplied by zero: it may be NaN.
    error = (output.actions - batch.actions).masked_fill(~batch.valid[..., None], 0.0)  # (B, K, A)
    action_mse = error.square().sum() / (steps * batch.actions.shape[-1])
    penalty = action_mse.new_zeros(())
    for objective in output.objectives.values():
        penalty = penalty + objective.square().sum() / sequences
    means = {layer: objective.detach().sum() / sequences for layer, objective in output.objectives.items()}
    return LossTerms(action_mse + eta * penalty, action_mse, penalty, means)
