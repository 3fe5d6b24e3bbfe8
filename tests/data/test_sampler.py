"""Training windows: what a batch contains, and that it is a function of seed and step."""

import itertools
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from primal_dt.data.normalizer import Normalizer
from primal_dt.data.sampler import Batch, RewardBatch, Weighting, WindowSampler, prefetch
from primal_dt.data.trajectories import (
    Trajectories,
    Trajectory,
    best_episodes,
    highest_returns,
    hold_out,
    returns_to_go,
)

STATE, ACTION = 3, 2
RAW = Normalizer(np.zeros(STATE, np.float32), np.ones(STATE, np.float32), 1.0)
SHIFTED = Normalizer(np.full(STATE, 7, np.float32), np.full(STATE, 2, np.float32), 10.0)
lengths = st.lists(st.integers(1, 9), min_size=1, max_size=6)
rewards = st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=50)
weightings = st.sampled_from(["transitions", "length", "return"])


def make_episodes(episode_lengths: list[int]) -> Iterator[Trajectory]:
    """Episodes whose observations (episode, step, noise) show where a window comes from."""
    random = np.random.default_rng(0)
    for number, length in enumerate(episode_lengths):
        observations = random.normal(size=(length, STATE)).astype(np.float32)
        observations[:, 0], observations[:, 1] = number, np.arange(length)
        actions = random.uniform(0.1, 1, size=(length, ACTION)).astype(np.float32)
        yield Trajectory(observations, actions, random.normal(size=length).astype(np.float32))


def make(*episode_lengths: int) -> Trajectories:
    return Trajectories.of(list(make_episodes(list(episode_lengths))))


def sampler(data: Trajectories, normalizer: Normalizer = RAW, **options: Any) -> WindowSampler:
    return WindowSampler(data, normalizer, **({"context": 4, "batch_size": 16, "seed": 0} | options))


def equal(a: Batch, b: Batch) -> bool:
    return all(torch.equal(x, y) for x, y in zip(vars(a).values(), vars(b).values(), strict=True))


@given(rewards)
@example([1.0, 10.0, 100.0])
def test_returns_to_go_include_the_current_reward(values: list[float]) -> None:
    expected = [sum(values[t:]) for t in range(len(values))]
    np.testing.assert_allclose(returns_to_go(np.array(values, np.float32)), expected, rtol=1e-6, atol=1e-3)


def test_returns_to_go_are_exact_over_long_episodes() -> None:
    values = np.random.default_rng(0).uniform(3.2, 3.4, 1000).astype(np.float32)
    exact = [math.fsum(values[t:].tolist()) for t in range(1000)]
    np.testing.assert_allclose(returns_to_go(values), exact, rtol=1e-7)


@settings(deadline=None)
@given(lengths, st.integers(1, 12), weightings, st.integers(0, 2**32), st.integers(0, 2**40))
def test_windows_never_cross_episodes(
    episode_lengths: list[int], context: int, weighting: Weighting, seed: int, step: int
) -> None:
    """Each row has consecutive steps of one episode, up to its end, and then padding."""
    data = make(*episode_lengths)
    batch = sampler(data, context=context, weighting=weighting, seed=seed).batch(step)
    for row in range(16):
        count = int(batch.valid[row].sum())
        assert batch.valid[row].tolist() == [True] * count + [False] * (context - count)
        episode, first = (int(entry) for entry in batch.states[row, 0, :2])
        assert count == min(context, episode_lengths[episode] - first)
        begin = int(data.offsets[episode]) + first
        np.testing.assert_array_equal(batch.states[row, :count], data.observations[begin : begin + count])
        np.testing.assert_array_equal(batch.actions[row, :count], data.actions[begin : begin + count])
        np.testing.assert_array_equal(batch.returns_to_go[row, :count, 0], data.returns_to_go[begin : begin + count])
        assert batch.timesteps[row, :count].tolist() == list(range(first, first + count))


@settings(deadline=None)
@given(lengths, weightings)
def test_padding_is_zero_after_standardizing(episode_lengths: list[int], weighting: Weighting) -> None:
    batch = sampler(make(*episode_lengths), SHIFTED, context=6, weighting=weighting).batch(0)
    for tensor in (batch.states, batch.actions, batch.returns_to_go, batch.timesteps):
        assert (tensor[~batch.valid] == 0).all()
    assert (batch.actions[batch.valid] != 0).all()


def test_states_and_returns_are_in_the_models_units() -> None:
    data = make(9, 4)
    raw, shifted = sampler(data).batch(3), sampler(data, SHIFTED).batch(3)
    real = raw.valid
    torch.testing.assert_close(shifted.states[real], (raw.states[real] - 7) / 2)
    torch.testing.assert_close(shifted.returns_to_go[real], raw.returns_to_go[real] / 10)
    torch.testing.assert_close(shifted.actions, raw.actions)


