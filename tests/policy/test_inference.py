"""Step by step the model says what it says of whole windows; and no row depends on the others."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from primal_dt.data.sampler import Batch
from primal_dt.model.transformer import ATTENTION_STACKS, Block, DecisionTransformer, ModelShape
from primal_dt.policy.inference import Inference, InferenceMode, StreamingInference, WindowInference, make_inference
from primal_dt.policy.tiles import Tiles

STREAMABLE = ("primal-plus", "primalformer", "softmax")
NUM_ROWS, NUM_STEPS = 4, 25
TILES = Tiles(2, side_by_side=True)


def make(attention: str = "primal-plus", *, context: int = 4, num_layers: int = 3) -> DecisionTransformer:
    torch.manual_seed(0)
    shape = ModelShape(
        3,
        (-1.0, -1.0),
        (1.0, 1.0),
        attention=attention,
        width=16,
        num_heads=2,
        num_layers=num_layers,
        context=context,
        rank=4,
        max_timesteps=NUM_STEPS,
    )
    model = DecisionTransformer(shape).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))  # every part has its say
    return model


def episode(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(NUM_ROWS, NUM_STEPS, 3, generator=generator),
        torch.randn(NUM_ROWS, NUM_STEPS, 1, generator=generator),
    )


@torch.inference_mode()
def play(inference: Inference, states: Tensor, returns: Tensor, tiles: Tiles = TILES) -> Tensor:
    """(N, T, A)."""
    steps = [inference.step(states[:, t], returns[:, t], tiles).clone() for t in range(NUM_STEPS)]
    return torch.stack(steps, 1)


@torch.inference_mode()
def by_windows(model: DecisionTransformer, states: Tensor, returns: Tensor, actions: Tensor) -> Iterator[Tensor]:
    """What the model says of the window of each step, (N, A) each."""
    for t in range(NUM_STEPS):
        window = slice(max(0, t + 1 - model.shape.context), t + 1)
        timesteps = torch.arange(NUM_STEPS)[window].expand(NUM_ROWS, -1)
        batch = Batch(
            states=states[:, window],
            actions=actions[:, window],
            returns_to_go=returns[:, window],
            timesteps=timesteps,
            valid=torch.ones_like(timesteps, dtype=torch.bool),
        )
        yield model(batch).actions[:, -1]


@pytest.mark.parametrize(("context", "num_layers"), [(1, 2), (2, 3), (4, 1), (5, 3)])
@pytest.mark.parametrize("attention", ATTENTION_STACKS)
def test_window_mode_is_exact(attention: str, context: int, num_layers: int) -> None:
    model = make(attention, context=context, num_layers=num_layers)
    states, returns = episode()
    actions = play(make_inference("window", model, NUM_ROWS), states, returns)
    expected = torch.stack(list(by_windows(model, states, returns, actions)), 1)
    torch.testing.assert_close(actions, expected, atol=2e-5, rtol=0)
    assert actions.std(1).min() > 1e-3  # there is something to get wrong


@pytest.mark.parametrize("attention", STREAMABLE)
def test_streaming_is_exact_until_the_window_slides_and_not_afterwards(attention: str) -> None:
    model = make(attention, context=6)
    states, returns = episode()
    actions = play(make_inference("streaming", model, NUM_ROWS), states, returns)
    error = (actions - torch.stack(list(by_windows(model, states, returns, actions)), 1)).abs()
    assert error[:, :6].max() < 1e-5
    assert error[:, 6:].max() > 1e-3


@pytest.mark.parametrize("attention", STREAMABLE)
@pytest.mark.parametrize("context", [1, 2, 5])
def test_streaming_one_layer_is_exact_for_ever(attention: str, context: int) -> None:
    """A layer's keys, values and tokens do not depend on the window: only what is above a layer does."""
    model = make(attention, context=context, num_layers=1)
    states, returns = episode()
    actions = play(make_inference("streaming", model, NUM_ROWS), states, returns)
    expected = torch.stack(list(by_windows(model, states, returns, actions)), 1)
    torch.testing.assert_close(actions, expected, atol=1e-5, rtol=0)


