"""Token by token equals all at once."""

import pytest
import torch

from primal_dt import CausalPrimalAttention
from primal_dt.attention import PrimalState

from .kinds import SIDES, make_batch, make_layer, pad

MAPS = pytest.mark.parametrize("name", ["primal", "primal, exponential"])


def make(name: str, dtype: torch.dtype = torch.float64) -> CausalPrimalAttention:
    layer = make_layer(name, True, dtype=dtype)
    assert isinstance(layer, CausalPrimalAttention)
    return layer


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@MAPS
def test_steps_equal_the_parallel_form(name: str, dtype: torch.dtype, tolerance: float) -> None:
    layer = make(name, dtype)
    x = torch.stack(make_batch((50, 50), dtype=dtype))
    parallel = layer(x).hidden
    state = layer.initial_state(2)
    for i in range(50):
        hidden, state = layer.step(x[:, i], state)
        torch.testing.assert_close(hidden, parallel[:, i], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("side", SIDES)
@MAPS
def test_steps_over_padding_equal_the_parallel_form(name: str, side: str) -> None:
    layer = make(name)
    x, valid = pad(make_batch((9, 4)), 12, side, float("nan"))
    parallel = layer(x, valid).hidden
    state = layer.initial_state(2)
    for i in range(12):
        hidden, state = layer.step(x[:, i], state, valid[:, i])
        torch.testing.assert_close(hidden, parallel[:, i])


@MAPS
def test_the_state_does_not_grow_with_the_past(name: str) -> None:
    layer = make(name)
    x = torch.stack(make_batch((30,)))
    first = state = layer.initial_state(1)
    for i in range(30):
        _, state = layer.step(x[:, i], state)

    def size(state: PrimalState) -> int:
        return sum(t.numel() for t in state if t is not None)

    assert size(state) == size(first)
    assert state.num_tokens.tolist() == [30]


@MAPS
def test_an_old_state_can_be_continued_again(name: str) -> None:
    """A state is a value: stepping from it leaves it as it was (a search or a rollback may return to it)."""
    layer = make(name)
    x = torch.stack(make_batch((6,)))
    state, window = layer.initial_state(1), layer.initial_window(1, 3)
    for i in range(4):
        _, state = layer.step(x[:, i], state)
        _, window = layer.step_window(x[:, i], window)
    once = layer.step(x[:, 4], state)[0], layer.step_window(x[:, 4], window)[0]
    layer.step(x[:, 5], state)
    layer.step_window(x[:, 5], window)
    assert torch.equal(layer.step(x[:, 4], state)[0], once[0])
    assert torch.equal(layer.step_window(x[:, 4], window)[0], once[1])


@pytest.mark.parametrize("window", [1, 4, 7])
@MAPS
def test_window_steps_equal_the_parallel_form_on_the_last_tokens(name: str, window: int) -> None:
    layer = make(name)
    x = torch.stack(make_batch((20, 20)))
    ring = layer.initial_window(2, window)
    for i in range(20):
        hidden, ring = layer.step_window(x[:, i], ring)
        parallel = layer(x[:, max(0, i + 1 - window) : i + 1]).hidden[:, -1]
        torch.testing.assert_close(hidden, parallel, atol=1e-12, rtol=1e-12)


@MAPS
def test_window_steps_pass_over_padding(name: str) -> None:
    layer = make(name)
    sequences = make_batch((9, 4))
    x, valid = pad(sequences, 12, "scattered", float("nan"))
    ring = layer.initial_window(2, 3)
    seen = [0, 0]
    for i in range(12):
        hidden, ring = layer.step_window(x[:, i], ring, valid[:, i])
        for row in range(2):
            if not valid[row, i]:
                assert (hidden[row] == 0).all()
                continue
            seen[row] += 1
            recent = sequences[row][max(0, seen[row] - 3) : seen[row]]
            torch.testing.assert_close(hidden[row], layer(recent[None]).hidden[0, -1])


@MAPS
def test_several_tokens_at_once_equal_one_after_the_other(name: str) -> None:
    layer = make(name)
    x = torch.stack(make_batch((20, 20)))
    parallel = layer(x).hidden
    state = layer.initial_state(2)
    begin = 0
    for count in (1, 3, 5, 2, 9):
        part = slice(begin, begin + count)
        last, _ = layer.advance(x[:, part], state, positions=slice(-1, None))
        hidden, state = layer.advance(x[:, part], state)
        torch.testing.assert_close(hidden, parallel[:, part])
        torch.testing.assert_close(last, parallel[:, begin + count - 1 : begin + count])
        begin += count
    assert state.num_tokens.tolist() == [20, 20]


def test_a_state_can_forget_its_oldest_tokens() -> None:
    layer = make("primal")
    x = torch.stack(make_batch((20, 20)))
    _, state = layer.advance(x[:, :15], layer.initial_state(2))
    hidden, _ = layer.advance(x[:, 15:], state.without(x[:, :9]))
    torch.testing.assert_close(hidden, layer(x[:, 9:]).hidden[:, 6:])
    with pytest.raises(ValueError, match="with the exponential map a state cannot forget"):
        make("primal, exponential").initial_state(2).without(x[:, :1])
