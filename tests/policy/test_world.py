"""A policy outside the simulator: bad readings, executed actions, long episodes, one environment."""

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from primal_dt.data.normalizer import Normalizer
from primal_dt.model.transformer import ModelShape
from primal_dt.policy.inference import InferenceMode
from primal_dt.policy.policy import DecisionTransformerPolicy
from primal_dt.policy.readings import BadReadingError
from tests.conftest import SHAPE as SMALL_SHAPE
from tests.model.small import random_model

SHAPE = replace(SMALL_SHAPE, max_timesteps=12)
UNITS = Normalizer(np.array([1, 2, 3], np.float32), np.array([2, 1, 4], np.float32), 100.0)
MODES = pytest.mark.parametrize("mode", ["window", "streaming"])
BAD = [np.nan, np.inf, -np.inf, 1e300]


def make(shape: ModelShape = SHAPE, **options: Any) -> DecisionTransformerPolicy:
    policy = DecisionTransformerPolicy(random_model(shape, 0.2), UNITS, **options)
    policy.reset([300.0, 50.0])
    return policy


def observations(step: int, count: int = 2) -> np.ndarray:
    return np.random.default_rng(step).normal(size=(count, 3))


@MODES
@pytest.mark.parametrize("value", BAD)
def test_a_refused_observation_changes_nothing(mode: InferenceMode, value: float) -> None:
    policy, other = make(mode=mode), make(mode=mode)
    for step in range(8):
        bad = observations(step)
        bad[1, 2] = value
        with pytest.raises(
            BadReadingError, match=r"entry 2 of the observation of environment 1 is (nan|-?inf)"
        ) as seen:
            policy.act(bad)
        assert (seen.value.environment, seen.value.entry) == (1, 2)
        np.testing.assert_array_equal(policy.act(observations(step)), other.act(observations(step)))
        policy.observe([1.0, 2.0])
        other.observe([1.0, 2.0])


@pytest.mark.parametrize("value", BAD[:3])
def test_a_refused_reward_changes_nothing(value: float) -> None:
    policy = make()
    policy.act(observations(0))
    with pytest.raises(BadReadingError, match="entry 0 of the reward of environment 1"):
        policy.observe([1.0, value])
    assert policy.left[:, 0].tolist() == [300, 50]
    policy.observe([1.0, 2.0])
    assert policy.left[:, 0].tolist() == [299, 48]


@MODES
def test_hold_uses_the_last_good_reading(mode: InferenceMode) -> None:
    """Of the same entry in the same environment, also after another environment has ended."""
    holding, told = make(mode=mode, on_bad="hold"), make(mode=mode)
    for step in range(7):
        rows = slice(None) if step < 4 else slice(1, None)
        good, rewards = observations(step)[rows], np.array([3.0, 5.0])[rows]
        read, earned = good.copy(), rewards.copy()
        if step:
            read[-1, 1], earned[-1] = np.nan, np.inf
            good[-1, 1] = observations(0)[1, 1]
        np.testing.assert_array_equal(holding.act(read), told.act(good))
        holding.observe(earned)
        told.observe(rewards)
        assert np.array_equal(holding.left, told.left)
        if step == 3:
            holding.keep(np.array([False, True]))
            told.keep(np.array([False, True]))


def test_hold_needs_an_earlier_reading() -> None:
    policy = make(on_bad="hold")
    with pytest.raises(BadReadingError, match="there is no earlier one in this episode to hold"):
        policy.act(np.full((2, 3), np.nan))
    policy.act(observations(0))
    with pytest.raises(BadReadingError, match="there is no earlier one in this episode to hold"):
        policy.observe([np.nan, 0.0])
    policy.observe([0.0, 0.0])
    policy.reset([1.0, 1.0])
    with pytest.raises(BadReadingError, match="to hold"):
        policy.act(np.full((2, 3), np.nan))


@MODES
def test_executed_actions_enter_the_history(mode: InferenceMode) -> None:
    """As if the policy had chosen them; the policy's own make no difference."""
    told, silent = make(mode=mode), make(mode=mode)
    chosen = [policy.act(observations(0)) for policy in (told, silent)]
    told.observe([0.0, 0.0], actions=chosen[0])
    silent.observe([0.0, 0.0])
    np.testing.assert_array_equal(told.act(observations(1)), silent.act(observations(1)))
    executed = np.array([[0.5, -0.5], [0.25, 1.0]])
    told.observe([0.0, 0.0], actions=executed.tolist())
    with torch.inference_mode():
        silent._inference.actions[:2] = torch.from_numpy(executed)
    silent.observe([0.0, 0.0])
    third = told.act(observations(2))
    np.testing.assert_array_equal(third, silent.act(observations(2)))
    usual = make(mode=mode)
    for step in range(2):
        usual.act(observations(step))
        usual.observe([0.0, 0.0])
    assert np.abs(usual.act(observations(2)) - third).max() > 1e-4


