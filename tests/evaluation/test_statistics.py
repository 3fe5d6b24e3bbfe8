"""Interquartile means, bootstrap intervals and performance profiles: computed by hand and compared with SciPy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

from primal_dt.evaluation import statistics
from primal_dt.evaluation.statistics import (
    interquartile_mean,
    iqm_interval,
    performance_profile,
    profile_band,
    rank_correlation,
)


def interval(*tasks: list[float]) -> statistics.Interval | None:
    return iqm_interval([np.array(scores) for scores in tasks], random=np.random.default_rng(0))


def test_interquartile_means_by_hand() -> None:
    assert interquartile_mean([1, 2, 3]).item() == 2  # a quarter of three values is less than one value
    assert interquartile_mean([100, 1, 2, 3]).item() == 2.5
    assert interquartile_mean([0, 0, 5, 6, 7, 8, 90, 90]).item() == 6.5
    np.testing.assert_array_equal(interquartile_mean([[1, 2, 3, 90], [0, 4, 6, 7]]), [2.5, 5])


@given(arrays(float, st.integers(1, 40), elements=st.floats(-1e3, 1e3)))
def test_interquartile_mean_equals_scipy_trimmed_mean(scores: np.ndarray) -> None:
    assert interquartile_mean(scores).item() == pytest.approx(stats.trim_mean(scores, 0.25), abs=1e-9)


def test_intervals_by_hand() -> None:
    """A quarter of the resamples of the runs 0 and 1 has mean 0, and a quarter has mean 1: the interval has both."""
    assert interval([0, 1]) == (0, 1)
    assert interval([7] * 5) == (7, 7)
    assert interval([3]) is None
    # Stratified: every resample includes the only run of the first task, so a third of its values are 10.
    assert interval([10], [0, 0]) == pytest.approx((10 / 3, 10 / 3))


@pytest.mark.parametrize("sizes", [(5,), (5, 8), (3, 3, 3, 10)])
def test_intervals_match_scipy_bootstrap(sizes: tuple[int, ...]) -> None:
    random = np.random.default_rng(1)
    scores = [random.normal(50, 20, size) for size in sizes]
    own = iqm_interval(scores, random=np.random.default_rng(2), num_resamples=20_000)

    def statistic(*tasks: np.ndarray, axis: int) -> np.ndarray:
        return stats.trim_mean(np.concatenate(tasks, axis=axis), 0.25, axis=axis)

    theirs = stats.bootstrap(
        scores, statistic, n_resamples=20_000, method="percentile", rng=np.random.default_rng(3), vectorized=True
    ).confidence_interval
    assert own == pytest.approx((theirs.low, theirs.high), abs=0.6)  # both draw 20,000 resamples at random


def test_the_interval_is_reproducible() -> None:
    assert interval([1, 5, 9]) == interval([1, 5, 9])


def test_the_deviation_over_seeds_is_of_a_sample() -> None:
    assert statistics.std_over_seeds([1.0, 2.0, 3.0]) == pytest.approx(1.0)
    assert statistics.std_over_seeds([1.0]) is None


def test_profiles_by_hand() -> None:
    """Each run has the same weight, whatever its number of episodes."""
    runs = [np.array([10.0, 30.0]), np.array([20.0, 20.0, 20.0, 20.0])]
    np.testing.assert_allclose(performance_profile(runs, [0, 10, 20, 30]), [1, 0.75, 0.25, 0])
    low, high = profile_band(runs, [0, 15, 25], random=np.random.default_rng(0)) or (0, 0)
    np.testing.assert_allclose(low, [1, 0.5, 0])
    np.testing.assert_allclose(high, [1, 1, 0.5])
    assert profile_band(runs[:1], [0.0], random=np.random.default_rng(0)) is None


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=3, max_size=10))
def test_the_rank_correlation_equals_scipys(pairs: list[tuple[int, int]]) -> None:
    """With ties. SciPy's is undefined where all values are equal."""
    x, y = zip(*pairs, strict=True)
    if len(set(x)) == 1 or len(set(y)) == 1:
        assert rank_correlation(x, y) == 0
    else:
        assert rank_correlation(x, y) == pytest.approx(stats.spearmanr(x, y).statistic)
