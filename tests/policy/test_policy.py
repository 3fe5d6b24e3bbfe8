"""The policy sees its history as a training window, and its actions do not depend on the other environments."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from primal_dt.data.normalizer import Normalizer
from primal_dt.data.sampler import WindowSampler
from primal_dt.data.trajectories import Trajectories, Trajectory
from primal_dt.model.critic import TwinCritic
from primal_dt.model.transformer import Conditioning, ModelShape
from primal_dt.policy.inference import InferenceMode, WindowInference
from primal_dt.policy.policy import CANDIDATES, DecisionTransformerPolicy
from primal_dt.policy.tiles import Tiles
from tests.conftest import SHAPE as SMALL_SHAPE
from tests.model.small import random_model

SHAPE = replace(SMALL_SHAPE, dropout=0.5, max_timesteps=12)
UNITS = Normalizer(np.array([1, 2, 3], np.float32), np.array([2, 1, 4], np.float32), 100.0)


def make(mode: InferenceMode = "window", shape: ModelShape = SHAPE) -> DecisionTransformerPolicy:
    return DecisionTransformerPolicy(random_model(shape, 0.2), UNITS, mode=mode)


def play(policy: DecisionTransformerPolicy, steps: int) -> Trajectories:
    """Two episodes with random states and rewards, whose targets are exactly the returns."""
    random = np.random.default_rng(0)
    states = random.normal(size=(steps, 2, 3))
    rewards = random.normal(size=(steps, 2)).round(2) * 50
    policy.reset(rewards.sum(0))
    actions = np.zeros((steps, 2, 2), np.float32)
    for step in range(steps):
        actions[step] = policy.act(states[step])
        policy.observe(rewards[step])
    s, r = states.astype(np.float32), rewards.astype(np.float32)
    return Trajectories.of([Trajectory(s[:, i], actions[:, i], r[:, i]) for i in range(2)])


@pytest.mark.parametrize("step", [0, 1, 3, 4, 9])
def test_the_policy_sees_the_training_window(step: int) -> None:
    """If the target is exactly the return, training on the episode has the same window."""
    policy = make()
    data = play(policy, 10)
    sampler = WindowSampler(data, UNITS, context=SHAPE.context, batch_size=1, seed=0)
    for start in data.offsets[:2]:
        first = max(0, step + 1 - SHAPE.context)
        window = sampler._windows(np.array([start + first]))
        with torch.inference_mode():
            predicted = policy.model(window).actions[0, step - first]
            shifted = replace(window, returns_to_go=window.returns_to_go + 5.0)  # a reward of 500
            other = policy.model(shifted).actions[0, step - first]
        np.testing.assert_allclose(data.actions[start + step], predicted, atol=1e-5)
        assert (other - predicted).abs().max() > 1e-3  # an error would show


def test_the_inputs_are_those_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """States are bit-identical; returns-to-go are equal up to single precision."""
    policy, seen, step = make(), [], WindowInference.step

    def watched(self: WindowInference, states: torch.Tensor, returns: torch.Tensor, tiles: Tiles) -> torch.Tensor:
        seen.append((states[:2].clone(), returns[:2].clone()))
        return step(self, states, returns, tiles)

    monkeypatch.setattr(WindowInference, "step", watched)
    data = play(policy, 10)
    window = WindowSampler(data, UNITS, context=10, batch_size=1, seed=0)._windows(data.offsets[:2])
    states, returns = (torch.stack(values, 1) for values in zip(*seen, strict=True))
    assert torch.equal(states, window.states)
    torch.testing.assert_close(returns, window.returns_to_go, atol=1e-5, rtol=0)


def test_the_target_drops_by_the_rewards() -> None:
    policy = make()
    policy.reset([300.0, 50.0])
    left = [policy.left[:, 0].tolist()]
    for reward in ([1.0, 10.0], [2.0, 20.0], [3.0, 30.0]):
        policy.act(np.zeros((2, 3)))
        policy.observe(reward)
        left.append(policy.left[:, 0].tolist())
    assert left == [[300, 50], [299, 40], [297, 20], [294, -10]]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["window", "streaming"])
@pytest.mark.parametrize(
    "changes",
    [
        {"width": 128, "context": 10, "rank": 64},
        {"width": 128, "context": 10, "attention": "softmax"},
        {"width": 128, "context": 10, "rank": 32, "attention": "primalformer"},
        {"width": 256, "num_heads": 4, "context": 20, "rank": 96},
        {"width": 48, "num_heads": 2, "context": 3, "rank": 4},
        {"width": 128, "context": 10, "rank": 64, "conditioning": "none"},
        {"width": 128, "context": 10, "rank": 64, "conditioning": "max-return"},
    ],
    ids=["quick", "softmax", "primalformer", "paper", "heads of 24", "cloning", "max-return"],
)
def test_actions_do_not_depend_on_other_rows(
    changes: dict[str, Any], mode: InferenceMode, set_threads: Callable[[int], None]
) -> None:
    """Alone, in another order, among others, and after others have finished; with any number of threads."""
    count, steps = 70, 4
    observations = np.random.default_rng(1).normal(size=(steps, count, 3))
    # Built once: with another number of threads its orthogonal weights would have other bits.
    model = random_model(replace(SHAPE, **changes), 0.2)
    critic = TwinCritic(model.shape).eval() if model.shape.conditioning == "max-return" else None

    def act(rows: list[int], *, leave_after: int | None = None) -> np.ndarray:
        """The actions of some rows; rows divisible by 3 may finish early."""
        policy = DecisionTransformerPolicy(model, UNITS, mode=mode, reproducible=True, critic=critic)
        active = np.array(rows)
        policy.reset(10.0 * active)
        actions = np.full((steps, count, 2), np.nan, np.float32)
        for step in range(steps):
            actions[step, active] = policy.act(observations[step, active])
            policy.observe(np.ones(len(active)))
            if step == leave_after:
                policy.keep(active % 3 > 0)
                active = active[active % 3 > 0]
        return actions

    set_threads(1)
    every = act(list(range(count)))
    for number in (2, 6):
        set_threads(number)
        for rows in ([69], [3, 1, 2], list(range(69, -1, -1))):
            np.testing.assert_array_equal(act(rows)[:, rows], every[:, rows])
        stayed = [row for row in range(count) if row % 3]
        np.testing.assert_array_equal(act(list(range(count)), leave_after=1)[:, stayed], every[:, stayed])


def test_a_policy_does_not_apply_dropout() -> None:
    policy = DecisionTransformerPolicy(make().model.train(), UNITS)
    np.testing.assert_array_equal(play(policy, 3).actions, play(policy, 3).actions)


def test_later_steps_do_not_change_returned_actions() -> None:
    policy = make()
    policy.reset([5.0])
    first = policy.act(np.ones((1, 3)))
    before = first.copy()
    policy.observe([1.0])
    policy.act(-np.ones((1, 3)))
    np.testing.assert_array_equal(first, before)


@pytest.mark.parametrize("targets", [[[1.0]], [float("nan")]])
def test_wrong_targets_raise(targets: list[Any]) -> None:
    with pytest.raises(ValueError, match="targets must be a 1-D array of finite numbers"):
        make().reset(targets)


def test_an_unsupported_mode_raises() -> None:
    with pytest.raises(ValueError, match="mode must be window or streaming, not 'fast'"):
        make("fast")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mode streaming supports only"):
        make("streaming", replace(SHAPE, attention="linear"))


def test_wrong_observations_raise() -> None:
    policy = make()
    policy.reset([1.0, 2.0])
    with pytest.raises(ValueError, match=r"observations must have shape \(2, 3\), not \(3, 3\)"):
        policy.act(np.zeros((3, 3)))


@pytest.mark.parametrize("mode", ["window", "streaming"])
@pytest.mark.parametrize("conditioning", ["return", "max-return"])
def test_the_critics_choose_the_action_of_the_largest_value(conditioning: Conditioning, mode: InferenceMode) -> None:
    """Among those of policies that follow the candidates' targets alone, with the chosen actions in their histories."""
    model = random_model(replace(SHAPE, conditioning=conditioning), 0.3)
    torch.manual_seed(0)
    critic = TwinCritic(model.shape).eval()
    policy = DecisionTransformerPolicy(model, UNITS, mode=mode, critic=critic)
    alone = [DecisionTransformerPolicy(model, UNITS, mode=mode) for _ in CANDIDATES]
    targets, random = np.array([300.0, -50.0]), np.random.default_rng(0)
    policy.reset(targets)
    for factor, single in zip(CANDIDATES, alone, strict=True):
        single.reset(targets * factor)
        single._candidates = np.array([factor]) if conditioning == "max-return" else np.ones(1)
    seen = set()
    for _ in range(8):
        observations, rewards = random.normal(size=(2, 3)), random.normal(size=2) * 50
        every = np.stack([single.act(observations) for single in alone], 1)  # (E, C, A)
        states = torch.from_numpy(UNITS.states(observations.astype(np.float32)))
        values = critic.least(states[:, None].expand(-1, len(CANDIDATES), -1), torch.from_numpy(every))
        best = values.argmax(1).numpy()
        np.testing.assert_allclose(policy.act(observations), every[np.arange(2), best], atol=1e-5)
        if conditioning == "max-return":
            predicted = [np.asarray(alone[i].predicted_returns)[row] for row, i in enumerate(best)]
            np.testing.assert_allclose(np.asarray(policy.predicted_returns), predicted, rtol=1e-4)
        for single in (policy, *alone):
            single.observe(rewards)
        for single in alone:  # what was done is what the critics chose
            with torch.inference_mode():
                single._inference.actions[:2] = torch.from_numpy(every[np.arange(2), best])
        seen |= set(best.tolist())
    assert len(seen) > 1


