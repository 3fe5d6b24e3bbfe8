"""The training loss: the actions' error, the KSVD penalty and, where the model predicts returns, their error.

``mean |a - a_hat|^2 + eta * mean_l mean(J_l^2)``. With ``action_loss="gaussian"`` the first term is the negative
log-likelihood ``mean (|a - a_hat|^2 / (2 std^2) + log std)``, which weighs each error by the inverse of its predicted
variance. For actions that are choices it is the negative log-likelihood of the choices, the cross-entropy. With
``conditioning="max-return"`` the expectile loss of the predicted returns-to-go is added.

Axes: B batch, K context steps, A action.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from primal_dt.attention.ksvd import PenaltyReduction, reduce_layers
from primal_dt.data.sampler import Batch
from primal_dt.model.transformer import ModelOutput

__all__ = ["LossTerms", "Objective", "expectile_loss", "loss_terms"]


@dataclass(frozen=True)
class Objective:
    """The weights and constants of the loss."""

    eta: float = 0.05
    """Weight of the KSVD penalty."""
    penalty: PenaltyReduction = "mean"
    """How the penalties of several layers are combined: ``mean``, as published, or ``sum``, as in the paper."""
    expectile: float = 0.99
    """The expectile of predicted returns-to-go: 0.5 is the mean, 1 the maximum."""
    return_size: float = 1.0
    """Mean absolute return-to-go of the data, scaled: the unit of errors of predicted returns-to-go."""


class LossTerms(NamedTuple):
    """The loss and its terms, as scalars on the device."""

    total: Tensor
    """The loss."""
    action_mse: Tensor
    """Mean squared error over the entries of valid actions; for choices, of their probabilities."""
    penalty: Tensor
    """``mean_l mean(J_l^2)`` over layers l and sequences, or the sum over layers; zero if no layer has a J."""
    objectives: dict[int, Tensor]
    """Layer index -> mean of J over sequences."""
    action_nll: Tensor | None = None
    """Mean negative log-likelihood over the entries of valid actions; of continuous ones without its constant."""
    return_loss: Tensor | None = None
    """Expectile loss of predicted returns-to-go."""
    guidance: Tensor | None = None
    """Term of value guidance, which the trainer adds."""
    policy_value: Tensor | None = None
    """Mean value of the predicted actions, in the units of rewards."""

    def scalars(self) -> dict[str, Tensor]:
        """The terms by the names under which they are logged."""
        terms = {"train/loss": self.total, "train/action_mse": self.action_mse, "train/penalty": self.penalty}
        terms |= {f"train/J/layer_{layer}": value for layer, value in self.objectives.items()}
        more = {"train/action_nll": self.action_nll, "train/return_loss": self.return_loss}
        more |= {"train/guidance": self.guidance, "critic/policy_value": self.policy_value}
        return terms | {name: value for name, value in more.items() if value is not None}


def expectile_loss(errors: Tensor, expectile: float) -> Tensor:
    """``|tau - 1(u < 0)| u^2`` of errors ``u = true - predicted``; its mean is least at the expectile tau."""
    return torch.where(errors < 0, 1 - expectile, expectile) * errors.square()


def loss_terms(
    output: ModelOutput,
    batch: Batch,
    objective: Objective,
    *,
    num_valid: Tensor | None = None,
    num_sequences: int | None = None,
) -> LossTerms:
    """Compute the loss of a batch, or the contribution of a part of a batch.

    Args:
        output: the model's output, with J of the layers unless eta is zero.
        batch: the model's input, with the actions to predict.
        objective: the weights of the loss.
        num_valid: number of valid steps in the *whole* batch, if ``batch`` is a part of it. The terms of all parts then
            add up to those of the whole batch.
        num_sequences: number of sequences in the whole batch, if ``batch`` is a part of it.
    """
    steps = batch.valid.sum() if num_valid is None else num_valid
    sequences = len(batch.valid) if num_sequences is None else num_sequences
    # Padding counts neither in sums nor in their denominators. It is replaced, not multiplied by zero: it may be NaN.
    padding = ~batch.valid[..., None]  # (B, K, 1)
    actions = batch.actions if output.encoded is None else output.encoded
    error = (output.actions - actions).masked_fill(padding, 0.0)  # (B, K, F)
    action_mse = error.square().sum() / (steps * error.shape[-1])
    total, action_nll, return_loss = action_mse, None, None
    if output.log_std is not None:
        log_std = output.log_std.masked_fill(padding, 0.0)
        nll = 0.5 * (error * torch.exp(-log_std)).square() + log_std
        total = action_nll = nll.sum() / (steps * error.shape[-1])
    if output.logits:
        entries = zip(output.logits, batch.actions.masked_fill(padding, 0.0).long().unbind(-1), strict=True)
        nlls = [F.cross_entropy(logits.mT, choice, reduction="none") for logits, choice in entries]  # (B, K) each
        total = action_nll = torch.stack(nlls, dim=-1).masked_fill(padding, 0.0).sum() / (steps * len(nlls))
    if output.best_returns is not None:
        missed = (batch.returns_to_go - output.best_returns).masked_fill(padding, 0.0)  # (B, K, 1)
        return_loss = expectile_loss(missed / objective.return_size, objective.expectile).sum() / steps
        total = total + return_loss
    penalty = action_mse.new_zeros(())
    if output.objectives:
        layers = [values.square().sum() / sequences for values in output.objectives.values()]
        penalty = reduce_layers(torch.stack(layers), objective.penalty)
    means = {layer: values.detach().sum() / sequences for layer, values in output.objectives.items()}
    return LossTerms(total + objective.eta * penalty, action_mse, penalty, means, action_nll, return_loss)
