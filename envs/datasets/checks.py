"""The interface of episode sources, and the checks that they share.

Axes: T transitions of one episode, S state, A action.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import h5py
import numpy as np
from numpy.typing import ArrayLike, NDArray

from envs.errors import DataError
from envs.spaces import ActionBounds, unit_box
from envs.tasks import Spaces
from primal_dt.data.trajectories import Trajectory, returns_to_go
from primal_dt.task import Reference, Specification

__all__ = ["ActionCheck", "EpisodeSource", "checked_trajectory", "flags", "guess_bounds", "number_array", "open_hdf5"]


class EpisodeSource(Protocol):
    """Interface of a file or folder of episodes on disk."""

    @property
    def path(self) -> Path:
        """The file with the episodes."""

    @property
    def files(self) -> tuple[Path, ...]:
        """All files that the episodes depend on."""

    @property
    def specification(self) -> Specification | None:
        """The environment in which a policy that learns from the episodes is to act, if the source names it."""

    @property
    def spaces(self) -> Spaces | None:
        """Observations and actions, if the source describes them."""

    @property
    def widths(self) -> tuple[int, int]:
        """The widths of observations and actions as they are stored."""

    @property
    def reference(self) -> Reference | None:
        """The reference returns, if the source has them."""

    def guess_actions(self) -> ActionBounds:
        """Bounds of the actions that are stored, for data without a description or an environment."""

    def episodes(self, check: "ActionCheck", /) -> Iterator[Trajectory]:
        """Read and check the episodes one by one."""


@dataclass
class ActionCheck:
    """Checks the actions of all episodes of a source, and counts those out of bounds."""

    bounds: ActionBounds
    clip: bool = False
    """Whether actions out of bounds are clipped. Otherwise they are an error."""
    seen: int = 0
    """The number of actions so far."""
    outside: int = 0
    """The number of actions with an entry out of bounds."""
    farthest: float = 0.0
    """The largest distance of an entry from its bounds."""
    first: str = ""
    """The place of the first action out of bounds, and its first such entry."""

    def entries(self, actions: NDArray[Any], where: str) -> NDArray[np.float32]:
        """Actions (T, A) as the environment takes them -> entries (T, A) as a model sees them, within the bounds.

        Raises:
            DataError: if they have another width, or if a choice does not exist.
        """
        if actions.shape[1:] != (self.bounds.width,):
            raise DataError(f"{where}: actions must have {self.bounds.width} entries, not shape {actions.shape[1:]}")
        self.seen += len(actions)
        if self.bounds.categories:
            choices = actions - np.array(self.bounds.start)
            fine = (choices >= 0) & (choices < np.array(self.bounds.categories)) & (choices == np.floor(choices))
            rule = f"actions must be choices among {', '.join(map(str, self.bounds.categories))}"
            _require(fine, where, rule, actions)
            return choices.astype(np.float32)
        with np.errstate(over="ignore"):  # values too large for single precision become infinite and are refused
            entries = actions.astype(np.float32)
        _require(np.isfinite(entries), where, "actions must be finite", entries)
        within = np.clip(entries, *np.array([self.bounds.low, self.bounds.high], np.float32))
        distance = np.abs(entries - within).max(axis=1, initial=0)
        if (wrong := distance > 0).any():
            step, entry = np.argwhere(entries != within)[0]
            self.first = self.first or f"{where}, step {step}, which has {entries[step, entry]!s}"
            self.outside += int(wrong.sum())
            self.farthest = max(self.farthest, float(distance.max()))
        return within

    def finish(self) -> None:
        """Call this after the last episode.

        Raises:
            DataError: if actions are out of bounds and may not be clipped.
        """
        if self.outside and not self.clip:
            raise DataError(
                f"{self.outside:,} of {self.seen:,} actions are out of bounds by up to {self.farthest:g}, the first at "
                f"{self.first}: the environment takes {self.bounds}. To clip them, pass --clip-actions"
            )


def guess_bounds(blocks: Iterable[NDArray[Any]]) -> ActionBounds:
    """Bounds of stored actions, blocks of (T, A), for data without a description or an environment.

    Integers are choices from 0 to the largest. Numbers within [-1, 1] have these bounds, others have none.
    """
    largest: NDArray[np.float64] = np.zeros(0)
    are_choices = True
    for block in blocks:
        own = np.abs(block.astype(np.float64)).max(0, initial=0)
        largest = np.maximum(largest, own) if len(largest) else own
        are_choices &= block.dtype.kind in "iub" and not (block < 0).any()
    if are_choices:
        return ActionBounds(categories=tuple(int(n) + 1 for n in largest), start=(0,) * len(largest))
    if largest.max() <= 1:
        return unit_box(len(largest))
    return ActionBounds(low=(-np.inf,) * len(largest), high=(np.inf,) * len(largest))


def checked_trajectory(
    where: str,
    *,
    observations: ArrayLike,
    actions: NDArray[Any],
    rewards: ArrayLike,
    check: ActionCheck,
    is_complete: bool,
) -> Trajectory:
    """Check an episode's numbers and return it as a trajectory.

    Args:
        where: the file and the episode, for error messages.
        observations: (T, S).
        actions: (T, A).
        rewards: (T,).
        check: checks the actions.
        is_complete: whether the recording includes the episode's end.

    Raises:
        DataError: at the first number that is not finite or action that is not valid.
    """
    given = {"observations": observations, "rewards": rewards}
    with np.errstate(over="ignore"):  # values too large for single precision become infinite and are refused
        arrays = {key: np.asarray(array, np.float32) for key, array in given.items()}
        sums = returns_to_go(arrays["rewards"])
    for key, array in (*arrays.items(), ("sums of rewards", sums)):
        _require(np.isfinite(array), where, f"{key} must be finite", array)
    arrays["actions"] = check.entries(actions, where)
    try:
        return Trajectory(**arrays, is_complete=is_complete)
    except ValueError as error:
        raise DataError(f"{where}: {error}") from error


def _require(fine: NDArray[np.bool_], where: str, rule: str, array: NDArray[Any]) -> None:
    if not fine.all():
        first = tuple(np.argwhere(~fine)[0])
        raise DataError(f"{where}, step {first[0]}: {rule}, not {array[first]!s} ({(~fine).sum()} in this episode)")


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
        except MemoryError as error:
            raise DataError(
                f"{path} cannot be read: there is not enough memory ({error}); if it is not that large, it is damaged"
            ) from error
        # h5py raises many kinds of exceptions for damaged files.
        except (OSError, KeyError, RuntimeError, TypeError, ValueError, OverflowError) as error:
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
