"""The loss: its terms equal a plain loop, and padding does not count."""

from dataclasses import replace

import pytest
import torch

from primal_dt.attention import PenaltyReduction
from primal_dt.data.sampler import Batch
from primal_dt.model.loss import loss_terms
from primal_dt.model.transformer import ModelOutput

from .small import make_batch, make_model, part_of


@pytest.mark.parametrize(("reduction", "divisor"), [("mean", 2), ("sum", 1)])
def test_the_terms_equal_a_plain_loop(reduction: PenaltyReduction, divisor: int) -> None:
    lengths = (6, 2, 1)
    batch = make_batch(*lengths)
    output = ModelOutput(torch.randn_like(batch.actions), {1: torch.randn(3).double(), 2: torch.randn(3).double()})
    terms = loss_terms(output, batch, eta=0.3, penalty=reduction)
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


@pytest.mark.parametrize("fill", [1e6, float("nan"), float("inf")])
@pytest.mark.parametrize("attention", ["primal-plus", "softmax", "primalformer"])
def test_padding_changes_no_bit_of_loss_or_gradient(attention: str, fill: float) -> None:
    model, clean = make_model(attention), make_batch(6, 2, 4)

    def loss_and_gradients(batch: Batch) -> list[torch.Tensor | None]:
        terms = loss_terms(model(batch, with_objective=True), batch, eta=0.05)
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
    total = loss_terms(model(batch, with_objective=True), batch, eta=0.1).total
    shares = []
    for part in (part_of(batch, slice(0, 1)), part_of(batch, slice(1, 3))):
        output = model(part, with_objective=True)
        shares.append(loss_terms(output, part, eta=0.1, num_valid=batch.valid.sum(), num_sequences=3).total)
    torch.testing.assert_close(sum(shares), total)
