"""Rollouts: every episode is the one that its seed and target say, however many run at once."""

import os
import signal
from typing import Any

import numpy as np
import pytest

from primal_dt.evaluation.rollout import Episode, RolloutError, rollout
from primal_dt.evaluation.score import normalized, summarize, summary_table
from primal_dt.evaluation.vector import Environments
from primal_dt.task import Reference


class Countdown:
    """Episode of seed s: s % 4 + 1 steps, observation (s, step), reward = action * (step + 1)."""

    made = 0

    def __init__(self) -> None:
        Countdown.made += 1
        self.closed = False

    def reset(self, *, seed: int | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        assert seed is not None
        self.seed, self.step_number = seed, 0
        return np.array([seed, 0.0]), {}

    def step(self, action: Any, /) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.step_number += 1
        ended = self.step_number == self.seed % 4 + 1
        reward = float(action[0]) * self.step_number
        return np.array([self.seed, self.step_number]), reward, ended and self.seed % 2 == 0, ended, {}

    def close(self) -> None:
        self.closed = True


class Recorder:
    """Acts by the target, and writes down what it is told."""

    def __init__(self) -> None:
        self.targets = np.zeros(0)
        self.seen: list[tuple[float, float, float]] = []
        self.told: list[list[float]] = []

    def reset(self, targets: np.ndarray, /) -> None:
        self.targets = targets.copy()

    def act(self, observations: np.ndarray, /) -> np.ndarray:
        assert len(observations) == len(self.targets)
        self.seen += [(t, *o) for t, o in zip(self.targets, observations.tolist(), strict=True)]
        return self.targets[:, None]

    def observe(self, rewards: np.ndarray, /) -> None:
        assert len(rewards) == len(self.targets)
        self.told.append(rewards.tolist())

    def keep(self, rows: np.ndarray, /) -> None:
        self.targets = self.targets[rows]


@pytest.mark.parametrize("at_once", [1, 2, 3, 100])
def test_episodes_do_not_depend_on_how_many_run_at_once(at_once: int) -> None:
    targets, seeds = [1.0, 2.0, 3.0, 4.0, 5.0], [7, 0, 2, 5, 3]
    policy = Recorder()
    before = Countdown.made
    running: list[int] = []
    episodes = rollout(
        policy, Countdown, targets=targets, seeds=seeds, num_environments=at_once, on_step=running.append
    )
    assert Countdown.made - before == min(at_once, 5)
    lengths = [seed % 4 + 1 for seed in seeds]
    expected = [
        Episode(target, seed, target * sum(range(1, length + 1)), length)
        for target, seed, length in zip(targets, seeds, lengths, strict=True)
    ]
    assert episodes == expected
    assert sorted(policy.seen) == sorted(
        (target, seed, float(step))
        for target, seed, length in zip(targets, seeds, lengths, strict=True)
        for step in range(length)
    )
    assert running[-1] == 0


def test_environments_are_closed_also_when_the_policy_fails() -> None:
    made: list[Countdown] = []

    def make() -> Countdown:
        made.append(Countdown())
        return made[-1]

    class Broken(Recorder):
        def act(self, observations: np.ndarray, /) -> np.ndarray:
            raise RuntimeError("no idea")

    with pytest.raises(RuntimeError, match="no idea"):
        rollout(Broken(), make, targets=[1.0, 1.0], seeds=[0, 1])
    assert [environment.closed for environment in made] == [True, True]


class Fragile(Countdown):
    """Fails, or dies, in the third step of the episode with seed 7."""

    def step(self, action: Any, /) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        if self.seed == 7 and self.step_number == 2:
            raise RuntimeError("the physics has diverged")
        return super().step(action)


class Deadly(Countdown):
    def step(self, action: Any, /) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        if self.seed == 7 and self.step_number == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_failing_environment_is_told_and_what_had_ended_is_not_lost(workers: int) -> None:
    ended: list[Episode] = []
    with pytest.raises(RolloutError, match="seed 7 failed at step 2: RuntimeError: the physics has diverged"):
        rollout(
            Recorder(), Fragile, targets=[1.0] * 5, seeds=[0, 7, 1, 3, 2], num_workers=workers, on_episode=ended.append
        )
    assert [(episode.seed, episode.length) for episode in ended] == [(0, 1), (1, 2), (2, 3)]  # the last in that step


def test_a_process_that_dies_is_told() -> None:
    ended: list[Episode] = []
    with pytest.raises(RolloutError, match="a process with environments has died, exit code -9"):
        rollout(Recorder(), Deadly, targets=[1.0] * 3, seeds=[0, 7, 3], num_workers=2, on_episode=ended.append)
    assert [episode.seed for episode in ended] == [0]


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_processes_make_no_difference(workers: int) -> None:
    targets, seeds = [1.0, 2.0, 3.0, 4.0, 5.0], [7, 0, 2, 5, 3]
    alone = rollout(Recorder(), Countdown, targets=targets, seeds=seeds)
    assert rollout(Recorder(), Countdown, targets=targets, seeds=seeds, num_workers=workers) == alone
    assert (
        rollout(Recorder(), Countdown, targets=targets, seeds=seeds, num_workers=workers, num_environments=2) == alone
    )


def test_an_environment_that_cannot_be_made_is_told() -> None:
    with pytest.raises(RolloutError, match="the environment cannot be made: no such thing"):
        rollout(Recorder(), cannot_be_made, targets=[1.0], seeds=[0])
    with pytest.raises(RolloutError, match="the environment cannot be made: no such thing"):
        rollout(Recorder(), cannot_be_made, targets=[1.0] * 2, seeds=[0, 1], num_workers=2)


def cannot_be_made() -> Countdown:
    raise RuntimeError("no such thing")


@pytest.mark.parametrize(("seen", "words"), [(0.0, "is finite"), (float("nan"), "is not finite either")])
def test_an_action_that_is_not_finite_is_told(seen: float, words: str) -> None:
    class Lost(Recorder):
        def act(self, observations: np.ndarray, /) -> np.ndarray:
            actions = super().act(observations)
            actions[observations[:, 1] == 1] = np.nan
            return actions

    class Foggy(Countdown):
        def step(self, action: Any, /) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
            observation, *rest = super().step(action)
            return (np.array([seen, observation[1]]), *rest)  # type: ignore[return-value]

    ended: list[Episode] = []
    with pytest.raises(RolloutError, match=f"action at step 1 of the episode with seed 6 is not finite.*{words}"):
        rollout(Lost(), Foggy, targets=[1.0, 1.0], seeds=[4, 6], on_episode=ended.append)
    assert [episode.seed for episode in ended] == [4]


def test_a_reward_that_is_not_finite_is_told() -> None:
    class Priceless(Countdown):
        def step(self, action: Any, /) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
            observation, reward, *rest = super().step(action)
            return (observation, reward if self.step_number < 3 else float("inf"), *rest)  # type: ignore[return-value]

    with pytest.raises(RolloutError, match="the reward at step 2 of the episode with seed 6 is not finite"):
        rollout(Recorder(), Priceless, targets=[1.0, 1.0], seeds=[4, 6])


def test_a_wrong_call_is_told() -> None:
    with pytest.raises(ValueError, match="one target for each seed, not 1 for 2"):
        rollout(Recorder(), Countdown, targets=[1.0], seeds=[0, 1])
    with pytest.raises(ValueError, match=r"num_environments \(0\) must be at least 1"):
        rollout(Recorder(), Countdown, targets=[1.0], seeds=[0], num_environments=0)
    assert rollout(Recorder(), Countdown, targets=[], seeds=[]) == []


def test_environments_answer_in_the_order_of_the_numbers() -> None:
    with Environments(Countdown, 5, num_workers=2) as environments:
        assert environments.reset([10, 11, 12, 13, 14])[:, 0].tolist() == [10, 11, 12, 13, 14]
        numbers = np.array([0, 3, 4])
        observations, rewards, ended, failures = environments.step(numbers, np.array([[1.0], [2.0], [3.0]]))
    assert failures == []
    assert observations[:, 0].tolist() == [10, 13, 14]
    assert rewards.tolist() == [1, 2, 3]
    assert ended.tolist() == [False, False, False]


def test_a_summary_has_the_means_and_d4rls_scores() -> None:
    episodes = [Episode(3600.0, 0, 1000.0, 10), Episode(1800.0, 0, 500.0, 5), Episode(3600.0, 1, 2000.0, 30)]
    reference = Reference(-20.272305, 3234.3)
    first, second = summarize(episodes, reference)
    assert (first.target, first.num_episodes, first.return_mean, first.return_std) == (3600, 2, 1500, 500)
    assert first.normalized_mean == pytest.approx(100 * 1520.272305 / 3254.572305)
    assert first.normalized_std == pytest.approx(100 * 500 / 3254.572305)
    assert (second.target, second.num_episodes, second.length_mean) == (1800, 1, 5)
    assert normalized([-20.272305, 3234.3], reference) == pytest.approx([0, 100])
    table = summary_table([first, second])
    assert "1500 ± 500" in table
    assert "46.7 ± 15.4" in table
