"""Readings of sensors and rewards, which may be NaN, infinite or absurdly large.

Axes: E environments, S entries of a reading.
"""

import warnings
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

__all__ = ["LONG", "BadReadingError", "Readings", "require_range"]

LONG = 10
"""Number of steps in a row for which an entry is held before there is a warning."""
Number = TypeVar("Number", bound=np.floating)
Limit = float | NDArray[np.floating]
"""The lowest or highest reading that is accepted: one number, or an array that broadcasts to (E, S)."""


class BadReadingError(ValueError):
    """Raised if a reading is not a number that the policy accepts: NaN, infinite, or absurdly large.

    Args:
        message: what is wrong, and what to do.
        environment: number of the environment.
        entry: number of the entry in its reading.
    """

    def __init__(self, message: str, environment: int, entry: int) -> None:
        super().__init__(message)
        self.environment = environment
        self.entry = entry


def require_range(name: str, values: NDArray[np.floating], low: Limit, high: Limit, *, advice: str) -> None:
    """Check that readings (E, S) are numbers from ``low`` to ``high``.

    Raises:
        BadReadingError: with the advice, if an entry is not.
    """
    good = _within(values, low, high)
    if not good.all():
        raise _error(name, values, good, low, high, advice)


class Readings:
    """Checks readings (E, S) of one kind in an episode, and holds the last good value of each entry.

    Args:
        name: what is read, for messages.
        hold: replace bad entries by their last good values instead of raising an error.
        count: E, the number of environments.
    """

    def __init__(self, name: str, *, hold: bool, count: int) -> None:
        self.name = name
        self.held = np.zeros(count, np.int64)
        """(E,), the number of readings of which at least one entry was held."""
        self._hold = hold
        self._last: NDArray[np.floating] | None = None
        self._age: NDArray[np.int64] | None = None  # (E, S), for how many readings each entry has been held

    def checked(self, values: NDArray[Number], low: Limit, high: Limit) -> NDArray[Number]:
        """Return readings (E, S) whose entries are numbers from ``low`` to ``high``.

        Raises:
            BadReadingError: if an entry is not, and its last good value is not to be held, or there is none.
        """
        good = _within(values, low, high)
        if not good.all():
            values = self._replaced(values, good, low, high)
        if self._hold:
            self._remember(values, good)
        return values

    def keep(self, rows: NDArray[np.bool_]) -> None:
        """Continue with the environments where ``rows`` (E,) is True."""
        self.held = self.held[rows]
        self._last = None if self._last is None else self._last[rows]
        self._age = None if self._age is None else self._age[rows]

    def _replaced(self, values: NDArray[Number], good: NDArray[np.bool_], low: Limit, high: Limit) -> NDArray[Number]:
        """The readings with the last good values where they are bad."""
        if not self._hold or self._last is None:
            advice = "give a number in this range, or use a policy with on_bad='hold'"
            if self._hold:
                advice = "there is no earlier one in this episode to hold"
            raise _error(self.name, values, good, low, high, advice)
        held = np.where(good, values, self._last).astype(values.dtype)
        require_range(self.name, held, low, high, advice="this is the last good one, which no longer fits")
        return held

    def _remember(self, values: NDArray[np.floating], good: NDArray[np.bool_]) -> None:
        self._last = values.copy()
        self._age = np.where(good, 0, 1 + (0 if self._age is None else self._age))
        self.held += ~good.all(1)
        if (is_old := self._age == LONG).any():
            environment, entry = np.argwhere(is_old)[0].tolist()
            warnings.warn(
                f"entry {entry} of the {self.name} of environment {environment} has been held for {LONG} steps",
                stacklevel=4,
            )


def _within(values: NDArray[np.floating], low: Limit, high: Limit) -> NDArray[np.bool_]:
    """Which entries are numbers from ``low`` to ``high``: False for NaN."""
    return (values >= low) & (values <= high)


def _error(
    name: str, values: NDArray[np.floating], good: NDArray[np.bool_], low: Limit, high: Limit, advice: str
) -> BadReadingError:
    """The error of the first bad entry."""
    environment, entry = np.argwhere(~good)[0].tolist()
    lowest, highest = (np.broadcast_to(limit, values.shape)[environment, entry] for limit in (low, high))
    return BadReadingError(
        f"entry {entry} of the {name} of environment {environment} is {values[environment, entry]:g}, "
        f"not a number from {lowest:g} to {highest:g}: {advice}",
        environment,
        entry,
    )
