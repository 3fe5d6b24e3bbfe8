"""Loads the trajectories of a data set by its name or path.

mujoco/hopper/medium-v0       Minari: the local copy, or Minari's own download
hopper-medium-v2              D4RL: the file in the cache, or a download
primal/hopper/medium-v0       built in: the local copy, or recorded when first used; needs no network
PATH/file.hdf5, PATH/folder   a file in D4RL's layout, or a Minari data set
A+B                           several data sets together
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from envs.behavior.recipes import builtin_recipe
from envs.datasets import cache
from envs.datasets.checks import ActionCheck, EpisodeSource
from envs.datasets.minari import MINARI_FILE, MinariData
from envs.datasets.names import parse_name
from envs.datasets.part_tasks import (
    DataOptions,
    check_early,
    common_task,
    environment_recorded_in,
    is_described,
    task_of_part,
)
from envs.datasets.sources import find_here, find_source
from envs.errors import DataError
from envs.specifications import registered
from envs.tasks import DEFAULT_LIMIT, Task
from primal_dt.config import ModelConfig
from primal_dt.data.names import split_names
from primal_dt.data.normalizer import Normalizer
from primal_dt.data.store import Store, StoreError, open_store, write_store
from primal_dt.data.trajectories import Trajectories, Trajectory
from primal_dt.model.transformer import ModelShape
from primal_dt.task import NO_LIMIT, RunTask
from primal_dt.training.run_folder import RunRecord

__all__ = ["Dataset", "Part", "load_dataset", "reload_dataset"]

DEFAULT_RANK = 32
DEFAULT = DataOptions()


@dataclass(frozen=True)
class Part:
    """One part of a data set: one name or path."""

    name: str
    """The name or path as the user gave it."""
    path: Path
    """The file that was read."""
    env_id: str
    """The environment that the part was recorded in, with what differs from the plain one. Empty if it is unknown."""
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
    kept_normalizer: Normalizer | None = None
    """The normalizer of another run whose weights the training starts with; None for the data's own."""

    @property
    def trajectories(self) -> Trajectories:
        """The episodes, memory-mapped."""
        return self.store.trajectories

    @property
    def normalizer(self) -> Normalizer:
        """The normalizer: standardizes states and divides returns by the return scale."""
        return self.kept_normalizer or self.own_normalizer

    @property
    def own_normalizer(self) -> Normalizer:
        """The normalizer by this data's mean and standard deviation."""
        return self.store.normalizer(return_scale=self.return_scale)

    @property
    def return_scale(self) -> float:
        """The table's, else a fifth of the largest size of a return, to one digit: the table's lie around that."""
        if self.task.environment.return_scale is not None:
            return self.task.environment.return_scale
        return float(f"{np.abs(self.trajectories.returns).max() / 5:.1g}") or 1.0

    @cached_property
    def episode_limit(self) -> int:
        """The maximum number of steps per episode; without an environment, at least the length of the longest."""
        specification = self.task.specification
        if specification is None:
            return max(DEFAULT_LIMIT, int(self.trajectories.lengths.max()))
        known = None
        with suppress(DataError):  # training needs no environment
            known = registered(specification.env_id, trust=self.task.trusted)
        own = specification.max_episode_steps or (known.max_episode_steps if known else None)
        return DEFAULT_LIMIT if own is None or own == NO_LIMIT else own

    @property
    def is_terminated(self) -> NDArray[np.bool_]:
        """Mask of the episodes that the environment ended, (E,).

        Inferred from their lengths: complete episodes that are shorter than the task's limit. An episode that another
        limit cut short counts as ended by the environment.
        """
        return self.store.is_complete & (self.trajectories.lengths < self.episode_limit)

    def run_task(self, targets: Sequence[float] | None = None) -> RunTask:
        """The task of a run on this data.

        The headline target comes first: the table's, else the largest return in the data. The other targets are
        ``targets``, else the table's, else half of the headline (if that is negative: twice, which is half as good).
        """
        known, task = self.task.environment.targets, self.task.run_task()
        best = float(f"{self.trajectories.returns.max():.4g}")
        own = known or (best, best / 2 if best > 0 else 2 * best)
        return replace(
            task,
            dataset=self.name,
            data_env_ids=tuple(sorted({part.env_id for part in self.parts if part.env_id})),
            fingerprint=self.store.fingerprint,
            notes=tuple(dict.fromkeys((*(note for part in self.parts for note in part.notes), *self._notes()))),
            targets=tuple(dict.fromkeys((own[0], *(targets or own)))),
            target_source=task.target_source if known else "the data: its largest return, and half of it",
            data_returns=tuple(float(f"{value:.7g}") for value in np.percentile(self.trajectories.returns, range(101))),
        )

    def _notes(self) -> Iterator[str]:
        longer = int((self.trajectories.lengths > self.episode_limit).sum())
        if longer and self.task.specification is not None:
            yield (
                f"{longer:,} episodes of the data are longer than the environment's limit of {self.episode_limit} "
                "steps, so their returns may be out of reach"
            )

    def model_shape(self, model: ModelConfig) -> ModelShape:
        """The shape of a model for this data."""
        actions = self.task.environment.actions
        low, high = np.array(actions.low), np.array(actions.high)
        unbounded = np.isinf(low) | np.isinf(high)
        if unbounded.any():  # scaled by the data instead
            stored = self.trajectories.actions[:, unbounded].astype(np.float64)
            spread = np.where(stored.std(0) > 0, stored.std(0), 1.0)
            low[unbounded], high[unbounded] = stored.mean(0) - spread, stored.mean(0) + spread
        return ModelShape(
            state_width=self.task.environment.state_width,
            action_low=tuple(low.tolist()),
            action_high=tuple(high.tolist()),
            categories=actions.categories,
            unbounded=tuple(unbounded.tolist()) if unbounded.any() else (),
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
            max_timesteps=max(self.episode_limit, int(self.trajectories.lengths.max())),
        )


