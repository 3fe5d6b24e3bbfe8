"""Raw returns + reference scores -> what a result is: across seeds, across tasks, with intervals.

Nothing is chosen here: the headline target of a task is fixed before it is evaluated, the checkpoint is the last one,
and every episode is in the files.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from primal_dt.rollout import Episode
from primal_dt.score import TargetSummary, normalized, summarize
from primal_dt.statistics import Interval, interquartile_mean, iqm_interval, std_over_seeds

__all__ = ["Average", "Evaluated", "Group", "Published", "Report", "TargetResult"]

FEW_SEEDS, FEW_EPISODES = 3, 10
"""What is fewer is marked."""
BOOTSTRAP_SEED = 0

Published = Mapping[tuple[str, str], Mapping[str, tuple[float, float]]]
"""(environment, tier) -> attention -> mean and spread that somebody published."""


@dataclass(frozen=True)
class Evaluated:
    """A policy's episodes, and what they are of."""

    dataset: str
    """What it was trained on."""
    policy: str
    """What it is: an attention stack, or a behaviour policy's name."""
    configuration: str
    """The same for runs that differ in their seed alone."""
    environment: str
    tier: str | None
    env_id: str
    """Where it acted."""
    trained_env_id: str
    """Where its data is from."""
    random_return: float
    expert_return: float
    headline: float
    """The target that counts, fixed in the task table."""
    seed: int | None
    """Of its training."""
    step: int | None
    """Of the checkpoint."""
    mode: str | None
    """Of inference."""
    checkpoint: str | None
    episodes: tuple[Episode, ...]
    curve: tuple[tuple[int, float], ...] = ()
    """Scores at the headline target while it was trained, by step."""

    @property
    def unit(self) -> tuple[str, float, float]:
        """What its scores are measured in."""
        return (self.env_id, self.random_return, self.expert_return)

    def summaries(self) -> list[TargetSummary]:
        """By target."""
        return summarize(self.episodes, random_return=self.random_return, expert_return=self.expert_return)

    def scores(self, target: float) -> NDArray[np.float64]:
        """Of its episodes at one target."""
        returns = [episode.total_reward for episode in self.episodes if episode.target == target]
        return normalized(returns, random_return=self.random_return, expert_return=self.expert_return)


