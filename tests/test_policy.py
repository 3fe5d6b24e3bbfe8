"""The policy: the model is shown what a training window would have."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from primal_dt.data import Batch, Trajectories, Trajectory, WindowSampler
from primal_dt.model import DecisionTransformer, ModelShape
from primal_dt.normalizer import Normalizer
from primal_dt.policy import DecisionTransformerPolicy

SHAPE = ModelShape(3, (-1.0, -1.0), (1.0, 1.0), width=16, context=4, rank=4, dropout=0.5, max_timesteps=12)
UNITS = Normalizer(np.array([1, 2, 3], np.float32), np.array([2, 1, 4], np.float32), 100.0)


def make() -> DecisionTransformerPolicy:
    torch.manual_seed(0)
    model = DecisionTransformer(SHAPE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return DecisionTransformerPolicy(model, UNITS)


def play(policy: DecisionTransformerPolicy, steps: int, count: int = 2) -> tuple[list[Trajectory], list[Batch]]:
    """An episode in each of several environments that give random states and rewards, and what the model was shown."""
    random = np.random.default_rng(0)
    states = random.normal(size=(steps, count, 3))
    rewards = random.normal(size=(steps, count)).round(2)
    policy.reset(rewards.sum(0))  # just what is going to be earned
    actions, windows = [], []
    for state, reward in zip(states, rewards, strict=True):
        actions.append(policy.act(state))
        windows.append(policy.window())
        policy.observe(reward)
    episodes = [
        Trajectory(
            states[:, i].astype(np.float32),
            np.stack([action[i] for action in actions]),
            rewards[:, i].astype(np.float32),
        )
        for i in range(count)
    ]
    return episodes, windows


@pytest.mark.parametrize("step", [0, 1, 3, 4, 9])
def test_the_model_is_shown_the_training_window_of_the_same_history(step: int) -> None:
    """A target that is earned exactly is the return of the recorded episode, so both windows must agree."""
    policy = make()
    episodes, windows = play(policy, 10)
    shown = windows[step]
    data = Trajectories.of(episodes)
    sampler = WindowSampler(data, UNITS, context=SHAPE.context, batch_size=1, seed=0)
    for row in range(2):
        first = max(0, step + 1 - SHAPE.context)
        training = sampler._windows(np.array([data.offsets[row] + first]))
        length = step + 1 - first
        for name in ("states", "returns_to_go", "timesteps", "valid"):
            own, theirs = getattr(shown, name)[row], getattr(training, name)[0, :length]
            torch.testing.assert_close(own, theirs, atol=1e-5, rtol=0)
        torch.testing.assert_close(shown.actions[row, :-1], training.actions[0, : length - 1])
        with torch.inference_mode():
            predicted = policy.model(training).actions[0, length - 1]
        np.testing.assert_allclose(episodes[row].actions[step], predicted, atol=1e-5)


def test_what_is_left_of_the_target_is_the_target_minus_the_rewards() -> None:
    policy = make()
    policy.reset([300.0, 50.0])
    rewards = np.array([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]])
    for reward in rewards:
        policy.act(np.zeros((2, 3)))
        policy.observe(reward)
    policy.act(np.zeros((2, 3)))
    left = policy.window().returns_to_go[..., 0] * 100
    torch.testing.assert_close(left, torch.tensor([[300.0, 299, 297, 294], [50, 40, 20, -10]]))


def test_an_environment_that_leaves_changes_nothing_for_those_that_stay() -> None:
    alone, together = make(), make()
    states = np.random.default_rng(1).normal(size=(8, 3, 3))
    alone.reset([5.0])
    together.reset([9.0, 5.0, 7.0])
    rows = [0, 1, 2]
    for step, state in enumerate(states):
        one = alone.act(state[1:2])
        many = together.act(state[rows])
        np.testing.assert_allclose(many[rows.index(1)], one[0], atol=1e-5)
        alone.observe([1.0])
        together.observe([1.0] * len(rows))
        if step in (2, 4):
            gone = 0 if step == 2 else len(rows) - 1
            together.keep(np.arange(len(rows)) != gone)
            del rows[gone]


def test_a_policy_does_not_drop_out() -> None:
    policy = make()
    policy.model.train()
    again = DecisionTransformerPolicy(policy.model, UNITS)
    first, second = play(again, 3)[0], play(again, 3)[0]
    np.testing.assert_array_equal(first[0].actions, second[0].actions)


def test_a_wrong_call_is_told() -> None:
    policy = make()
    with pytest.raises(ValueError, match="targets must be a vector"):
        policy.reset([[1.0]])
    policy.reset([1.0, 2.0])
    with pytest.raises(ValueError, match=r"observations must have shape \(2, 3\), not \(3, 3\)"):
        policy.act(np.zeros((3, 3)))
    for _ in range(12):
        policy.act(np.zeros((2, 3)))
        policy.observe([0.0, 0.0])
    with pytest.raises(ValueError, match="step 12 is past the model's last, 11"):
        policy.act(np.zeros((2, 3)))


def test_the_shape_decides_how_far_it_sees() -> None:
    assert replace(SHAPE, context=2).context == 2
    policy = make()
    _, windows = play(policy, 10)
    assert [window.states.shape[1] for window in windows] == [1, 2, 3, 4, 4, 4, 4, 4, 4, 4]
