"""Reads Minari data sets without Minari, and writes them with it.

A data set has a folder ``data`` with ``metadata.json`` and ``main_data.hdf5``. In the HDF5 file, each group
``episode_i`` has ``observations`` (T + 1, S), ``actions`` (T, A), ``rewards``, ``terminations`` and ``truncations``
(T,). Observations in a Dict or Tuple are groups, whose parts are flattened to S entries in the space's order.
Minari's own reader may create the environment that the metadata describes, which imports the module named there. This
reader takes only numbers and executes nothing.

Axes: T transitions of one episode, S state, A action.
"""

import json
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from envs.datasets.checks import ActionCheck, checked_trajectory, flags, guess_bounds, number_array, open_hdf5
from envs.datasets.minari_folder import datasets_path, minari_folder, staged
from envs.errors import DataError
from envs.spaces import ActionBounds, Space, action_bounds, flat_width, flatten_rows, parse_space
from envs.specifications import parse_specification
from envs.tasks import Spaces, Task
from primal_dt.data.trajectories import Trajectory
from primal_dt.system.files import check_space, name_errors
from primal_dt.task import Reference, Specification

__all__ = [
    "MINARI_FILE",
    "MinariData",
    "RecordedEpisode",
    "check_metadata",
    "open_minari",
    "write_minari",
]

MINARI_FILE = "main_data.hdf5"
KEYS = ("observations", "actions", "rewards", "terminations", "truncations")
EPISODES_PER_OPEN = 50
"""Episodes read before the file is reopened. HDF5 caches what it reads of an open file, about 60 kB per episode."""
STEPS_PER_WRITE = 50_000
"""Minimum steps per write: about the number of steps in memory at a time."""
INDEX_BYTES = 4096
"""Maximum bytes that HDF5 adds to each array and to each group."""


@dataclass(frozen=True)
class MinariData:
    """A Minari data set whose metadata is read and whose episodes are not read yet."""

    path: Path
    """The path of ``main_data.hdf5``."""
    metadata: Mapping[str, Any]
    specification: Specification | None
    """``eval_env_spec``, or ``env_spec`` if there is none: the environment in which policies are to act."""
    recorded_in: Specification | None
    """``env_spec``: the environment of the episodes."""
    observation_space: Space
    action_space: Space | None
    """None if the metadata does not describe it."""
    widths: tuple[int, int]
    num_episodes: int

    @property
    def files(self) -> tuple[Path, ...]:
        """``main_data.hdf5`` and ``metadata.json``."""
        return (self.path, self.path.with_name("metadata.json"))

    @property
    def spaces(self) -> Spaces | None:
        """Observations and actions as the metadata describes them."""
        if self.action_space is None:
            return None
        return Spaces(self.widths[0], action_bounds(self.action_space, str(self.path)))

    @property
    def reference(self) -> Reference | None:
        """``ref_min_score`` and ``ref_max_score``."""
        low, high = self.metadata.get("ref_min_score"), self.metadata.get("ref_max_score")
        if low is None or high is None:
            return None
        if not (isinstance(low, int | float) and isinstance(high, int | float) and -math.inf < low < high < math.inf):
            raise DataError(
                f"{self.files[1]}: ref_min_score ({low!r}) must be below ref_max_score ({high!r}), and both finite"
            )
        return Reference(float(low), float(high))

    def guess_actions(self) -> ActionBounds:
        """Bounds of the actions that are stored, see :func:`guess_bounds`."""
        with open_hdf5(self.path) as file:
            numbers = range(self.num_episodes)
            stored = (_episode_arrays(file, i, self.observation_space, str(self.path))["actions"] for i in numbers)
            return guess_bounds(stored)

    def episodes(self, check: ActionCheck) -> Iterator[Trajectory]:
        """Read the episodes, one in memory at a time, without the observation after the last action.

        Raises:
            DataError: at the first episode that breaks a rule.
        """
        for first in range(0, self.num_episodes, EPISODES_PER_OPEN):
            with open_hdf5(self.path) as file:
                for number in range(first, min(first + EPISODES_PER_OPEN, self.num_episodes)):
                    yield self._episode(file, number, check)

    def _episode(self, file: h5py.File, number: int, check: ActionCheck) -> Trajectory:
        where = f"{self.path}, episode {number}"
        rows = _episode_arrays(file, number, self.observation_space, where)
        lengths = {key: len(rows[key]) for key in KEYS[1:]}
        if len(set(lengths.values())) > 1:
            counts = ", ".join(f"{key} {length}" for key, length in lengths.items())
            raise DataError(f"{where}: there must be one row per step, but there are {counts}")
        steps = lengths["actions"]
        if len(rows["observations"]) != steps + 1:
            raise DataError(
                f"{where}: {steps} steps must have {steps + 1} observations, including the one after the last step, "
                f"not {len(rows['observations'])}"
            )
        widths = (rows["observations"].shape[1], rows["actions"].shape[1])
        if widths != self.widths:
            raise DataError(
                f"{where}: observations and actions must have the widths of episode 0, {self.widths[0]} and "
                f"{self.widths[1]}, not {widths[0]} and {widths[1]}"
            )
        if steps == 0:
            raise DataError(f"{where}: an episode must have at least one step")
        ends = flags(rows["terminations"], f"{where}: terminations") | flags(
            rows["truncations"], f"{where}: truncations"
        )
        if ends[:-1].any():
            raise DataError(f"{where}: it continues after its end at step {int(np.flatnonzero(ends)[0])}")
        return checked_trajectory(
            where,
            observations=rows["observations"][:-1],
            actions=rows["actions"],
            rewards=rows["rewards"],
            check=check,
            is_complete=bool(ends[-1]),
        )