@pytest.mark.parametrize("conditioning", ["none", "max-return"])
def test_policies_without_a_target_ignore_it(conditioning: Conditioning) -> None:
    policy = make(shape=replace(SHAPE, conditioning=conditioning))
    assert not policy.needs_target
    actions = []
    for targets in ([np.nan, np.nan], [100.0, -100.0]):
        policy.reset(targets)
        actions.append(policy.act(np.ones((2, 3))))
        policy.observe([1.0, 2.0])
    assert np.array_equal(actions[0], actions[1])
    assert (policy.predicted_returns is None) == (conditioning == "none")


def test_environments_that_end_keep_their_candidates_apart() -> None:
    model = random_model(replace(SHAPE, conditioning="max-return"), 0.3)
    torch.manual_seed(0)
    critic = TwinCritic(model.shape).eval()
    both, one = (DecisionTransformerPolicy(model, UNITS, reproducible=True, critic=critic) for _ in range(2))
    both.reset([0.0, 0.0])
    one.reset([0.0])
    states = np.random.default_rng(0).normal(size=(6, 2, 3))
    for step, pair in enumerate(states):
        np.testing.assert_array_equal(both.act(pair if step < 3 else pair[1:])[-1:], one.act(pair[1:]))
        both.observe([1.0] * (2 if step < 3 else 1))
        one.observe([1.0])
        if step == 2:
            both.keep(np.array([False, True]))


def test_factors_of_predictions_do_not_exceed_the_cap() -> None:
    policy = make(shape=replace(SHAPE, conditioning="max-return"))
    policy.model.return_cap.fill_(0.3)
    last = policy.model.return_head[1]
    assert isinstance(last, torch.nn.Linear)
    torch.nn.init.zeros_(last.weight)
    torch.nn.init.constant_(last.bias, 0.25)
    for factor, followed in ((1.0, 25.0), (1.25, 30.0), (0.5, 12.5)):
        policy._candidates = np.array([factor])
        policy.reset([0.0])
        policy.act(np.zeros((1, 3)))
        assert np.asarray(policy.predicted_returns) == pytest.approx([followed], rel=1e-5)