def load_dataset(name: str, options: DataOptions = DEFAULT) -> Dataset:
    """Find a data set, download or record it if necessary, check it, and map it into memory.

    Args:
        name: a name or a path, or several joined by ``+``.
        options: how it is read, and the environment that policies act in.

    Raises:
        DataError: if the data set is unavailable or unusable. The message is written for the user.
    """
    return _load(name, split_names(name), options)


def _load(name: str, names: Sequence[str], options: DataOptions) -> Dataset:
    """Load the data set with this name from its parts."""
    if options.env_id is not None and ":" in options.env_id:
        registered(options.env_id, trust=options.trust_env_id)  # so that the registry has it
    # Check what is known already, so that a mistake is reported before anything is downloaded or recorded.
    here = {part: find_here(part) for part in names}
    early = [
        (part, task_of_part(part, source, options)) for part, source in here.items() if source or is_described(part)
    ]
    common_task(early, options)
    sources = [here[part] or find_source(part, partial(check_early, options=options)) for part in names]
    tasks = [task_of_part(part, source, options) for part, source in zip(names, sources, strict=True)]
    task = common_task(list(zip(names, tasks, strict=True)), options)
    assert task is not None
    stores, parts = [], []
    for part, source, own in zip(names, sources, tasks, strict=True):
        check = ActionCheck(own.environment.actions, clip=options.clip_actions)
        identity = "".join(map(cache.file_identity, source.files)) + _reading(own, options)
        store, clipped = _open_or_write_store(identity, partial(source.episodes, check), check)
        stores.append(store)
        cut_off = int((~store.is_complete).sum())
        notes = _notes(part, source, own, task, clipped)
        recorded_in = environment_recorded_in(source, own)
        text = "" if recorded_in is None else str(recorded_in)
        parts.append(Part(part, source.path, text, cut_off, _about(source), notes))
    return Dataset(name, task, stores[0] if len(stores) == 1 else _joined(stores), tuple(parts))


def reload_dataset(record: RunRecord, *, trust: bool = False) -> Dataset:
    """Load a run's data set, even if the run was started from another working folder.

    Args:
        record: the run's record.
        trust: whether modules that the record or the data names may be imported.

    Raises:
        DataError: if the data set is unavailable, or has changed since the run.
    """
    config = record.config
    names = []
    for part in record.parts:
        path = Path(part.path).parent if Path(part.path).name == MINARI_FILE else Path(part.path)
        names.append(part.name if parse_name(part.name) or not path.exists() else str(path))
    dataset = _load(config.dataset, names, replace(DataOptions.of(config), trust_env=trust, trust_env_id=trust))
    if dataset.store.fingerprint != record.task.fingerprint:
        raise DataError(f"the data set {config.dataset!r} has changed since the run was trained on it")
    return dataset


def _reading(task: Task, options: DataOptions) -> str:
    """All that the stored numbers depend on, apart from the files."""
    return f"{task.environment.actions!r} {'clipped' if options.clip_actions else ''}"


def _open_or_write_store(
    identity: str, episodes: Callable[[], Iterable[Trajectory]], check: ActionCheck | None = None
) -> tuple[Store, str]:
    """Open the cached store of these episodes, or write a new one. Returns it, and what was clipped."""
    note = cache.read_note(identity)
    if note is not None:
        try:
            return open_store(cache.stores_folder() / str(note["fingerprint"])), str(note.get("clipped", ""))
        except (StoreError, KeyError):
            pass  # cleared, damaged or from an earlier version: write it again

    def checked() -> Iterator[Trajectory]:
        yield from episodes()
        if check is not None:
            check.finish()

    store, clipped = write_store(cache.stores_folder(), checked()), ""
    if check is not None and check.outside:
        clipped = f"{check.outside:,} of {check.seen:,} actions, by up to {check.farthest:g}"
    cache.write_note(identity, {"fingerprint": store.fingerprint, "clipped": clipped})
    return store, clipped


def _notes(name: str, source: EpisodeSource, own: Task, task: Task, clipped: str) -> tuple[str, ...]:
    """Caveats about a part."""
    notes = []
    if own.specification != task.specification:
        notes.append(f"{name} was recorded in {own.specification} but is used for {task.specification}")
    if clipped:
        notes.append(f"{name}: actions out of bounds are clipped: {clipped}")
    recorded_in = environment_recorded_in(source, own)
    if recorded_in != own.specification:
        notes.append(f"{name} was recorded in {recorded_in}; its metadata names {own.specification} to evaluate in")
    if source.reference not in (None, task.environment.reference):
        notes.append(
            f"{name}: the reference returns of its metadata ({source.reference}) are not used, but those of "
            f"{task.environment.reference_source} ({task.environment.reference})"
        )
    if task.environment.note is not None:
        notes.append(task.environment.note)
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
            store.verify()  # or damage would be part of the new store's fingerprint
            data = store.trajectories
            for (begin, end), is_complete in zip(pairwise(data.offsets), store.is_complete.tolist(), strict=True):
                rows = slice(begin, end)
                yield Trajectory(data.observations[rows], data.actions[rows], data.rewards[rows], is_complete)

    try:
        return _open_or_write_store("\n".join(store.fingerprint for store in stores), episodes)[0]
    except StoreError as error:
        raise DataError(str(error)) from error
