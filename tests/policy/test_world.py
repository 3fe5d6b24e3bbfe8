"""A policy outside the simulator: bad readings, executed actions, long episodes, one environment."""

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from primal_dt.data.normalizer import Normalizer
from primal_dt.model.critic import TwinCritic
from primal_dt.model.transformer import ModelShape
from primal_dt.policy.inference import InferenceMode
from primal_dt.policy.policy import DecisionTransformerPolicy
from primal_dt.policy.readings import BadReadingError
from primal_dt.policy.stepwise import BadActionError, StepwisePolicy
from tests.conftest import SHAPE as SMALL_SHAPE
from tests.model.small import random_model
from tests.policy.eager import eager_policy

SHAPE = replace(SMALL_SHAPE, max_timesteps=12)
UNITS = Normalizer(np.array([1, 2, 3], np.float32), np.array([2, 1, 4], np.float32), 100.0)
MODES = pytest.mark.parametrize("mode", ["window", "streaming"])
KINDS = pytest.mark.parametrize("kind", ["torch", "exported"])
BAD = [np.nan, np.inf, -np.inf, 1e15, 1e25, 3e38, -3e38, 1e300]
"""Readings that are not finite, or beyond the limits of ``UNITS``: more than 1e12 deviations or return scales."""


def make(shape: ModelShape = SHAPE, **options: Any) -> DecisionTransformerPolicy:
    policy = DecisionTransformerPolicy(random_model(shape, 0.2), UNITS, **options)
    policy.reset([300.0, 50.0])
    return policy


def make_kind(kind: str, shape: ModelShape = SHAPE, **options: Any) -> StepwisePolicy:
    """The policy in torch, or exported."""
    policy = make(shape, **options) if kind == "torch" else eager_policy(random_model(shape, 0.2), UNITS, **options)
    policy.reset([300.0, 50.0])
    return policy


def observations(step: int, count: int = 2) -> np.ndarray:
    return np.random.default_rng(step).normal(size=(count, 3))


@KINDS
@MODES
@pytest.mark.parametrize("value", BAD)
def test_a_refused_observation_changes_nothing(kind: str, mode: InferenceMode, value: float) -> None:
    policy, other = (make_kind(kind, mode=mode) for _ in range(2))
    for step in range(8):
        bad = observations(step)
        bad[1, 2] = value
        message = r"entry 2 of the observation of environment 1 is \S+, not a number from -4e\+12 to 4e\+12: "
        with pytest.raises(BadReadingError, match=message) as seen:
            policy.act(bad)
        assert (seen.value.environment, seen.value.entry) == (1, 2)
        np.testing.assert_array_equal(policy.act(observations(step)), other.act(observations(step)))
        policy.observe([1.0, 2.0])
        other.observe([1.0, 2.0])


@KINDS
@MODES
@pytest.mark.parametrize("value", [*BAD, 1e42])
def test_a_refused_reward_changes_nothing(kind: str, mode: InferenceMode, value: float) -> None:
    policy = make_kind(kind, mode=mode)
    policy.act(observations(0))
    with pytest.raises(BadReadingError, match="entry 0 of the reward of environment 1"):
        policy.observe([1.0, value])
    assert policy.left[:, 0].tolist() == [300, 50]
    policy.observe([1.0, 2.0])
    assert policy.left[:, 0].tolist() == [299, 48]


@KINDS
def test_rewards_cannot_take_the_return_out_of_its_range(kind: str) -> None:
    """Each of them alone could be accepted."""
    policy = make_kind(kind)
    policy.act(observations(0))
    policy.observe([9e13, 0.0])
    policy.act(observations(1))
    with pytest.raises(BadReadingError, match=r"the reward of environment 0 is 9e\+13, not a number from -1.9e\+14"):
        policy.observe([9e13, 0.0])


