"""Rollouts: every episode is the one that its seed and target say, however many run at once."""

from typing import Any

import numpy as np
import pytest

from primal_dt.report import normalized, summarize, summary_table
from primal_dt.rollout import Episode, rollout


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


def test_a_target_for_each_seed() -> None:
    with pytest.raises(ValueError, match="one target for each seed, not 1 for 2"):
        rollout(Recorder(), Countdown, targets=[1.0], seeds=[0, 1])


def test_a_summary_has_the_means_and_d4rls_scores() -> None:
    episodes = [Episode(3600.0, 0, 1000.0, 10), Episode(1800.0, 0, 500.0, 5), Episode(3600.0, 1, 2000.0, 30)]
    first, second = summarize(episodes, random_return=-20.272305, expert_return=3234.3)
    assert (first.target, first.num_episodes, first.return_mean, first.return_std) == (3600, 2, 1500, 500)
    assert first.normalized_mean == pytest.approx(100 * 1520.272305 / 3254.572305)
    assert first.normalized_std == pytest.approx(100 * 500 / 3254.572305)
    assert (second.target, second.num_episodes, second.length_mean) == (1800, 1, 5)
    assert normalized([-20.272305, 3234.3], random_return=-20.272305, expert_return=3234.3) == pytest.approx([0, 100])
    table = summary_table([first, second])
    assert "1500 ± 500" in table
    assert "46.7 ± 15.4" in table
