"""Units: raw outside the model, normalized inside. Only this module converts between them.

Axes: ... any leading axes, S state.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

__all__ = ["LARGEST", "Normalizer"]

STD_FLOOR = 1e-6
"""Constant added to the standard deviation, which is 0 for constant entries. From the Decision Transformer's code."""
SMALLEST_STD = 1e-7
"""Smallest standard deviation: below ``STD_FLOOR``, so that only damaged or crafted files have less."""
LARGEST = 1e12
"""Largest absolute value of a standardized state, a scaled return or an action that a policy accepts.

A LayerNorm squares what the model makes of it. That gives 1e24 and leaves a factor of 1e14 to the end of single
precision, for the weights and for sums over entries. Real data is far below: an entry that never changed in the data
has a standard deviation of 1e-6, and would have to be off by a million."""
LARGEST_RAW = 1e38
"""Bound on raw values and their distance from the mean, which must be finite in single precision too."""


@dataclass(frozen=True)
class Normalizer:
    """``state -> (state - mean) / std``, ``return -> return / return_scale``. Part of every checkpoint."""

    state_mean: NDArray[np.float32]
    """Mean of each state entry, (S,)."""
    state_std: NDArray[np.float32]
    """Standard deviation of each state entry, (S,), all positive."""
    return_scale: float
    """Divisor of returns."""

    def __post_init__(self) -> None:
        if self.state_mean.ndim != 1 or self.state_mean.shape != self.state_std.shape:
            raise ValueError(
                f"state_mean and state_std must be vectors of the same length, not {self.state_mean.shape} "
                f"and {self.state_std.shape}"
            )
        if not (np.isfinite(self.state_mean).all() and np.isfinite(self.state_std).all()):
            raise ValueError("state_mean and state_std must be finite")
        if (self.state_std < SMALLEST_STD).any():  # tiny ones would make any reading huge
            entry = int(self.state_std.argmin())
            rule = "positive" if self.state_std[entry] <= 0 else f"at least {SMALLEST_STD:g}"
            raise ValueError(f"state_std must be {rule}, but entry {entry} is {self.state_std[entry]:g}")
        if not (np.isfinite(self.return_scale) and self.return_scale > 0):
            raise ValueError(f"return_scale ({self.return_scale}) must be positive and finite")

    @classmethod
    def of(cls, states: NDArray[np.floating], *, return_scale: float) -> Self:
        """Compute the statistics of states (N, S) that fit into memory."""
        std = states.std(0, dtype=np.float64) + STD_FLOOR
        return cls(states.mean(0, dtype=np.float64).astype(np.float32), std.astype(np.float32), return_scale)

    @property
    def state_limits(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The lowest and the highest raw states, (S,) each, that a policy accepts."""
        mean, std = self.state_mean.astype(np.float64), self.state_std.astype(np.float64)
        reach, end = np.minimum(LARGEST * std, LARGEST_RAW), float(np.finfo(np.float32).max)
        return np.maximum(mean - reach, -end), np.minimum(mean + reach, end)

    @property
    def largest_return(self) -> float:
        """The largest absolute value of a raw return that a policy accepts."""
        return min(LARGEST * self.return_scale, LARGEST_RAW)

    def states(self, raw: NDArray[np.floating]) -> NDArray[np.float32]:
        """Standardize states, (..., S) -> (..., S)."""
        return ((raw - self.state_mean) / self.state_std).astype(np.float32, copy=False)

    def returns(self, raw: NDArray[np.floating]) -> NDArray[np.float32]:
        """Divide returns by ``return_scale``."""
        return (raw / self.return_scale).astype(np.float32, copy=False)
