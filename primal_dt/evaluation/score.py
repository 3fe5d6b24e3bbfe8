"""Episodes -> returns for each target, normalized if the task has reference returns.

The normalized return is D4RL's: 0 for the reference's random policy, 100 for its expert. Without reference returns,
plain returns are reported.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from primal_dt.evaluation.rollout import Episode
from primal_dt.system.table import format_table
from primal_dt.task import Reference
from primal_dt.training.scalars import HEADLINE, PLAIN_HEADLINE

__all__ = [
    "Spread",
    "TargetSummary",
    "evaluation_scalars",
    "normalized",
    "number_text",
    "success_text",
    "summarize",
    "summary_table",
    "target_text",
]


def normalized(returns: ArrayLike, reference: Reference | None) -> NDArray[np.float64]:
    """``100 (return - random) / (expert - random)``; the plain returns if there is no reference."""
    values = np.asarray(returns, np.float64)
    if reference is None:
        return values
    low, high = reference.random_return, reference.expert_return
    return 100 * (values - low) / (high - low)


@dataclass(frozen=True)
class Spread:
    """The distribution of a value over episodes. The standard deviation has ``ddof=0``."""

    mean: float
    std: float
    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: NDArray[np.float64]) -> "Spread":
        """The spread of values (n,)."""
        return cls(*(float(function(values)) for function in (np.mean, np.std, np.median, np.min, np.max)))

    def texts(self, *, is_plain: bool) -> list[str]:
        """Mean and standard deviation, median, minimum and maximum for tables."""
        mean, *rest = (number_text(value, is_plain=is_plain) for value in asdict(self).values())
        return [f"{mean} ± {rest[0]}", *rest[1:]]


@dataclass(frozen=True)
class TargetSummary:
    """A summary of a run's episodes at one target."""

    target: float | None
    num_episodes: int
    returns: Spread
    normalized: Spread | None
    """None if there are no reference returns."""
    length_mean: float
    predicted_mean: float | None = None
    """Mean of the returns that the policy predicted at the first step; None if it predicts none."""
    success_rate: float | None = None
    """Share of the episodes with success, from 0 to 1; None if the environment says nothing about success."""

    def as_json(self) -> dict[str, Any]:
        """Flat JSON values: ``return_mean``, ``normalized_mean`` and so on. The normalized ones may be None."""
        values = asdict(self)
        returns, scores = values.pop("returns"), values.pop("normalized")
        for name, value in returns.items():
            values |= {f"return_{name}": value, f"normalized_{name}": None if scores is None else scores[name]}
        return values


def target_text(target: float | None, predicted: float | None = None) -> str:
    """A target return for tables: a number, the predicted return that was followed instead, or ``none``."""
    if target is not None:
        return f"{target:g}"
    return "none" if predicted is None else f"predicted {predicted:.0f}"


def number_text(value: float, *, is_plain: bool) -> str:
    """A normalized or a plain return for tables. Plain returns have more digits, as some are between 0 and 1."""
    return f"{value:.2f}" if is_plain else f"{value:.1f}"


def success_text(rate: float | None) -> str:
    """A success rate for tables, in percent; empty if the environment says nothing about success."""
    return "" if rate is None else f"{100 * rate:.1f} %"


def summarize(episodes: Iterable[Episode], reference: Reference | None) -> list[TargetSummary]:
    """One summary for each target, in the order of their first episodes."""
    by_target: dict[float | None, list[Episode]] = {}
    for episode in episodes:
        by_target.setdefault(episode.target, []).append(episode)
    summaries = []
    for target, members in by_target.items():
        returns = np.array([episode.total_reward for episode in members])
        predicted = [episode.predicted for episode in members if episode.predicted is not None]
        success = [episode.success for episode in members if episode.success is not None]
        summaries.append(
            TargetSummary(
                target=target,
                num_episodes=len(members),
                returns=Spread.of(returns),
                normalized=None if reference is None else Spread.of(normalized(returns, reference)),
                length_mean=float(np.mean([episode.length for episode in members])),
                predicted_mean=float(np.mean(predicted)) if predicted else None,
                success_rate=float(np.mean(success)) if success else None,
            )
        )
    return summaries


def evaluation_scalars(summaries: Iterable[TargetSummary], *, headline: float | None) -> dict[str, float]:
    """The scalars to log for an evaluation."""
    scalars: dict[str, float] = {}
    for summary in summaries:
        values = {"eval/return": summary.returns.mean, "eval/length": summary.length_mean}
        if summary.normalized is not None:
            values[HEADLINE] = summary.normalized.mean
        if summary.success_rate is not None:
            values["eval/success_rate"] = summary.success_rate
        if summary.predicted_mean is not None:
            scalars["eval/predicted_return"] = summary.predicted_mean
        if summary.target is not None:
            scalars |= {f"{name}/target_{summary.target:g}": value for name, value in values.items()}
            shown = (PLAIN_HEADLINE if summary.normalized is None else HEADLINE, "eval/success_rate")
            values = {name: value for name, value in values.items() if name in shown}
        if summary.target == headline:
            scalars |= values
    return scalars


def summary_table(summaries: Iterable[TargetSummary]) -> str:
    """The summaries of one run as a table, one row for each target.

    Median, minimum and maximum are of normalized returns, or of returns if there are no reference returns. A column
    that would be empty is left out.
    """
    rows = []
    for summary in summaries:
        row = {"target": target_text(summary.target, summary.predicted_mean)}
        if summary.normalized is None:
            row["return"], *rest = summary.returns.texts(is_plain=True)
        else:
            row["return"] = f"{summary.returns.mean:.0f} ± {summary.returns.std:.0f}"
            row["normalized return"], *rest = summary.normalized.texts(is_plain=False)
        row |= dict(zip(("median", "min", "max"), rest, strict=True))
        row |= {"length": f"{summary.length_mean:.0f}", "success": success_text(summary.success_rate)}
        rows.append(row | {"episodes": str(summary.num_episodes)})
    header = [name for name in rows[0] if any(row[name] for row in rows)]
    return format_table(header, [[row[name] for name in header] for row in rows])
