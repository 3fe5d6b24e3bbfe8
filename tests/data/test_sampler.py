"""Windows of trajectories: what is in a batch, and that it is a function of seed and step alone."""

import itertools
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from primal_dt.data.normalizer import Normalizer
from primal_dt.data.sampler import Batch, Weighting, WindowSampler, prefetch
from primal_dt.data.trajectories import Trajectories, Trajectory, returns_to_go

STATE, ACTION = 3, 2
lengths = st.lists(st.integers(1, 9), min_size=1, max_size=6)
rewards = st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=50)
weightings = st.sampled_from(["transitions", "length", "return"])


def make(episode_lengths: list[int], seed: int = 0) -> Trajectories:
    """Episode e, step t has the observation (e, t, noise): a window tells where it comes from."""
    random = np.random.default_rng(seed)
    episodes = []
    for number, length in enumerate(episode_lengths):
        observations = random.normal(size=(length, STATE)).astype(np.float32)
        observations[:, 0], observations[:, 1] = number, np.arange(length)
        actions = random.uniform(0.1, 1, size=(length, ACTION)).astype(np.float32)
        episodes.append(Trajectory(observations, actions, random.normal(size=length).astype(np.float32)))
    return Trajectories.of(episodes)


RAW = Normalizer(np.zeros(STATE, np.float32), np.ones(STATE, np.float32), 1.0)
SHIFTED = Normalizer(np.full(STATE, 7, np.float32), np.full(STATE, 2, np.float32), 10.0)


def sampler(data: Trajectories, normalizer: Normalizer = RAW, **options: Any) -> WindowSampler:
    return WindowSampler(data, normalizer, **({"context": 4, "batch_size": 16, "seed": 0} | options))


def equal(a: Batch, b: Batch) -> bool:
    return all(torch.equal(x, y) for x, y in zip(vars(a).values(), vars(b).values(), strict=True))


@given(rewards)
def test_returns_to_go_are_the_brute_force_sums(values: list[float]) -> None:
    expected = [sum(values[t:]) for t in range(len(values))]
    np.testing.assert_allclose(returns_to_go(np.array(values, np.float32)), expected, rtol=1e-6, atol=1e-3)


def test_returns_to_go_include_the_current_reward() -> None:
    assert returns_to_go(np.array([1.0, 10.0, 100.0], np.float32)).tolist() == [111, 110, 100]


@settings(deadline=None)
@given(lengths, st.integers(1, 12), weightings, st.integers(0, 2**32), st.integers(0, 2**40))
def test_windows_never_cross_episodes(
    episode_lengths: list[int], context: int, weighting: Weighting, seed: int, step: int
) -> None:
    """Each row is one episode's consecutive steps, as many as are left of it, then padding."""
    data = make(episode_lengths)
    batch = sampler(data, context=context, weighting=weighting, seed=seed).batch(step)
    for row in range(16):
        count = int(batch.valid[row].sum())
        assert batch.valid[row].tolist() == [True] * count + [False] * (context - count)
        episode, first = (int(entry) for entry in batch.states[row, 0, :2])
        assert count == min(context, episode_lengths[episode] - first)
        begin = int(data.offsets[episode]) + first
        for field, source in (("states", data.observations), ("actions", data.actions)):
            np.testing.assert_array_equal(getattr(batch, field)[row, :count], source[begin : begin + count])
        np.testing.assert_array_equal(batch.returns_to_go[row, :count, 0], data.returns_to_go[begin : begin + count])
        assert batch.timesteps[row, :count].tolist() == list(range(first, first + count))


@settings(deadline=None)
@given(lengths, weightings)
def test_padding_is_zero_after_standardizing(episode_lengths: list[int], weighting: Weighting) -> None:
    batch = sampler(make(episode_lengths), SHIFTED, context=6, weighting=weighting).batch(0)
    for tensor in (batch.states, batch.actions, batch.returns_to_go, batch.timesteps):
        assert (tensor[~batch.valid] == 0).all()
    assert (batch.actions[batch.valid] != 0).all()


def test_states_and_returns_are_in_the_models_units() -> None:
    data = make([9, 4])
    raw, shifted = sampler(data).batch(3), sampler(data, SHIFTED).batch(3)
    real = raw.valid
    torch.testing.assert_close(shifted.states[real], (raw.states[real] - 7) / 2)
    torch.testing.assert_close(shifted.returns_to_go[real], raw.returns_to_go[real] / 10)
    torch.testing.assert_close(shifted.actions, raw.actions)


@settings(deadline=None)
@given(lengths, weightings, st.integers(2, 5))
def test_the_slices_of_several_processes_make_up_the_batch_of_one(
    episode_lengths: list[int], weighting: Weighting, num_processes: int
) -> None:
    data = make(episode_lengths)
    whole = sampler(data, weighting=weighting).batch(5)
    parts = [
        sampler(data, weighting=weighting, process=process, num_processes=num_processes).batch(5)
        for process in range(num_processes)
    ]
    for name, tensor in vars(whole).items():
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), tensor)
    assert max(len(part.valid) for part in parts) - min(len(part.valid) for part in parts) <= 1


def test_a_batch_is_a_function_of_seed_and_step() -> None:
    data = make([9, 4, 7])
    one, other = sampler(data), sampler(data)
    for step in (0, 1, 2):
        one.batch(step)
    assert equal(one.batch(7), other.batch(7))  # whatever was drawn before
    assert not equal(one.batch(7), one.batch(8))
    assert not equal(one.batch(7), sampler(data, seed=1).batch(7))