@KINDS
@MODES
def test_all_that_is_accepted_gives_finite_actions(kind: str, mode: InferenceMode) -> None:
    """Also at the ends of what is accepted, and after them."""
    policy = make_kind(kind, mode=mode)
    low, high = np.array(policy.limits.observation_low), np.array(policy.limits.observation_high)
    for step in range(8):
        extreme = 0.999 * np.array([low, high])[:: 1 if step % 2 else -1]
        seen = policy.act(extreme if step < 5 else observations(step))
        assert np.isfinite(seen).all()
        policy.observe([(-1) ** step * 9.9e13, 1.0], actions=np.full((2, 2), 9.9e11) * (-1) ** step)


@KINDS
@pytest.mark.parametrize("target", [1e14 + 1e5, -3e14, 1e300])
def test_targets_beyond_the_range_of_returns_are_refused(kind: str, target: float) -> None:
    policy = make_kind(kind)
    policy.reset([9e13])
    with pytest.raises(ValueError, match=r"targets must be from -1e\+14 to 1e\+14, not \["):
        policy.reset([target])
    critic = TwinCritic(SHAPE).eval()
    policy = DecisionTransformerPolicy(random_model(SHAPE, 0.2), UNITS, critic=critic)
    with pytest.raises(
        ValueError, match=r"targets must be from -8e\+13 to 8e\+13, not"
    ):  # one candidate takes 1.25 of it
        policy.reset([9e13])


@KINDS
@MODES
def test_actions_that_are_not_finite_are_never_returned(kind: str, mode: InferenceMode) -> None:
    """Whatever the weights are: those of a crafted file may overflow."""
    model = random_model(SHAPE, 0.2)
    torch.nn.init.constant_(model.embed_state.weight, 3e38)
    policy: StepwisePolicy
    policy = DecisionTransformerPolicy(model, UNITS, mode=mode)
    if kind == "exported":
        policy = eager_policy(model, UNITS, mode=mode)
    policy.reset([300.0, 50.0])
    with pytest.raises(BadActionError, match=r"the action of environment 0 is \[nan, nan\]"):
        policy.act(observations(0))
    with pytest.raises(RuntimeError, match="call reset"):
        policy.act(observations(0))


@KINDS
@MODES
def test_hold_uses_the_last_good_reading(kind: str, mode: InferenceMode) -> None:
    """The reading held is that of the same entry in the same environment, also after another environment has ended.

    Good readings lie between bad ones, so that the last good one is not the first.
    """
    holding, told = make_kind(kind, mode=mode, on_bad="hold"), make_kind(kind, mode=mode)
    last, last_reward = observations(0)[1, 1], 5.0
    for step in range(10):
        rows = slice(None) if step < 5 else slice(1, None)
        good, rewards = observations(step)[rows], np.array([3.0, 5.0 + step])[rows]
        read, earned = good.copy(), rewards.copy()
        if step % 3:
            read[-1, 1], earned[-1] = BAD[step % len(BAD)], BAD[-step % len(BAD)]
            good[-1, 1], rewards[-1] = last, last_reward
        last, last_reward = good[-1, 1], rewards[-1]
        np.testing.assert_array_equal(holding.act(read), told.act(good))
        holding.observe(earned)
        told.observe(rewards)
        assert np.array_equal(holding.left, told.left)
        if step == 4:
            assert holding.held.tolist() == [0, 6]
            for policy in (holding, told):
                policy.keep(np.array([False, True]))
    assert holding.held.tolist() == [12]
    assert told.held.tolist() == [0]
    holding.reset([1.0])
    assert holding.held.tolist() == [0]


def test_a_reading_that_is_held_for_long_is_reported_once() -> None:
    policy = make(replace(SHAPE, max_timesteps=20), on_bad="hold")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for step in range(16):
            read = observations(step)
            read[1, 2] = np.nan if step else 0.0
            read[0, 0] = np.nan if step % 5 else 0.0  # never for ten steps in a row
            policy.act(read)
            assert len(seen) == (step >= 10)
            policy.observe([0.0, 0.0])
    (warning,) = seen
    assert str(warning.message) == "entry 2 of the observation of environment 1 has been held for 10 steps"
    assert warning.filename == __file__


