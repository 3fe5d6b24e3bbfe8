"""Rollouts: an episode depends only on its policy, target and seed; failures are explained and lose no episode."""

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from primal_dt.evaluation.episode_cache import EpisodeCache
from primal_dt.evaluation.rollout import Episode, RolloutError, rollout
from primal_dt.evaluation.score import evaluation_scalars, normalized, summarize, summary_table
from primal_dt.evaluation.vector import Environments
from primal_dt.policy.readings import BadReadingError
from primal_dt.policy.stepwise import BadActionError
from primal_dt.task import Reference


class Countdown:
    """An episode with seed s has s % 4 + 1 steps, the observations (s, step) and the rewards action * (step + 1).

    Faults: "make" raises at once; "raise" and "die" strike in the third step of seed 7; "observation" gives NaN
    observations; "reward" gives an infinite reward in the third step.
    """

    made = 0

    def __init__(self, fault: str = "") -> None:
        if fault == "make":
            raise RuntimeError("no such thing")
        Countdown.made += 1
        self.fault, self.closed = fault, False

    def reset(self, *, seed: int | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        assert seed is not None
        self.seed, self.step_number = seed, 0
        return np.array([seed, 0.0]), {}

    def step(self, action: Any, /) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        if (self.fault, self.seed, self.step_number) == ("raise", 7, 2):
            raise RuntimeError("the physics has diverged")
        if (self.fault, self.seed, self.step_number) == ("die", 7, 2):
            os.kill(os.getpid(), signal.SIGKILL)
        self.step_number += 1
        ended = self.step_number == self.seed % 4 + 1
        observation = np.array([np.nan if self.fault == "observation" else self.seed, self.step_number])
        reward = np.inf if (self.fault, self.step_number) == ("reward", 3) else float(action[0]) * self.step_number
        return observation, reward, ended and self.seed % 2 == 0, ended, {}

    def close(self) -> None:
        self.closed = True


class Goal(Countdown):
    """Reports success as ``value`` under ``key``, in the first step of seeds that are odd; else 0."""

    def __init__(self, key: str, value: Any) -> None:
        super().__init__()
        self.key, self.value = key, value

    def step(self, action: Any, /) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        *results, _ = super().step(action)
        is_reached = self.seed % 2 == 1 and self.step_number == 1
        return *results, {self.key: self.value if is_reached else 0 * self.value}  # type: ignore[return-value]


class TargetPolicy:
    """Takes the target as its action and records the targets and observations that it has seen."""

    def __init__(self) -> None:
        self.targets = np.zeros(0)
        self.seen: list[tuple[float, float, float]] = []

    def reset(self, targets: np.ndarray, /) -> None:
        self.targets = targets.copy()

    def act(self, observations: np.ndarray, /) -> np.ndarray:
        assert len(observations) == len(self.targets)
        self.seen += [(t, *o) for t, o in zip(self.targets, observations.tolist(), strict=True)]
        return self.targets[:, None]

    def observe(self, rewards: np.ndarray, /) -> None:
        assert len(rewards) == len(self.targets)

    def keep(self, rows: np.ndarray, /) -> None:
        self.targets = self.targets[rows]


class NanActions(TargetPolicy):
    """Takes the action NaN in the second step."""

    def act(self, observations: np.ndarray, /) -> np.ndarray:
        return np.where(observations[:, 1:] == 1, np.nan, super().act(observations))


class RaisingPolicy(TargetPolicy):
    def act(self, observations: np.ndarray, /) -> np.ndarray:
        raise RuntimeError("no idea")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("at_once", "workers"), [(1, 0), (2, 0), (3, 0), (100, 0), (2, 1), (2, 2), (2, 3), (100, 1), (100, 2), (100, 3)]
)
def test_episodes_do_not_depend_on_how_they_are_run(at_once: int, workers: int) -> None:
    targets, seeds, lengths = [1.0, 2.0, 3.0, 4.0, 5.0], [7, 0, 2, 5, 3], [4, 1, 3, 2, 4]
    policy, before = TargetPolicy(), Countdown.made
    running: list[int] = []
    options: Any = {"num_environments": at_once, "num_workers": workers, "on_step": running.append}
    episodes = rollout(policy, Countdown, targets=targets, seeds=seeds, **options)
    assert Countdown.made - before == (0 if workers else min(at_once, 5))
    expected = list(zip(targets, seeds, lengths, strict=True))
    assert episodes == [Episode(target, seed, target * sum(range(n + 1)), n) for target, seed, n in expected]
    assert sorted(policy.seen) == sorted((target, seed, step) for target, seed, n in expected for step in range(n))
    assert running[-1] == 0


def test_environments_are_closed_when_the_policy_fails() -> None:
    made: list[Countdown] = []

    def make() -> Countdown:
        made.append(Countdown())
        return made[-1]

    with pytest.raises(RuntimeError, match="no idea"):
        rollout(RaisingPolicy(), make, targets=[1.0, 1.0], seeds=[0, 1])
    assert [environment.closed for environment in made] == [True, True]


