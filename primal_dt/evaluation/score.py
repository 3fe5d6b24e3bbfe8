"""Episodes -> normalized returns for each target.

The normalized return is D4RL's: 0 for the reference's random policy, 100 for its expert.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from primal_dt.evaluation.rollout import Episode
from primal_dt.system.table import format_table
from primal_dt.task import Reference
from primal_dt.training.scalars import HEADLINE

__all__ = ["TargetSummary", "evaluation_scalars", "normalized", "summarize", "summary_table", "target_text"]


def normalized(returns: ArrayLike, reference: Reference) -> NDArray[np.float64]:
    """``100 (return - random) / (expert - random)``."""
    low, high = reference.random_return, reference.expert_return
    return 100 * (np.asarray(returns, np.float64) - low) / (high - low)


@dataclass(frozen=True)
class TargetSummary:
    """A summary of a run's episodes at one target. Standard deviations are over episodes (``ddof=0``)."""

    target: float | None
    num_episodes: int
    return_mean: float
    return_std: float
    normalized_mean: float
    normalized_std: float
    normalized_median: float
    normalized_least: float
    normalized_most: float
    length_mean: float
    predicted_mean: float | None = None
    """Mean of the returns that the policy predicted at the first step; None if it predicts none."""


def target_text(target: float | None, predicted: float | None = None) -> str:
    """A target return for tables: a number, the predicted return that was followed instead, or ``none``."""
    if target is not None:
        return f"{target:g}"
    return "none" if predicted is None else f"predicted {predicted:.0f}"


def summarize(episodes: Iterable[Episode], reference: Reference) -> list[TargetSummary]:
    """One summary for each target, in the order of their first episodes."""
    by_target: dict[float | None, list[Episode]] = {}
    for episode in episodes:
        by_target.setdefault(episode.target, []).append(episode)
    summaries = []
    for target, members in by_target.items():
        returns = np.array([episode.total_reward for episode in members])
        predicted = [episode.predicted for episode in members if episode.predicted is not None]
        scores = normalized(returns, reference)
        summaries.append(
            TargetSummary(
                target=target,
                num_episodes=len(members),
                return_mean=float(returns.mean()),
                return_std=float(returns.std()),
                normalized_mean=float(scores.mean()),
                normalized_std=float(scores.std()),
                normalized_median=float(np.median(scores)),
                normalized_least=float(scores.min()),
                normalized_most=float(scores.max()),
                length_mean=float(np.mean([episode.length for episode in members])),
                predicted_mean=float(np.mean(predicted)) if predicted else None,
            )
        )
    return summaries


def evaluation_scalars(summaries: Iterable[TargetSummary], *, headline: float | None) -> dict[str, float]:
    """The scalars to log for an evaluation."""
    scalars: dict[str, float] = {}
    for summary in summaries:
        if summary.target == headline:
            scalars[HEADLINE] = summary.normalized_mean
        if summary.predicted_mean is not None:
            scalars["eval/predicted_return"] = summary.predicted_mean
        if summary.target is None:
            scalars |= {"eval/return": summary.return_mean, "eval/length": summary.length_mean}
            continue
        target = f"target_{summary.target:g}"
        scalars[f"eval/return/{target}"] = summary.return_mean
        scalars[f"{HEADLINE}/{target}"] = summary.normalized_mean
        scalars[f"eval/length/{target}"] = summary.length_mean
    return scalars


def summary_table(summaries: Iterable[TargetSummary]) -> str:
    """The summaries as a table, one row for each target."""
    rows = [
        [
            target_text(summary.target, summary.predicted_mean),
            f"{summary.return_mean:.0f} ± {summary.return_std:.0f}",
            f"{summary.normalized_mean:.1f} ± {summary.normalized_std:.1f}",
            f"{summary.normalized_median:.1f}",
            f"{summary.normalized_least:.1f}",
            f"{summary.normalized_most:.1f}",
            f"{summary.length_mean:.0f}",
            str(summary.num_episodes),
        ]
        for summary in summaries
    ]
    header = ["target", "return", "normalized return", "median", "min", "max", "length", "episodes"]
    return format_table(header, rows)
