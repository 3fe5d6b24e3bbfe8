"""Trajectories on disk: written once, episode by episode, and read through memory maps.

A store is a folder of flat little-endian arrays (``observations.f32`` and so on) and ``store.json``, which
describes them. It contains nothing executable.

Axes: N transitions, E episodes, S state, A action.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import DTypeLike, NDArray

from primal_dt.data.normalizer import STD_FLOOR, Normalizer
from primal_dt.data.trajectories import Trajectories, Trajectory, returns_to_go
from primal_dt.system.files import check_regular, name_errors, read_text

__all__ = ["Store", "StoreError", "open_store", "write_store"]

FORMAT = 2
PARTIAL_PREFIX = ".partial-"
"""Prefix of folders that are being written, or were being written when the process was killed."""
ARRAYS: dict[str, DTypeLike] = {
    "observations": "<f4",
    "actions": "<f4",
    "rewards": "<f4",
    "returns_to_go": "<f4",
    "offsets": "<i8",
    "is_complete": "|b1",
}


class StoreError(ValueError):
    """Raised if a store cannot be read, or if episodes cannot be stored."""


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

    def normalizer(self, *, return_scale: float) -> Normalizer:
        """Return the normalizer under which these states have mean 0 and standard deviation 1."""
        std = self.state_std + STD_FLOOR
        return Normalizer(self.state_mean.astype(np.float32), std.astype(np.float32), return_scale)


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


def write_store(parent: Path, episodes: Iterable[Trajectory]) -> Store:
    """Write episodes to a store, with one episode in memory at a time, and open the store.

    The store is a folder in ``parent``, named after the fingerprint. It appears only when it is complete. If a store
    with that fingerprint exists, it is left unchanged, or replaced if it is damaged.
    """
    parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=PARTIAL_PREFIX, dir=parent))
    try:
        with name_errors(parent):
            folder = parent / _write_files(partial, episodes)
        try:
            partial.rename(folder)
        except OSError:
            if not folder.exists():
                raise
            try:  # a store with this fingerprint exists
                return open_store(folder)
            except StoreError:
                shutil.rmtree(folder)
                partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return open_store(folder)


def _write_files(folder: Path, episodes: Iterable[Trajectory]) -> str:
    """Write all files of a store, and return its fingerprint."""
    digest = hashlib.sha256()
    moments: _Moments | None = None
    widths: tuple[int, int] | None = None
    end, num_episodes = 0, 0
    files: dict[str, BinaryIO] = {name: (folder / name).with_suffix(_suffix(name)).open("wb") for name in ARRAYS}
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
            rows = {
                "observations": episode.observations,
                "actions": episode.actions,
                "rewards": episode.rewards,
                "returns_to_go": returns_to_go(episode.rewards),
                "offsets": np.array([end]),
                "is_complete": np.array([episode.is_complete]),
            }
            for name, array in rows.items():
                data = np.ascontiguousarray(array, ARRAYS[name]).tobytes()
                files[name].write(data)
                if name != "returns_to_go":  # derived from the rewards
                    digest.update(data)
            moments.add(episode.observations)
        if widths is None or moments is None:
            raise StoreError("there is no episode to store: at least one is required")
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
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
        "state_std": np.sqrt(moments.squares / moments.count).tolist(),
        "fingerprint": digest.hexdigest(),
    }
    with (folder / "store.json").open("w") as text:
        json.dump(description, text, indent=1)
        text.flush()
        os.fsync(text.fileno())
    return digest.hexdigest()


def open_store(folder: Path) -> Store:
    """Open a store. Its arrays are memory-mapped and read on use."""
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
        arrays = {name: _map(folder, name, shape) for name, shape in shapes.items()}
        is_complete = np.array(arrays.pop("is_complete"))
        return Store(
            Trajectories(**arrays | {"offsets": np.array(arrays["offsets"])}),
            is_complete=is_complete,
            state_mean=np.array(description["state_mean"]),
            state_std=np.array(description["state_std"]),
            fingerprint=description["fingerprint"],
        )
    except FileNotFoundError as error:
        raise StoreError(f"{folder} is not a store of trajectories: {error.filename} is missing") from error
    except StoreError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{folder} is damaged ({error}); delete the folder") from error


def _map(folder: Path, name: str, shape: tuple[int, ...]) -> NDArray[Any]:
    path = (folder / name).with_suffix(_suffix(name))
    check_regular(path)
    dtype = np.dtype(ARRAYS[name])
    expected, size = int(np.prod(shape)) * dtype.itemsize, path.stat().st_size
    if size != expected:
        raise StoreError(f"{folder} is damaged: {path.name} has {size} bytes, not {expected}; delete the folder")
    return np.memmap(path, dtype=dtype, mode="r", shape=shape)


def _suffix(name: str) -> str:
    return {"offsets": ".i64", "is_complete": ".bool"}.get(name, ".f32")
