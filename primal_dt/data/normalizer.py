"""Units: raw outside the model, normalized inside. Only this module converts between them.

Axes: ... any leading axes, S state.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

__all__ = ["Normalizer"]

STD_FLOOR = 1e-6
"""Constant added to the standard deviation, which is 0 for constant entries. From the Decision Transformer's code."""


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
        if not (self.state_std > 0).all():
            entry = int(self.state_std.argmin())
            raise ValueError(f"state_std must be positive, but entry {entry} is {self.state_std[entry]:g}")
        if not (np.isfinite(self.return_scale) and self.return_scale > 0):
            raise ValueError(f"return_scale ({self.return_scale}) must be positive and finite")

    @classmethod
    def of(cls, states: NDArray[np.floating], *, return_scale: float) -> Self:
        """Compute the statistics of states (N, S) that fit into memory."""
        std = states.std(0, dtype=np.float64) + STD_FLOOR
        return cls(states.mean(0, dtype=np.float64).astype(np.float32), std.astype(np.float32), return_scale)

    def states(self, raw: NDArray[np.floating]) -> NDArray[np.float32]:
        """Standardize states, (..., S) -> (..., S)."""
        return ((raw - self.state_mean) / self.state_std).astype(np.float32, copy=False)

    def returns(self, raw: NDArray[np.floating]) -> NDArray[np.float32]:
        """Divide returns by ``return_scale``."""
        return (raw / self.return_scale).astype(np.float32, copy=False)