DIVERGED = "seed 7 failed at step 2: RuntimeError: the physics has diverged"
NOT_MADE = "the environment cannot be made: no such thing"
NAN_ACTION = "action at step 1 of the episode with seed 6 is not finite.*the observation is "


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "fault", "workers", "seeds", "message", "expected"),
    [
        (TargetPolicy, "raise", 0, [0, 7, 1, 3, 2], DIVERGED, [(0, 1), (1, 2), (2, 3)]),  # 2 ends in the failing step
        (TargetPolicy, "raise", 2, [0, 7, 1, 3, 2], DIVERGED, [(0, 1), (1, 2), (2, 3)]),
        (TargetPolicy, "die", 2, [0, 7, 3], "a worker process died with exit code -9", [(0, 1)]),
        (TargetPolicy, "make", 0, [0], NOT_MADE, []),
        (TargetPolicy, "make", 2, [0, 1], NOT_MADE, []),
        (TargetPolicy, "reward", 0, [4, 6], "reward at step 2 of the episode with seed 6 is not finite", [(4, 1)]),
        (NanActions, "", 0, [4, 6], NAN_ACTION + "finite", [(4, 1)]),
        (NanActions, "observation", 0, [4, 6], NAN_ACTION + "not finite either", [(4, 1)]),
    ],
)
def test_a_failure_is_explained_and_loses_no_episode(
    policy: type[TargetPolicy], fault: str, workers: int, seeds: list[int], message: str, expected: list[Any]
) -> None:
    ended: list[Episode] = []
    options: Any = {"num_workers": workers, "on_episode": ended.append}
    with pytest.raises(RolloutError, match=message):
        rollout(policy(), partial(Countdown, fault), targets=[1.0] * len(seeds), seeds=seeds, **options)
    assert [(episode.seed, episode.length) for episode in ended] == expected


def test_invalid_arguments_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"targets \(1\) and seeds \(2\) must have the same length"):
        rollout(TargetPolicy(), Countdown, targets=[1.0], seeds=[0, 1])
    with pytest.raises(ValueError, match=r"num_environments \(0\) must be at least 1"):
        rollout(TargetPolicy(), Countdown, targets=[1.0], seeds=[0], num_environments=0)


def test_a_rollout_of_no_episodes_is_empty() -> None:
    assert rollout(TargetPolicy(), Countdown, targets=[], seeds=[]) == []


def test_environments_answer_in_the_order_of_their_numbers() -> None:
    with Environments(Countdown, 5, num_workers=2) as environments:
        assert environments.reset([10, 11, 12, 13, 14])[:, 0].tolist() == [10, 11, 12, 13, 14]
        steps = environments.step(np.array([0, 3, 4]), np.array([[1.0], [2.0], [3.0]]))
    observations, rewards, ended, _, failures = steps
    assert failures == []
    assert observations[:, 0].tolist() == [10, 13, 14]
    assert rewards.tolist() == [1, 2, 3]
    assert ended.tolist() == [False, False, False]


@pytest.mark.parametrize("key", ["success", "is_success"])
@pytest.mark.parametrize("value", [True, 1.0, np.True_, np.float32(1)])
def test_success_at_any_step_is_success(key: str, value: Any) -> None:
    """The first step of the episodes with seeds 3 and 5 succeeds, and later ones do not."""
    make = partial(Goal, key, value)
    episodes = rollout(TargetPolicy(), make, targets=[1.0] * 4, seeds=[2, 3, 4, 5], num_environments=3)
    assert [episode.success for episode in episodes] == [False, True, False, True]


def test_success_comes_from_worker_processes() -> None:
    make = partial(Goal, "success", True)
    episodes = rollout(TargetPolicy(), make, targets=[1.0] * 3, seeds=[2, 3, 5], num_workers=2)
    assert [episode.success for episode in episodes] == [False, True, True]


@pytest.mark.parametrize("make", [Countdown, partial(Goal, "coverage", 1.0), partial(Goal, "success", "yes")])
def test_environments_that_say_nothing_have_no_success(make: Any) -> None:
    episodes = rollout(TargetPolicy(), make, targets=[1.0, 1.0], seeds=[1, 3])
    assert [episode.success for episode in episodes] == [None, None]
    (summary,) = summarize(episodes, None)
    assert summary.success_rate is None
    assert "success" not in summary_table([summary])
    assert not any("success" in name for name in evaluation_scalars([summary], headline=1.0))


def test_the_cache_stores_success(tmp_path: Path) -> None:
    """Lines of earlier versions, which have none, are read."""
    episodes = [Episode(1.0, seed, 0.0, 4, None, success) for seed, success in enumerate((True, False, None))]
    for episode in episodes:
        EpisodeCache(tmp_path, {}).end_episode(episode)
    (path,) = tmp_path.iterdir()
    path.write_text(path.read_text() + '{"target": 1.0, "seed": 3, "total_reward": 0.0, "length": 4}\n')
    cached = [EpisodeCache(tmp_path, {}).get(1.0, seed) for seed in range(4)]
    assert cached == [*episodes, Episode(1.0, 3, 0.0, 4)]


