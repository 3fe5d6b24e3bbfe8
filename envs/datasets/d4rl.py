"""Reads files in D4RL's layout episode by episode, and checks them.

The layout is HDF5 with ``observations`` (N, S), ``actions`` (N, A), ``rewards``, ``terminals`` and ``timeouts`` (N,):
one row per transition, episodes back to back. The last three may be columns (N, 1) of any numeric type: in D4RL's
medium-replay files all are float64, and rewards are a column. Actions may also be choices, integers (N,) or (N, A).
Reading takes only numbers from a file and executes nothing.

Axes: N transitions, E episodes, T transitions of one episode, S state, A action.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from envs.datasets.checks import ActionCheck, checked_trajectory, flags, guess_bounds, number_array, open_hdf5
from envs.errors import DataError
from envs.spaces import ActionBounds
from envs.tasks import Spaces
from primal_dt.data.trajectories import Trajectory
from primal_dt.task import Reference, Specification

__all__ = ["D4rlFile", "open_d4rl"]

DIMENSIONS = {"observations": 2, "actions": 2, "rewards": 1, "terminals": 1, "timeouts": 1}
NUMBERS = ("observations", "actions", "rewards")
ROWS_PER_READ = 8192
"""Minimum rows per read. Files are compressed in chunks; reading single episodes would unpack each chunk many times."""


@dataclass(frozen=True)
class D4rlFile:
    """A D4RL file whose structure is checked and whose episodes are not read yet."""

    path: Path
    env_id: str | None
    """The file's attribute ``env_id``, if it has one."""
    widths: tuple[int, int]
    offsets: NDArray[np.int64]
    """First transition of each episode, then the number of transitions, (E + 1,)."""
    last_is_cut_off: bool
    """Whether the recording stops before the last episode ends. The episode is still read."""

    @property
    def files(self) -> tuple[Path, ...]:
        """The file itself."""
        return (self.path,)

    @property
    def specification(self) -> Specification | None:
        """The plain environment of the file's attribute."""
        return None if self.env_id is None else Specification(self.env_id)

    @property
    def spaces(self) -> Spaces | None:
        """None: such files have no description."""
        return None

    @property
    def reference(self) -> Reference | None:
        """None: such files have no reference returns."""
        return None

    def guess_actions(self) -> ActionBounds:
        """Bounds of the actions that are stored, see :func:`guess_bounds`."""
        with open_hdf5(self.path) as file:
            return guess_bounds([file["actions"][:].reshape(-1, self.widths[1])])

    def episodes(self, check: ActionCheck) -> Iterator[Trajectory]:
        """Read the episodes, with a few thousand rows in memory at a time.

        Raises:
            DataError: at the first episode that breaks a rule.
        """
        with open_hdf5(self.path) as file:
            for first, last in self._blocks():
                base = self.offsets[first]
                block = {key: _rows(file[key][base : self.offsets[last]], key) for key in NUMBERS}
                block["actions"] = block["actions"].reshape(-1, self.widths[1])
                for number, (begin, end) in enumerate(pairwise(self.offsets[first : last + 1] - base), first):
                    yield checked_trajectory(
                        f"{self.path}, episode {number}",
                        **{key: array[begin:end] for key, array in block.items()},
                        check=check,
                        is_complete=number + 2 < len(self.offsets) or not self.last_is_cut_off,
                    )

    def _blocks(self) -> Iterator[tuple[int, int]]:
        """Ranges [first, last) of episodes. Each range but the final one has at least ``ROWS_PER_READ`` rows."""
        first, num_episodes = 0, len(self.offsets) - 1
        while first < num_episodes:
            last = int(np.searchsorted(self.offsets, self.offsets[first] + ROWS_PER_READ))
            last = min(max(last, first + 1), num_episodes)
            yield first, last
            first = last


def open_d4rl(path: Path) -> D4rlFile:
    """Check the structure of a file and locate its episodes.

    Raises:
        DataError: if it is not a complete file in D4RL's layout.
    """
    with open_hdf5(path) as file:
        missing = [key for key in DIMENSIONS if key not in file]
        if missing:
            raise DataError(
                f"{path} lacks {', '.join(missing)}: a file in D4RL's layout has {', '.join(DIMENSIONS)}; "
                f"this one has {', '.join(file) or 'nothing'}"
            )
        stored = file["actions"]
        are_choices = isinstance(stored, h5py.Dataset) and stored.ndim == 1 and stored.dtype.kind in "iub"
        arrays = {
            key: number_array(file, key, dimensions=1 if key == "actions" and are_choices else size, where=str(path))
            for key, size in DIMENSIONS.items()
        }
        lengths = {key: len(array) for key, array in arrays.items()}
        if len(set(lengths.values())) > 1:
            counts = ", ".join(f"{key} {length}" for key, length in lengths.items())
            raise DataError(f"{path}: all arrays must have one row per transition, but there are {counts}")
        if lengths["rewards"] == 0:
            raise DataError(f"{path} has no episodes")
        terminals, timeouts = (flags(_rows(arrays[key][:], key), f"{path}: {key}") for key in ("terminals", "timeouts"))
        ends = terminals | timeouts
        return D4rlFile(
            path=path,
            env_id=_text(file.attrs.get("env_id"), path),
            widths=(arrays["observations"].shape[1], _width(arrays["actions"])),
            offsets=_episode_offsets(ends),
            last_is_cut_off=not ends[-1],
        )


def _width(actions: h5py.Dataset) -> int:
    return 1 if actions.ndim == 1 else int(actions.shape[1])


def _rows(array: NDArray[Any], key: str) -> NDArray[Any]:
    """An array with the dimensions of its kind: a column (N, 1) becomes (N,)."""
    return array.reshape(-1) if DIMENSIONS[key] == 1 else array


def _text(value: object, path: Path) -> str | None:
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    if value is not None and not isinstance(value, str):
        raise DataError(f"{path}: the attribute env_id must be a string such as Hopper-v5, not {value!r}")
    return value


def _episode_offsets(ends: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Offsets (E + 1,) from the flags (N,) of last transitions. The end of the file also ends an episode."""
    last = np.flatnonzero(ends)
    if not ends[-1]:
        last = np.append(last, len(ends) - 1)
    return np.concatenate(([0], last + 1)).astype(np.int64)