def _episode_arrays(file: h5py.File, number: int, space: Space, where: str) -> dict[str, NDArray[Any]]:
    """The arrays of an episode: flattened observations (T + 1, S), actions (T, A), and (T,) each of the others."""
    group = _group(file, f"episode_{number}")
    if group is None:
        raise DataError(f"{where} is missing")
    missing = [key for key in KEYS if key not in group]
    if missing:
        raise DataError(f"{where} lacks {', '.join(missing)}: it has {', '.join(group) or 'nothing'}")
    arrays = {key: number_array(group, key, dimensions=1, where=where)[()].reshape(-1) for key in KEYS[2:]}
    has_rows = isinstance(group["actions"], h5py.Dataset) and group["actions"].ndim == 2
    actions = number_array(group, "actions", dimensions=1 + has_rows, where=where)[()]
    observations = flatten_rows(space, _observations(group, "observations", space, where))
    return arrays | {"observations": observations, "actions": actions if has_rows else actions[:, None]}


def _observations(group: h5py.Group, key: str, space: Space, where: str) -> Any:
    """The numbers of an observation space: an array, or for a Dict or Tuple a mapping of the names in the file."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = space.spaces if isinstance(space, spaces.Dict) else {f"_index_{i}": s for i, s in enumerate(space)}
        inner = _group(group, key)
        if inner is None or (missing := [name for name in parts if name not in inner]):
            lacks = "it is not a group" if inner is None else f"it lacks {', '.join(missing)}"
            raise DataError(f"{where}: {key} must have the parts {', '.join(parts)}, but {lacks}")
        return {name: _observations(inner, name, part, where) for name, part in parts.items()}
    dimensions = 1 if isinstance(space, spaces.Discrete) else 1 + len(space.shape or ())
    return number_array(group, key, dimensions=dimensions, where=where)[()]


def _group(parent: h5py.Group, name: str) -> h5py.Group | None:
    """A group that is stored in the file itself, not a link."""
    found = parent[name] if isinstance(parent.get(name, getlink=True), h5py.HardLink) else None
    return found if isinstance(found, h5py.Group) else None


def open_minari(folder: Path) -> MinariData:
    """Read the metadata of a data set and the shape of its first episode.

    Args:
        folder: the data set's folder, or the folder ``data`` in it.

    Raises:
        DataError: if the data set is missing, is not in HDF5, or has no episodes.
    """
    data = folder if (folder / "metadata.json").is_file() else folder / "data"
    if not (data / "metadata.json").is_file():  # a pipe is not one
        raise DataError(f"{folder} is not a Minari data set: there is no metadata.json in it")
    try:
        metadata = json.loads((data / "metadata.json").read_text())
        num_episodes = int(metadata["total_episodes"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise DataError(f"{data / 'metadata.json'} cannot be read: {error!r}") from error
    where, path = str(data / "metadata.json"), data / MINARI_FILE
    check_metadata(metadata, str(data))
    specs = [
        None if metadata.get(key) is None else parse_specification(metadata[key], where)
        for key in ("env_spec", "eval_env_spec")
    ]
    with open_hdf5(path) as file:
        if len(file) != num_episodes:
            raise DataError(f"{path} has {len(file)} episodes, but its metadata.json says {num_episodes}")
        observation_space = _space(metadata, "observation_space", where) or _stored_space(file, f"{path}, episode 0")
        first = _episode_arrays(file, 0, observation_space, f"{path}, episode 0")
    return MinariData(
        path=path,
        metadata=metadata,
        specification=specs[1] or specs[0],
        recorded_in=specs[0],
        observation_space=observation_space,
        action_space=_space(metadata, "action_space", where),
        widths=(first["observations"].shape[1], first["actions"].shape[1]),
        num_episodes=num_episodes,
    )


def check_metadata(metadata: Mapping[str, Any], where: str) -> None:
    """Check what the metadata alone tells: the format, the number of episodes and the spaces.

    Raises:
        DataError: if the data set cannot be used.
    """
    if (data_format := metadata.get("data_format", "hdf5")) != "hdf5":
        raise DataError(f"{where} is in Minari's format {data_format!r}; only 'hdf5' can be read here")
    if int(metadata["total_episodes"]) < 1:
        raise DataError(f"{where} has no episodes")
    if (observations := _space(metadata, "observation_space", where)) is not None:
        flat_width(observations, where)
    if (actions := _space(metadata, "action_space", where)) is not None:
        action_bounds(actions, where)


def _space(metadata: Mapping[str, Any], key: str, where: str) -> Space | None:
    """A space that the metadata describes; None if it does not."""
    return None if metadata.get(key) is None else parse_space(metadata[key], f"{where}, {key}")


def _stored_space(file: h5py.File, where: str) -> Space:
    """A Box with the width of the first episode's observations, for metadata without a description."""
    group = _group(file, "episode_0")
    if group is None or "observations" not in group:
        raise DataError(f"{where} is missing, or lacks observations")
    return spaces.Box(-np.inf, np.inf, number_array(group, "observations", dimensions=2, where=where).shape[1:])


