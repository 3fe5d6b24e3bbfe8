"""Outputs at chosen positions equal all outputs, selected."""

from typing import Any

import pytest
import torch
from torch import Tensor

from primal_dt.attention import PrimalAttention

from .kinds import PRIMAL_VARIANTS, VARIANTS, make_batch, make_layer, pad

CHOICES = {
    "states": slice(1, None, 3),
    "last": slice(-1, None),
    "indices": torch.tensor([4, 0, 9, 4]),
    "none": slice(0, 0),
}


@pytest.mark.parametrize("with_objective", [False, True])
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize(("name", "causal"), VARIANTS)
def test_chosen_outputs_equal_all_outputs_selected(name: str, causal: bool, choice: str, with_objective: bool) -> None:
    """In values, in the objective, and in every gradient."""
    layer, positions = make_layer(name, causal), CHOICES[choice]
    x, valid = pad(make_batch((10, 6)), 12, "both")
    x.requires_grad_()
    inputs = [x, *layer.parameters()]
    results = []
    for some in (False, True):
        output = layer(x, valid, positions=positions if some else None, with_objective=with_objective)
        hidden = output.hidden if some else output.hidden[:, positions]
        loss = hidden.sin().sum() + (0 if output.objective is None else output.objective.square().sum())
        gradients = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
        results.append((hidden, output.objective, *gradients))
    for selected, computed in zip(*results, strict=True):
        if selected is None:
            assert computed is None
        else:
            torch.testing.assert_close(computed, selected, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize(("name", "causal"), PRIMAL_VARIANTS)
def test_the_primal_layer_computes_only_what_is_asked_for(
    name: str, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores at all positions for J alone; output maps and dropout at the chosen positions only."""
    layer = make_layer(name, causal)
    assert isinstance(layer, PrimalAttention)
    x = torch.stack(make_batch((12, 12)))
    tokens: dict[str, int] = {}
    scores, merge = layer._scores, layer._merge

    def watch_scores(phi: Tensor, weights: Any) -> Tensor:
        tokens["scores"] = phi.shape[1]
        return scores(phi, weights)

    def watch_merge(values: Tensor) -> Tensor:
        tokens["merge"] = values.shape[3]
        return merge(values)

    def watch_dropout(_: torch.nn.Module, args: tuple[Tensor]) -> None:
        tokens["dropout"] = args[0].shape[1]

    monkeypatch.setattr(layer, "_scores", watch_scores)
    monkeypatch.setattr(layer, "_merge", watch_merge)
    layer.dropout.register_forward_pre_hook(watch_dropout)
    layer(x, positions=slice(1, None, 3))
    assert tokens == {"scores": 4, "merge": 4, "dropout": 4}
    layer(x, positions=slice(1, None, 3), with_objective=True)
    assert tokens == {"scores": 12, "merge": 4, "dropout": 4}


@pytest.mark.parametrize(("name", "causal"), VARIANTS)
def test_every_kind_projects_only_the_chosen_outputs(name: str, causal: bool) -> None:
    """And softmax makes only their queries."""
    layer = make_layer(name, causal)
    tokens: dict[str, int] = {}
    for part in ("output", "query"):
        if hasattr(layer, part):
            module: torch.nn.Module = getattr(layer, part)
            module.register_forward_pre_hook(lambda _, args, part=part: tokens.update({part: args[0].shape[1]}))
    layer(torch.stack(make_batch((12, 12))), positions=slice(1, None, 3))
    assert tokens["output"] == 4
    if name.startswith("softmax"):
        assert tokens["query"] == 4
