"""Critics learn known values, guide the model towards them, and tell when they diverge."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from primal_dt.data.normalizer import Normalizer
from primal_dt.data.sampler import RewardBatch, WindowSampler
from primal_dt.data.trajectories import Trajectories, Trajectory
from primal_dt.model.critic import TwinCritic
from primal_dt.model.transformer import DecisionTransformer
from primal_dt.training.guidance import Guidance, ValueRange, value_range, window_targets
from tests.conftest import SHAPE

GAMMA = 0.8
MODEL = replace(SHAPE, dropout=0.0)


def chain(length: int = 5, count: int = 8) -> Trajectories:
    """A chain of states 0, 1, ... with a reward of 1 at its end, where the environment ends the episode."""
    states = np.eye(3, dtype=np.float32)[np.minimum(np.arange(length), 2)] * np.arange(1, length + 1)[:, None]
    rewards = (np.arange(length) == length - 1).astype(np.float32)
    random = np.random.default_rng(0)
    actions = random.uniform(-1, 1, (count, length, 2)).astype(np.float32)
    return Trajectories.of([Trajectory(states.astype(np.float32), each, rewards) for each in actions])


def batch_of(rewards: list[list[float]], lengths: list[int], ended: list[bool]) -> RewardBatch:
    shape = (len(rewards), len(rewards[0]))
    steps, counts = torch.arange(shape[1]), torch.tensor(lengths)[:, None]
    is_last = steps == counts - 1
    return RewardBatch(
        states=torch.zeros(*shape, 3),
        actions=torch.zeros(*shape, 2),
        returns_to_go=torch.zeros(*shape, 1),
        timesteps=steps.expand(shape),
        valid=steps < counts,
        rewards=torch.tensor(rewards),
        terminated=is_last & torch.tensor(ended)[:, None],
    )


def test_targets_sum_rewards_and_end_in_a_value() -> None:
    batch = batch_of([[1.0, 2.0, 4.0], [1.0, 2.0, 4.0], [3.0, 0.0, 0.0]], [3, 3, 1], [False, True, False])
    targets, has_target = window_targets(batch, torch.tensor([10.0, 10.0, 10.0]), GAMMA)
    assert has_target.tolist() == [[True, True, False], [True, True, True], [False, False, False]]
    expected = [[1 + 0.8 * 2 + 0.64 * 10, 2 + 0.8 * 10, 0], [1 + 0.8 * 2 + 0.64 * 4, 2 + 0.8 * 4, 4], [0, 0, 0]]
    torch.testing.assert_close(targets, torch.tensor(expected))


def test_the_value_range_is_that_of_discounted_returns() -> None:
    random = np.random.default_rng(0)
    data = Trajectories.of(
        [
            Trajectory(np.zeros((n, 1), np.float32), np.zeros((n, 1), np.float32), random.normal(size=n).astype("f4"))
            for n in (1, 7, 4)
        ]
    )
    slow = [
        sum(GAMMA**i * reward for i, reward in enumerate(data.rewards[t:end]))
        for begin, end in zip(data.offsets[:-1], data.offsets[1:], strict=True)
        for t in range(begin, end)
    ]
    found = value_range(data, GAMMA)
    assert (found.low, found.high) == pytest.approx((min(slow), max(slow)))


def test_a_mean_value_far_outside_the_data_is_beyond() -> None:
    values = ValueRange(-10.0, 30.0)
    assert not any(map(values.is_beyond, (-10.0, 0.0, 30.0)))
    assert all(map(values.is_beyond, (-11.0, 31.0, float("nan"))))
    assert values.scale == 30.0
    assert not ValueRange(0.0, 0.0).is_beyond(0.0)  # all rewards are zero
    guidance = Guidance(DecisionTransformer(MODEL), weight=1.0, values=values, reward_scale=1.0)
    assert guidance.problem({"critic/policy_value": 29.0}) is None
    assert "diverged" in str(guidance.problem({"critic/policy_value": 31.0}))


@pytest.mark.parametrize("context", [1, 3])
def test_critics_learn_the_values_of_a_chain(context: int) -> None:
    """The value of state t is gamma^(end - t), by sums inside a window and, from window to window, by the average.

    The critics' windows may be longer than the model's context.
    """
    data = chain()
    units = Normalizer(np.zeros(3, np.float32), np.ones(3, np.float32), 1.0)
    ends = np.ones(len(data.lengths), np.bool_)
    sampler = WindowSampler(data, units, context=3, batch_size=32, seed=0, is_terminated=ends)
    torch.manual_seed(0)
    model = DecisionTransformer(replace(MODEL, context=context))
    options = {"discount": GAMMA, "average": 0.1, "lr": 3e-3}
    guidance = Guidance(model, weight=1.0, values=value_range(data, GAMMA), reward_scale=1.0, **options)
    for step in range(200):
        batch = sampler.batch(step)
        assert isinstance(batch, RewardBatch)
        scalars = guidance.update_critics(batch)
        guidance.update_averages()
    states, actions = torch.from_numpy(data.observations[:5]), torch.from_numpy(data.actions[:5])
    learned = guidance.critic.least(states, actions) * guidance.values.scale
    expected = GAMMA ** torch.arange(4.0, -1.0, -1.0)
    torch.testing.assert_close(learned, expected, atol=0.03, rtol=0)
    assert float(scalars["critic/loss"]) < 1e-3
    assert not guidance.values.is_beyond(float(scalars["critic/value"]))


def test_the_smaller_of_two_values_counts() -> None:
    torch.manual_seed(0)
    critic, states, actions = TwinCritic(MODEL), torch.randn(20, 3), torch.randn(20, 2)
    both = critic(states, actions)
    assert torch.equal(critic.least(states, actions), torch.minimum(both[0], both[1]))
    assert 0 < int((both[0] < both[1]).sum()) < 20


def test_guidance_moves_actions_to_larger_values() -> None:
    """The gradient of the term with respect to the actions is along that of the first or the second critic."""
    torch.manual_seed(0)
    guidance = Guidance(DecisionTransformer(MODEL), weight=2.0, values=ValueRange(0.0, 1.0), reward_scale=1.0)
    batch = batch_of([[1.0, 2.0, 4.0]], [2], [False])
    batch = replace(batch, states=torch.randn(1, 3, 3))
    for i in range(2):
        actions = torch.randn(1, 3, 2, requires_grad=True)
        term, value = guidance.terms(actions, batch, batch.valid.sum(), swapped=bool(i))
        assert float(value) == pytest.approx(float(guidance.critic(batch.states, actions)[i, 0, :2].mean().detach()))
        (moved,) = torch.autograd.grad(term, actions)
        (up,) = torch.autograd.grad(guidance.critic(batch.states, actions)[i, :, :2].sum(), actions)
        torch.testing.assert_close(moved, -2.0 * up / 2)
        assert (moved[:, 2] == 0).all()  # padding
        assert moved[:, :2].abs().min() > 0
