"""The loss: its terms equal a plain loop, and padding does not count."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from primal_dt.attention import PenaltyReduction
from primal_dt.data.sampler import Batch
from primal_dt.model.loss import Objective, expectile_loss, loss_terms
from primal_dt.model.transformer import ModelOutput

from .small import SHAPE, make_batch, make_model, part_of, random_model


@pytest.mark.parametrize(("reduction", "divisor"), [("mean", 2), ("sum", 1)])
def test_the_terms_equal_a_plain_loop(reduction: PenaltyReduction, divisor: int) -> None:
    lengths = (6, 2, 1)
    batch = make_batch(*lengths)
    output = ModelOutput(torch.randn_like(batch.actions), {1: torch.randn(3).double(), 2: torch.randn(3).double()})
    terms = loss_terms(output, batch, Objective(eta=0.3, penalty=reduction))
    errors = [
        float((output.actions[b, t, a] - batch.actions[b, t, a]) ** 2)
        for b, length in enumerate(lengths)
        for t in range(length)
        for a in range(2)
    ]
    action_mse = sum(errors) / len(errors)
    penalty = sum(float(j) ** 2 for values in output.objectives.values() for j in values) / 3 / divisor
    assert float(terms.action_mse) == pytest.approx(action_mse)
    assert float(terms.penalty) == pytest.approx(penalty)
    assert float(terms.total) == pytest.approx(action_mse + 0.3 * penalty)
    means = {layer: float(values.mean()) for layer, values in output.objectives.items()}
    assert {layer: float(value) for layer, value in terms.objectives.items()} == pytest.approx(means)


def test_the_likelihood_equals_that_of_a_normal_distribution() -> None:
    batch = make_batch(6, 2, 1)
    output = ModelOutput(torch.randn_like(batch.actions), {}, log_std=torch.randn_like(batch.actions))
    terms = loss_terms(output, batch, Objective())
    assert output.log_std is not None
    normal = torch.distributions.Normal(output.actions, output.log_std.exp())
    expected = -normal.log_prob(batch.actions)[batch.valid].mean() - 0.5 * math.log(2 * math.pi)
    torch.testing.assert_close(terms.action_nll, expected)
    torch.testing.assert_close(terms.total, expected)
    assert float(terms.action_mse) == pytest.approx(
        float((output.actions - batch.actions)[batch.valid].square().mean())
    )


@pytest.mark.parametrize("tau", [0.5, 0.9, 0.99])
def test_the_expectile_of_a_known_distribution_is_found(tau: float) -> None:
    """The expectile of 0 with probability 3/4 and 1 with 1/4 is m with tau (1 - m) / 4 = (1 - tau) 3 m / 4."""
    values, guesses = torch.tensor([0.0, 0.0, 0.0, 1.0]), torch.linspace(0, 1, 10_001)
    losses = expectile_loss(values - guesses[:, None], tau).mean(1)
    assert float(guesses[losses.argmin()]) == pytest.approx(tau / (tau + 3 * (1 - tau)), abs=2e-4)


def test_predicted_returns_are_compared_in_units_of_the_data() -> None:
    batch = make_batch(6, 2, 1)
    output = ModelOutput(batch.actions, {}, best_returns=torch.randn_like(batch.returns_to_go))
    terms = loss_terms(output, batch, Objective(expectile=0.9, return_size=5.0))
    assert output.best_returns is not None
    errors = ((batch.returns_to_go - output.best_returns)[batch.valid] / 5.0)[:, 0]
    slow = [float(abs(0.9 - (u < 0).double()) * u**2) for u in errors]
    assert float(terms.total) == pytest.approx(sum(slow) / len(slow))


@pytest.mark.parametrize("fill", [1e6, float("nan"), float("inf")])
@pytest.mark.parametrize(
    "change",
    [
        {"attention": "primal-plus"},
        {"attention": "softmax"},
        {"attention": "primalformer"},
        {"action_loss": "gaussian", "action_dropout": 0.5},
        {"conditioning": "max-return"},
        {"conditioning": "none"},
    ],
)
def test_padding_changes_no_bit_of_loss_or_gradient(change: dict[str, Any], fill: float) -> None:
    model, clean = random_model(replace(SHAPE, **change), 0.3, torch.float64), make_batch(6, 2, 4)

    def loss_and_gradients(batch: Batch) -> list[torch.Tensor | None]:
        terms = loss_terms(model(batch, with_objective=True), batch, Objective(eta=0.05))
        gradients = torch.autograd.grad(terms.total, list(model.parameters()), allow_unused=True)
        return [terms.total, terms.action_mse, terms.penalty, *gradients]

    padding = ~clean.valid[..., None]
    dirty = replace(
        clean,
        states=clean.states.masked_fill(padding, fill),
        actions=clean.actions.masked_fill(padding, fill),
        returns_to_go=clean.returns_to_go.masked_fill(padding, fill),
        timesteps=clean.timesteps.masked_fill(~clean.valid, 3),
    )
    torch.testing.assert_close(loss_and_gradients(dirty), loss_and_gradients(clean), atol=0, rtol=0)


def test_the_losses_of_parts_sum_to_the_loss_of_the_batch() -> None:
    model, batch = make_model(), make_batch(6, 2, 4)
    total = loss_terms(model(batch, with_objective=True), batch, Objective(eta=0.1)).total
    shares = []
    for part in (part_of(batch, slice(0, 1)), part_of(batch, slice(1, 3))):
        output = model(part, with_objective=True)
        shares.append(loss_terms(output, part, Objective(eta=0.1), num_valid=batch.valid.sum(), num_sequences=3).total)
    torch.testing.assert_close(sum(shares), total)