def streamed_slowly(model: DecisionTransformer, states: Tensor, returns: Tensor, actions: Tensor) -> Tensor:
    """Streaming from its definition: layer by layer, for each token of the episode, over the tokens of its window."""
    N, T, K = NUM_ROWS, NUM_STEPS, model.shape.context
    time = model.embed_timestep.weight[:T]
    kinds = (model.embed_return(returns), model.embed_state(states), model.embed_action(actions))
    x = model.embed_norm(torch.stack([kind + time for kind in kinds], 2).flatten(1, 2))  # (N, 3 T, D)
    for block in model.blocks:
        assert isinstance(block, Block)
        normed = block.attention_norm(x)
        hidden = torch.empty_like(x)
        for token in range(3 * T):
            step = (token + 1) // 3  # at which it is new: an action comes with the step after its own
            first = max(0, 3 * (step - K + 1))
            hidden[:, token] = block.attention(normed[:, first : token + 1]).hidden[:, -1]
        x = block.finish(x, hidden)
    return model.actions_at(x.unflatten(1, (T, 3))[:, :, 1]).view(N, T, -1)


@pytest.mark.parametrize("attention", STREAMABLE)
@pytest.mark.parametrize("context", [2, 5])
def test_streaming_is_what_its_definition_says(attention: str, context: int) -> None:
    model = make(attention, context=context)
    states, returns = episode()
    actions = play(make_inference("streaming", model, NUM_ROWS), states, returns)
    with torch.inference_mode():
        expected = streamed_slowly(model, states, returns, actions)
    torch.testing.assert_close(actions, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("mode", ["window", "streaming"])
def test_rows_that_leave_change_nothing_for_those_that_stay(mode: InferenceMode) -> None:
    model = make()
    states, returns = episode()
    every = play(make_inference(mode, model, NUM_ROWS), states, returns)
    some, rows = make_inference(mode, model, NUM_ROWS), torch.arange(NUM_ROWS)
    with torch.inference_mode():
        for t in range(NUM_STEPS):
            padded = torch.cat((rows, rows.new_zeros(some.num_rows - len(rows))))
            actions = some.step(states[padded, t], returns[padded, t], TILES)
            assert torch.equal(actions[: len(rows)], every[rows, t])
            if t in (3, 11):
                kept = torch.tensor([1, 2, 3] if t == 3 else [0, 2])
                rows = rows[kept]
                some.keep(kept, TILES.whole(len(rows)))
    assert rows.tolist() == [1, 3]
    assert some.num_rows == 2


def test_what_is_asked_for_is_made_or_refused() -> None:
    assert isinstance(make_inference("window", make(), 2), WindowInference)
    assert isinstance(make_inference("streaming", make(), 2), StreamingInference)
    with pytest.raises(
        ValueError, match="streaming is for stacks of softmax and primal layers, not of linear: use mode window"
    ):
        make_inference("streaming", make("linear"), 2)
    with pytest.raises(ValueError, match="mode must be window or streaming, not 'fast'"):
        make_inference("fast", make(), 2)  # type: ignore[arg-type]


# Tiles


def test_tiles_cover_all_rows_once() -> None:
    seen: list[slice] = []
    for tiles in (Tiles(3), Tiles(3, side_by_side=True)):
        assert [tiles.whole(count) for count in (0, 1, 3, 4)] == [0, 3, 3, 6]
        tiles.run(seen.append, 9)
        assert sorted((rows.start, rows.stop) for rows in seen[-3:]) == [(0, 3), (3, 6), (6, 9)]
    whole = Tiles(None)
    assert whole.whole(5) == 5
    whole.run(seen.append, 5)
    assert (seen[-1].start, seen[-1].stop) == (0, 5)
    with pytest.raises(ValueError, match="at least 1 row, not 0"):
        Tiles(0)


def test_side_by_side_a_tile_has_one_thread_and_no_gradients() -> None:
    threads = torch.get_num_threads()
    found: list[tuple[int, bool]] = []
    try:
        torch.set_num_threads(2)
        Tiles(1, side_by_side=True).run(
            lambda rows: found.append((torch.get_num_threads(), torch.is_inference_mode_enabled())), 3
        )
        assert torch.get_num_threads() == 2  # of the caller
    finally:
        torch.set_num_threads(threads)
    assert found == [(1, True)] * 3


def test_one_after_the_other_a_tile_has_few_threads() -> None:
    threads = torch.get_num_threads()
    found: list[int] = []
    try:
        torch.set_num_threads(7)
        Tiles(1).run(lambda rows: found.append(torch.get_num_threads()), 2)
        Tiles(None).run(lambda rows: found.append(torch.get_num_threads()), 2)
        assert found == [4, 4, 7]
        assert torch.get_num_threads() == 7
    finally:
        torch.set_num_threads(threads)


def test_what_fails_in_a_tile_is_told() -> None:
    def fail(rows: slice) -> None:
        raise RuntimeError(f"in row {rows.start}")

    for tiles in (Tiles(2), Tiles(2, side_by_side=True)):
        with pytest.raises(RuntimeError, match="in row 0"):
            tiles.run(fail, 4)
