"""Outputs at chosen positions equal all outputs, selected."""

import pytest
import torch
from torch import Tensor

from primal_dt.attention import AttentionOutput

from .kinds import all_variants, make_batch, make_layer, make_sequences, pad, primal_variants, with_gradients

STATES = slice(1, None, 3)
CHOICES = {
    "states": STATES,
    "last": slice(-1, None),
    "indices": torch.tensor([4, 0, 9, 4]),
    "none": slice(0, 0),
}


@pytest.mark.parametrize("with_objective", [False, True])
@pytest.mark.parametrize("choice", CHOICES)
@all_variants
def test_chosen_outputs_equal_all_outputs_selected(name: str, causal: bool, choice: str, with_objective: bool) -> None:
    """In values, in the objective, and in every gradient."""
    layer, positions = make_layer(name, causal), CHOICES[choice]
    x, valid = pad(make_sequences(10, 6), 12, "both")
    chosen = layer(x.requires_grad_(), valid, positions=positions, with_objective=with_objective)
    hidden, objective = layer(x, valid, with_objective=with_objective)
    selected = AttentionOutput(hidden[:, positions], objective)
    results = [with_gradients(output, layer, x, allow_unused=True) for output in (chosen, selected)]
    torch.testing.assert_close(*results, atol=1e-12, rtol=1e-10)


@primal_variants
def test_primal_computes_only_the_chosen_tokens(name: str, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """J needs the scores of all tokens; output maps and dropout run at the chosen tokens only."""
    layer, x = make_layer(name, causal), make_batch(2, 12)
    tokens: dict[str, int] = {}
    scores, merge = layer._scores, layer._merge

    def watch_scores(phi: Tensor, weights: object) -> Tensor:
        tokens["scores"] = phi.shape[1]
        return scores(phi, weights)

    def watch_merge(values: Tensor) -> Tensor:
        tokens["merge"] = values.shape[3]
        return merge(values)

    monkeypatch.setattr(layer, "_scores", watch_scores)
    monkeypatch.setattr(layer, "_merge", watch_merge)
    layer.dropout.register_forward_pre_hook(lambda _, args: tokens.update(dropout=args[0].shape[1]))
    layer(x, positions=STATES)
    assert tokens == {"scores": 4, "merge": 4, "dropout": 4}
    layer(x, positions=STATES, with_objective=True)
    assert tokens == {"scores": 12, "merge": 4, "dropout": 4}


@all_variants
def test_every_kind_projects_only_the_chosen_outputs(name: str, causal: bool) -> None:
    """Softmax also projects only the chosen queries."""
    layer = make_layer(name, causal)
    tokens: dict[str, int] = {}
    for part in ("output", "query"):
        if hasattr(layer, part):
            getattr(layer, part).register_forward_pre_hook(
                lambda _, args, part=part: tokens.update({part: args[0].shape[1]})
            )
    layer(make_batch(2, 12), positions=STATES)
    assert tokens["output"] == 4
    assert not name.startswith("softmax") or tokens["query"] == 4
