"""The interface of episode sources, and the checks that they share.

Axes: T transitions of one episode, S state, A action.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import h5py
import numpy as np
from numpy.typing import ArrayLike, NDArray

from envs.errors import DataError
from envs.tasks import ActionBox, Task
from primal_dt.data.trajectories import Trajectory, returns_to_go

__all__ = ["EpisodeSource", "check_widths", "checked_trajectory", "flags", "number_array", "open_hdf5"]


class EpisodeSource(Protocol):
    """Interface of a file or folder of episodes on disk."""

    @property
    def path(self) -> Path:
        """The file with the episodes."""

    @property
    def files(self) -> tuple[Path, ...]:
        """All files that the episodes depend on."""

    @property
    def env_id(self) -> str | None:
        """The environment that the episodes were recorded in, if the source names it."""

    @property
    def state_width(self) -> int:
        """The state width S."""

    @property
    def action_width(self) -> int:
        """The action width A."""

    def episodes(self, box: ActionBox, /) -> Iterator[Trajectory]:
        """Read and check the episodes one by one."""


def check_widths(source: EpisodeSource, task: Task) -> None:
    """Check that observations and actions have the widths of a task's environment.

    Raises:
        DataError: if they do not.
    """
    widths = (task.environment.state_width, task.environment.action_width)
    if (source.state_width, source.action_width) != widths:
        raise DataError(
            f"{source.path} has observations of width {source.state_width} and actions of width "
            f"{source.action_width}, but {task.env_id} has {widths[0]} and {widths[1]}"
        )


def checked_trajectory(
    where: str, *, observations: ArrayLike, actions: ArrayLike, rewards: ArrayLike, box: ActionBox, is_complete: bool
) -> Trajectory:
    """Check an episode's numbers and return it as a trajectory.

    Args:
        where: the file and the episode, for error messages.
        observations: (T, S).
        actions: (T, A).
        rewards: (T,).
        box: the environment's action bounds.
        is_complete: whether the recording includes the episode's end.

    Raises:
        DataError: at the first number that is not finite or action that is out of bounds. Nothing is clipped.
    """
    given = {"observations": observations, "actions": actions, "rewards": rewards}
    with np.errstate(over="ignore"):  # values too large for single precision become infinite and are refused
        arrays = {key: np.asarray(array, np.float32) for key, array in given.items()}
        sums = returns_to_go(arrays["rewards"])
    for key, array in (*arrays.items(), ("sums of rewards", sums)):
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
        raise DataError(f"{where}, step {first[0]}: {rule}, not {array[first]:g} ({(~fine).sum()} in this episode)")


@contextmanager
def open_hdf5(path: Path) -> Iterator[h5py.File]:
    """Open an HDF5 file for reading.

    Raises:
        DataError: if the file is missing, is not HDF5, is incomplete, or proves to be damaged inside the block.
    """
    if not path.is_file():
        raise DataError(f"there is no file {path}")
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        raise DataError(f"{path} is not an HDF5 file, or is incomplete: {error}") from error
    with file:
        try:
            yield file
        except DataError:
            raise
        # h5py raises many kinds of exceptions for damaged files.
        except (OSError, KeyError, RuntimeError, TypeError, ValueError, OverflowError, MemoryError) as error:
            raise DataError(f"{path} is damaged: {error}") from error


def number_array(group: h5py.Group, key: str, *, dimensions: int, where: str) -> h5py.Dataset:
    """Get an array of numbers that is stored in the file itself.

    An array of one dimension may also be a column (N, 1), as in D4RL's medium-replay files.

    Raises:
        DataError: if it is not such an array, or if it links to another file, which would be read unnoticed.
    """
    here = isinstance(group.get(key, getlink=True), h5py.HardLink)
    entry: Any = group[key] if here else None
    if not isinstance(entry, h5py.Dataset) or entry.external or entry.is_virtual:
        raise DataError(f"{where}: {key} must be an array stored in this file, not a group or a link")
    is_column = dimensions == 1 and entry.ndim == 2 and entry.shape[1] == 1
    if (entry.ndim != dimensions and not is_column) or entry.dtype.kind not in "fiub":
        raise DataError(
            f"{where}: {key} must be an array of real numbers with {dimensions} dimension(s), "
            f"not {entry.dtype} of shape {entry.shape}"
        )
    return entry


def flags(values: NDArray[Any], where: str) -> NDArray[np.bool_]:
    """Convert flags that mark the end of an episode to booleans.

    Raises:
        DataError: if a value is neither 0 nor 1.
    """
    if not np.isin(values, (0, 1)).all():
        raise DataError(f"{where} must be 0 or 1 everywhere")
    return values.astype(bool)
