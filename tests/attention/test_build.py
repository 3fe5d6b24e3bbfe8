"""Building layers by name, and what a wrong argument is told."""

from typing import Any

import pytest
import torch

from primal_dt import CausalPrimalAttention, PrimalAttention, build_attention
from primal_dt.attention import ATTENTION_KINDS, CAUSAL_KINDS

from .kinds import VARIANTS, WIDTH, make_batch, make_layer, pad


def test_the_kinds_are_those_of_the_papers() -> None:
    bidirectional_only = {"linformer", "nystromformer"}
    assert set(ATTENTION_KINDS) - set(CAUSAL_KINDS) == bidirectional_only
    assert isinstance(build_attention("primal", width=8, num_heads=2, causal=True), CausalPrimalAttention)
    bidirectional = build_attention("primal", width=8, num_heads=2)
    assert isinstance(bidirectional, PrimalAttention)
    assert not bidirectional.causal


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "sofmax"}, "unknown attention kind 'sofmax': it must be one of primal, softmax"),
        ({"kind": "linformer", "causal": True, "max_length": 8}, "'linformer' is bidirectional only; causal kinds"),
        ({"kind": "softmax", "rank": 8}, "'softmax' has no option rank; its options: attention_dropout, bias, fused"),
        ({"kind": "linformer"}, "'linformer' needs the option max_length"),
        ({"kind": "softmax", "width": 130, "num_heads": 4}, r"width \(130\) must be divisible by num_heads \(4\)"),
        ({"kind": "softmax", "num_heads": 0}, r"num_heads \(0\)"),
        ({"kind": "softmax", "dropout": 1.0}, r"dropout \(1.0\) must be at least 0 and below 1"),
        ({"kind": "softmax", "attention_dropout": -0.1}, r"attention_dropout \(-0.1\)"),
        ({"kind": "primal", "rank": 0}, r"rank \(0\) must be at least 1"),
        ({"kind": "primal", "rank_multi": 0}, r"rank_multi \(0\) must be at least 1"),
        ({"kind": "primal", "max_length": 0}, r"max_length \(0\) must be at least 1"),
        ({"kind": "primal", "feature_map": "rbf"}, "feature_map must be 'cosine' or 'exponential', not 'rbf'"),
        ({"kind": "primal", "causal": True, "data_dependent": True}, "see the future"),
        ({"kind": "performer", "num_features": 0}, r"num_features \(0\)"),
        ({"kind": "cosformer", "horizon": 0}, r"horizon \(0\)"),
        ({"kind": "reformer", "num_buckets": 3}, r"num_buckets \(3\) must be even"),
        ({"kind": "reformer", "chunk_size": 0}, r"chunk_size \(0\)"),
        ({"kind": "linformer", "max_length": 8, "num_rows": 0}, r"num_rows \(0\)"),
        ({"kind": "nystromformer", "num_landmarks": 0}, r"num_landmarks \(0\)"),
        ({"kind": "attention_sh", "strides": (2, 0)}, r"strides \(\(2, 0\)\)"),
    ],
)
def test_a_wrong_argument_is_told_the_rule_and_the_value(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        build_attention(**({"width": 8, "num_heads": 2} | arguments))


@pytest.mark.parametrize(("name", "causal"), VARIANTS)
def test_a_wrong_input_is_told_the_rule_and_the_value(name: str, causal: bool) -> None:
    layer = make_layer(name, causal)
    x = torch.stack(make_batch((5, 5)))
    with pytest.raises(ValueError, match=rf"x must have shape \(batch, tokens >= 1, width {WIDTH}\), not \(2, 5, 11\)"):
        layer(x[..., :-1])
    with pytest.raises(ValueError, match=r"not \(5, 12\)"):
        layer(x[0])
    with pytest.raises(ValueError, match=r"not \(2, 0, 12\)"):
        layer(x[:, :0])
    with pytest.raises(ValueError, match=r"valid must be a bool tensor of shape \(2, 5\), not torch.float64"):
        layer(x, torch.ones(2, 5, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"valid must be a bool tensor of shape \(2, 5\), .* of shape \(2, 4\)"):
        layer(x, torch.ones(2, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"positions must be a slice or a 1-D integer tensor, not torch\.bool"):
        layer(x, positions=torch.ones(5, dtype=torch.bool))


@pytest.mark.parametrize(("kind", "option"), [("cosformer", "horizon"), ("linformer", "max_length")])
def test_a_sequence_longer_than_the_layer_was_built_for_is_refused(kind: str, option: str) -> None:
    options: dict[str, Any] = {option: 4}
    layer = build_attention(kind, width=8, num_heads=2, **options)
    with pytest.raises(ValueError, match=f"5 tokens is longer than .*{option}.* with a larger {option}"):
        layer(torch.zeros(1, 5, 8))


def test_a_wrong_step_is_told_the_rule_and_the_value() -> None:
    layer = CausalPrimalAttention(width=8, num_heads=2)
    state = layer.initial_state(2)
    with pytest.raises(ValueError, match=r"x must have shape \(batch, width 8\), not \(2, 1, 8\)"):
        layer.step(torch.zeros(2, 1, 8), state)
    with pytest.raises(ValueError, match=r"not \(2, 1, 7\)"):
        layer.step(torch.zeros(2, 7), state)
    with pytest.raises(ValueError, match=r"valid must have shape \(2,\), not \(2, 1\)"):
        layer.step(torch.zeros(2, 8), state, torch.ones(2, 1, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"window \(0\) must be at least 1"):
        layer.initial_window(2, 0)


@pytest.mark.parametrize(("name", "causal"), VARIANTS)
def test_every_parameter_receives_a_gradient(name: str, causal: bool) -> None:
    """From output and objective together. A bias on softmax's keys shifts a row's scores as one: it has none."""
    layer = make_layer(name, causal)
    x, valid = pad(make_batch((10, 6)), 12, "both")
    hidden, objective = layer(x, valid, with_objective=True)
    (hidden.sin().sum() + (0 if objective is None else objective.square().sum())).backward()
    without = {"key.bias"} if name.startswith("softmax") else set()
    for parameter_name, parameter in layer.named_parameters():
        assert parameter.grad is not None
        largest = parameter.grad.abs().max()
        assert (largest < 1e-12) if parameter_name in without else (largest > 1e-9), parameter_name
