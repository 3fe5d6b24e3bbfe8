"""Measurements of a model on fixed windows during training: the error on held-out episodes, and whether it listens.

Axes: B batch, K context steps, A action.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from primal_dt.data.sampler import Batch
from primal_dt.model.transformer import DecisionTransformer

__all__ = ["Validation", "action_mse", "return_sensitivity"]


@dataclass(frozen=True)
class Validation:
    """The windows and returns-to-go to measure a model with."""

    probe: Batch
    """Windows of held-out episodes if there are any, else of the training's."""
    returns: tuple[float, float]
    """The 10th and the 90th percentile of the data's returns-to-go, scaled."""
    best: Batch | None = None
    """Windows of the best tenth of the held-out episodes, if there are any."""

    def scalars(self, model: DecisionTransformer) -> dict[str, float]:
        """Measure a model. Returns the values by the names under which they are logged."""
        values = {}
        if model.shape.conditioning != "none":
            values["train/return_sensitivity"] = return_sensitivity(model, self.probe, *self.returns)
        if self.best is not None:
            values["valid/action_mse"] = action_mse(model, self.probe)
            values["valid/action_mse_best"] = action_mse(model, self.best)
        return values


def action_mse(model: DecisionTransformer, batch: Batch) -> float:
    """The mean squared error over the entries of valid actions."""
    with _evaluating(model):
        errors = model(batch).actions - model.action_space.encode(batch.actions)
    return float(errors[batch.valid].square().mean())


def return_sensitivity(model: DecisionTransformer, batch: Batch, low: float, high: float) -> float:
    """``sqrt(mean |a(high) - a(low)|^2 / var(a))``: how far the actions move with the return-to-go.

    Args:
        model: the model, conditioned on returns-to-go.
        batch: windows of the data. All their returns-to-go are set to ``low``, then to ``high``.
        low: a return-to-go, scaled.
        high: another one.
    """
    with _evaluating(model):
        one, two = (
            model(replace(batch, returns_to_go=torch.full_like(batch.returns_to_go, value))).actions[batch.valid]
            for value in (low, high)
        )  # (steps, A) each
    variance = model.action_space.encode(batch.actions)[batch.valid].var(0, correction=0).mean()
    return float(((two - one).square().mean() / variance.clamp(min=1e-12)).sqrt())


@contextmanager
def _evaluating(model: DecisionTransformer) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