@pytest.mark.parametrize(
    ("shape", "actions", "message"),
    [
        (SHAPE, [[0.0, 0.0]], r"actions must have shape \(2, 2\), not \(1, 2\)"),
        (SHAPE, [[0.0, 0.0], [np.nan, 0.0]], "entry 0 of the action of environment 1 is nan"),
        (
            replace(SHAPE, action_low=(), action_high=(), categories=(3,)),
            [[0.0], [3.0]],
            "whole numbers from 0 to below",
        ),
        (
            replace(SHAPE, action_low=(), action_high=(), categories=(3,)),
            [[0.5], [1.0]],
            "whole numbers from 0 to below",
        ),
    ],
)
def test_wrong_executed_actions_change_nothing(shape: ModelShape, actions: list[Any], message: str) -> None:
    policy = make(shape)
    policy.act(observations(0))
    with pytest.raises(ValueError, match=message):
        policy.observe([1.0, 1.0], actions=actions)
    assert policy.left[:, 0].tolist() == [300, 50]
    policy.observe([1.0, 1.0])


@MODES
@pytest.mark.parametrize("conditioning", ["return", "max-return"])
def test_the_last_timestep_is_used_again(mode: InferenceMode, conditioning: Any) -> None:
    """A longer episode has actions of the model whose table repeats the last row, and one warning."""
    short = make(replace(SHAPE, conditioning=conditioning), mode=mode)
    long = make(replace(SHAPE, conditioning=conditioning, max_timesteps=20), mode=mode)
    weights = short.model.state_dict()
    for name in ("embed_timestep.weight", "return_cap"):
        if name in weights:
            weights[name] = torch.cat((weights[name], weights[name][-1:].expand(8, *weights[name].shape[1:])))
    long.model.load_state_dict(weights)
    long.reset([300.0, 50.0])
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for step in range(20):
            np.testing.assert_array_equal(short.act(observations(step)), long.act(observations(step)))
            short.observe([1.0, 1.0])
            long.observe([1.0, 1.0])
    assert [str(warning.message)[:45] for warning in seen] == ["step 12 is past the model's last timestep (11)"[:45]]


def test_long_episodes_are_an_error_if_asked_for() -> None:
    policy = make(past_end="error")
    for step in range(12):
        policy.act(observations(step))
        policy.observe([0.0, 0.0])
    with pytest.raises(ValueError, match=r"step 12 must be below max_timesteps \(12\)"):
        policy.act(observations(12))


@MODES
@pytest.mark.parametrize("kind", [list, np.asarray, torch.tensor])
def test_one_environment_needs_no_batch_axis(mode: InferenceMode, kind: Any) -> None:
    single, batched = make(mode=mode), make(mode=mode)
    single.reset(300.0)
    batched.reset([300.0])
    for step in range(8):
        seen = observations(step, 1)[0].tolist()
        action = single.act(kind(seen))
        assert action.shape == (2,)
        np.testing.assert_array_equal(action, batched.act([seen])[0])
        single.observe(1.5, actions=kind(action.tolist()))
        batched.observe([1.5])


def test_calls_alternate() -> None:
    policy = make()
    with pytest.raises(RuntimeError, match="observe was called before act"):
        policy.observe([0.0, 0.0])
    policy.act(observations(0))
    with pytest.raises(RuntimeError, match="act was called twice"):
        policy.act(observations(0))
    policy.observe([0.0, 0.0])
    policy.act(observations(1))
    policy.reset([1.0])  # a new episode, whatever came before
    policy.act(observations(0, 1))


def test_a_policy_that_needs_a_target_asks_for_it() -> None:
    with pytest.raises(ValueError, match="this policy follows a target return"):
        make().reset()
    policy = make(replace(SHAPE, conditioning="max-return"))
    policy.reset()
    assert policy.act(observations(0, 1)[0]).shape == (2,)


@pytest.mark.parametrize("rewards", [[1.0], 1.0, [[1.0, 2.0]]])
def test_wrong_rewards_raise(rewards: Any) -> None:
    policy = make()
    policy.act(observations(0))
    with pytest.raises(ValueError, match=r"rewards must have shape \(2,\)"):
        policy.observe(rewards)


@pytest.mark.parametrize("options", [{"on_bad": "skip"}, {"past_end": "stop"}])
def test_unknown_options_raise(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must be .* or .*, not '(skip|stop)'"):
        make(**options)


@MODES
@pytest.mark.parametrize("count", [1, 2, 9, 70])
def test_the_fastest_way_gives_the_same_actions(mode: InferenceMode, count: int) -> None:
    model = random_model(SHAPE, 0.2)
    policies = [DecisionTransformerPolicy(model, UNITS, mode=mode, reproducible=value) for value in (True, False)]
    for policy in policies:
        policy.reset(np.linspace(0, 300, count))
    for step in range(8):
        expected, actions = (policy.act(observations(step, count)) for policy in policies)
        np.testing.assert_allclose(actions, expected, atol=1e-5)
        for policy in policies:
            policy.observe(np.ones(count))
