"""What all sources of episodes share: the rules that an episode must keep, and the error when it does not.

Axes: T transitions of one episode, S state, A action.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import h5py
import numpy as np
from numpy.typing import ArrayLike, NDArray

from primal_dt.data import Trajectory

__all__ = ["ActionBox", "DataError", "EpisodeSource", "checked_trajectory", "open_hdf5"]


class DataError(ValueError):
    """A data set that cannot be used: what was looked for, or which file, which episode, which rule."""


@dataclass(frozen=True)
class ActionBox:
    """The actions that an environment takes, in each entry."""

    low: float
    high: float


class EpisodeSource(Protocol):
    """Episodes somewhere on disk."""

    @property
    def path(self) -> Path:
        """The file that they are in."""

    @property
    def env_id(self) -> str | None:
        """The environment that they were recorded in, if the source says so."""

    @property
    def state_width(self) -> int:
        """S."""

    @property
    def action_width(self) -> int:
        """A."""

    def episodes(self, box: ActionBox, /) -> Iterator[Trajectory]:
        """Read them one after the other, checked."""


def checked_trajectory(
    where: str, *, observations: ArrayLike, actions: ArrayLike, rewards: ArrayLike, box: ActionBox, is_complete: bool
) -> Trajectory:
    """An episode whose numbers are fit to be learnt from.

    Args:
        where: file and episode, for the error.
        observations: (T, S).
        actions: (T, A).
        rewards: (T,).
        box: what the environment takes.
        is_complete: whether the recording goes to the episode's end.

    Raises:
        DataError: at the first number that is not finite, or action that is out of bounds. Nothing is clipped.
    """
    given = {"observations": observations, "actions": actions, "rewards": rewards}
    with np.errstate(over="ignore"):  # what single precision cannot hold becomes infinite and is refused
        arrays = {key: np.asarray(array, np.float32) for key, array in given.items()}
    for key, array in arrays.items():
        _require(np.isfinite(array), where, f"{key} must be finite", array)
    within = (arrays["actions"] >= box.low) & (arrays["actions"] <= box.high)
    _require(within, where, f"actions must be within [{box.low:g}, {box.high:g}]", arrays["actions"])
    try:
        return Trajectory(**arrays, is_complete=is_complete)
    except ValueError as error:
        raise DataError(f"{where}: {error}") from error


def _require(fine: NDArray[np.bool_], where: str, rule: str, array: NDArray[np.float32]) -> None:
    if not fine.all():
        first = tuple(np.argwhere(~fine)[0])
        raise DataError(f"{where}, step {first[0]}: {rule}, not {array[first]:g} ({(~fine).sum()} such in the episode)")


def open_hdf5(path: Path) -> h5py.File:
    """An HDF5 file to read from.

    Raises:
        DataError: if it is none, or not all of one.
    """
    if not path.is_file():
        raise DataError(f"there is no file {path}")
    try:
        return h5py.File(path, "r")
    except OSError as error:
        raise DataError(f"{path} is not an HDF5 file, or not all of one: {error}") from error
