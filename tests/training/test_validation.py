"""Measurements during training: they equal a plain computation, and leave the model as it was."""

from dataclasses import replace

import pytest
import torch

from primal_dt.training.validation import Validation, action_mse, return_sensitivity
from tests.model.small import SHAPE, make_batch, random_model

MODEL = random_model(replace(SHAPE, dropout=0.5), 0.3, torch.float64)
BATCH = make_batch(6, 2, 4)


def test_the_error_is_that_of_valid_actions_without_dropout() -> None:
    MODEL.train()
    measured = action_mse(MODEL, BATCH)
    assert MODEL.training
    predicted = MODEL.eval()(BATCH).actions.detach()
    errors = [
        float((predicted[b, t] - BATCH.actions[b, t]).square().mean())
        for b, n in enumerate((6, 2, 4))
        for t in range(n)
    ]
    assert measured == pytest.approx(sum(errors) / len(errors))


def test_the_sensitivity_is_the_move_in_units_of_the_spread() -> None:
    low, high = (
        MODEL.eval()(replace(BATCH, returns_to_go=torch.full_like(BATCH.returns_to_go, value)))
        .actions[BATCH.valid]
        .detach()
        for value in (-1.0, 2.0)
    )
    spread = BATCH.actions[BATCH.valid].std(0, correction=0).square().mean()
    expected = float((high - low).square().mean() / spread) ** 0.5
    assert return_sensitivity(MODEL, BATCH, -1.0, 2.0) == pytest.approx(expected)
    assert return_sensitivity(MODEL, BATCH, 1.0, 1.0) == 0


def test_only_what_can_be_measured_is_logged() -> None:
    cloning = random_model(replace(SHAPE, conditioning="none"), 0.3, torch.float64)
    assert Validation(BATCH, (0.0, 1.0)).scalars(cloning) == {}
    every = Validation(BATCH, (0.0, 1.0), best=BATCH).scalars(MODEL)
    assert list(every) == ["train/return_sensitivity", "valid/action_mse", "valid/action_mse_best"]
