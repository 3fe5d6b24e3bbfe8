"""Layers are built by name, and wrong arguments raise errors that state the rule and the value."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from primal_dt import CausalPrimalAttention, PrimalAttention, build_attention
from primal_dt.attention import ATTENTION_KINDS, CAUSAL_KINDS

from .kinds import WIDTH, all_variants, make_batch, make_layer, make_sequences, pad, run


def test_two_kinds_are_bidirectional_only() -> None:
    assert set(ATTENTION_KINDS) - set(CAUSAL_KINDS) == {"linformer", "nystromformer"}


def test_causal_selects_the_causal_primal_layer() -> None:
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
        ({"kind": "softmax", "right_padded": True}, "right_padded=True is for causal layers"),
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
        ({"kind": "attention_sh", "strides": (1.5,)}, r"strides \(\(1.5,\)\) must be one or more integers"),
    ],
)
def test_wrong_arguments_raise(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        build_attention(**({"width": 8, "num_heads": 2} | arguments))


X = make_batch(2, 5)
NOT_A_MASK = r"valid must be a bool tensor of shape \(2, 5\), "
NOT_POSITIONS = "positions must be None, a slice with a positive step, or a 1-D int64 or int32 tensor, "
WRONG_INPUTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"x": X[..., 1:]}, ValueError, rf"x must have shape \(batch, tokens >= 1, width {WIDTH}\), not \(2, 5, 11\)"),
    ({"x": X[0]}, ValueError, r"not \(5, 12\)"),
    ({"x": X[:, :0]}, ValueError, r"not \(2, 0, 12\)"),
    ({"x": X.tolist()}, TypeError, r"x must be a torch\.Tensor, not list"),
    ({"x": X.long()}, TypeError, r"x must hold floating-point numbers, not torch\.int64: embed or cast"),
    ({"x": X, "valid": X[..., 0]}, ValueError, NOT_A_MASK + r".*not torch\.float64"),
    ({"x": X, "valid": X[:, 1:, 0] > 0}, ValueError, NOT_A_MASK + r".* of shape \(2, 4\)"),
    ({"x": X, "valid": [[True] * 5] * 2}, TypeError, r"valid must be a torch\.Tensor, not list"),
    ({"x": X, "positions": X[0, :, 0] > 0}, ValueError, NOT_POSITIONS + r"not torch\.bool"),
    ({"x": X, "positions": slice(None, None, -1)}, ValueError, NOT_POSITIONS + "not a slice with step -1"),
    ({"x": X, "positions": 3}, TypeError, NOT_POSITIONS + "not int"),
]


@all_variants
def test_wrong_inputs_raise(name: str, causal: bool) -> None:
    layer = make_layer(name, causal)
    for arguments, error, message in WRONG_INPUTS:
        with pytest.raises(error, match=message):
            layer(**arguments)


@pytest.mark.parametrize(("kind", "option"), [("cosformer", "horizon"), ("linformer", "max_length")])
def test_too_long_sequences_raise(kind: str, option: str) -> None:
    layer = build_attention(kind, width=8, num_heads=2, causal=False, **{option: 4})
    with pytest.raises(ValueError, match=f"5 tokens is longer than .*{option}.* with a larger {option}"):
        layer(torch.zeros(1, 5, 8))


LAYER = CausalPrimalAttention(width=8, num_heads=2)
EXPONENTIAL = CausalPrimalAttention(width=8, num_heads=2, feature_map="exponential")
TOKEN, STATE, WINDOW = torch.zeros(2, 8), LAYER.initial_state(2), LAYER.initial_window(2, 3)
WRONG_MASK = torch.ones(2, 1, dtype=torch.bool)
ONE_STATE, NARROW_STATE = LAYER.initial_state(1), CausalPrimalAttention(width=1, num_heads=1).initial_state(2)
OTHER_BATCH = "has batch size {} and width {}, but x has batch size {} and width 8"


@pytest.mark.parametrize(
    ("call", "arguments", "error", "message"),
    [
        (LAYER.step, (TOKEN[:, None], STATE), ValueError, r"x must have shape \(batch, width 8\), not \(2, 1, 8\)"),
        (LAYER.step, (TOKEN[:, :7], STATE), ValueError, r"x must have shape \(batch, width 8\), not \(2, 7\)"),
        (LAYER.step, (TOKEN, STATE, WRONG_MASK), ValueError, r"bool tensor of shape \(2,\), .*bool of shape \(2, 1\)"),
        (LAYER.initial_window, (2, 0), ValueError, r"window \(0\) must be at least 1"),
        (LAYER.step, (TOKEN, WINDOW), TypeError, "be a PrimalState, as returned by initial_state, not PrimalWindow"),
        (LAYER.step_window, (TOKEN, STATE), TypeError, "PrimalWindow, as returned by initial_window, not PrimalState"),
        # Broadcasting would accept the state of another batch or layer, and return wrong numbers.
        (LAYER.step, (TOKEN, ONE_STATE), ValueError, f"state {OTHER_BATCH.format(1, 8, 2)}: .* initial_state"),
        (LAYER.step, (TOKEN, NARROW_STATE), ValueError, f"state {OTHER_BATCH.format(2, 1, 2)}"),
        (LAYER.step_window, (TOKEN[:1], WINDOW), ValueError, f"window {OTHER_BATCH.format(2, 8, 1)}"),
        (EXPONENTIAL.step, (TOKEN, STATE), ValueError, "another feature map"),
        (LAYER.step, (TOKEN, EXPONENTIAL.initial_state(2)), ValueError, "another feature map"),
    ],
)
def test_wrong_steps_raise(
    call: Callable[..., Any], arguments: tuple[Any, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call(*arguments)


@all_variants
def test_reset_parameters_draws_all_weights_again(name: str, causal: bool) -> None:
    """Deferred initialization needs it: after ``to_empty`` the memory holds anything."""
    layer = make_layer(name, causal)
    with torch.no_grad():
        for tensor in (*layer.parameters(), *layer.buffers()):
            tensor.fill_(float("nan"))
    layer.reset_parameters()
    assert all(tensor.isfinite().all() for tensor in (*layer.parameters(), *layer.buffers()))
    fresh = make_layer(name, causal, seed=1).state_dict()
    for key, tensor in layer.state_dict().items():
        if tensor.numel() > 40:
            assert 0.6 < tensor.std() / fresh[key].std() < 1.6, key


def test_repr_shows_the_options() -> None:
    layer = build_attention("performer", width=8, num_heads=2, causal=True, num_features=16)
    assert "width=8, num_heads=2, causal=True, num_features=16" in repr(layer)
    assert "rank=4, data_dependent=True, num_rows=40" in repr(PrimalAttention(width=8, num_heads=2, rank=4))


@all_variants
def test_every_parameter_receives_a_gradient(name: str, causal: bool) -> None:
    """Except softmax's key bias, which shifts all scores of a row by the same amount."""
    layer = make_layer(name, causal)
    x, valid = pad(make_sequences(10, 6), 12, "both")
    for (key, _), gradient in zip(layer.named_parameters(), run(layer, x, valid)[3:], strict=True):
        largest = gradient.abs().max()
        assert (largest < 1e-12) if name.startswith("softmax") and key == "key.bias" else (largest > 1e-9), key
