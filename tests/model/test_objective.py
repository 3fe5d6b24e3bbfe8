"""The loss: what counts in it, and that padding does not."""

from dataclasses import replace

import pytest
import torch

from primal_dt.data.sampler import Batch
from primal_dt.model.objective import loss_terms
from primal_dt.model.transformer import ModelOutput
from tests.model.test_transformer import batch, make


def test_the_terms_are_those_of_a_plain_loop() -> None:
    source = batch((6, 2, 1))
    output = ModelOutput(torch.randn_like(source.actions), {1: torch.randn(3).double(), 2: torch.randn(3).double()})
    terms = loss_terms(output, source, eta=0.3)
    errors = [
        float((output.actions[b, t, a] - source.actions[b, t, a]) ** 2)
        for b, length in enumerate((6, 2, 1))
        for t in range(length)
        for a in range(2)
    ]
    assert float(terms.action_mse) == pytest.approx(sum(errors) / len(errors))
    penalty = sum(float(j) ** 2 for values in output.objectives.values() for j in values) / 3
    assert float(terms.penalty) == pytest.approx(penalty)
    assert float(terms.total) == pytest.approx(sum(errors) / len(errors) + 0.3 * penalty)
    assert {layer: float(value) for layer, value in terms.objectives.items()} == {
        layer: pytest.approx(float(values.mean())) for layer, values in output.objectives.items()
    }


@pytest.mark.parametrize("junk", [1e6, float("nan"), float("inf")])
@pytest.mark.parametrize("attention", ["primal-plus", "softmax", "primalformer"])
def test_what_stands_in_padding_changes_no_bit_of_loss_or_gradient(attention: str, junk: float) -> None:
    model, clean = make(attention), batch((6, 2, 4))

    def loss_and_gradients(source: Batch) -> list[torch.Tensor]:
        terms = loss_terms(model(source, with_objective=True), source, eta=0.05)
        gradients = torch.autograd.grad(terms.total, list(model.parameters()), allow_unused=True)
        return [terms.total, terms.action_mse, terms.penalty, *(g for g in gradients if g is not None)]

    padding = ~clean.valid[..., None]
    dirty = replace(
        clean,
        states=clean.states.masked_fill(padding, junk),
        actions=clean.actions.masked_fill(padding, junk),
        returns_to_go=clean.returns_to_go.masked_fill(padding, junk),
        timesteps=clean.timesteps.masked_fill(~clean.valid, 3),
    )
    for one, two in zip(loss_and_gradients(clean), loss_and_gradients(dirty), strict=True):
        assert torch.equal(one, two)


def test_the_shares_of_parts_add_up_to_the_whole() -> None:
    model, whole = make(), batch((6, 2, 4))
    expected = loss_terms(model(whole, with_objective=True), whole, eta=0.1)
    totals = []
    for rows in (slice(0, 1), slice(1, 3)):
        part = Batch(*(getattr(whole, name)[rows] for name in vars(whole)))
        totals.append(
            loss_terms(
                model(part, with_objective=True), part, eta=0.1, num_valid=whole.valid.sum(), num_sequences=3
            ).total
        )
    torch.testing.assert_close(sum(totals), expected.total)
