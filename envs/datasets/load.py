"""A name or a path -> trajectories.

mujoco/hopper/medium-v0       Minari: the local copy, else Minari's own download
hopper-medium-v2              D4RL: the downloaded file, else a download
primal/hopper/medium-v0       built in: the local copy, else recorded now; needs no network
PATH/file.hdf5, PATH/folder   a file in D4RL's layout, or a Minari data set
A+B                           several together
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from envs.behavior.recipes import builtin_recipe
from envs.datasets import cache
from envs.datasets.checks import EpisodeSource
from envs.datasets.minari import MinariData
from envs.datasets.names import parse_name
from envs.datasets.sources import find_here, find_source
from envs.errors import DataError
from envs.tasks import Task, task_of
from primal_dt.config import ModelConfig
from primal_dt.data.names import join_names, split_names
from primal_dt.data.normalizer import Normalizer
from primal_dt.data.store import Store, StoreError, open_store, write_store
from primal_dt.data.trajectories import Trajectories, Trajectory
from primal_dt.model.transformer import ModelShape
from primal_dt.task import RunTask
from primal_dt.training.run_folder import RunRecord

__all__ = ["Dataset", "Part", "load_dataset", "reload_dataset"]

DEFAULT_RANK = 32


@dataclass(frozen=True)
class Part:
    """One source of a data set."""

    name: str
    """As it was asked for."""
    path: Path
    """The file that was read."""
    env_id: str
    """The environment that it was recorded in."""
    cut_off_episodes: int
    """How many episodes stop before the environment or the time limit ends them. They are kept."""
    about: Mapping[str, Any]
    """What its metadata say of how it was made."""
    notes: tuple[str, ...]
    """What a reader of results should know."""


@dataclass(frozen=True)
class Dataset:
    """Trajectories, the task that they are for, and where they come from."""

    name: str
    task: Task
    store: Store
    parts: tuple[Part, ...]

    @property
    def trajectories(self) -> Trajectories:
        """The episodes, memory-mapped."""
        return self.store.trajectories

    @property
    def normalizer(self) -> Normalizer:
        """Units in which its states are standardized and returns are divided by the task's scale."""
        return self.store.normalizer(return_scale=self.task.environment.return_scale)

    def run_task(self, targets: Sequence[float] | None = None) -> RunTask:
        """What a run on this data knows of its task.

        Args:
            targets: returns to ask for beside the task's headline, which comes first. If not given: the task's.
        """
        return self.task.run_task(
            targets,
            dataset=self.name,
            data_env_ids=[part.env_id for part in self.parts],
            fingerprint=self.store.fingerprint,
        )

    def model_shape(self, model: ModelConfig) -> ModelShape:
        """The model for this data."""
        environment = self.task.environment
        return ModelShape(
            state_width=environment.state_width,
            action_low=(environment.action_box.low,) * environment.action_width,
            action_high=(environment.action_box.high,) * environment.action_width,
            attention=model.attention,
            width=model.width,
            num_heads=model.num_heads,
            num_layers=model.num_layers,
            context=model.context,
            rank=model.rank or self.task.paper_rank or DEFAULT_RANK,
            dropout=model.dropout,
            max_timesteps=max(environment.episode_limit, int(self.trajectories.lengths.max())),
        )


def load_dataset(name: str, *, env_id: str | None = None, mix_versions: bool = False) -> Dataset:
    """Find a data set, fetch or record it if need be, check it, and map it into memory.

    Args:
        name: a name, a path, or several with ``+`` between them.
        env_id: the environment that a policy shall act in; needed if the data does not say.
        mix_versions: whether data may come from other versions of the environment than ``env_id``, or than each other.

    Raises:
        DataError: if it cannot be had or cannot be used. The message is meant for the user.
    """
    names = split_names(name)
    # What can be told without fetching or recording is told before anything is fetched or recorded.
    here = {part: find_here(part) for part in names}
    early = [(part, _task(part, source, env_id)) for part, source in here.items() if source or parse_name(part)]
    _common_task(early, env_id, mix_versions)
    sources = [here[part] or find_source(part) for part in names]
    tasks = [_task(part, source, env_id) for part, source in zip(names, sources, strict=True)]
    task = _common_task(list(zip(names, tasks, strict=True)), env_id, mix_versions)
    assert task is not None
    stores, parts = [], []
    for part, source, own in zip(names, sources, tasks, strict=True):
        identity = "".join(map(cache.file_identity, source.files))
        stores.append(_stored(identity, source.episodes(own.environment.action_box)))
        cut_off = int((~stores[-1].is_complete).sum())
        notes = _notes(part, source, own, task)
        parts.append(Part(part, source.path, own.env_id, cut_off, _about(source), notes))
    return Dataset(name, task, stores[0] if len(stores) == 1 else _joined(stores), tuple(parts))