@dataclass(frozen=True)
class TargetResult:
    """What runs of one configuration reach at one target, in normalised returns. A run's score is its mean."""

    target: float
    is_headline: bool
    num_seeds: int
    num_episodes: int
    """Of the run with the fewest."""
    mean: float
    std: float | None
    """Over seeds."""
    iqm: float
    interval: Interval | None
    """Of the interquartile mean."""
    return_mean: float
    length_mean: float

    @property
    def is_few(self) -> bool:
        """Too few seeds or episodes to mean much."""
        return self.num_seeds < FEW_SEEDS or self.num_episodes < FEW_EPISODES


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed alone."""

    runs: tuple[Evaluated, ...]
    results: tuple[TargetResult, ...]
    """The headline first."""

    @property
    def first(self) -> Evaluated:
        """For what all of them share."""
        return self.runs[0]

    @property
    def headline(self) -> TargetResult:
        """At the target that counts."""
        return self.results[0]

    @property
    def warnings(self) -> list[str]:
        """What a reader must know before comparing."""
        found = []
        own = self.first
        if own.env_id != own.trained_env_id:
            found.append(
                f"{own.policy} on {own.dataset}: trained on data of {own.trained_env_id}, evaluated in {own.env_id}"
            )
        if len({run.step for run in self.runs}) > 1:
            steps = ", ".join(f"seed {run.seed}: {run.step}" for run in self.runs)
            found.append(f"{own.policy} on {own.dataset}: checkpoints of different steps ({steps})")
        return found


@dataclass(frozen=True)
class Average:
    """Over tasks, of cells that are measured in the same way."""

    policy: str
    mode: str | None
    version: str
    """Of the environments."""
    num_tasks: int
    mean: float
    iqm: float
    interval: Interval | None


@dataclass(frozen=True)
class Report:
    """All that was evaluated, grouped."""

    groups: tuple[Group, ...]
    published: Published = field(default_factory=dict)

    @classmethod
    def of(cls, runs: Iterable[Evaluated], published: Published | None = None) -> "Report":
        """Group runs by their configuration."""
        by_kind: dict[tuple[Any, ...], list[Evaluated]] = {}
        for run in runs:
            key = (run.dataset, run.policy, run.configuration, run.mode, *run.unit, run.headline)
            by_kind.setdefault(key, []).append(run)
        groups = [_group(sorted(own, key=lambda run: -1 if run.seed is None else run.seed)) for own in by_kind.values()]
        return cls(tuple(groups), published or {})

    @property
    def warnings(self) -> list[str]:
        """Of all groups."""
        return [warning for group in self.groups for warning in group.warnings]

    def averages(self) -> list[Average]:
        """For each policy and mode: over its tasks, if it has several in one unit, and each of them once.

        Tasks of one unit are in one version of the environments, and an environment has one pair of reference returns.
        """
        cells: dict[tuple[str, str | None, str], list[Group]] = {}
        for group in self.groups:
            own = group.first
            cells.setdefault((own.policy, own.mode, own.env_id.rpartition("-")[2]), []).append(group)
        averages = []
        for (policy, mode, version), tasks in cells.items():
            firsts = [group.first for group in tasks]
            each_once = len({run.dataset for run in firsts}) == len(tasks)
            one_pair_each = len({run.unit for run in firsts}) == len({run.env_id for run in firsts})
            if len(tasks) < 2 or not each_once or not one_pair_each:
                continue
            scores = [_run_scores(group.runs, group.headline.target) for group in tasks]
            averages.append(
                Average(
                    policy=policy,
                    mode=mode,
                    version=version,
                    num_tasks=len(tasks),
                    mean=float(np.mean([own.mean() for own in scores])),
                    iqm=float(interquartile_mean(np.concatenate(scores))),
                    interval=iqm_interval(scores, random=np.random.default_rng(BOOTSTRAP_SEED)),
                )
            )
        return averages

    def published_for(self, run: Evaluated) -> tuple[float, float] | None:
        """What was published for a task and a policy."""
        return self.published.get((run.environment, run.tier or ""), {}).get(run.policy)

    def as_json(self) -> dict[str, Any]:
        """Everything, all raw returns included."""
        return {
            "unit": "normalized return: 100 * (return - random_return) / (expert_return - random_return)",
            "groups": [
                {
                    **_described(group.first),
                    "results": [asdict(result) | {"few": result.is_few} for result in group.results],
                    "published": self.published_for(group.first),
                    "runs": [
                        {
                            "seed": run.seed,
                            "step": run.step,
                            "checkpoint": run.checkpoint,
                            "summaries": [asdict(summary) for summary in run.summaries()],
                            "episodes": [asdict(episode) for episode in run.episodes],
                            "curve": run.curve,
                        }
                        for run in group.runs
                    ],
                }
                for group in self.groups
            ],
            "averages": [asdict(average) for average in self.averages()],
            "warnings": self.warnings,
        }


def _group(runs: Sequence[Evaluated]) -> Group:
    # An episode of a target that only some runs have would make seeds unlike one another.
    common = set.intersection(*({episode.target for episode in run.episodes} for run in runs))
    targets = list(dict.fromkeys(episode.target for episode in runs[0].episodes if episode.target in common))
    headline = runs[0].headline
    if headline not in targets:
        raise ValueError(f"{runs[0].policy} on {runs[0].dataset} has no episode at the headline target {headline:g}")
    targets.sort(key=lambda target: target != headline)
    kept = tuple(replace(run, episodes=tuple(e for e in run.episodes if e.target in common)) for run in runs)
    return Group(kept, tuple(_result(kept, target, headline) for target in targets))


def _run_scores(runs: Sequence[Evaluated], target: float) -> NDArray[np.float64]:
    """(N,), a score for each run."""
    return np.array([run.scores(target).mean() for run in runs])


def _result(runs: Sequence[Evaluated], target: float, headline: float) -> TargetResult:
    scores = _run_scores(runs, target)
    summaries = [summary for run in runs for summary in run.summaries() if summary.target == target]
    return TargetResult(
        target=target,
        is_headline=target == headline,
        num_seeds=len(runs),
        num_episodes=min(summary.num_episodes for summary in summaries),
        mean=float(scores.mean()),
        std=std_over_seeds(scores),
        iqm=float(interquartile_mean(scores)),
        interval=iqm_interval([scores], random=np.random.default_rng(BOOTSTRAP_SEED)),
        return_mean=float(np.mean([summary.return_mean for summary in summaries])),
        length_mean=float(np.mean([summary.length_mean for summary in summaries])),
    )


def _described(run: Evaluated) -> dict[str, Any]:
    """What runs of a group share."""
    own = ("seed", "step", "checkpoint", "episodes", "curve")
    return {name: value for name, value in asdict(run).items() if name not in own}
