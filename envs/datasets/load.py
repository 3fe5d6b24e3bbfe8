"""Loads the trajectories of a data set by its name or path.

mujoco/hopper/medium-v0       Minari: the local copy, or Minari's own download
hopper-medium-v2              D4RL: the file in the cache, or a download
primal/hopper/medium-v0       built in: the local copy, or recorded when first used; needs no network
PATH/file.hdf5, PATH/folder   a file in D4RL's layout, or a Minari data set
A+B                           several data sets together
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from envs.behavior.recipes import builtin_recipe
from envs.datasets import cache
from envs.datasets.checks import EpisodeSource, check_widths
from envs.datasets.minari import MinariData
from envs.datasets.names import parse_name
from envs.datasets.sources import find_here, find_source
from envs.errors import DataError
from envs.tasks import Task, task_of
from primal_dt.config import ModelConfig
from primal_dt.data.names import split_names
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
    """One part of a data set: one name or path."""

    name: str
    """The name or path as the user gave it."""
    path: Path
    """The file that was read."""
    env_id: str
    """The environment that the part was recorded in."""
    cut_off_episodes: int
    """The number of episodes that stop before the environment or the time limit ends them. They are included."""
    about: Mapping[str, Any]
    """The part's provenance, from its metadata."""
    notes: tuple[str, ...]
    """Caveats that a reader of results should know."""


@dataclass(frozen=True)
class Dataset:
    """Trajectories, their task and their sources."""

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
        """The normalizer: standardizes states and divides returns by the task's return scale."""
        return self.store.normalizer(return_scale=self.task.environment.return_scale)

    @property
    def is_terminated(self) -> NDArray[np.bool_]:
        """Mask of the episodes that the environment ended, (E,).

        Inferred from their lengths: complete episodes that are shorter than the task's limit. An episode that another
        limit cut short counts as ended by the environment.
        """
        return self.store.is_complete & (self.trajectories.lengths < self.task.environment.episode_limit)

    def run_task(self, targets: Sequence[float] | None = None) -> RunTask:
        """The task of a run on this data. ``targets`` replaces all of the task's targets but the headline."""
        return self.task.run_task(
            targets,
            dataset=self.name,
            data_env_ids=[part.env_id for part in self.parts],
            fingerprint=self.store.fingerprint,
            data_returns=[float(f"{value:.7g}") for value in np.percentile(self.trajectories.returns, range(101))],
        )

    def model_shape(self, model: ModelConfig) -> ModelShape:
        """The shape of a model for this data."""
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
            attention_dropout=model.attention_dropout,
            action_dropout=model.action_dropout,
            feature_map=model.feature_map,
            scores=model.scores,
            init=model.init,
            primal_init=model.primal_init,
            conditioning=model.conditioning,
            action_loss=model.action_loss,
            max_timesteps=max(environment.episode_limit, int(self.trajectories.lengths.max())),
        )


def load_dataset(name: str, *, env_id: str | None = None, mix_versions: bool = False) -> Dataset:
    """Find a data set, download or record it if necessary, check it, and map it into memory.

    Args:
        name: a name or a path, or several joined by ``+``.
        env_id: the environment that the policy will act in. If the data does not name its environment, this is also
            taken as the environment of the data, and required.
        mix_versions: whether the parts' environment versions may differ from each other and from ``env_id``.

    Raises:
        DataError: if the data set is unavailable or unusable. The message is written for the user.
    """
    return _load(name, split_names(name), env_id, mix_versions)


def _load(name: str, names: Sequence[str], env_id: str | None, mix_versions: bool) -> Dataset:
    """Load the data set with this name from its parts."""
    # Check what is known already, so that a mistake is reported before anything is downloaded or recorded.
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
        stores.append(_open_or_write_store(identity, source.episodes(own.environment.action_box)))
        cut_off = int((~stores[-1].is_complete).sum())
        notes = _notes(part, source, own, task)
        parts.append(Part(part, source.path, own.env_id, cut_off, _about(source), notes))
    return Dataset(name, task, stores[0] if len(stores) == 1 else _joined(stores), tuple(parts))


