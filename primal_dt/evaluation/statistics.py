"""Statistics over runs: the interquartile mean (IQM) with an interval, and performance profiles.

They follow "Deep Reinforcement Learning at the Edge of the Statistical Precipice" (arXiv 2108.13264): with few runs, a
mean without an interval says little. A run's score is the mean over its episodes. The bootstrap is stratified: runs are
resampled within each task.

Axes: T tasks, N runs of a task.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "Interval",
    "interquartile_mean",
    "iqm_interval",
    "mean_interval",
    "performance_profile",
    "profile_band",
    "rank_correlation",
    "std_over_seeds",
]

NUM_RESAMPLES = 5_000
Scores = Sequence[NDArray[np.float64]]
"""T arrays (N,): the score of each run of each task."""


class Interval(NamedTuple):
    """A 95 % confidence interval."""

    low: float
    high: float


def interquartile_mean(scores: ArrayLike) -> NDArray[np.float64]:
    """Scores (..., N) -> IQM (...): the mean without the lowest and the highest quarter of the scores.

    ``N // 4`` scores are cut off at each end. With three or fewer none is, so the IQM is the mean.
    """
    values = np.sort(np.asarray(scores, np.float64), axis=-1)
    count = values.shape[-1]
    cut = count // 4
    return np.asarray(values[..., cut : count - cut].mean(-1))


def iqm_interval(scores: Scores, *, random: np.random.Generator, num_resamples: int = NUM_RESAMPLES) -> Interval | None:
    """The percentile interval of the IQM over all runs of all tasks, from a stratified bootstrap.

    It is None if no task has two runs, because nothing can be resampled.
    """
    if all(len(runs) < 2 for runs in scores):
        return None
    means = interquartile_mean(np.concatenate(_resampled(scores, random, num_resamples), axis=1))
    low, high = np.percentile(means, (2.5, 97.5))
    return Interval(float(low), float(high))


def mean_interval(
    values: ArrayLike, *, random: np.random.Generator, num_resamples: int = NUM_RESAMPLES
) -> Interval | None:
    """The percentile interval of the mean of values (n,), from a bootstrap; None for a single value."""
    own = np.asarray(values, np.float64)
    if len(own) < 2:
        return None
    (resampled,) = _resampled([own], random, num_resamples)
    low, high = np.percentile(resampled.mean(1), (2.5, 97.5))
    return Interval(float(low), float(high))


def std_over_seeds(scores: ArrayLike) -> float | None:
    """The sample standard deviation over seeds (``ddof=1``); None for a single run."""
    values = np.asarray(scores, np.float64)
    return float(values.std(ddof=1)) if len(values) > 1 else None


def performance_profile(runs: Scores, thresholds: ArrayLike) -> NDArray[np.float64]:
    """The share of episodes with a score above each threshold, (M,). Every run has the same weight.

    Args:
        runs: the scores of the episodes of each run, one array for each run.
        thresholds: (M,).
    """
    return np.asarray(_shares(runs, thresholds).mean(0))


def profile_band(
    runs: Scores, thresholds: ArrayLike, *, random: np.random.Generator, num_resamples: int = NUM_RESAMPLES
) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
    """The 95 % band of the profile at each threshold, two arrays (M,), by resampling runs; None for a single run."""
    if len(runs) < 2:
        return None
    shares = _shares(runs, thresholds)  # (N, M)
    chosen = random.integers(len(runs), size=(num_resamples, len(runs)))
    low, high = np.percentile(shares[chosen].mean(1), (2.5, 97.5), axis=0)
    return low, high


def _shares(runs: Scores, thresholds: ArrayLike) -> NDArray[np.float64]:
    """The share of episodes above each threshold for each run, (N, M)."""
    levels = np.asarray(thresholds, np.float64)
    return np.stack([(np.asarray(run)[:, None] > levels).mean(0) for run in runs])


def _resampled(scores: Scores, random: np.random.Generator, num_resamples: int) -> list[NDArray[np.float64]]:
    """Draw runs with replacement within each task: T arrays (num_resamples, N)."""
    return [np.asarray(runs)[random.integers(len(runs), size=(num_resamples, len(runs)))] for runs in scores]


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Spearman's rank correlation, from -1 to 1. Equal values share their mean rank; 0 if all of x or y are equal."""

    def ranks(values: Sequence[float]) -> NDArray[np.float64]:
        array = np.asarray(values, np.float64)
        return np.array([(array < value).sum() + ((array == value).sum() - 1) / 2 for value in array])

    one, two = ranks(x), ranks(y)
    return float(np.corrcoef(one, two)[0, 1]) if one.std() > 0 and two.std() > 0 else 0.0
