"""Trajectories on disk: written once, episode by episode, and read through memory maps.

A store is a folder of flat little-endian arrays (``observations.f32`` and so on) and ``store.json``, which
describes them. It contains nothing executable. Opening a store checks the sizes of its files; verifying it reads them
and checks their contents against the fingerprint.

Axes: N transitions, E episodes, S state, A action.
"""

import hashlib
import json
import os
import threading
import weakref
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import DTypeLike, NDArray

from primal_dt.data.normalizer import STD_FLOOR, Normalizer
from primal_dt.data.trajectories import Trajectories, Trajectory, returns_to_go
from primal_dt.system.files import move, name_errors, open_regular, read_text, remove_tree
from primal_dt.system.staging import staging_folder

__all__ = ["Store", "StoreError", "Verification", "open_store", "write_store"]

FORMAT = 2
ARRAYS: dict[str, DTypeLike] = {
    "observations": "<f4",
    "actions": "<f4",
    "rewards": "<f4",
    "returns_to_go": "<f4",
    "offsets": "<i8",
    "is_complete": "|b1",
}
REMEDY = "delete the folder, or clear the cache: python -m envs cache --clear"
BLOCK_ROWS = 1 << 14


class StoreError(ValueError):
    """Raised if a store cannot be read, or if episodes cannot be stored."""


class _MappedFile:
    """A memory-mapped array. Its file stays open, so that :meth:`check` notices changes."""

    def __init__(self, path: Path, dtype: DTypeLike, shape: tuple[int, ...]) -> None:
        self.path = path
        self._file = open_regular(path, "rb")
        weakref.finalize(self, self._file.close)
        self._state = self._size_and_time()
        expected, size = int(np.prod(shape)) * np.dtype(dtype).itemsize, self._state[0]
        if size != expected:
            raise StoreError(f"{path.parent} is damaged: {path.name} has {size} bytes, not {expected}; {REMEDY}")
        self.array: NDArray[Any] = np.memmap(self._file, dtype=dtype, mode="r", shape=shape)

    def check(self) -> None:
        """Raise StoreError if the file has changed. Reading a map beyond the end of its file would end the process."""
        if self._size_and_time() != self._state:
            raise StoreError(f"{self.path} was changed while it was in use; {REMEDY}")

    def _size_and_time(self) -> tuple[int, int]:
        state = os.fstat(self._file.fileno())
        return state.st_size, state.st_mtime_ns


@dataclass(frozen=True)
class Store:
    """Trajectories, with statistics that are available without reading the arrays."""

    trajectories: Trajectories
    is_complete: NDArray[np.bool_]
    """Mask, (E,): False for episodes that the recording cut off."""
    state_mean: NDArray[np.float64]
    """Mean of each state entry, (S,)."""
    state_std: NDArray[np.float64]
    """Population standard deviation of each state entry, (S,)."""
    fingerprint: str
    """Digest of the content: equal for equal episodes in equal order, whatever their source."""
    folder: Path
    """The store's folder."""

    def normalizer(self, *, return_scale: float) -> Normalizer:
        """Return the normalizer under which these states have mean 0 and standard deviation 1."""
        std = self.state_std + STD_FLOOR
        return Normalizer(self.state_mean.astype(np.float32), std.astype(np.float32), return_scale)

    @np.errstate(all="ignore")  # damaged numbers may overflow
    def verify(self) -> None:
        """Read all arrays, and check that they and the statistics have the contents that were written.

        Raises:
            StoreError: if they do not.
        """
        data = self.trajectories
        # Plain views: each slice of a np.memmap costs microseconds.
        observations, actions, rewards, sums = map(
            np.asarray, (data.observations, data.actions, data.rewards, data.returns_to_go)
        )
        digest = hashlib.sha256(repr((observations.shape[1], actions.shape[1])).encode())
        is_same = True
        for (begin, end), is_complete in zip(pairwise(data.offsets.tolist()), self.is_complete.tolist(), strict=True):
            data.check_files()
            episode = Trajectory(observations[begin:end], actions[begin:end], rewards[begin:end], is_complete)
            rows = _stored_rows(episode, end)
            _add_to_digest(digest, rows)
            is_same &= rows["returns_to_go"].tobytes() == sums[begin:end].tobytes()
        moments = _Moments(observations.shape[1])
        for begin in range(0, len(observations), BLOCK_ROWS):
            data.check_files()
            moments.add(observations[begin : begin + BLOCK_ROWS])
        found, stored = np.stack([moments.mean, moments.std]), np.stack([self.state_mean, self.state_std])
        # Rounding depends on the blocks of rows: by at most an epsilon for each row.
        tolerance = (1e-12 + np.finfo(np.float64).eps * len(observations)) * np.abs(found).sum(0)
        is_same &= bool((np.abs(stored - found) <= tolerance).all()) and digest.hexdigest() == self.fingerprint
        if not is_same:
            raise StoreError(f"{self.folder} is damaged: it does not have the contents that were written; {REMEDY}")


class Verification:
    """Verifies a store in a thread, so that its user can begin to work. Call :meth:`wait` before saving results."""

    def __init__(self, store: Store) -> None:
        self._result: Future[None] = Future()
        threading.Thread(target=self._verify, args=(store,), daemon=True).start()

    def _verify(self, store: Store) -> None:
        try:
            store.verify()
            self._result.set_result(None)
        except BaseException as error:
            self._result.set_exception(error)

    def wait(self) -> None:
        """Wait until all is read.

        Raises:
            StoreError: if the store is damaged.
        """
        self._result.result()


