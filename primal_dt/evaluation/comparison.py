"""Two policies compared on the tasks that both were evaluated on, paired by task."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from primal_dt.evaluation.report import BOOTSTRAP_SEED, Group, Report
from primal_dt.evaluation.statistics import Difference, Interval, difference_of_means, probability_of_improvement
from primal_dt.system.table import format_table

__all__ = ["Comparison", "TaskDifference", "compare", "comparison_table"]

NOTES = """\
The difference is that of the means over seeds, at the headline target; the last row is the mean over tasks. The square
brackets show its 95 % interval, from a stratified bootstrap: runs are resampled within each task, for each policy. With
few seeds such intervals are too narrow. "Could be found" is the smallest true difference that so many seeds find with a
probability of 80 % (2.8 standard errors). P is the probability that a run of the first policy scores higher than a run
of the second on the same task; ties count half."""


@dataclass(frozen=True)
class TaskDifference:
    """Both policies on one task."""

    dataset: str
    scores: NDArray[np.float64]
    """The score of each run of the first policy at the headline target, (N,)."""
    others: NDArray[np.float64]
    """Those of the second policy, (M,)."""
    difference: Difference
    probability: float
    """The probability that a run of the first policy has a higher score."""


@dataclass(frozen=True)
class Comparison:
    """The first policy minus the second."""

    first: str
    second: str
    tasks: tuple[TaskDifference, ...]
    difference: Difference
    """The mean over tasks."""
    probability: float
    probability_interval: Interval | None
    warnings: tuple[str, ...]
    """What makes the two hard to compare."""

    def as_json(self) -> dict[str, Any]:
        """The comparison as JSON values."""
        return {
            "first": self.first,
            "second": self.second,
            "tasks": [
                {
                    "dataset": task.dataset,
                    "scores": task.scores.tolist(),
                    "others": task.others.tolist(),
                    **task.difference._asdict(),
                    "probability": task.probability,
                }
                for task in self.tasks
            ],
            **self.difference._asdict(),
            "probability": self.probability,
            "probability_interval": self.probability_interval,
            "warnings": self.warnings,
        }

    @property
    def sentence(self) -> str:
        """What was found, in one sentence."""
        tasks = "1 task" if len(self.tasks) == 1 else f"{len(self.tasks)} tasks"
        over = f"{self.first} scores {self.difference.mean:+.1f} {_interval(self.difference.interval)}".rstrip()
        verdict = "a difference" if self.difference.is_found else "no difference"
        return f"{over} relative to {self.second}, as a mean over {tasks}: the interval shows {verdict}."


def compare(report: Report, first: str, second: str) -> Comparison:
    """Compare two policies of a report by their scores at the headline targets, in exact inference.

    Args:
        report: the report.
        first: the label of a policy, as the report shows it.
        second: the label of another.

    Raises:
        ValueError: if a label is unknown, or if there is no task with scores of both.
    """
    groups = [group for group in report.groups if group.first.mode in (None, "window") and not group.is_plain]
    known = list(dict.fromkeys(group.label for group in groups))
    if missing := [label for label in (first, second) if label not in known]:
        raise ValueError(
            f"{missing[0]!r} is not a policy with scores in this report: they are {', '.join(map(repr, known))}"
        )
    if first == second:
        raise ValueError(f"the policies to compare must be two, not {first!r} twice")
    cells = {(group.label, _key(group)): group for group in groups}
    pairs = [
        (cells[first, key], cells[second, key])
        for key in dict.fromkeys(map(_key, groups))
        if (first, key) in cells and (second, key) in cells
    ]
    if not pairs:
        raise ValueError(f"{first!r} and {second!r} have no task in common: evaluate both on the same data sets")
    tasks = tuple(_task_difference(*pair) for pair in pairs)
    scores, others = [task.scores for task in tasks], [task.others for task in tasks]
    probability, interval = probability_of_improvement(scores, others, random=np.random.default_rng(BOOTSTRAP_SEED))
    return Comparison(
        first,
        second,
        tasks,
        difference_of_means(scores, others, random=np.random.default_rng(BOOTSTRAP_SEED)),
        probability,
        interval,
        tuple(_warnings(first, second, pairs, groups)),
    )


def comparison_table(comparison: Comparison) -> str:
    """One row for each task, and one for their mean."""

    def row(name: str, means: tuple[float, float], runs: str, difference: Difference, probability: str) -> list[str]:
        shown = f"{difference.mean:+.1f} {_interval(difference.interval)}".rstrip()
        smallest = "" if difference.smallest is None else f"{difference.smallest:.1f}"
        return [name, *(f"{mean:.1f}" for mean in means), shown, smallest, probability, runs]

    rows = [
        row(
            task.dataset,
            (float(task.scores.mean()), float(task.others.mean())),
            f"{len(task.scores)}, {len(task.others)}",
            task.difference,
            f"{task.probability:.2f}",
        )
        for task in comparison.tasks
    ]
    averages = tuple(
        float(np.mean([values.mean() for values in every]))
        for every in ([task.scores for task in comparison.tasks], [task.others for task in comparison.tasks])
    )
    found = f"{comparison.probability:.2f} {_interval(comparison.probability_interval, digits=2)}".rstrip()
    rows.append(row("mean", (averages[0], averages[1]), "", comparison.difference, found))
    header = ["data set", comparison.first, comparison.second, "difference", "could be found", "P", "seeds"]
    return format_table(header, rows)


def _key(group: Group) -> tuple[str, object]:
    """What must be equal for two results to be of one task."""
    return group.first.task.dataset, group.first.unit


def _task_difference(one: Group, other: Group) -> TaskDifference:
    scores, others = one.run_scores, other.run_scores
    return TaskDifference(
        one.first.task.dataset,
        scores,
        others,
        difference_of_means([scores], [others], random=np.random.default_rng(BOOTSTRAP_SEED)),
        probability_of_improvement([scores], [others], random=np.random.default_rng(BOOTSTRAP_SEED))[0],
    )


def _warnings(first: str, second: str, pairs: Sequence[tuple[Group, Group]], groups: Sequence[Group]) -> list[str]:
    found = []
    for one, other in pairs:
        name = one.first.task.dataset
        if one.first.task.fingerprint != other.first.task.fingerprint:
            found.append(f"{name}: {first} and {second} were trained on data sets of this name with other contents")
        steps = [{run.step for run in group.runs} for group in (one, other)]
        if steps[0] != steps[1]:
            found.append(f"{name}: the checkpoints of {first} and {second} are from different steps")
        if one.headline.num_episodes != other.headline.num_episodes:
            found.append(f"{name}: {first} and {second} have different numbers of episodes")
    paired = {_key(one) for one, _ in pairs}
    alone = [
        group.first.task.dataset for group in groups if group.label in (first, second) and _key(group) not in paired
    ]
    if alone:
        found.append(f"only one of {first} and {second} has results on {', '.join(dict.fromkeys(alone))}: left out")
    return found


def _interval(interval: Interval | None, digits: int = 1) -> str:
    return "" if interval is None else f"[{interval.low:.{digits}f}, {interval.high:.{digits}f}]"
