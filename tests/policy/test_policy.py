"""The policy: the model is shown what a training window would have, and nothing depends on how many act at once."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from primal_dt.data.normalizer import Normalizer
from primal_dt.data.sampler import WindowSampler
from primal_dt.data.trajectories import Trajectories, Trajectory
from primal_dt.model.transformer import DecisionTransformer, ModelShape
from primal_dt.policy.inference import InferenceMode, WindowInference
from primal_dt.policy.policy import DecisionTransformerPolicy
from primal_dt.policy.tiles import Tiles

SHAPE = ModelShape(3, (-1.0, -1.0), (1.0, 1.0), width=16, context=4, rank=4, dropout=0.5, max_timesteps=12)
UNITS = Normalizer(np.array([1, 2, 3], np.float32), np.array([2, 1, 4], np.float32), 100.0)
MODES: tuple[InferenceMode, ...] = ("window", "streaming")


def make(mode: InferenceMode = "window", shape: ModelShape = SHAPE) -> DecisionTransformerPolicy:
    torch.manual_seed(0)
    model = DecisionTransformer(shape)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return DecisionTransformerPolicy(model, UNITS, mode=mode)


def play(policy: DecisionTransformerPolicy, steps: int, count: int = 2) -> list[Trajectory]:
    """An episode in each of several environments that give random states and rewards."""
    random = np.random.default_rng(0)
    states = random.normal(size=(steps, count, 3))
    rewards = random.normal(size=(steps, count)).round(2) * 50
    policy.reset(rewards.sum(0))  # just what is going to be earned
    actions = []
    for state, reward in zip(states, rewards, strict=True):
        actions.append(policy.act(state))
        policy.observe(reward)
    return [
        Trajectory(
            states[:, i].astype(np.float32),
            np.stack([action[i] for action in actions]),
            rewards[:, i].astype(np.float32),
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("step", [0, 1, 3, 4, 9])
def test_the_model_is_shown_the_training_window_of_the_same_history(step: int) -> None:
    """A target that is earned exactly is the return of the recorded episode: training would have the same window."""
    policy = make()
    episodes = play(policy, 10)
    data = Trajectories.of(episodes)
    sampler = WindowSampler(data, UNITS, context=SHAPE.context, batch_size=1, seed=0)
    for row in range(2):
        first = max(0, step + 1 - SHAPE.context)
        window = sampler._windows(np.array([data.offsets[row] + first]))
        with torch.inference_mode():
            predicted = policy.model(window).actions[0, step - first]
            shifted = replace(window, returns_to_go=window.returns_to_go + 0.5)  # a reward of 50
            other = policy.model(shifted).actions[0, step - first]
        np.testing.assert_allclose(episodes[row].actions[step], predicted, atol=1e-5)
        assert (other - predicted).abs().max() > 1e-3  # would be seen


def test_the_inputs_are_bit_for_bit_those_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """States as a data set would have them; what is left of the target as close as single precision has it."""
    policy, seen = make(), []
    policy.reset(np.zeros(2))
    step = type(policy._inference).step

    def watched(self: WindowInference, states: torch.Tensor, returns: torch.Tensor, tiles: Tiles) -> torch.Tensor:
        seen.append((states[:2].clone(), returns[:2].clone()))
        return step(self, states, returns, tiles)

    monkeypatch.setattr(WindowInference, "step", watched)
    data = Trajectories.of(play(policy, 10))
    window = WindowSampler(data, UNITS, context=10, batch_size=1, seed=0)._windows(data.offsets[:2])
    assert torch.equal(torch.stack([states for states, _ in seen], 1), window.states)
    torch.testing.assert_close(torch.stack([left for _, left in seen], 1), window.returns_to_go, atol=1e-5, rtol=0)


def test_what_is_left_of_the_target_is_the_target_minus_the_rewards() -> None:
    policy = make()
    policy.reset([300.0, 50.0])
    left = []
    for reward in ([1.0, 10.0], [2.0, 20.0], [3.0, 30.0]):
        left.append(policy.left.tolist())
        policy.act(np.zeros((2, 3)))
        policy.observe(reward)
    assert [*left, policy.left.tolist()] == [[300, 50], [299, 40], [297, 20], [294, -10]]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "changes",
    [
        {"width": 128, "context": 10, "rank": 64},
        {"width": 128, "context": 10, "attention": "softmax"},
        {"width": 128, "context": 10, "rank": 32, "attention": "primalformer"},
        {"width": 256, "num_heads": 4, "context": 20, "rank": 96},
        {"width": 48, "num_heads": 2, "context": 3, "rank": 4},
    ],
    ids=["quick", "softmax", "primalformer", "paper", "heads of 24"],
)
def test_actions_are_the_same_bit_for_bit_however_many_act_at_once(
    changes: dict[str, Any], mode: InferenceMode
) -> None:
    """Alone, in another order, among others, and after others have left; on any number of threads."""
    shape = replace(SHAPE, **changes, max_timesteps=20)
    count, steps = 70, 6
    observations = np.random.default_rng(1).normal(size=(steps, count, 3))

    model = make(mode, shape).model  # once: with other threads its orthogonal weights would have other bits

    def act(rows: list[int], *, leave_after: int | None = None) -> np.ndarray:
        policy, inside = DecisionTransformerPolicy(model, UNITS, mode=mode), list(rows)
        policy.reset([10.0 * row for row in rows])
        actions = np.full((steps, len(rows), 2), np.nan, np.float32)
        for step in range(steps):
            places = [rows.index(row) for row in inside]
            actions[step, places] = policy.act(observations[step, inside])
            policy.observe(np.ones(len(inside)))
            if step == leave_after:
                policy.keep(np.array([row % 3 > 0 for row in inside]))
                inside = [row for row in inside if row % 3]
        return actions

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        every = act(list(range(count)))
        for number in (2, 6):
            torch.set_num_threads(number)
            for rows in ([69], [3, 1, 2], list(range(69, -1, -1))):
                np.testing.assert_array_equal(act(rows), every[:, rows])
            fewer = act(list(range(count)), leave_after=2)
            stayed = [row for row in range(count) if row % 3]
            np.testing.assert_array_equal(fewer[:, stayed], every[:, stayed])
    finally:
        torch.set_num_threads(threads)


def test_a_policy_does_not_drop_out() -> None:
    policy = make()
    policy.model.train()
    again = DecisionTransformerPolicy(policy.model, UNITS)
    np.testing.assert_array_equal(play(again, 3)[0].actions, play(again, 3)[0].actions)


def test_actions_stay_as_they_were_given() -> None:
    policy = make()
    policy.reset([5.0])
    first = policy.act(np.ones((1, 3)))
    kept = first.copy()
    policy.observe([1.0])
    policy.act(-np.ones((1, 3)))
    np.testing.assert_array_equal(first, kept)


def test_a_wrong_call_is_told() -> None:
    policy = make()
    with pytest.raises(ValueError, match="targets must be a vector"):
        policy.reset([[1.0]])
    with pytest.raises(ValueError, match="targets must be a vector of finite numbers"):
        policy.reset([float("nan")])
    with pytest.raises(ValueError, match="mode must be window or streaming, not 'fast'"):
        make("fast")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="streaming is for stacks"):
        make("streaming", replace(SHAPE, attention="linear"))
    policy.reset([1.0, 2.0])
    with pytest.raises(ValueError, match=r"observations must have shape \(2, 3\), not \(3, 3\)"):
        policy.act(np.zeros((3, 3)))
    for _ in range(12):
        policy.act(np.zeros((2, 3)))
        policy.observe([0.0, 0.0])
    with pytest.raises(ValueError, match="step 12 is past the model's last, 11"):
        policy.act(np.zeros((2, 3)))
