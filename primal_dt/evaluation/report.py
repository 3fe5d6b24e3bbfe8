"""Raw returns + reference returns -> results over seeds and over tasks, with intervals.

A task without reference returns has no scores: its results are plain returns, and it is in no average.
Nothing is selected here: a task's headline target is fixed before the evaluation, and the report has every episode.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from primal_dt.evaluation.rollout import Episode
from primal_dt.evaluation.score import TargetSummary, normalized, summarize, target_text
from primal_dt.evaluation.statistics import (
    Interval,
    interquartile_mean,
    iqm_interval,
    performance_profile,
    rank_correlation,
    std_over_seeds,
)
from primal_dt.task import Reference, RunTask

__all__ = ["Average", "Evaluation", "Group", "Published", "Report", "TargetResult"]

FEW_SEEDS, FEW_EPISODES = 3, 10
"""Results with fewer seeds or fewer episodes than these are marked."""
BOOTSTRAP_SEED = 0
LISTENS, NUM_TARGETS = 0.5, 4
"""Policies with a lower rank correlation of target and achieved return get a warning. It needs so many targets."""
PROFILE_THRESHOLDS = tuple(range(0, 121, 10))

METHODS: Mapping[str, Any] = {
    "conditioning": "return",
    "action_loss": "mse",
    "action_dropout": 0.0,
    "top_fraction": 1.0,
    "validation": 0.0,
    "critic_weight": 0.0,
}
"""Settings that choose a method, and their values in the published Decision Transformer."""
Published = Mapping[str, Mapping[str, tuple[float, float]]]
"""Data set -> attention stack -> published mean and spread."""


@dataclass(frozen=True)
class Evaluation:
    """A policy's episodes, and what a report says about the policy."""

    policy: str
    """The attention stack, or the name of a behavior policy."""
    configuration: str
    """Equal for runs that differ only in their seed: a digest of the settings and of the data's content."""
    task: RunTask
    """The environment in which the policy acted, and the data on which it was trained."""
    episodes: tuple[Episode, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The settings of the training, to label configurations that differ."""
    seed: int | None = None
    """The training's seed; None for a policy that was not trained here."""
    step: int | None = None
    """The checkpoint's step."""
    mode: str | None = None
    """The inference mode."""
    checkpoint: str | None = None
    """The checkpoint's path."""
    curve: tuple[tuple[int, float], ...] = ()
    """Results at the headline target during training, by step."""
    notes: tuple[str, ...] = ()
    """Caveats for the reader, such as an unfinished training."""

    @property
    def unit(self) -> tuple[str, Reference | None]:
        """The unit of its results: environment and reference returns. Different units are not comparable."""
        return (self.task.environment_text, self.task.reference)

    @property
    def is_plain(self) -> bool:
        """Whether its results are plain returns, because its task has no reference returns."""
        return self.task.reference is None

    @property
    def is_elsewhere(self) -> bool:
        """Whether some of its data was recorded in another environment, or in another version, than it acted in."""
        return any(text != self.task.environment_text for text in self.task.data_env_ids)

    def summaries(self) -> list[TargetSummary]:
        """One summary for each target."""
        return summarize(self.episodes, self.task.reference)

    def returns(self, target: float | None) -> NDArray[np.float64]:
        """The returns of its episodes at one target."""
        return np.array([episode.total_reward for episode in self.episodes if episode.target == target])

    def scores(self, target: float | None) -> NDArray[np.float64]:
        """The normalized returns of its episodes at one target, or the returns if it is plain."""
        return normalized(self.returns(target), self.task.reference)


@dataclass(frozen=True)
class TargetResult:
    """A group's results at one target, over seeds. A run's result is the mean over its episodes.

    Mean, deviation, interquartile mean and interval are of normalized returns, or of returns if the group is plain.
    """

    target: float | None
    is_headline: bool
    num_seeds: int | None
    """Number of seeds; None for a policy that was not trained here."""
    num_episodes: int
    """Number of episodes of the run that has the fewest."""
    mean: float
    std: float | None
    """Sample standard deviation over seeds; None for one seed."""
    iqm: float
    interval: Interval | None
    """95 % interval of the interquartile mean; None for one seed."""
    return_mean: float
    return_std: float | None
    """Sample standard deviation of the return over seeds; None for one seed."""
    length_mean: float
    predicted_mean: float | None = None
    """Mean of the returns that the policies predicted at the first step; None if they predict none."""
    success_rate: float | None = None
    """Mean share of episodes with success, from 0 to 1; None if the environment says nothing about success."""

    @property
    def is_few(self) -> bool:
        """Whether there are too few seeds or episodes for a reliable result."""
        few_seeds = self.num_seeds is not None and self.num_seeds < FEW_SEEDS
        return few_seeds or self.num_episodes < FEW_EPISODES


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed."""

    label: str
    """The policy, with the settings in which it differs from others of the same name."""
    runs: tuple[Evaluation, ...]
    results: tuple[TargetResult, ...]
    """One result for each target, the headline target first."""

    @property
    def first(self) -> Evaluation:
        """The first run, for what all runs of the group share."""
        return self.runs[0]

    @property
    def is_plain(self) -> bool:
        """Whether its results are plain returns, because its task has no reference returns."""
        return self.first.is_plain

    @property
    def headline(self) -> TargetResult:
        """The result at the headline target."""
        return self.results[0]

    @property
    def run_scores(self) -> NDArray[np.float64]:
        """The result of each run at the headline target, (N,)."""
        return _run_scores(self.runs, self.headline.target)

    @property
    def warnings(self) -> list[str]:
        """Caveats for a reader who compares results."""
        task, name = self.first.task, f"{self.label} on {self.first.task.dataset}"
        found = [f"{name}: {note}" for note in task.notes]
        found += [f"{name}, seed {run.seed}: {note}" for run in self.runs for note in run.notes]
        if self.first.is_elsewhere:
            data = ", ".join(task.data_env_ids)
            found.append(f"{name}: trained on data from {data}, evaluated in {task.environment_text}")
        if len({run.step for run in self.runs}) > 1:
            steps = ", ".join(f"seed {run.seed}: {run.step}" for run in self.runs)
            found.append(f"{name}: the checkpoints are from different steps ({steps})")
        targets = {episode.target for run in self.runs for episode in run.episodes}
        if missing := targets - {result.target for result in self.results}:
            listed = ", ".join(sorted(map(target_text, missing)))
            found.append(f"{name}: not all seeds have episodes at the targets {listed}, so these have no result")
        if self.target_correlation is not None and self.target_correlation < LISTENS:
            found.append(
                f"{name}: the achieved return does not rise with the target (rank correlation "
                f"{self.target_correlation:.2f}): the policy hardly follows its target"
            )
        return found

    @property
    def target_correlation(self) -> float | None:
        """The rank correlation of target and achieved return; None for fewer than four targets.

        Targets that are far above the data's returns do not count.
        """
        if len(self.results) < NUM_TARGETS:
            return None
        task = self.first.task
        limit = task.spread_targets()[-1] if task.data_returns else math.inf  # a headline target may be far above
        pairs = [(result.target, result.return_mean) for result in self.results if (result.target or 0.0) <= limit]
        return rank_correlation(*zip(*pairs, strict=True)) if len(pairs) >= NUM_TARGETS else None


@dataclass(frozen=True)
class Average:
    """A policy's average over tasks whose scores have the same unit."""

    policy: str
    mode: str | None
    version: str
    """The version of the environments, such as ``v5``."""
    datasets: tuple[str, ...]
    mean: float
    """Mean over tasks of the mean over seeds."""
    iqm: float
    """Interquartile mean over all runs of all tasks."""
    interval: Interval | None
    """95 % interval of the interquartile mean."""
    is_few: bool
    """Whether any of its tasks has too few seeds or episodes."""


@dataclass(frozen=True)
class Report:
    """All evaluations, grouped by configuration."""

    groups: tuple[Group, ...]
    published: Published = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """How the report was produced, such as the command, the commit and the versions."""
    failures: tuple[str, ...] = ()
    """Messages about runs that could not be evaluated."""

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
            ValueError: if two runs of one configuration have the same seed, as they are one experiment; or if a run has
                no episode at the headline target.
        """
        by_kind: dict[tuple[Any, ...], list[Evaluation]] = {}
        for run in runs:
            by_kind.setdefault((run.configuration, run.policy, run.mode, *run.unit, run.task.headline), []).append(run)
        labels = _labels([members[0] for members in by_kind.values()])
        groups = [_group(label, members) for label, members in zip(labels, by_kind.values(), strict=True)]
        return cls(tuple(groups), published or {}, provenance or {}, tuple(failures))

    @property
    def warnings(self) -> list[str]:
        """The warnings of all groups, about averages, and about runs that could not be evaluated."""
        found = [warning for group in self.groups for warning in group.warnings]
        by_version: dict[str, set[tuple[str, ...]]] = {}
        for average in self.averages():
            by_version.setdefault(average.version, set()).add(tuple(sorted(average.datasets)))
        found += [
            f"averages in {version} are over different tasks for different policies: do not compare them"
            for version, sets in by_version.items()
            if len(sets) > 1
        ]
        plain = dict.fromkeys(group.first.task.dataset for group in self.groups if group.is_plain)
        if plain and by_version:
            found.append(f"averages leave out tasks without reference returns: {', '.join(plain)}")
        return list(dict.fromkeys([*found, *self.failures]))  # once each: both modes of a run have its notes

    def averages(self) -> list[Average]:
        """Averages over tasks, one for each policy, inference mode and version of the environments.

        Tasks without reference returns are left out. A policy has no average if it has fewer than two other tasks, if
        one of its data sets occurs twice, or if one environment has different reference returns, arguments or wrappers.
        """
        cells: dict[tuple[str, str | None, str], list[Group]] = {}
        for group in self.groups:
            if not group.is_plain:
                version = group.first.task.env_id.rpartition("-")[2]
                cells.setdefault((group.label, group.first.mode, version), []).append(group)
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
                    mean=float(np.mean([task_scores.mean() for task_scores in scores])),
                    iqm=float(interquartile_mean(np.concatenate(scores))),
                    interval=iqm_interval(scores, random=np.random.default_rng(BOOTSTRAP_SEED)),
                    is_few=any(group.headline.is_few for group in tasks),
                )
            )
        return averages

    def published_for(self, run: Evaluation) -> tuple[float, float] | None:
        """The published mean and spread for a run's data set and policy; None if there are none.

        They are those of the published Decision Transformer, not of other methods with the same attention.
        """
        if any(run.settings.get(name, value) != value for name, value in METHODS.items()):
            return None
        return self.published_beside(run.task).get(run.policy)

    def published_beside(self, task: RunTask) -> Mapping[str, tuple[float, float]]:
        """The published results of a task, by attention stack. They are normalized returns in plain environments."""
        if task.reference is None or task.specification is not None:
            return {}
        return self.published.get(task.dataset, {})

    def as_json(self) -> dict[str, Any]:
        """The whole report as JSON values, with all raw returns."""
        return {
            "unit": "normalized return: 100 * (return - random_return) / (expert_return - random_return), except in "
            "groups whose unit is return: they have no reference returns, and their results are plain returns",
            "provenance": dict(self.provenance),
            "groups": [
                {
                    **_described(group),
                    "published": self.published_for(group.first),
                    "results": [asdict(result) | {"few": result.is_few} for result in group.results],
                    "profile": _profile(group),
                    "target_correlation": group.target_correlation,
                    "runs": [_run_as_json(run) for run in group.runs],
                }
                for group in self.groups
            ],
            "averages": [asdict(average) for average in self.averages()],
            "warnings": self.warnings,
        }


def _labels(runs: Sequence[Evaluation]) -> list[str]:
    """The label of each run: the policy, and the settings in which runs of the same policy differ.

    A method that a run does not use, such as critics, is not mentioned.
    """
    labels = []
    for run in runs:
        alike = [other.settings for other in runs if other.policy == run.policy]
        names = [name for name in run.settings if len({str(settings.get(name)) for settings in alike}) > 1]
        shown = [name for name in names if name not in METHODS or run.settings[name] != METHODS[name]]
        labels.append(", ".join([run.policy, *(f"{name} {run.settings[name]}" for name in shown)]))
    return labels


def _group(label: str, runs: Sequence[Evaluation]) -> Group:
    ordered = tuple(sorted(runs, key=lambda run: -1 if run.seed is None else run.seed))
    seeds = [run.seed for run in ordered]
    if len(set(seeds)) < len(seeds):
        repeated = next(run for run in ordered if seeds.count(run.seed) > 1)
        paths = ", ".join(str(run.checkpoint) for run in ordered if run.seed == repeated.seed)
        raise ValueError(f"{label} on {repeated.task.dataset} has several runs with seed {repeated.seed}: {paths}")
    headline = ordered[0].task.headline
    common = set.intersection(*({episode.target for episode in run.episodes} for run in ordered))
    if headline not in common:
        raise ValueError(f"{label} on {ordered[0].task.dataset} has no episode at the headline target {headline}")
    targets = [target for target in dict.fromkeys(e.target for e in ordered[0].episodes) if target in common]
    targets.sort(key=lambda target: target != headline)
    return Group(label, ordered, tuple(_result(ordered, target, headline) for target in targets))


def _run_scores(runs: Sequence[Evaluation], target: float | None) -> NDArray[np.float64]:
    """The result of each run, (N,)."""
    return np.array([run.scores(target).mean() for run in runs])


def _result(runs: Sequence[Evaluation], target: float | None, headline: float | None) -> TargetResult:
    scores = _run_scores(runs, target)
    summaries = [summary for run in runs for summary in run.summaries() if summary.target == target]
    returns = [summary.returns.mean for summary in summaries]
    predicted = [summary.predicted_mean for summary in summaries if summary.predicted_mean is not None]
    success = [summary.success_rate for summary in summaries if summary.success_rate is not None]
    return TargetResult(
        target=target,
        is_headline=target == headline,
        num_seeds=None if runs[0].seed is None else len(runs),
        num_episodes=min(summary.num_episodes for summary in summaries),
        mean=float(scores.mean()),
        std=std_over_seeds(scores),
        iqm=float(interquartile_mean(scores)),
        interval=iqm_interval([scores], random=np.random.default_rng(BOOTSTRAP_SEED)),
        return_mean=float(np.mean(returns)),
        return_std=std_over_seeds(returns),
        length_mean=float(np.mean([summary.length_mean for summary in summaries])),
        predicted_mean=float(np.mean(predicted)) if predicted else None,
        success_rate=float(np.mean(success)) if success else None,
    )


def _described(group: Group) -> dict[str, Any]:
    """The values that the runs of a group share, as JSON."""
    run, task = group.first, group.first.task
    return {
        "label": group.label,
        "dataset": task.dataset,
        "policy": run.policy,
        "configuration": run.configuration,
        "settings": dict(run.settings),
        "environment": task.environment,
        "env_id": task.env_id,
        "environment_text": task.environment_text,
        "specification": None if task.specification is None else asdict(task.specification),
        "data_env_ids": list(task.data_env_ids),
        "unit": "return" if group.is_plain else "normalized return",
        "random_return": None if task.reference is None else task.reference.random_return,
        "expert_return": None if task.reference is None else task.reference.expert_return,
        "reference_source": None if task.reference is None else task.reference_source,
        "headline": task.headline,
        "target_source": task.target_source if task.targets else None,
        "mode": run.mode,
    }


def _profile(group: Group) -> dict[str, float] | None:
    """Threshold -> share of episodes with a score above it; None if there are no scores."""
    if group.is_plain:
        return None
    runs = [run.scores(group.headline.target) for run in group.runs]
    shares = performance_profile(runs, PROFILE_THRESHOLDS).tolist()
    return {str(threshold): share for threshold, share in zip(PROFILE_THRESHOLDS, shares, strict=True)}


def _run_as_json(run: Evaluation) -> dict[str, Any]:
    return {
        "seed": run.seed,
        "step": run.step,
        "checkpoint": run.checkpoint,
        "notes": run.notes,
        "summaries": [summary.as_json() for summary in run.summaries()],
        "episodes": [asdict(episode) for episode in run.episodes],
        "curve": run.curve,
    }
