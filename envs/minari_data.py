"""Minari data sets: read without Minari, written with it.

A data set is a folder ``data`` with ``metadata.json`` and ``main_data.hdf5``, in which a group ``episode_i`` has
``observations`` (T + 1, S), ``actions`` (T, A), ``rewards``, ``terminations`` and ``truncations`` (T,). Minari's own
reader may make the environment that the metadata describe, which imports the module that they name; this one reads
numbers and executes nothing.

Axes: T transitions of one episode, S state, A action.
"""

import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from envs.episodes import ActionBox, DataError, checked_trajectory, open_hdf5
from envs.tasks import Task
from primal_dt.data import Trajectory

__all__ = ["MinariData", "RecordedEpisode", "minari_folder", "open_minari", "staged", "write_minari"]

KEYS = ("observations", "actions", "rewards", "terminations", "truncations")
EPISODES_PER_OPEN = 50
"""HDF5 remembers what it has read of an open file, some 60 kB an episode."""
STEPS_PER_WRITE = 50_000
"""So many are in memory at a time."""


@dataclass(frozen=True)
class MinariData:
    """What a data set has to say before its episodes are read."""

    path: Path
    """``main_data.hdf5``."""
    metadata: Mapping[str, Any]
    env_id: str | None
    state_width: int
    action_width: int
    num_episodes: int

    def episodes(self, box: ActionBox) -> Iterator[Trajectory]:
        """The episodes, one at a time in memory. The observation after the last action is left out.

        Raises:
            DataError: at the first that breaks a rule.
        """
        for first in range(0, self.num_episodes, EPISODES_PER_OPEN):
            with open_hdf5(self.path) as file:
                for number in range(first, min(first + EPISODES_PER_OPEN, self.num_episodes)):
                    yield self._episode(file, number, box)

    def _episode(self, file: h5py.File, number: int, box: ActionBox) -> Trajectory:
        where = f"{self.path}, episode {number}"
        rows = _episode_arrays(file, number, where)
        lengths = {key: len(rows[key]) for key in KEYS[1:]}
        if len(set(lengths.values())) > 1:
            counts = ", ".join(f"{key} {length}" for key, length in lengths.items())
            raise DataError(f"{where}: there must be one row per step, but there are {counts}")
        steps = lengths["actions"]
        if len(rows["observations"]) != steps + 1:
            raise DataError(
                f"{where}: {steps} steps must have {steps + 1} observations, the one after the last step included, "
                f"not {len(rows['observations'])}"
            )
        widths = (rows["observations"].shape[1], rows["actions"].shape[1])
        if widths != (self.state_width, self.action_width):
            raise DataError(
                f"{where}: observations and actions have the widths {widths[0]} and {widths[1]}, "
                f"those of episode 0 {self.state_width} and {self.action_width}"
            )
        return checked_trajectory(
            where,
            observations=rows["observations"][:-1],
            actions=rows["actions"],
            rewards=rows["rewards"],
            box=box,
            is_complete=bool(rows["terminations"][-1] or rows["truncations"][-1]),
        )


def _episode_arrays(file: h5py.File, number: int, where: str) -> dict[str, NDArray[Any]]:
    group = file.get(f"episode_{number}")
    if not isinstance(group, h5py.Group):
        raise DataError(f"{where} is missing")
    missing = [key for key in KEYS if key not in group]
    if missing:
        raise DataError(f"{where} lacks {', '.join(missing)}: it has {', '.join(group) or 'nothing'}")
    entries = {key: group[key] for key in KEYS}
    for key, entry in entries.items():
        dimensions = 2 if key in ("observations", "actions") else 1
        if not isinstance(entry, h5py.Dataset) or entry.ndim != dimensions or entry.dtype.kind not in "fiub":
            raise DataError(f"{where}: {key} must be an array of numbers with {dimensions} dimension(s), not {entry}")
    return {key: entry[()] for key, entry in entries.items()}


def minari_folder(dataset_id: str = "") -> Path:
    """Where Minari keeps its data sets, or one of them: ``~/.minari/datasets``, or ``$MINARI_DATASETS_PATH``."""
    root = os.environ.get("MINARI_DATASETS_PATH")
    return Path(root if root is not None else Path.home() / ".minari" / "datasets", dataset_id)


def open_minari(folder: Path) -> MinariData:
    """Read the metadata of a data set and the shape of its first episode.

    Args:
        folder: the data set's, or the folder ``data`` in it.

    Raises:
        DataError: if there is none, or not in HDF5, or without episodes.
    """
    data = folder if (folder / "metadata.json").is_file() else folder / "data"
    try:
        metadata = json.loads((data / "metadata.json").read_text())
        num_episodes = int(metadata["total_episodes"])
        data_format = metadata.get("data_format", "hdf5")
        spec = metadata.get("env_spec")
        env_id = None if spec is None else str(json.loads(spec)["id"])
    except FileNotFoundError as error:
        raise DataError(f"{folder} is not a Minari data set: there is no metadata.json in it") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{data / 'metadata.json'} cannot be read: {error!r}") from error
    if data_format != "hdf5":
        raise DataError(f"{data} is in Minari's format {data_format!r}; only 'hdf5' can be read here")
    if num_episodes == 0:
        raise DataError(f"{data} has no episode")
    path = data / "main_data.hdf5"
    with open_hdf5(path) as file:
        first = _episode_arrays(file, 0, f"{path}, episode 0")
    return MinariData(
        path=path,
        metadata=metadata,
        env_id=env_id,
        state_width=first["observations"].shape[1],
        action_width=first["actions"].shape[1],
        num_episodes=num_episodes,
    )


