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
        ({"kind": "primal", "max_rows": 0}, r"max_rows \(0\) must be at least 1"),
        ({"kind": "primal", "feature_map": "rbf"}, "feature_map must be 'cosine' or 'exponential', not 'rbf'"),
        ({"kind": "primal", "causal": True, "data_dependent": True}, "see the future"),
        ({"kind": "performer", "num_features": 0}, r"num_features \(0\)"),
        ({"kind": "cosformer", "horizon": 0}, r"horizon \(0\)"),
        ({"kind": "reformer", "num_buckets": 3}, r"num_buckets \(3\) must be even"),
        ({"kind": "reformer", "chunk_size": 0}, r"chunk_size \(0\)"),
        ({"kind": "linformer", "max_length": 8, "num_rows": 0}, r"num_rows \(0\)"),
        ({"kind": "nystromformer", "num_landmarks": 0}, r"num_landmarks \(0\)"),
        ({"kind": "attention_sh", "strides": (2, 0)}, r"strides \(\(2, 0\)\)"),
        ({"kind": "attention_sh", "strides": (1.5,)}, r"strides \(\(1.5,\)\) must be one or more whole numbers"),
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
    with pytest.raises(ValueError, match=r"valid must be a bool tensor of shape \(2, 5\), .*not torch.float64"):
        layer(x, torch.ones(2, 5, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"valid must be a bool tensor of shape \(2, 5\), .* of shape \(2, 4\)"):
        layer(x, torch.ones(2, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"positions must be .* 1-D int64 or int32 tensor, not torch\.bool"):
        layer(x, positions=torch.ones(5, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"positions must be .* slice that goes forward.*, not one with step -1"):
        layer(x, positions=slice(None, None, -1))
    with pytest.raises(TypeError, match=r"positions must be .*, not int"):
        layer(x, positions=3)
    with pytest.raises(TypeError, match=r"x must be a torch\.Tensor, not list"):
        layer(x.tolist())
    with pytest.raises(TypeError, match=r"x must hold floating-point numbers, not torch\.int64: embed or cast"):
        layer(x.long())
    with pytest.raises(TypeError, match=r"valid must be a torch\.Tensor, not list"):
        layer(x, [[True] * 5] * 2)


@pytest.mark.parametrize(("kind", "option"), [("cosformer", "horizon"), ("linformer", "max_length")])
def test_a_sequence_longer_than_the_layer_was_built_for_is_refused(kind: str, option: str) -> None:
    options: dict[str, Any] = {option: 4}
    layer = build_attention(kind, width=8, num_heads=2, **options)
    with pytest.raises(ValueError, match=f"5 tokens is longer than .*{option}.* with a larger {option}"):
        layer(torch.zeros(1, 5, 8))


def test_a_wrong_step_is_told_the_rule_and_the_value() -> None:
    layer = CausalPrimalAttention(width=8, num_heads=2)
    x, state, window = torch.zeros(2, 8), layer.initial_state(2), layer.initial_window(2, 3)
    with pytest.raises(ValueError, match=r"x must have shape \(batch, width 8\), not \(2, 1, 8\)"):
        layer.step(x[:, None], state)
    with pytest.raises(ValueError, match=r"x must have shape \(batch, width 8\), not \(2, 7\)"):
        layer.step(x[:, :7], state)
    with pytest.raises(
        ValueError, match=r"valid must be a bool tensor of shape \(2,\), .*not torch.bool of shape \(2, 1\)"
    ):
        layer.step(x, state, torch.ones(2, 1, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"window \(0\) must be at least 1"):
        layer.initial_window(2, 0)
    with pytest.raises(TypeError, match="state must be a PrimalState, as initial_state gives, not PrimalWindow"):
        layer.step(x, window)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="window must be a PrimalWindow, as initial_window gives, not PrimalState"):
        layer.step_window(x, state)  # type: ignore[arg-type]


def test_a_state_of_another_batch_or_layer_is_refused() -> None:
    """Broadcasting would take it, and answer with wrong numbers."""
    layer = CausalPrimalAttention(width=8, num_heads=2)
    other = CausalPrimalAttention(width=8, num_heads=2, feature_map="exponential")
    narrow = CausalPrimalAttention(width=1, num_heads=1)
    x = torch.zeros(2, 8)
    with pytest.raises(
        ValueError, match=r"state is for 1 sequences of width 8, but x has 2 of width 8: .* initial_state"
    ):
        layer.step(x, layer.initial_state(1))
    with pytest.raises(ValueError, match="state is for 2 sequences of width 1"):
        layer.step(x, narrow.initial_state(2))
    with pytest.raises(ValueError, match="window is for 2 sequences of width 8, but x has 1 of width 8"):
        layer.step_window(x[:1], layer.initial_window(2, 3))
    with pytest.raises(ValueError, match="other feature map"):
        other.step(x, layer.initial_state(2))
    with pytest.raises(ValueError, match="other feature map"):
        layer.step(x, other.initial_state(2))


@pytest.mark.parametrize(("name", "causal"), VARIANTS)
def test_resetting_draws_everything_anew(name: str, causal: bool) -> None:
    """As deferred initialization needs: after ``to_empty``, nothing of what memory held before is left."""
    layer = make_layer(name, causal)
    with torch.no_grad():
        for tensor in (*layer.parameters(), *layer.buffers()):
            tensor.fill_(float("nan"))
    layer.reset_parameters()
    assert all(tensor.isfinite().all() for tensor in (*layer.parameters(), *layer.buffers()))
    fresh = {name: tensor.std() for name, tensor in make_layer(name, causal, seed=1).state_dict().items()}
    for tensor_name, tensor in layer.state_dict().items():
        if tensor.numel() > 40:
            assert 0.6 < tensor.std() / fresh[tensor_name] < 1.6, tensor_name


def test_a_layer_shows_its_options() -> None:
    layer = build_attention("performer", width=8, num_heads=2, causal=True, num_features=16)
    assert "width=8, num_heads=2, causal=True, num_features=16" in repr(layer)
    assert "rank=4, data_dependent=True, num_rows=40" in repr(PrimalAttention(width=8, num_heads=2, rank=4))


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