@settings(deadline=None)
@given(lengths, weightings, st.integers(2, 5))
def test_slices_of_processes_make_up_the_batch(episode_lengths: list[int], weighting: Weighting, count: int) -> None:
    data = make(*episode_lengths)
    parts = [
        sampler(data, weighting=weighting, process=process, num_processes=count).batch(5) for process in range(count)
    ]
    for name, tensor in vars(sampler(data, weighting=weighting).batch(5)).items():
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), tensor)
    assert max(len(part.valid) for part in parts) - min(len(part.valid) for part in parts) <= 1


def test_batch_is_a_function_of_seed_and_step() -> None:
    data = make(9, 4, 7)
    one, other = sampler(data), sampler(data)
    for step in (0, 1, 2):
        one.batch(step)
    assert equal(one.batch(7), other.batch(7))  # whatever was drawn before
    assert not equal(one.batch(7), one.batch(8))
    assert not equal(one.batch(7), sampler(data, seed=1).batch(7))


def test_neighboring_seeds_share_no_batches() -> None:
    """The key is not the sum of seed and step."""
    data, large = make(50, 40), 2**62
    assert not equal(sampler(data, seed=1).batch(7), sampler(data, seed=0).batch(8))
    assert not equal(sampler(data, seed=large).batch(0), sampler(data, seed=large + 1).batch(0))


@pytest.mark.slow
def test_another_process_draws_the_same_batch() -> None:
    code = (
        "from tests.data.test_sampler import make, sampler; batch = sampler(make(9, 4, 7)).batch(7);"
        "print(batch.states.double().sum().item(), batch.timesteps.tolist())"
    )
    batch = sampler(make(9, 4, 7)).batch(7)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split("\n")[0] == f"{batch.states.double().sum().item()} {batch.timesteps.tolist()}"


def draws(data: Trajectories, weighting: Weighting) -> torch.Tensor:
    """The number of windows that begin at each (episode, step), of 64,000."""
    batch = sampler(data, context=1, batch_size=64_000, weighting=weighting).batch(0)
    counts = torch.zeros(len(data.lengths), int(data.lengths.max()))
    index = batch.states[:, 0, :2].long()
    return counts.index_put((index[:, 0], index[:, 1]), torch.ones(64_000), accumulate=True)


@pytest.mark.parametrize("weighting", ["transitions", "length"])
def test_all_transitions_are_equally_likely(weighting: Weighting) -> None:
    expected = torch.zeros(3, 8)
    for episode, length in enumerate((8, 2, 6)):
        expected[episode, :length] = 64_000 / 16
    # The tolerance is five standard deviations.
    torch.testing.assert_close(draws(make(8, 2, 6), weighting), expected, atol=300, rtol=0)


