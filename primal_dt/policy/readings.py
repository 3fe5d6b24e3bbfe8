"""Readings of sensors and rewards, which may be NaN or infinite.

Axes: E environments, S entries of a reading.
"""

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

__all__ = ["BadReadingError", "Readings"]

Number = TypeVar("Number", bound=np.floating)


class BadReadingError(ValueError):
    """Raised if a reading is NaN or infinite.

    Args:
        name: what was read: observation, reward or action.
        environment: number of the environment.
        entry: number of the entry in its reading.
        value: the entry.
        advice: what to do.
    """

    def __init__(self, name: str, environment: int, entry: int, value: float, advice: str) -> None:
        super().__init__(f"entry {entry} of the {name} of environment {environment} is {value:g}: {advice}")
        self.environment = environment
        self.entry = entry


class Readings:
    """Checks readings (E, S) of one kind in an episode, and holds the last good value of each entry.

    Args:
        name: what is read, for messages.
        hold: replace bad entries by their last good values instead of raising an error.
    """

    def __init__(self, name: str, *, hold: bool) -> None:
        self.name = name
        self._hold = hold
        self._last: NDArray[np.floating] | None = None

    def checked(self, values: NDArray[Number]) -> NDArray[Number]:
        """Return readings (E, S) that are finite.

        Raises:
            BadReadingError: if an entry is not finite, and its last good value is not to be held, or there is none.
        """
        good = np.isfinite(values)
        if not good.all():
            if not self._hold or self._last is None:
                advice = "give a finite number, or use a policy with on_bad='hold'"
                if self._hold:
                    advice = "there is no earlier one in this episode to hold"
                environment, entry = np.argwhere(~good)[0].tolist()
                raise BadReadingError(self.name, environment, entry, float(values[environment, entry]), advice)
            values = np.where(good, values, self._last)
        if self._hold:
            self._last = values.copy()
        return values

    def keep(self, rows: NDArray[np.bool_]) -> None:
        """Continue with the environments where ``rows`` (E,) is True."""
        if self._last is not None:
            self._last = self._last[rows]
