"""Raw returns + reference scores -> what a result is: across seeds, across tasks, with intervals.

Nothing is chosen here: the headline target of a task is fixed before it is evaluated, and every episode that was run is
in the report.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from primal_dt.evaluation.rollout import Episode
from primal_dt.evaluation.score import TargetSummary, normalized, summarize
from primal_dt.evaluation.statistics import (
    Interval,
    interquartile_mean,
    iqm_interval,
    performance_profile,
    std_over_seeds,
)
from primal_dt.task import Reference, RunTask

__all__ = ["Average", "Evaluation", "Group", "Published", "Report", "TargetResult"]

FEW_SEEDS, FEW_EPISODES = 3, 10
"""What is fewer is marked."""
BOOTSTRAP_SEED = 0
PROFILE_THRESHOLDS = tuple(range(0, 121, 10))

Published = Mapping[str, Mapping[str, tuple[float, float]]]
"""Data set -> attention -> mean and spread that somebody published for it."""


@dataclass(frozen=True)
class Evaluation:
    """A policy's episodes, and what a report says about them."""

    policy: str
    """An attention stack, or the name of a behavior policy."""
    configuration: str
    """Equal for runs that differ in the seed alone: a digest of the data's content and of all settings."""
    task: RunTask
    """Where it acted, and what it was trained on."""
    episodes: tuple[Episode, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    """How it was trained, to tell configurations apart."""
    seed: int | None = None
    """The training's seed; None for a policy that was not trained here."""
    step: int | None = None
    """The checkpoint's step."""
    mode: str | None = None
    """The mode of inference."""
    checkpoint: str | None = None
    curve: tuple[tuple[int, float], ...] = ()
    """Normalized returns at the headline target during training, by step."""
    notes: tuple[str, ...] = ()
    """What a reader must know about it."""

    @property
    def unit(self) -> tuple[str, Reference]:
        """What its scores are measured in."""
        return (self.task.env_id, self.task.reference)

    @property
    def is_elsewhere(self) -> bool:
        """Whether it acted in another version of the environment than that of its data."""
        return any(env_id != self.task.env_id for env_id in self.task.data_env_ids)

    def summaries(self) -> list[TargetSummary]:
        """One for each target."""
        return summarize(self.episodes, self.task.reference)

    def scores(self, target: float) -> NDArray[np.float64]:
        """The normalized returns of its episodes at one target."""
        returns = [episode.total_reward for episode in self.episodes if episode.target == target]
        return normalized(returns, self.task.reference)


@dataclass(frozen=True)
class TargetResult:
    """What runs of one configuration reach at one target, in normalized returns. A run's score is its mean."""

    target: float
    is_headline: bool
    num_seeds: int | None
    """None for a policy that was not trained."""
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
        few_seeds = self.num_seeds is not None and self.num_seeds < FEW_SEEDS
        return few_seeds or self.num_episodes < FEW_EPISODES


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed alone."""

    label: str
    """The policy, and what sets it apart from others of the same name."""
    runs: tuple[Evaluation, ...]
    results: tuple[TargetResult, ...]
    """The headline first."""

    @property
    def first(self) -> Evaluation:
        """For what all of them share."""
        return self.runs[0]

    @property
    def headline(self) -> TargetResult:
        """At the target that counts."""
        return self.results[0]

    @property
    def run_scores(self) -> NDArray[np.float64]:
        """(N,), at the headline."""
        return _run_scores(self.runs, self.headline.target)

    @property
    def warnings(self) -> list[str]:
        """What a reader must know before comparing."""
        own, name = self.first, f"{self.label} on {self.first.task.dataset}"
        found = [f"{name}, seed {run.seed}: {note}" for run in self.runs for note in run.notes]
        if own.is_elsewhere:
            found.append(
                f"{name}: trained on data of {', '.join(own.task.data_env_ids)}, evaluated in {own.task.env_id}"
            )
        if len({run.step for run in self.runs}) > 1:
            steps = ", ".join(f"seed {run.seed}: {run.step}" for run in self.runs)
            found.append(f"{name}: checkpoints of different steps ({steps})")
        targets = {episode.target for run in self.runs for episode in run.episodes}
        if missing := targets - {result.target for result in self.results}:
            listed = ", ".join(f"{target:g}" for target in sorted(missing))
            found.append(f"{name}: not all seeds have episodes at the targets {listed}, so there is no result for them")
        return found


@dataclass(frozen=True)
class Average:
    """Over tasks, of cells that are measured in the same unit."""

    policy: str
    mode: str | None
    version: str
    """Of the environments."""
    datasets: tuple[str, ...]
    mean: float
    iqm: float
    interval: Interval | None
    is_few: bool
    """Whether any cell is marked as few."""


@dataclass(frozen=True)
class Report:
    """All that was evaluated, grouped."""

    groups: tuple[Group, ...]
    published: Published = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """How it was made: command, versions and so on."""
    failures: tuple[str, ...] = ()
    """What could not be evaluated, and why."""

    @classmethod
    def of(
        cls,
        runs: Iterable[Evaluation],
        *,
        published: Published | None = None,
        provenance: Mapping[str, Any] | None = None,
        failures: Sequence[str] = (),
    ) -> "Report":
        """Group runs by their configuration.

        Raises:
            ValueError: if two runs of one configuration have the same seed: they are one experiment, not two.
        """
        by_kind: dict[tuple[Any, ...], list[Evaluation]] = {}
        for run in runs:
            by_kind.setdefault((run.configuration, run.policy, run.mode, *run.unit, run.task.headline), []).append(run)
        labels = _labels([own[0] for own in by_kind.values()])
        groups = [_group(label, own) for label, own in zip(labels, by_kind.values(), strict=True)]
        return cls(tuple(groups), published or {}, provenance or {}, tuple(failures))

    @property
    def warnings(self) -> list[str]:
        """Of all groups, and of what is not among them."""
        found = [warning for group in self.groups for warning in group.warnings]
        by_version: dict[str, set[tuple[str, ...]]] = {}
        for average in self.averages():
            by_version.setdefault(average.version, set()).add(tuple(sorted(average.datasets)))
        found += [
            f"averages in {version} are over different tasks for different policies: do not compare them"
            for version, sets in by_version.items()
            if len(sets) > 1
        ]
        return [*found, *self.failures]

    def averages(self) -> list[Average]:
        """For each policy and mode: over its tasks, if it has several in one unit, and each of them once.

        Tasks of one unit are in one version of the environments, and an environment has one pair of reference returns.
        """
        cells: dict[tuple[str, str | None, str], list[Group]] = {}
        for group in self.groups:
            cells.setdefault((group.label, group.first.mode, group.first.task.env_id.rpartition("-")[2]), []).append(
                group
            )
        averages = []
        for (label, mode, version), tasks in cells.items():
            datasets = tuple(group.first.task.dataset for group in tasks)
            units, environments = {group.first.unit for group in tasks}, {group.first.task.env_id for group in tasks}
            if len(tasks) < 2 or len(set(datasets)) < len(tasks) or len(units) > len(environments):
                continue
            scores = [group.run_scores for group in tasks]
            averages.append(
                Average(
                    policy=label,
                    mode=mode,
                    version=version,
                    datasets=datasets,
                    mean=float(np.mean([own.mean() for own in scores])),
                    iqm=float(interquartile_mean(np.concatenate(scores))),
                    interval=iqm_interval(scores, random=np.random.default_rng(BOOTSTRAP_SEED)),
                    is_few=any(group.headline.is_few for group in tasks),
                )
            )
        return averages

    def published_for(self, run: Evaluation) -> tuple[float, float] | None:
        """What was published for its data set and policy."""
        return self.published.get(run.task.dataset, {}).get(run.policy)

    def as_json(self) -> dict[str, Any]:
        """Everything, all raw returns included."""
        return {
            "unit": "normalized return: 100 * (return - random_return) / (expert_return - random_return)",
            "provenance": dict(self.provenance),
            "groups": [
                {
                    **_described(group),
                    "published": self.published_for(group.first),
                    "results": [asdict(result) | {"few": result.is_few} for result in group.results],
                    "profile": _profile(group),
                    "runs": [_run_as_json(run) for run in group.runs],
                }
                for group in self.groups
            ],
            "averages": [asdict(average) for average in self.averages()],
            "warnings": self.warnings,
        }


def _labels(runs: Sequence[Evaluation]) -> list[str]:
    """The policy; and, where several of one name differ in their settings, those that differ."""
    labels = []
    for run in runs:
        alike = [
            other.settings for other in runs if (other.policy, other.task.dataset) == (run.policy, run.task.dataset)
        ]
        names = [name for name in run.settings if len({str(settings.get(name)) for settings in alike}) > 1]
        labels.append(", ".join([run.policy, *(f"{name} {run.settings[name]}" for name in names)]))
    return labels


def _group(label: str, runs: Sequence[Evaluation]) -> Group:
    ordered = tuple(sorted(runs, key=lambda run: -1 if run.seed is None else run.seed))
    seeds = [run.seed for run in ordered]
    if len(set(seeds)) < len(seeds):
        own = next(run for run in ordered if seeds.count(run.seed) > 1)
        paths = ", ".join(str(run.checkpoint) for run in ordered if run.seed == own.seed)
        raise ValueError(f"{label} on {own.task.dataset} is there twice with seed {own.seed}: {paths}")
    headline = ordered[0].task.headline
    common = set.intersection(*({episode.target for episode in run.episodes} for run in ordered))
    if headline not in common:
        raise ValueError(f"{label} on {ordered[0].task.dataset} has no episode at the headline target {headline:g}")
    targets = [target for target in dict.fromkeys(e.target for e in ordered[0].episodes) if target in common]
    targets.sort(key=lambda target: target != headline)
    return Group(label, ordered, tuple(_result(ordered, target, headline) for target in targets))


def _run_scores(runs: Sequence[Evaluation], target: float) -> NDArray[np.float64]:
    """(N,), a score for each run."""
    return np.array([run.scores(target).mean() for run in runs])


def _result(runs: Sequence[Evaluation], target: float, headline: float) -> TargetResult:
    scores = _run_scores(runs, target)
    summaries = [summary for run in runs for summary in run.summaries() if summary.target == target]
    return TargetResult(
        target=target,
        is_headline=target == headline,
        num_seeds=None if runs[0].seed is None else len(runs),
        num_episodes=min(summary.num_episodes for summary in summaries),
        mean=float(scores.mean()),
        std=std_over_seeds(scores),
        iqm=float(interquartile_mean(scores)),
        interval=iqm_interval([scores], random=np.random.default_rng(BOOTSTRAP_SEED)),
        return_mean=float(np.mean([summary.return_mean for summary in summaries])),
        length_mean=float(np.mean([summary.length_mean for summary in summaries])),
    )


def _described(group: Group) -> dict[str, Any]:
    """What the runs of a group share."""
    run, task = group.first, group.first.task
    return {
        "label": group.label,
        "dataset": task.dataset,
        "policy": run.policy,
        "configuration": run.configuration,
        "settings": dict(run.settings),
        "environment": task.environment,
        "env_id": task.env_id,
        "data_env_ids": list(task.data_env_ids),
        "random_return": task.reference.random_return,
        "expert_return": task.reference.expert_return,
        "headline": task.headline,
        "mode": run.mode,
    }


def _profile(group: Group) -> dict[str, float]:
    """Threshold -> share of episodes above it."""
    runs = [run.scores(group.headline.target) for run in group.runs]
    shares = performance_profile(runs, PROFILE_THRESHOLDS).tolist()
    return {str(threshold): share for threshold, share in zip(PROFILE_THRESHOLDS, shares, strict=True)}


def _run_as_json(run: Evaluation) -> dict[str, Any]:
    return {
        "seed": run.seed,
        "step": run.step,
        "checkpoint": run.checkpoint,
        "notes": run.notes,
        "summaries": [asdict(summary) for summary in run.summaries()],
        "episodes": [asdict(episode) for episode in run.episodes],
        "curve": run.curve,
    }