def reload_dataset(record: RunRecord) -> Dataset:
    """A run's data, also from another working folder than the run's.

    Raises:
        DataError: if it is unavailable, or has changed since the run.
    """
    names = (
        part.name if parse_name(part.name) or not os.path.exists(part.path) else part.path for part in record.parts
    )
    config = record.config
    dataset = load_dataset(join_names(names), env_id=config.env_id, mix_versions=config.mix_versions)
    if dataset.store.fingerprint != record.task.fingerprint:
        raise DataError(f"the data set {dataset.name!r} has changed since the run was trained on it")
    return replace(dataset, name=config.dataset)


def _task(name: str, source: EpisodeSource | None, env_id: str | None) -> Task:
    """The task that a part's data is of."""
    known = parse_name(name)
    own = (source and source.env_id) or (known and known.task.env_id) or env_id
    if own is None:
        where = name if source is None else source.path
        raise DataError(
            f"{where} does not say which environment it is from: give it with --env-id, "
            "such as Hopper-v5; D4RL's data goes with Hopper-v4"
        )
    task = task_of(own, None if known is None else known.tier, where=None if source is None else str(source.path))
    widths = (task.environment.state_width, task.environment.action_width)
    if source is not None and (source.state_width, source.action_width) != widths:
        raise DataError(
            f"{source.path} has observations of width {source.state_width} and actions of width "
            f"{source.action_width}, but {own} has {widths[0]} and {widths[1]}"
        )
    return task


def _common_task(tasks: list[tuple[str, Task]], env_id: str | None, mix_versions: bool) -> Task | None:
    """The task that a policy is trained for on these parts, if there are any.

    Raises:
        DataError: if they are of different environments, or of different versions and nobody asked for that.
    """
    wanted = tasks if env_id is None else [*tasks, ("--env-id", task_of(env_id))]
    kinds = {task.environment.name for _, task in wanted}
    versions = {task.env_id for _, task in wanted}
    listed = ", ".join(f"{name} {task.env_id}" for name, task in wanted)
    if len(kinds) > 1:
        raise DataError(f"all parts must be of one environment, but these are of several: {listed}")
    if len(versions) > 1 and not mix_versions:
        raise DataError(
            f"versions of an environment differ in physics and reward, and these are mixed: {listed}. "
            "Leave --env-id out or make them agree; if it is meant, ask for it with --mix-versions"
        )
    if len(versions) > 1 and env_id is None:
        raise DataError(f"with data of several versions, say with --env-id in which one to act: {listed}")
    if not tasks:
        return None
    tiers = {task.tier for _, task in tasks}
    tier = "medium-expert" if tiers == {"medium", "expert"} else tiers.pop() if len(tiers) == 1 else None
    return Task(wanted[-1][1].environment, wanted[-1][1].env_id, tier)


def _stored(identity: str, episodes: Iterable[Trajectory]) -> Store:
    """The store that was written when episodes of this identity were last read, or a new one."""
    note = cache.read_note(identity)
    if note is not None:
        try:
            return open_store(cache.stores_folder() / str(note["fingerprint"]))
        except (StoreError, KeyError):
            pass  # cleared, damaged or of an earlier version: write it anew
    store = write_store(cache.stores_folder(), episodes)
    cache.write_note(identity, {"fingerprint": store.fingerprint})
    return store


def _notes(name: str, source: EpisodeSource, own: Task, task: Task) -> tuple[str, ...]:
    """What is unusual about a part."""
    notes = []
    if own.env_id != task.env_id:
        notes.append(f"{name} was recorded in {own.env_id}, and is used for {task.env_id}")
    known = parse_name(name)
    if known is not None and known.source == "primal" and isinstance(source, MinariData):
        standard = [asdict(part) for part in builtin_recipe(known)]
        if source.metadata.get("recipe") != standard or source.metadata.get("seed") != 0:
            notes.append(f"{name} was recorded with other steps, seed or policies than the standard ones")
    return tuple(notes)


def _about(source: EpisodeSource) -> Mapping[str, Any]:
    if not isinstance(source, MinariData):
        return {}
    kept = ("dataset_id", "algorithm_name", "description", "author", "recipe", "seed", "recorded_by", "converted_from")
    return {key: source.metadata[key] for key in kept if key in source.metadata}


def _joined(stores: list[Store]) -> Store:
    """One store with the episodes of several, in order."""

    def episodes() -> Iterator[Trajectory]:
        for store in stores:
            data = store.trajectories
            for (begin, end), is_complete in zip(pairwise(data.offsets), store.is_complete.tolist(), strict=True):
                rows = slice(begin, end)
                yield Trajectory(data.observations[rows], data.actions[rows], data.rewards[rows], is_complete)

    return _stored("\n".join(store.fingerprint for store in stores), episodes())