def test_the_success_rate_is_in_tables_and_scalars() -> None:
    episodes = [Episode(1.0, seed, 0.0, 4, success=seed < 3) for seed in range(4)]
    summaries = summarize([*episodes, Episode(2.0, 0, 0.0, 4, success=False)], Reference(0, 1))
    assert [summary.success_rate for summary in summaries] == [0.75, 0]
    assert [row.split("|")[-3].strip() for row in summary_table(summaries).splitlines()[2:]] == ["75.0 %", "0.0 %"]
    scalars = evaluation_scalars(summaries, headline=2.0)
    found = {name: value for name, value in scalars.items() if "success" in name}
    assert found == {
        "eval/success_rate": 0,
        "eval/success_rate/target_1": 0.75,
        "eval/success_rate/target_2": 0,
    }


def test_summaries_without_references_have_returns() -> None:
    """No number is called normalized, and the headline scalar is the return under its own name."""
    episodes = [Episode(3.0, 0, 0.25, 10), Episode(3.0, 1, 0.75, 30), Episode(1.0, 0, 0.5, 5)]
    summaries = summarize(episodes, None)
    first = summaries[0]
    assert (first.returns.mean, first.returns.least, first.returns.most) == (0.5, 0.25, 0.75)
    assert {value for name, value in first.as_json().items() if name.startswith("normalized_")} == {None}
    header, _, row, _ = summary_table(summaries).splitlines()
    assert "normalized" not in header
    assert [cell.strip() for cell in row.split("|")[1:-1]] == ["3", "0.50 ± 0.25", "0.50", "0.25", "0.75", "20", "2"]
    scalars = evaluation_scalars(summaries, headline=3.0)
    assert scalars["eval/return"] == scalars["eval/return/target_3"] == 0.5
    assert scalars["eval/return/target_1"] == 0.5
    assert not any("normalized" in name for name in scalars)
    (untargeted,) = summarize([Episode(None, 0, 7.0, 10)], None)
    assert evaluation_scalars([untargeted], headline=None) == {"eval/return": 7, "eval/length": 10}


def test_normalized_returns_need_references() -> None:
    assert normalized([1.5, 2.0], None).tolist() == [1.5, 2.0]


def test_summaries_have_means_and_d4rl_scores() -> None:
    episodes = [Episode(3600.0, 0, 1000.0, 10), Episode(1800.0, 0, 500.0, 5), Episode(3600.0, 1, 2000.0, 30)]
    reference = Reference(-20.272305, 3234.3)
    first, second = summarize(episodes, reference)
    assert (first.target, first.num_episodes, first.returns.mean, first.returns.std) == (3600, 2, 1500, 500)
    assert first.normalized is not None
    assert first.normalized.mean == pytest.approx(100 * 1520.272305 / 3254.572305)
    assert first.normalized.std == pytest.approx(100 * 500 / 3254.572305)
    assert (second.target, second.num_episodes, second.length_mean) == (1800, 1, 5)
    assert normalized([-20.272305, 3234.3], reference) == pytest.approx([0, 100])
    table = summary_table([first, second])
    assert "1500 ± 500" in table
    assert "46.7 ± 15.4" in table


class Refusing(TargetPolicy):
    """Refuses the observation of the last environment in the second step."""

    def act(self, observations: np.ndarray, /) -> np.ndarray:
        if observations[-1, 1] == 1:
            raise BadReadingError("entry 0 of the observation is nan", len(observations) - 1, 0)
        return super().act(observations)


def test_a_refused_observation_names_the_episode() -> None:
    """By its seed, also after another episode has ended."""
    with pytest.raises(RolloutError, match="step 1 of the episode with seed 6: entry 0 of the observation"):
        rollout(Refusing(), Countdown, targets=[1.0] * 3, seeds=[4, 5, 6])


class RefusingRewards(TargetPolicy):
    """Refuses the rewards of the first step."""

    def observe(self, rewards: np.ndarray, /) -> None:
        raise BadReadingError("entry 0 of the reward is 1e25", 1, 0)


class Failing(TargetPolicy):
    """Computes no finite action in the first step."""

    def act(self, observations: np.ndarray, /) -> np.ndarray:
        raise BadActionError(0, np.array([np.nan]))


@pytest.mark.parametrize(
    ("policy", "message"),
    [(RefusingRewards(), "seed 5: entry 0 of the reward is 1e25"), (Failing(), r"seed 4: the action .* is \[nan\]")],
)
def test_errors_of_a_policy_name_the_episode(policy: TargetPolicy, message: str) -> None:
    with pytest.raises(RolloutError, match=f"step 0 of the episode with {message}"):
        rollout(policy, Countdown, targets=[1.0] * 2, seeds=[4, 5])
