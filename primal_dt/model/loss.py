"""The training loss: ``mean |a - a_hat|^2 + eta * mean_l mean(J_l^2)``.

Axes: B batch, K context steps, A action.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from primal_dt.attention.ksvd import PenaltyReduction, reduce_layers
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
    """``mean_l mean(J_l^2)`` over layers l and sequences, or the sum over layers; zero if no layer has a J."""
    objectives: dict[int, Tensor]
    """Layer index -> mean of J over sequences."""


def loss_terms(
    output: ModelOutput,
    batch: Batch,
    *,
    eta: float,
    penalty: PenaltyReduction = "mean",
    num_valid: Tensor | None = None,
    num_sequences: int | None = None,
) -> LossTerms:
    """Compute the loss of a batch, or the contribution of a part of a batch.

    Args:
        output: the model's output, with objectives unless eta is zero.
        batch: the model's input, with the actions to predict.
        eta: weight of the KSVD penalty.
        penalty: how the penalties of several layers are combined: ``mean``, as published, or ``sum``, as in the paper.
        num_valid: number of valid steps in the *whole* batch, if ``batch`` is a part of it. The terms of all parts then
            add up to those of the whole batch.
        num_sequences: number of sequences in the whole batch, if ``batch`` is a part of it.
    """
    steps = batch.valid.sum() if num_valid is None else num_valid
    sequences = len(batch.valid) if num_sequences is None else num_sequences
    # Padding counts neither in the sum nor in its denominator. It is replaced, not multiplied by zero: it may be NaN.
    error = (output.actions - batch.actions).masked_fill(~batch.valid[..., None], 0.0)  # (B, K, A)
    action_mse = error.square().sum() / (steps * batch.actions.shape[-1])
    total_penalty = action_mse.new_zeros(())
    if output.objectives:
        squares = [objective.square().sum() / sequences for objective in output.objectives.values()]
        total_penalty = reduce_layers(torch.stack(squares), penalty)
    means = {layer: objective.detach().sum() / sequences for layer, objective in output.objectives.items()}
    return LossTerms(action_mse + eta * total_penalty, action_mse, total_penalty, means)