def test_another_process_draws_the_same_batch() -> None:
    code = (
        "from tests.data.test_sampler import make, sampler; batch = sampler(make([9, 4, 7])).batch(7);"
        "print(batch.states.double().sum().item(), batch.timesteps.tolist())"
    )
    batch = sampler(make([9, 4, 7])).batch(7)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split("\n")[0] == f"{batch.states.double().sum().item()} {batch.timesteps.tolist()}"


def draws(data: Trajectories, weighting: Weighting) -> torch.Tensor:
    """How often each (episode, step) begins a window, in 64,000."""
    batch = sampler(data, context=1, batch_size=64_000, weighting=weighting).batch(0)
    counts = torch.zeros(len(data.lengths), int(data.lengths.max()))
    index = batch.states[:, 0, :2].long()
    return counts.index_put((index[:, 0], index[:, 1]), torch.ones(64_000), accumulate=True)


@pytest.mark.parametrize("weighting", ["transitions", "length"])
def test_every_transition_is_as_likely(weighting: Weighting) -> None:
    counts = draws(make([8, 2, 6]), weighting)
    expected = torch.zeros(3, 8)
    for episode, length in enumerate((8, 2, 6)):
        expected[episode, :length] = 64_000 / 16
    torch.testing.assert_close(counts, expected, atol=300, rtol=0)  # five standard deviations


def test_weighting_by_return_prefers_good_episodes() -> None:
    zeros = np.zeros((4, STATE), np.float32)
    episodes = []
    for number, reward in enumerate((0.0, 1.0, 3.0)):
        observations = zeros.copy()
        observations[:, 0], observations[:, 1] = number, np.arange(4)
        episodes.append(Trajectory(observations, np.ones((4, ACTION), np.float32), np.full(4, reward, np.float32)))
    counts = draws(Trajectories.of(episodes), "return").sum(1) / 64_000
    weights = torch.tensor([0.01, 1 / 3 + 0.01, 1 + 0.01])
    torch.testing.assert_close(counts, weights / weights.sum(), atol=0.01, rtol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": 0}, r"context \(0\) must be at least 1"),
        ({"seed": -1}, r"seed \(-1\) must be a whole number, not negative"),
        ({"seed": 2**63}, r"must be a whole number, not negative and below 2\^63"),
        ({"seed": 1.5}, r"seed \(1\.5\) must be a whole number"),
        ({"weighting": "reward"}, "weighting must be one of transitions, length, return, not 'reward'"),
        ({"process": 2, "num_processes": 2}, r"process \(2\) must be at least 0 and below num_processes \(2\)"),
        ({"batch_size": 1, "num_processes": 2}, r"num_processes \(2\), which must be at most batch_size \(1\)"),
    ],
)
def test_a_wrong_argument_is_told_the_rule_and_the_value(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sampler(make([5]), **options)


def test_arrays_that_do_not_fit_together_are_refused() -> None:
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
        with pytest.raises(ValueError, match="offsets must rise from 0 to 4"):
            Trajectories(table, table, column, column, np.array(offsets))


def test_episodes_keep_their_lengths_and_returns() -> None:
    data = make([5, 1, 3])
    assert data.lengths.tolist() == [5, 1, 3]
    for number, total in enumerate(data.returns):
        own = data.rewards[data.offsets[number] : data.offsets[number + 1]]
        assert total == pytest.approx(own.sum(), rel=1e-5)


@pytest.mark.parametrize("ahead", [1, 2, 50])
def test_prefetched_batches_are_those_of_the_sampler_in_order(ahead: int) -> None:
    source = sampler(make([8, 2, 6]))
    steps = [3, 1, 4, 1, 5, 9, 2]
    batches = list(prefetch(source, steps, "cpu", ahead=ahead))
    assert len(batches) == len(steps)
    for step, batch in zip(steps, batches, strict=True):
        expected = source.batch(step)
        for name in ("states", "actions", "returns_to_go", "timesteps", "valid"):
            assert torch.equal(getattr(batch, name), getattr(expected, name))


def test_prefetching_runs_ahead_and_no_further() -> None:
    taken = []

    def steps() -> Iterator[int]:
        for step in itertools.count():
            taken.append(step)
            yield step

    batches = prefetch(sampler(make([8, 2])), steps(), "cpu", ahead=3)
    next(batches)
    next(batches)
    assert taken == [0, 1, 2, 3, 4]
    batches.close()  # type: ignore[attr-defined]


def test_an_error_in_the_thread_reaches_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    source = sampler(make([8, 2]))

    def fail(step: int) -> Batch:
        raise OSError(f"the disk is gone at step {step}")

    monkeypatch.setattr(source, "batch", fail)
    with pytest.raises(OSError, match="the disk is gone at step 5"):
        list(prefetch(source, [5], "cpu"))


def test_seed_and_step_are_two_numbers() -> None:
    """Not their sum: neighboring seeds do not see one another's batches a step later."""
    data = make([50, 40])
    large = 2**62
    assert not equal(sampler(data, seed=1).batch(7), sampler(data, seed=0).batch(8))
    assert not equal(sampler(data, seed=large).batch(0), sampler(data, seed=large + 1).batch(0))
    with pytest.raises(ValueError, match=r"step \(-1\) must be a whole number"):
        sampler(data).batch(-1)


def test_returns_to_go_keep_their_digits_over_a_long_episode() -> None:
    values = np.random.default_rng(0).uniform(3.2, 3.4, 1000).astype(np.float32)
    exact = [math.fsum(values[t:].tolist()) for t in range(1000)]
    np.testing.assert_allclose(returns_to_go(values), exact, rtol=1e-7)


def test_prefetching_that_is_given_up_makes_no_more_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    source = sampler(make([8, 2]))
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
