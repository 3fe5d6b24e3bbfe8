"""Units: raw outside, standardized inside. This is the one place where they change.

Axes: ... any leading axes, S state.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

__all__ = ["Normalizer"]

STD_FLOOR = 1e-6
"""Added to the standard deviation, as the Decision Transformer's published code does: a constant entry has none."""


@dataclass(frozen=True)
class Normalizer:
    """``state -> (state - mean) / std``, ``return -> return / return_scale``. Part of every checkpoint."""

    state_mean: NDArray[np.float32]
    """(S,)."""
    state_std: NDArray[np.float32]
    """(S,), all positive."""
    return_scale: float
    """What returns are divided by."""

    def __post_init__(self) -> None:
        if self.state_mean.ndim != 1 or self.state_mean.shape != self.state_std.shape:
            raise ValueError(
                f"state_mean and state_std must be vectors of one length, not {self.state_mean.shape} "
                f"and {self.state_std.shape}"
            )
        if not (np.isfinite(self.state_mean).all() and np.isfinite(self.state_std).all()):
            raise ValueError("state_mean and state_std must be finite")
        if not (self.state_std > 0).all():
            raise ValueError(f"state_std must be positive, but entry {int(self.state_std.argmin())} is not")
        if not (np.isfinite(self.return_scale) and self.return_scale > 0):
            raise ValueError(f"return_scale ({self.return_scale}) must be positive and finite")

    @classmethod
    def of(cls, states: NDArray[np.floating], *, return_scale: float) -> Self:
        """The statistics of states (N, S) that fit into memory."""
        std = states.std(0, dtype=np.float64) + STD_FLOOR
        return cls(states.mean(0, dtype=np.float64).astype(np.float32), std.astype(np.float32), return_scale)

    def states(self, raw: NDArray[np.floating]) -> NDArray[np.float32]:
        """(..., S) -> (..., S), standardized."""
        return ((raw - self.state_mean) / self.state_std).astype(np.float32, copy=False)

    def returns(self, raw: NDArray[np.floating]) -> NDArray[np.float32]:
        """Scaled."""
        return (raw / self.return_scale).astype(np.float32, copy=False)