def test_a_held_reward_must_fit_the_returns() -> None:
    policy = make(on_bad="hold")
    policy.act(observations(0))
    policy.observe([9e13, 0.0])
    policy.act(observations(1))
    with pytest.raises(BadReadingError, match=r"is 9e\+13, not .* this is the last good one, which no longer fits"):
        policy.observe([np.nan, 0.0])


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
        (
            SHAPE,
            [[0.0, 0.0], [np.nan, 0.0]],
            "entry 0 of the action of environment 1 is nan.*: give the action that was",
        ),
        (
            SHAPE,
            [[0.0, 0.0], [9.0, 1e13]],
            r"entry 1 of the action of environment 1 is 1e\+13, not a number from -1e\+12",
        ),
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
@KINDS
@pytest.mark.parametrize("on_bad", ["error", "hold"])
def test_wrong_executed_actions_change_nothing(
    shape: ModelShape, actions: list[Any], message: str, kind: str, on_bad: str
) -> None:
    policy = make_kind(kind, shape, on_bad=on_bad)
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


@MODES
def test_numbers_of_any_real_type_are_taken(mode: InferenceMode) -> None:
    single, expected = make(mode=mode), make(mode=mode)
    for policy in (single, expected):
        policy.reset(300.0)
    for step, kind in enumerate((torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool)):
        seen = torch.tensor([1.0, 0.0, 1.0]).to(kind)
        np.testing.assert_array_equal(single.act(seen), expected.act([1.0, 0.0, 1.0]))
        single.observe(torch.tensor(1.0).to(kind))
        expected.observe(1)
        assert single.timestep == step + 1


@pytest.mark.parametrize(
    "values", [[1j, 0, 0], np.zeros(3, complex), torch.zeros(3, dtype=torch.complex64), ["1", "2", "3"], [None, 1, 2]]
)
def test_what_is_no_real_number_is_refused(values: Any) -> None:
    policy = make()
    policy.reset(300.0)
    with pytest.raises(ValueError, match="expected real numbers, not"):
        policy.act(values)


@KINDS
def test_act_needs_a_reset(kind: str) -> None:
    model = random_model(SHAPE, 0.2)
    policy = DecisionTransformerPolicy(model, UNITS) if kind == "torch" else eager_policy(model, UNITS)
    with pytest.raises(RuntimeError, match=r"act was called before reset: call reset\(targets\)"):
        policy.act(observations(0, 1)[0])
    assert policy.predicted_returns is None


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
@pytest.mark.parametrize(
    ("changes", "count"),
    [
        *(({}, count) for count in (1, 2, 9, 70)),
        ({"attention": "softmax", "num_heads": 2}, 3),
        ({"attention": "primalformer", "num_heads": 2}, 3),
        ({"conditioning": "max-return", "num_heads": 2}, 3),
        ({"conditioning": "none", "context": 2}, 3),
        ({"action_low": (), "action_high": (), "categories": (3, 2)}, 3),
    ],
    ids=str,
)
def test_the_fastest_way_gives_the_same_actions(mode: InferenceMode, changes: dict[str, Any], count: int) -> None:
    model = random_model(replace(SHAPE, **changes), 0.2)
    policies = [DecisionTransformerPolicy(model, UNITS, mode=mode, reproducible=value) for value in (True, False)]
    for policy in policies:
        policy.reset(np.linspace(0, 300, count))
    for step in range(12):
        expected, actions = (policy.act(observations(step, count)) for policy in policies)
        np.testing.assert_allclose(actions, expected, atol=1e-5)
        for policy in policies:
            policy.observe(np.ones(count))
            if step == 6 and count > 1:
                policy.keep(np.arange(count) != 1)
        count -= step == 6 and count > 1