class _Moments:
    """Running mean and variance of blocks of rows, merged without cancellation (Chan et al., 1979)."""

    def __init__(self, width: int) -> None:
        self.count = 0
        self.mean = np.zeros(width)
        self.squares = np.zeros(width)

    def add(self, rows: NDArray[np.float32]) -> None:
        count = self.count + len(rows)
        mean = rows.mean(0, dtype=np.float64)
        shift = mean - self.mean
        self.squares += np.square(rows - mean).sum(0) + shift**2 * (self.count * len(rows) / count)
        self.mean += shift * (len(rows) / count)
        self.count = count

    @property
    def std(self) -> NDArray[np.float64]:
        deviation: NDArray[np.float64] = np.sqrt(self.squares / self.count)
        return deviation


def write_store(parent: Path, episodes: Iterable[Trajectory]) -> Store:
    """Write episodes to a store, with one episode in memory at a time, and open the store.

    The store is a folder in ``parent``, named after the fingerprint. It appears only when it is complete. If a store
    with that fingerprint exists, it is left unchanged, or replaced if it is damaged.
    """
    with staging_folder(parent) as partial:
        with name_errors(parent):
            folder = parent / _write_files(partial, episodes)
        try:
            move(partial, folder)
        except OSError:
            if not os.path.lexists(folder):
                raise
            try:  # a store with this fingerprint exists
                store = open_store(folder)
                store.verify()
                return store
            except StoreError:
                remove_tree(folder)
                move(partial, folder)
    return open_store(folder)


def _write_files(folder: Path, episodes: Iterable[Trajectory]) -> str:
    """Write all files of a store, and return its fingerprint."""
    digest = hashlib.sha256()
    moments: _Moments | None = None
    widths: tuple[int, int] | None = None
    end, num_episodes = 0, 0
    files: dict[str, BinaryIO] = {name: _path_of(folder, name).open("wb") for name in ARRAYS}
    try:
        files["offsets"].write(np.array([0], ARRAYS["offsets"]).tobytes())
        for number, episode in enumerate(episodes):
            current = (episode.observations.shape[1], episode.actions.shape[1])
            if widths is None:
                widths, moments = current, _Moments(current[0])
                digest.update(repr(widths).encode())
            if current != widths or moments is None:
                raise StoreError(
                    "all episodes must have the same state and action widths: "
                    f"episode {number} has {current[0]} and {current[1]}, earlier episodes {widths[0]} and {widths[1]}"
                )
            end, num_episodes = end + len(episode.rewards), number + 1
            rows = _stored_rows(episode, end)
            for name, array in rows.items():
                files[name].write(array.tobytes())
            _add_to_digest(digest, rows)
            moments.add(episode.observations)
        if widths is None or moments is None:
            raise StoreError("there is no episode to store: at least one is required")
    finally:
        for file in files.values():
            file.close()
    description = {
        "format": FORMAT,
        "num_steps": end,
        "num_episodes": num_episodes,
        "state_width": widths[0],
        "action_width": widths[1],
        "state_mean": moments.mean.tolist(),
        "state_std": moments.std.tolist(),
        "fingerprint": digest.hexdigest(),
    }
    with (folder / "store.json").open("w") as text:
        json.dump(description, text, indent=1)
    return digest.hexdigest()


def _stored_rows(episode: Trajectory, end: int) -> dict[str, NDArray[Any]]:
    """What each array holds of an episode that ends before transition ``end``."""
    rows = {
        "observations": episode.observations,
        "actions": episode.actions,
        "rewards": episode.rewards,
        "returns_to_go": returns_to_go(episode.rewards),
        "offsets": np.array([end]),
        "is_complete": np.array([episode.is_complete]),
    }
    return {name: np.ascontiguousarray(array, ARRAYS[name]) for name, array in rows.items()}


def _add_to_digest(digest: "hashlib._Hash", rows: dict[str, NDArray[Any]]) -> None:
    for name, array in rows.items():
        if name != "returns_to_go":  # derived from the rewards
            digest.update(array.ravel().data)


def open_store(folder: Path) -> Store:
    """Open a store. Its arrays are memory-mapped and read on use, and their contents are not verified."""
    try:
        description = json.loads(read_text(folder / "store.json"))
        if description["format"] != FORMAT:
            raise StoreError(f"{folder} has format {description['format']}, but this code reads format {FORMAT}")
        n, e = description["num_steps"], description["num_episodes"]
        shapes = {
            "observations": (n, description["state_width"]),
            "actions": (n, description["action_width"]),
            "rewards": (n,),
            "returns_to_go": (n,),
            "offsets": (e + 1,),
            "is_complete": (e,),
        }
        files = {name: _MappedFile(_path_of(folder, name), ARRAYS[name], shape) for name, shape in shapes.items()}
        is_complete, offsets = (np.array(files.pop(name).array) for name in ("is_complete", "offsets"))

        def check_files() -> None:
            for file in files.values():
                file.check()

        arrays = {name: file.array for name, file in files.items()}
        mean, std = (
            np.array(description[name], np.float64).reshape(description["state_width"])
            for name in ("state_mean", "state_std")
        )
        if not (np.isfinite(mean).all() and np.isfinite(std).all()):
            raise ValueError("its statistics must be finite")
        return Store(
            Trajectories(**arrays, offsets=offsets, check_files=check_files),
            is_complete=is_complete,
            state_mean=mean,
            state_std=std,
            fingerprint=description["fingerprint"],
            folder=folder,
        )
    except FileNotFoundError as error:
        raise StoreError(f"{folder} is not a store of trajectories: {error.filename} is missing") from error
    except StoreError:
        raise
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise StoreError(f"{folder} is damaged ({error}); {REMEDY}") from error


def _path_of(folder: Path, name: str) -> Path:
    return folder / (name + {"offsets": ".i64", "is_complete": ".bool"}.get(name, ".f32"))
