"""Conversion between raw units and the model's units."""

import numpy as np
import pytest

from primal_dt.data.normalizer import Normalizer

MEAN, STD = np.array([1.0, -2.0], np.float32), np.array([2.0, 0.5], np.float32)
NORMALIZER = Normalizer(MEAN, STD, 1000.0)


def test_states_are_standardized_and_returns_scaled() -> None:
    assert NORMALIZER.states(np.array([[3.0, -2.0], [1.0, -1.0]])).tolist() == [[1, 0], [0, 2]]
    assert NORMALIZER.returns(np.array([3600.0, -500.0])).tolist() == pytest.approx([3.6, -0.5])


def test_results_are_in_single_precision() -> None:
    assert NORMALIZER.states(np.zeros((3, 2), np.float64)).dtype == np.float32
    assert NORMALIZER.returns(np.zeros(3, np.float64)).dtype == np.float32


def test_constant_entries_stay_finite() -> None:
    states = np.array([[1.0, 5.0], [3.0, 5.0]], np.float32)
    normalizer = Normalizer.of(states, return_scale=1.0)
    np.testing.assert_allclose(normalizer.states(states), [[-1, 0], [1, 0]], atol=1e-5)


@pytest.mark.parametrize(
    ("mean", "std", "scale", "message"),
    [
        (MEAN, STD[:1], 1.0, "vectors of the same length"),
        (MEAN * np.nan, STD, 1.0, "finite"),
        (MEAN, STD * [1, 0], 1.0, "state_std must be positive, but entry 1 is 0"),
        (MEAN, np.array([1, 1e-45], np.float32), 1.0, "state_std must be at least 1e-07, but entry 1 is 1.4"),
        (MEAN, STD, 0.0, r"return_scale \(0.0\) must be positive"),
        (MEAN, STD, np.inf, r"return_scale \(inf\) must be positive and finite"),
    ],
)
def test_wrong_statistics_are_refused(mean: np.ndarray, std: np.ndarray, scale: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Normalizer(mean, std, scale)


def test_limits_are_those_of_single_precision() -> None:
    low, high = Normalizer(np.array([1, 3e38, 0], np.float32), np.array([2, 1, 1e30], np.float32), 10.0).state_limits
    np.testing.assert_allclose(low, [-2e12, 3e38 - 1e12, -1e38], rtol=1e-6)
    np.testing.assert_allclose(high, [2e12, 3e38 + 1e12, 1e38], rtol=1e-6)
    assert Normalizer(MEAN, STD, 10.0).largest_return == 1e13
    assert Normalizer(MEAN, STD, 1e30).largest_return == 1e38