@dataclass(frozen=True)
class RecordedEpisode:
    """A recorded episode, in Minari's layout."""

    observations: Any
    """Observations, (T + 1, S), including the one after the last action. Nested for a Dict or Tuple."""
    actions: NDArray[Any]
    """Actions, (T, A), or (T,) for choices."""
    rewards: NDArray[np.floating]
    """Rewards, (T,)."""
    terminated: bool
    """Whether the environment ended the episode."""
    truncated: bool
    """Whether the time limit ended the episode."""
    seed: int | None = None
    """The seed that the environment was reset with."""


def write_minari(
    dataset_id: str,
    episodes: Iterable[RecordedEpisode],
    *,
    task: Task,
    algorithm: str,
    description: str,
    metadata: Mapping[str, Any],
    replace: bool = False,
) -> Path:
    """Stream episodes to a local data set with Minari's writer, and return its folder.

    The data set appears under its name only when it is complete. Its metadata includes the task's reference returns,
    if there are any.

    Args:
        dataset_id: the data set's name.
        episodes: the episodes; iterated once.
        task: the task whose environment the episodes are from.
        algorithm: the algorithm that trained the policy.
        description: one or two sentences.
        metadata: additional metadata entries; must be JSON-serializable.
        replace: whether to replace an existing data set of that name.

    Raises:
        DataError: if there are no episodes, if the name is invalid, or if it exists and ``replace`` is False.
    """
    import minari  # importing Minari and the environments takes a second, and reading needs neither

    from envs.make import make_raw

    blocks = _blocks(episodes)
    with staged(dataset_id, replace=replace) as staging, warnings.catch_warnings():
        # Warnings about missing metadata (author, address, link) and about environments that are not the newest.
        warnings.simplefilter("ignore")
        first = next(blocks)
        env = make_raw(task)
        spec = env.spec
        if spec is not None and callable(made := spec.entry_point):  # which cannot be written as JSON
            spec.entry_point = f"{made.__module__}:{getattr(made, '__qualname__', type(made).__qualname__)}"
        reference = task.environment.reference
        _check_fit(staging, dataset_id, first)
        with datasets_path(staging):
            dataset = minari.create_dataset_from_buffers(
                dataset_id,
                first,
                env=env,
                eval_env=env,
                algorithm_name=algorithm,
                description=description,
                ref_min_score=None if reference is None else reference.random_return,
                ref_max_score=None if reference is None else reference.expert_return,
            )
        env.close()
        for block in blocks:
            _check_fit(staging, dataset_id, block)
            dataset.update_dataset_from_buffer(block)
        dataset.storage.update_metadata(dict(metadata))
    return minari_folder(dataset_id)


def _check_fit(staging: Path, dataset_id: str, block: Iterable[Any]) -> None:
    """Check that there is space for a block. If a write of HDF5 fails, the library may crash the process.

    Raises:
        OSError: if there is not enough.
    """
    file = staging / dataset_id / "data" / "main_data.hdf5"
    size = sum(
        _size_in_hdf5([buffer.observations, buffer.actions, buffer.rewards, buffer.terminations, buffer.truncations])
        for buffer in block
    )
    with name_errors(minari_folder(dataset_id)):
        check_space(staging, size, start=file.stat().st_size if file.exists() else 0)


def _size_in_hdf5(values: Any) -> int:
    """An upper bound of the bytes that arrays take in a file: HDF5 pads them to whole chunks and adds an index."""
    if isinstance(values, Mapping | list | tuple):
        parts = values.values() if isinstance(values, Mapping) else values
        return sum(map(_size_in_hdf5, parts)) + INDEX_BYTES
    return 2 * int(np.asarray(values).nbytes) + INDEX_BYTES


def _blocks(episodes: Iterable[RecordedEpisode]) -> Iterator[list[Any]]:
    """Group episodes into lists of Minari buffers with at least ``STEPS_PER_WRITE`` steps each, except the last."""
    from minari.data_collector import EpisodeBuffer

    block: list[Any] = []
    steps = 0
    first = next(iterator := iter(episodes), None)
    if first is None:
        raise DataError("there are no episodes to write")
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