def test_weighting_by_return_prefers_good_episodes() -> None:
    pairs = zip(make_episodes([4, 4, 4]), (0.0, 1.0, 3.0), strict=True)
    data = Trajectories.of([replace(episode, rewards=np.full(4, reward, np.float32)) for episode, reward in pairs])
    weights = torch.tensor([0.01, 1 / 3 + 0.01, 1 + 0.01])
    torch.testing.assert_close(draws(data, "return").sum(1) / 64_000, weights / weights.sum(), atol=0.01, rtol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": 0}, r"context \(0\) must be at least 1"),
        ({"seed": -1}, r"seed \(-1\) must be an integer, at least 0"),
        ({"seed": 2**63}, r"must be an integer, at least 0 and below 2\^63"),
        ({"seed": 1.5}, r"seed \(1\.5\) must be an integer"),
        ({"weighting": "reward"}, "weighting must be one of transitions, length, return, not 'reward'"),
        ({"process": 2, "num_processes": 2}, r"process \(2\) must be at least 0 and below num_processes \(2\)"),
        ({"batch_size": 1, "num_processes": 2}, r"num_processes \(2\), which must be at most batch_size \(1\)"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sampler(make(5), **options)


def test_inconsistent_arrays_are_refused() -> None:
    table, column = np.zeros((4, 2), np.float32), np.zeros(4, np.float32)
    with pytest.raises(ValueError, match=r"one observation, action and reward per step.*not 4, 4 and 3"):
        Trajectory(table, table, column[:3])
    with pytest.raises(ValueError, match=r"observations \(T, S\).*not \(4,\), \(4, 2\) and \(4,\)"):
        Trajectory(column, table, column)
    with pytest.raises(ValueError, match="at least one step"):
        Trajectory(table[:0], table[:0], column[:0])
    with pytest.raises(ValueError, match="at least one episode"):
        Trajectories.of([])
    with pytest.raises(ValueError, match=r"actions must have as many rows as observations \(4\), not 3"):
        Trajectories(table, table[:3], column, column, np.array([0, 4]))
    for offsets in ([0, 3], [1, 4], [0, 2, 2, 4]):
        with pytest.raises(ValueError, match="offsets must increase strictly from 0 to 4"):
            Trajectories(table, table, column, column, np.array(offsets))


def test_episodes_have_their_lengths_and_returns() -> None:
    data = make(5, 1, 3)
    assert data.lengths.tolist() == [5, 1, 3]
    sums = [part.sum() for part in np.split(data.rewards, data.offsets[1:-1])]
    assert data.returns == pytest.approx(sums, rel=1e-5)


@pytest.mark.parametrize("ahead", [1, 2, 50])
def test_prefetch_keeps_the_order(ahead: int) -> None:
    source, steps = sampler(make(8, 2, 6)), [3, 1, 4, 1, 5, 9, 2]
    for step, batch in zip(steps, prefetch(source, steps, "cpu", ahead=ahead), strict=True):
        assert equal(batch, source.batch(step))


def test_prefetch_runs_ahead_and_no_further() -> None:
    taken = []

    def steps() -> Iterator[int]:
        for step in itertools.count():
            taken.append(step)
            yield step

    batches = prefetch(sampler(make(8, 2)), steps(), "cpu", ahead=3)
    next(batches)
    next(batches)
    assert taken == [0, 1, 2, 3, 4]
    batches.close()  # type: ignore[attr-defined]


def test_prefetch_passes_errors_to_the_caller() -> None:
    with pytest.raises(ValueError, match=r"step \(-1\) must be an integer"):
        list(prefetch(sampler(make(8, 2)), [-1], "cpu"))


def test_closed_prefetch_makes_no_more_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    source = sampler(make(8, 2))
    made: list[int] = []
    batch = source.batch

    def slow(step: int) -> Batch:
        made.append(step)
        time.sleep(0.01)
        return batch(step)

    monkeypatch.setattr(source, "batch", slow)
    batches = prefetch(source, range(100), "cpu", ahead=50)
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert len(made) < 50


@pytest.mark.parametrize("weighting", ["transitions", "length", "return"])
def test_windows_are_drawn_from_the_chosen_episodes(weighting: Weighting) -> None:
    data, chosen = make(3, 9, 2, 5), np.array([1, 3])
    batch = sampler(data, weighting=weighting, episodes=chosen, batch_size=2000, context=1).batch(0)
    episodes, counts = np.unique(batch.states[:, 0, 0], return_counts=True)
    assert episodes.tolist() == [1, 3]
    steps = {tuple(state) for state in batch.states[:, 0, :2].int().tolist()}
    assert steps == {(1, t) for t in range(9)} | {(3, t) for t in range(5)}
    if weighting != "return":
        assert counts[0] / counts.sum() == pytest.approx(9 / 14, abs=0.04)


def test_all_episodes_have_the_same_draws_as_no_choice() -> None:
    data = make(3, 9, 2, 5)
    assert equal(sampler(data).batch(7), sampler(data, episodes=np.arange(4)).batch(7))


def test_rewards_come_with_the_ends_of_episodes() -> None:
    """An episode that the environment ended is marked at its last step; one that a time limit ended is not."""
    data, ends = make(3, 2, 4), np.array([True, False, True])
    batch = sampler(data, SHIFTED, is_terminated=ends, batch_size=64, context=3).batch(0)
    assert isinstance(batch, RewardBatch)
    places = batch.states * torch.from_numpy(SHIFTED.state_std) + torch.from_numpy(SHIFTED.state_mean)
    for row, step in itertools.product(range(64), range(3)):
        if not batch.valid[row, step]:
            assert not batch.terminated[row, step]
            assert batch.rewards[row, step] == 0
            continue
        episode, t = places[row, step, :2].round().int().tolist()
        assert float(batch.rewards[row, step]) == pytest.approx(data.rewards[data.offsets[episode] + t] / 10)
        assert bool(batch.terminated[row, step]) == (ends[episode] and t == data.lengths[episode] - 1)


def test_held_out_episodes_are_the_rest() -> None:
    for count, fraction, held in ((40, 0.05, 2), (40, 0.0, 0), (3, 0.01, 1), (2, 0.9, 1)):
        training, held_out = hold_out(count, fraction)
        assert len(held_out) == held
        assert sorted([*training, *held_out]) == list(range(count))
    assert hold_out(40, 0.5)[1].tolist() != list(range(20))  # not the first ones
    with pytest.raises(ValueError, match="at least two episodes"):
        hold_out(1, 0.1)


def test_the_best_episodes_have_the_fraction_of_the_steps() -> None:
    lengths, returns = (4, 1, 3, 2), (5.0, 9.0, 7.0, 1.0)
    rewards = [np.full(n, total / n, np.float32) for n, total in zip(lengths, returns, strict=True)]
    rows = [np.zeros((n, 1), np.float32) for n in lengths]
    data = Trajectories.of([Trajectory(x, x, r) for x, r in zip(rows, rewards, strict=True)])
    every = np.arange(4)
    for fraction, best in ((0.1, [1]), (0.2, [1, 2]), (0.4, [1, 2]), (0.5, [0, 1, 2]), (1.0, [0, 1, 2, 3])):
        assert best_episodes(data, every, fraction).tolist() == best, fraction
    assert best_episodes(data, np.array([0, 3]), 0.1).tolist() == [0]


def test_highest_returns_are_by_timestep() -> None:
    data = make(3, 5)
    expected = [max(data.returns_to_go[start + t] for start, n in ((0, 3), (3, 5)) if t < n) for t in range(5)]
    assert highest_returns(data, 7).tolist() == [*expected, expected[-1], expected[-1]]
    assert highest_returns(data, 2).tolist() == expected[:2]