@dataclass(frozen=True)
class RecordedEpisode:
    """An episode as Minari wants it."""

    observations: NDArray[np.floating]
    """(T + 1, S)."""
    actions: NDArray[np.floating]
    """(T, A)."""
    rewards: NDArray[np.floating]
    """(T,)."""
    terminated: bool
    """Whether the environment ended it."""
    truncated: bool
    """Whether the time limit did."""
    seed: int | None = None
    """That the environment was reset with."""


def write_minari(
    dataset_id: str,
    episodes: Iterable[RecordedEpisode],
    *,
    task: Task,
    algorithm: str,
    description: str,
    facts: Mapping[str, Any],
    replace: bool = False,
) -> Path:
    """Write episodes as they come into a local data set, with Minari's writer, and return its folder.

    It appears under its name when it is whole. Reference scores of the task become part of its metadata.

    Args:
        dataset_id: its name.
        episodes: read once.
        task: whose environment they are from.
        algorithm: what made the policy.
        description: a sentence or two.
        facts: further entries of the metadata, as JSON.
        replace: whether it may take the place of one of that name.
    """
    import minari  # it and the environments take a second to import, and reading needs neither
    from minari.dataset.minari_dataset import parse_dataset_id

    from envs.mujoco import make_environment

    folder = minari_folder(dataset_id)
    if folder.exists() and not replace:
        raise DataError(
            f"there is a data set {dataset_id!r} already, in {folder}: give another name, or ask for it to be replaced"
        )
    try:
        parse_dataset_id(dataset_id)
    except ValueError as error:
        raise DataError(f"{dataset_id!r} cannot be a data set's name: it must be like mine/hopper/walk-v0") from error
    with staged(dataset_id), warnings.catch_warnings():
        # It warns of what is left out (author, address, link) and of environments that are not the newest.
        warnings.simplefilter("ignore")
        blocks = _blocks(episodes)
        env = make_environment(task)
        dataset = minari.create_dataset_from_buffers(
            dataset_id,
            next(blocks),
            env=env,
            eval_env=env,
            algorithm_name=algorithm,
            description=description,
            ref_min_score=task.environment.reference.random_return,
            ref_max_score=task.environment.reference.expert_return,
        )
        env.close()
        for block in blocks:
            dataset.update_dataset_from_buffer(block)
        dataset.storage.update_metadata(dict(facts))
    return folder


def _blocks(episodes: Iterable[RecordedEpisode]) -> Iterator[list[Any]]:
    """Lists of Minari's buffers of about ``STEPS_PER_WRITE`` steps each."""
    from minari.data_collector import EpisodeBuffer

    block: list[Any] = []
    steps = 0
    first = next(iterator := iter(episodes), None)
    if first is None:
        raise DataError("there is no episode to write")
    for episode in chain([first], iterator):
        length = len(episode.rewards)
        last = np.arange(length) == length - 1
        block.append(
            EpisodeBuffer(
                seed=episode.seed,
                observations=episode.observations,
                actions=episode.actions,
                rewards=episode.rewards,
                terminations=last & episode.terminated,
                truncations=last & episode.truncated,
            )
        )
        steps += length
        if steps >= STEPS_PER_WRITE:
            yield block
            block, steps = [], 0
    if block:
        yield block


@contextmanager
def staged(dataset_id: str) -> Iterator[None]:
    """What Minari writes under this name inside the block appears when the block ends; nothing does if it fails."""
    root = minari_folder()
    root.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".partial-", dir=root))  # Minari does not look into hidden folders
    try:
        with _datasets_path(staging):
            yield
        target = root / dataset_id
        target.parent.mkdir(parents=True, exist_ok=True)
        for file in staging.rglob("namespace_metadata.json"):
            if not (there := root / file.relative_to(staging)).exists():
                file.rename(there)
        if target.exists():
            target.rename(staging / "replaced")
        (staging / dataset_id).rename(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


@contextmanager
def _datasets_path(folder: Path) -> Iterator[None]:
    """Minari learns where to write from the process's environment alone."""
    before = os.environ.get("MINARI_DATASETS_PATH")
    os.environ["MINARI_DATASETS_PATH"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["MINARI_DATASETS_PATH"]
        else:
            os.environ["MINARI_DATASETS_PATH"] = before
