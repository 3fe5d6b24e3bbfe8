"""Step-by-step inference equals the model on whole windows, and no row depends on the others."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from primal_dt.data.sampler import Batch
from primal_dt.model.transformer import ATTENTION_STACKS, Block, DecisionTransformer
from primal_dt.policy.inference import (
    Inference,
    InferenceMode,
    StreamingInference,
    WindowInference,
    make_inference,
    require_mode,
)
from primal_dt.policy.tiles import Tiles
from tests.conftest import SHAPE
from tests.model.small import random_model

NUM_ROWS, NUM_STEPS = 4, 25
TILES = Tiles(2, side_by_side=True)
STATES = torch.randn(NUM_ROWS, NUM_STEPS, 3, generator=torch.Generator().manual_seed(0))
RETURNS = torch.randn(NUM_ROWS, NUM_STEPS, 1, generator=torch.Generator().manual_seed(1))

all_stacks = pytest.mark.parametrize("attention", ATTENTION_STACKS)
streamable_stacks = pytest.mark.parametrize("attention", ["primal-plus", "primalformer", "softmax"])


def make(
    attention: str = "primal-plus", *, context: int = 4, num_layers: int = 3, **changes: Any
) -> DecisionTransformer:
    shape = replace(
        SHAPE,
        attention=attention,
        num_heads=2,
        num_layers=num_layers,
        context=context,
        max_timesteps=NUM_STEPS,
        **changes,
    )
    return random_model(shape, 0.2)


@torch.inference_mode()
def play(inference: Inference) -> Tensor:
    """The actions of an episode, (N, T, A)."""
    return torch.stack([inference.step(STATES[:, t], RETURNS[:, t], TILES).clone() for t in range(NUM_STEPS)], 1)


@torch.inference_mode()
def by_windows(model: DecisionTransformer, actions: Tensor, returns: Tensor = RETURNS, what: str = "actions") -> Tensor:
    """The last action, or return, that the model predicts from the window of each step, (N, T, A)."""
    predicted = []
    for t in range(NUM_STEPS):
        window = slice(max(0, t + 1 - model.shape.context), t + 1)
        timesteps = torch.arange(NUM_STEPS)[window].expand(NUM_ROWS, -1)
        valid = torch.ones_like(timesteps, dtype=torch.bool)
        batch = Batch(STATES[:, window], actions[:, window], returns[:, window], timesteps, valid)
        predicted.append(getattr(model(batch), what)[:, -1])
    return torch.stack(predicted, 1)


@pytest.mark.parametrize("attention", ["primal-plus", "softmax", "linear"])
def test_window_mode_is_exact_without_returns(attention: str) -> None:
    model = make(attention, conditioning="none")
    actions = play(make_inference("window", model, NUM_ROWS))
    torch.testing.assert_close(actions, by_windows(model, actions), atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("mode", "context", "num_layers"),
    [("window", 4, 3), ("window", 1, 2), ("window", NUM_STEPS, 3), ("streaming", 5, 1), ("streaming", NUM_STEPS, 3)],
)
@pytest.mark.parametrize("attention", ["primal-plus", "softmax"])
def test_predicted_returns_are_followed(mode: InferenceMode, attention: str, context: int, num_layers: int) -> None:
    """The model predicts the return at the newest state. The action is that for this return, at most the cap.

    Where streaming is exact: in the first window, or with one layer.
    """
    model = make(attention, context=context, num_layers=num_layers, conditioning="max-return")
    model.return_cap.fill_(float(followed(make_inference(mode, model, NUM_ROWS))[1].median()))
    actions, returns = followed(make_inference(mode, model, NUM_ROWS))
    assert returns.max() == model.return_cap[0]
    assert (returns < model.return_cap[0]).any()
    predicted = by_windows(model, actions, returns, what="best_returns").clamp(max=model.return_cap[0])
    torch.testing.assert_close(returns, predicted, atol=2e-5, rtol=0)
    torch.testing.assert_close(actions, by_windows(model, actions, returns), atol=2e-5, rtol=0)


@torch.inference_mode()
def followed(inference: Inference) -> tuple[Tensor, Tensor]:
    """The actions (N, T, A) and the predicted returns-to-go that they follow (N, T, 1)."""
    ones = torch.ones(NUM_ROWS, 1)
    steps = [(inference.step(STATES[:, t], ones, TILES).clone(), inference.returns.clone()) for t in range(NUM_STEPS)]
    actions, returns = zip(*steps, strict=True)
    return torch.stack(actions, 1), torch.stack(returns, 1)


@pytest.mark.parametrize(("context", "num_layers"), [(1, 2), (2, 3), (4, 1), (5, 3)])
@all_stacks
def test_window_mode_is_exact(attention: str, context: int, num_layers: int) -> None:
    model = make(attention, context=context, num_layers=num_layers)
    actions = play(make_inference("window", model, NUM_ROWS))
    torch.testing.assert_close(actions, by_windows(model, actions), atol=2e-5, rtol=0)
    assert actions.std(1).min() > 1e-3  # an error would show


@streamable_stacks
def test_streaming_is_exact_until_the_window_slides(attention: str) -> None:
    model = make(attention, context=6)
    actions = play(make_inference("streaming", model, NUM_ROWS))
    error = (actions - by_windows(model, actions)).abs()
    assert error[:, :6].max() < 1e-5
    assert error[:, 6:].max() > 1e-3


@pytest.mark.parametrize("context", [1, 2, 5])
@streamable_stacks
def test_streaming_one_layer_is_always_exact(attention: str, context: int) -> None:
    """The keys, values and tokens of the first layer do not depend on the window; those of later layers do."""
    model = make(attention, context=context, num_layers=1)
    actions = play(make_inference("streaming", model, NUM_ROWS))
    torch.testing.assert_close(actions, by_windows(model, actions), atol=1e-5, rtol=0)


@torch.inference_mode()
def streamed_slowly(model: DecisionTransformer, actions: Tensor) -> Tensor:
    """Streaming by its definition: layer by layer, for each token of the episode, over the tokens of its window."""
    time = model.embed_timestep.weight[:NUM_STEPS]
    kinds = [model.embed_state(STATES), model.embed_action(actions)]
    if model.shape.conditioning == "return":
        kinds.insert(0, model.embed_return(RETURNS))
    number = len(kinds)
    x = model.embed_norm(torch.stack([kind + time for kind in kinds], 2).flatten(1, 2))  # (N, number T, D)
    for block in model.blocks:
        assert isinstance(block, Block)
        normed = block.attention_norm(x)
        hidden = torch.empty_like(x)
        for token in range(number * NUM_STEPS):
            step = (token + 1) // number  # when the token is new: an action comes with the step after its own
            first = max(0, number * (step - model.shape.context + 1))
            hidden[:, token] = block.attention(normed[:, first : token + 1]).hidden[:, -1]
        x = block.finish(x, hidden)
    return model.actions_at(x.unflatten(1, (NUM_STEPS, number))[:, :, -2])


@pytest.mark.parametrize("conditioning", ["return", "none"])
@pytest.mark.parametrize("context", [2, 5])
@streamable_stacks
def test_streaming_equals_its_definition(attention: str, context: int, conditioning: str) -> None:
    model = make(attention, context=context, conditioning=conditioning)
    actions = play(make_inference("streaming", model, NUM_ROWS))
    torch.testing.assert_close(actions, streamed_slowly(model, actions), atol=2e-5, rtol=0)


@pytest.mark.parametrize("mode", ["window", "streaming"])
def test_finished_rows_do_not_change_the_others(mode: InferenceMode) -> None:
    model = make()
    expected = play(make_inference(mode, model, NUM_ROWS))
    inference, rows = make_inference(mode, model, NUM_ROWS), torch.arange(NUM_ROWS)
    with torch.inference_mode():
        for t in range(NUM_STEPS):
            padded = torch.cat((rows, rows.new_zeros(inference.num_rows - len(rows))))
            actions = inference.step(STATES[padded, t], RETURNS[padded, t], TILES)
            assert torch.equal(actions[: len(rows)], expected[rows, t])
            if t in (3, 11):
                remaining = torch.tensor([1, 2, 3] if t == 3 else [0, 2])
                rows = rows[remaining]
                inference.keep(remaining, TILES.whole(len(rows)))
    assert rows.tolist() == [1, 3]
    assert inference.num_rows == 2


def test_the_mode_selects_the_class() -> None:
    assert isinstance(make_inference("window", make(), 2), WindowInference)
    assert isinstance(make_inference("streaming", make(), 2), StreamingInference)


@pytest.mark.parametrize(
    ("mode", "attention", "message"),
    [
        ("streaming", "linear", "mode streaming supports only softmax and primal layers, not linear: use mode window"),
        ("fast", "softmax", "mode must be window or streaming, not 'fast'"),
    ],
)
def test_an_unsupported_mode_raises(mode: InferenceMode, attention: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_inference(mode, make(attention), 2)


def test_streaming_needs_the_cosine_map() -> None:
    require_mode("window", replace(SHAPE, feature_map="exponential"))
    require_mode("streaming", replace(SHAPE, feature_map="exponential", attention="softmax"))
    with pytest.raises(ValueError, match="supports only the cosine map, not exponential: use mode window"):
        require_mode("streaming", replace(SHAPE, feature_map="exponential"))


@pytest.mark.parametrize(
    ("tiles", "whole", "starts"),
    [(Tiles(3), 6, [0, 3, 6]), (Tiles(3, side_by_side=True), 6, [0, 3, 6]), (Tiles(None), 4, [0])],
)
def test_tiles_cover_all_rows_once(tiles: Tiles, whole: int, starts: list[int]) -> None:
    seen: list[slice] = []
    tiles.run(seen.append, 9)
    assert sorted((rows.start, rows.stop) for rows in seen) == list(zip(starts, [*starts[1:], 9], strict=True))
    assert [tiles.whole(count) for count in (0, 3, 4)] == [0, 3, whole]


def test_a_tile_needs_a_row() -> None:
    assert Tiles(3).whole(1) == 3
    with pytest.raises(ValueError, match="at least 1 row, not 0"):
        Tiles(0)


def test_parallel_tiles_have_one_thread_and_no_gradients(set_threads: Callable[[int], None]) -> None:
    found: list[tuple[int, bool]] = []
    set_threads(2)
    Tiles(1, side_by_side=True).run(
        lambda rows: found.append((torch.get_num_threads(), torch.is_inference_mode_enabled())), 3
    )
    assert torch.get_num_threads() == 2  # in the caller
    assert found == [(1, True)] * 3


def test_sequential_tiles_have_at_most_four_threads(set_threads: Callable[[int], None]) -> None:
    found: list[int] = []
    set_threads(7)
    for tiles in (Tiles(1), Tiles(None)):
        tiles.run(lambda rows: found.append(torch.get_num_threads()), 2)
    assert found == [4, 4, 7]
    assert torch.get_num_threads() == 7


@pytest.mark.parametrize("side_by_side", [False, True])
def test_an_error_in_a_tile_is_raised(side_by_side: bool) -> None:
    def fail(rows: slice) -> None:
        raise RuntimeError(f"in row {rows.start}")

    with pytest.raises(RuntimeError, match="in row 0"):
        Tiles(2, side_by_side=side_by_side).run(fail, 4)
