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
    "Difference",
    "Interval",
    "difference_of_means",
    "interquartile_mean",
    "iqm_interval",
    "mean_interval",
    "performance_profile",
    "probability_of_improvement",
    "profile_band",
    "rank_correlation",
    "std_over_seeds",
]

NUM_RESAMPLES = 5_000
POWER_FACTOR = 2.8
"""1.96 + 0.84: a difference of so many standard errors is found in 80 % of all cases, by a test at the 5 % level."""
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


class Difference(NamedTuple):
    """How much higher the scores of one policy are than those of another, as a mean over tasks."""

    mean: float
    interval: Interval | None
    """None if no task has two runs of either policy."""
    smallest: float | None
    """The smallest true difference that so many runs find with a probability of 80 %, by their spread over runs.
    None if a task has a single run of either policy."""

    @property
    def is_found(self) -> bool:
        """Whether the interval excludes zero."""
        return self.interval is not None and not self.interval.low <= 0 <= self.interval.high


def difference_of_means(
    scores: Scores, others: Scores, *, random: np.random.Generator, num_resamples: int = NUM_RESAMPLES
) -> Difference:
    """Compare two policies on the same tasks: the mean over tasks of the difference of the means over runs.

    Its percentile interval is from a stratified bootstrap: runs are resampled within each task, for each policy.

    Args:
        scores: the scores of one policy.
        others: the scores of the other, on the same tasks in the same order.
        random: generator of the resamples.
        num_resamples: their number.
    """
    means = [float(np.mean(own) - np.mean(other)) for own, other in zip(scores, others, strict=True)]
    sizes = [len(runs) for runs in (*scores, *others)]
    interval = None
    if max(sizes) > 1:
        both = zip(_resampled(scores, random, num_resamples), _resampled(others, random, num_resamples), strict=True)
        low, high = np.percentile(np.mean([own.mean(1) - other.mean(1) for own, other in both], axis=0), (2.5, 97.5))
        interval = Interval(float(low), float(high))
    smallest = None
    if min(sizes) > 1:
        variance = sum(float(np.var(runs, ddof=1)) / len(runs) for runs in (*scores, *others))
        smallest = POWER_FACTOR * variance**0.5 / len(means)
    return Difference(float(np.mean(means)), interval, smallest)


def probability_of_improvement(
    scores: Scores, others: Scores, *, random: np.random.Generator, num_resamples: int = NUM_RESAMPLES
) -> tuple[float, Interval | None]:
    """The probability that a run of one policy has a higher score than a run of the other, as a mean over tasks.

    Ties count half. The arguments are those of :func:`difference_of_means`, and the interval is of the same kind.
    """

    def probability(own: NDArray[np.float64], other: NDArray[np.float64]) -> NDArray[np.float64]:
        """Scores (..., N) and (..., M) -> (...)."""
        gap = np.asarray(own)[..., :, None] - np.asarray(other)[..., None, :]
        return np.asarray(((gap > 0) + 0.5 * (gap == 0)).mean((-2, -1)))

    found = float(np.mean([probability(own, other) for own, other in zip(scores, others, strict=True)]))
    if max(len(runs) for runs in (*scores, *others)) < 2:
        return found, None
    both = zip(_resampled(scores, random, num_resamples), _resampled(others, random, num_resamples), strict=True)
    low, high = np.percentile(np.mean([probability(own, other) for own, other in both], axis=0), (2.5, 97.5))
    return found, Interval(float(low), float(high))


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Spearman's rank correlation, from -1 to 1. Equal values share their mean rank; 0 if all of x or y are equal."""

    def ranks(values: Sequence[float]) -> NDArray[np.float64]:
        array = np.asarray(values, np.float64)
        return np.array([(array < value).sum() + ((array == value).sum() - 1) / 2 for value in array])

    one, two = ranks(x), ranks(y)
    return float(np.corrcoef(one, two)[0, 1]) if one.std() > 0 and two.std() > 0 else 0.0
