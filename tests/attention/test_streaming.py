"""Attention token by token equals attention over all tokens at once."""

from typing import Any

import pytest
import torch
from torch import Tensor

from .kinds import SIDES, make_batch, make_layer, make_sequences, pad

feature_maps = pytest.mark.parametrize("name", ["primal", "primal, exponential"])


def steps(layer: Any, x: Tensor, valid: Tensor | None = None, window: int | None = None) -> tuple[Tensor, Any]:
    """The outputs (B, L, D) of single steps, and the last state."""
    state = layer.initial_state(len(x)) if window is None else layer.initial_window(len(x), window)
    step = layer.step if window is None else layer.step_window
    outputs = []
    for i in range(x.shape[1]):
        hidden, state = step(x[:, i], state, None if valid is None else valid[:, i])
        outputs.append(hidden)
    return torch.stack(outputs, 1), state


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@feature_maps
def test_steps_equal_the_parallel_form(name: str, dtype: torch.dtype, tolerance: float) -> None:
    layer, x = make_layer(name, True, dtype=dtype), make_batch(2, 50, dtype=dtype)
    torch.testing.assert_close(steps(layer, x)[0], layer(x).hidden, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("side", SIDES)
@feature_maps
def test_steps_over_padding_equal_the_parallel_form(name: str, side: str) -> None:
    layer = make_layer(name, True)
    x, valid = pad(make_sequences(9, 4), 12, side, float("nan"))
    torch.testing.assert_close(steps(layer, x, valid)[0], layer(x, valid).hidden)


@feature_maps
def test_the_state_does_not_grow_with_the_past(name: str) -> None:
    layer = make_layer(name, True)
    _, state = steps(layer, make_batch(1, 30))
    sizes = [sum(t.numel() for t in s if t is not None) for s in (state, layer.initial_state(1))]
    assert sizes[0] == sizes[1]
    assert state.num_tokens.tolist() == [30]


@pytest.mark.parametrize("window", [None, 3])
@feature_maps
def test_a_step_leaves_its_state_unchanged(name: str, window: int | None) -> None:
    """A search or a rollback may return to an old state."""
    layer, x = make_layer(name, True), make_batch(1, 6)
    step = layer.step if window is None else layer.step_window
    _, state = steps(layer, x[:, :4], window=window)
    before = step(x[:, 4], state)[0]
    step(x[:, 5], state)
    assert torch.equal(step(x[:, 4], state)[0], before)


@pytest.mark.parametrize("window", [1, 4, 7])
@feature_maps
def test_window_steps_equal_the_parallel_form(name: str, window: int) -> None:
    layer, x = make_layer(name, True), make_batch(2, 20)
    parallel = [layer(x[:, max(0, i + 1 - window) : i + 1]).hidden[:, -1] for i in range(20)]
    hidden, _ = steps(layer, x, window=window)
    torch.testing.assert_close(hidden, torch.stack(parallel, 1), atol=1e-12, rtol=1e-12)


@feature_maps
def test_window_steps_skip_padding(name: str) -> None:
    layer, sequences = make_layer(name, True), make_sequences(9, 4)
    x, valid = pad(sequences, 12, "scattered", float("nan"))
    hidden, _ = steps(layer, x, valid, window=3)
    assert (hidden[~valid] == 0).all()
    recent = [sequence[None, max(0, i - 2) : i + 1] for sequence in sequences for i in range(len(sequence))]
    torch.testing.assert_close(hidden[valid], torch.cat([layer(tokens).hidden[:, -1] for tokens in recent]))


@feature_maps
def test_advance_equals_single_steps(name: str) -> None:
    layer, x = make_layer(name, True), make_batch(2, 20)
    parallel = layer(x).hidden.split((1, 3, 5, 2, 9), 1)
    state = layer.initial_state(2)
    for tokens, expected in zip(x.split((1, 3, 5, 2, 9), 1), parallel, strict=True):
        last, _ = layer.advance(tokens, state, positions=slice(-1, None))
        hidden, state = layer.advance(tokens, state)
        torch.testing.assert_close(hidden, expected)
        torch.testing.assert_close(last, expected[:, -1:])
    assert state.num_tokens.tolist() == [20, 20]


def test_a_state_can_forget_its_oldest_tokens() -> None:
    layer, x = make_layer("primal", True), make_batch(2, 20)
    _, state = layer.advance(x[:, :15], layer.initial_state(2))
    hidden, _ = layer.advance(x[:, 15:], state.without(x[:, :9]))
    torch.testing.assert_close(hidden, layer(x[:, 9:]).hidden[:, 6:])
    with pytest.raises(ValueError, match="tokens cannot be removed from a state of the exponential map"):
        make_layer("primal, exponential", True).initial_state(2).without(x[:, :1])