def reload_dataset(record: RunRecord) -> Dataset:
    """Load a run's data set, even if the run was started from another working folder.

    Raises:
        DataError: if the data set is unavailable, or has changed since the run.
    """
    config = record.config
    names = [
        part.name if parse_name(part.name) or not os.path.exists(part.path) else part.path for part in record.parts
    ]
    dataset = _load(config.dataset, names, config.env_id, config.mix_versions)
    if dataset.store.fingerprint != record.task.fingerprint:
        raise DataError(f"the data set {config.dataset!r} has changed since the run was trained on it")
    return dataset


def _task(name: str, source: EpisodeSource | None, env_id: str | None) -> Task:
    """The task of one part of a data set."""
    known = parse_name(name)
    own = (source and source.env_id) or (known and known.task.env_id) or env_id
    if own is None:
        where = name if source is None else source.path
        raise DataError(
            f"{where} does not name its environment: pass --env-id, such as --env-id Hopper-v5 "
            "(Hopper-v4 for D4RL's data)"
        )
    task = task_of(own, None if known is None else known.tier, where=None if source is None else str(source.path))
    if source is not None:
        check_widths(source, task)
    return task


def _common_task(tasks: list[tuple[str, Task]], env_id: str | None, mix_versions: bool) -> Task | None:
    """The task of a policy that is trained on these parts; None if there are no parts.

    Raises:
        DataError: if the parts are from different environments, or from different versions without ``mix_versions``.
    """
    wanted = tasks if env_id is None else [*tasks, ("--env-id", task_of(env_id))]
    kinds = {task.environment.name for _, task in wanted}
    versions = {task.env_id for _, task in wanted}
    listed = ", ".join(f"{name} {task.env_id}" for name, task in wanted)
    if len(kinds) > 1:
        raise DataError(f"all parts must be from one environment, but these are from several: {listed}")
    if len(versions) > 1 and not mix_versions:
        raise DataError(
            f"versions of an environment differ in physics and reward, and these are mixed: {listed}. "
            "Omit --env-id or make the versions agree; if mixing is intended, pass --mix-versions"
        )
    if len(versions) > 1 and env_id is None:
        raise DataError(f"data from several versions of an environment needs --env-id, the version to act in: {listed}")
    if not tasks:
        return None
    tiers = {task.tier for _, task in tasks}
    tier = "medium-expert" if tiers == {"medium", "expert"} else tiers.pop() if len(tiers) == 1 else None
    return Task(wanted[-1][1].environment, wanted[-1][1].env_id, tier)


def _open_or_write_store(identity: str, episodes: Iterable[Trajectory]) -> Store:
    """Open the cached store of these episodes, or write a new one."""
    note = cache.read_note(identity)
    if note is not None:
        try:
            return open_store(cache.stores_folder() / str(note["fingerprint"]))
        except (StoreError, KeyError):
            pass  # cleared, damaged or from an earlier version: write it again
    store = write_store(cache.stores_folder(), episodes)
    cache.write_note(identity, {"fingerprint": store.fingerprint})
    return store


def _notes(name: str, source: EpisodeSource, own: Task, task: Task) -> tuple[str, ...]:
    """Caveats about a part."""
    notes = []
    if own.env_id != task.env_id:
        notes.append(f"{name} was recorded in {own.env_id} but is used for {task.env_id}")
    known = parse_name(name)
    if known is not None and known.source == "primal" and isinstance(source, MinariData):
        standard = [asdict(part) for part in builtin_recipe(known)]
        if source.metadata.get("recipe") != standard or source.metadata.get("seed") != 0:
            notes.append(f"{name} was recorded with nonstandard steps, seed or policies")
    return tuple(notes)


def _about(source: EpisodeSource) -> Mapping[str, Any]:
    if not isinstance(source, MinariData):
        return {}
    keys = ("dataset_id", "algorithm_name", "description", "author", "recipe", "seed", "recorded_by")
    return {key: source.metadata[key] for key in keys if key in source.metadata}


def _joined(stores: list[Store]) -> Store:
    """One store with the episodes of several stores, in order."""

    def episodes() -> Iterator[Trajectory]:
        for store in stores:
            data = store.trajectories
            for (begin, end), is_complete in zip(pairwise(data.offsets), store.is_complete.tolist(), strict=True):
                rows = slice(begin, end)
                yield Trajectory(data.observations[rows], data.actions[rows], data.rewards[rows], is_complete)

    return _open_or_write_store("\n".join(store.fingerprint for store in stores), episodes())
