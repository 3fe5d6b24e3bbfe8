"""Spaces as vectors: flattening equals gymnasium's, and actions are recovered."""

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.spaces.utils import flatten
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.errors import DataError
from envs.spaces import action_bounds, flat_width, flatten_rows, to_action

SIMPLE = st.one_of(
    st.integers(1, 4).map(lambda n: spaces.Box(-1.0, 1.0, (n,), np.float32)),
    st.integers(1, 3).map(lambda n: spaces.Box(-100, 100, (n,), np.int32)),
    st.tuples(st.integers(1, 5), st.integers(-2, 2)).map(lambda pair: spaces.Discrete(pair[0], start=pair[1])),
    st.lists(st.integers(1, 4), min_size=1, max_size=3).map(spaces.MultiDiscrete),
    st.integers(1, 3).map(spaces.MultiBinary),
)
NESTED = st.recursive(
    SIMPLE,
    lambda part: st.one_of(
        st.dictionaries(st.text("abc", min_size=1, max_size=3), part, min_size=1, max_size=3).map(spaces.Dict),
        st.lists(part, min_size=1, max_size=3).map(spaces.Tuple),
    ),
    max_leaves=5,
)
ACTIONS = st.one_of(
    st.integers(1, 4).map(lambda n: spaces.Box(-2.0, np.inf, (n,), np.float32)),
    st.tuples(st.integers(1, 5), st.integers(-2, 2)).map(lambda pair: spaces.Discrete(pair[0], start=pair[1])),
    st.lists(st.integers(1, 4), min_size=1, max_size=3).map(spaces.MultiDiscrete),
)


def stacked(space: spaces.Space[Any], samples: list[Any]) -> Any:
    """Samples of a space as one value with a leading axis in each part."""
    if isinstance(space, spaces.Dict):
        return {name: stacked(part, [sample[name] for sample in samples]) for name, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return {f"_index_{i}": stacked(part, [s[i] for s in samples]) for i, part in enumerate(space.spaces)}
    return np.stack(samples)


@settings(deadline=None)
@given(NESTED, st.integers(0, 99))
def test_rows_are_flattened_as_by_gymnasium(space: spaces.Space[Any], seed: int) -> None:
    space.seed(seed)
    samples = [space.sample() for _ in range(3)]
    flat = flatten_rows(space, stacked(space, samples))
    assert flat.shape == (3, flat_width(space, "here"))
    expected = np.stack([np.asarray(flatten(space, sample), np.float32) for sample in samples])
    np.testing.assert_allclose(flat, expected, rtol=1e-6)


@settings(deadline=None)
@given(ACTIONS, st.integers(0, 99))
def test_actions_are_in_their_space(space: spaces.Space[Any], seed: int) -> None:
    bounds, random = action_bounds(space, "here"), np.random.default_rng(seed)
    if bounds.categories:
        entries = np.array([random.integers(number) for number in bounds.categories], np.float32)
    else:
        entries = np.clip(random.normal(size=bounds.width), bounds.low, bounds.high).astype(np.float32)
    assert space.contains(to_action(space, entries))


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (spaces.Box(0, 255, (8, 8, 3), np.uint8), r"shape \(8, 8, 3\) \(images\) are not supported"),
        (spaces.Dict({"a": spaces.Text(3)}), "here, a: observations in Text are not supported"),
        (spaces.Tuple([spaces.Sequence(spaces.Discrete(2))]), "here, part 0: observations in Sequence"),
    ],
)
def test_observations_without_a_vector_are_refused(space: spaces.Space[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        flat_width(space, "here")


@pytest.mark.parametrize(
    "space", [spaces.Box(-1, 1, (2, 2)), spaces.Dict({"a": spaces.Discrete(2)}), spaces.MultiBinary(2)]
)
def test_actions_of_other_spaces_are_refused(space: spaces.Space[Any]) -> None:
    with pytest.raises(DataError, match="here: actions must be a Box of one dimension, Discrete"):
        action_bounds(space, "here")


def test_a_value_outside_a_discrete_space_is_refused() -> None:
    with pytest.raises(DataError, match="must be one of 3 values, not 1 to 3"):
        flatten_rows(spaces.Discrete(3), np.array([1, 3]))
