"""A trained run, opened to be evaluated."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from primal_dt.evaluation.episode_cache import file_digest
from primal_dt.evaluation.report import Evaluation
from primal_dt.evaluation.rollout import Episode
from primal_dt.policy.inference import InferenceMode, require_mode
from primal_dt.task import RunTask
from primal_dt.training.checkpoint import Checkpoint, CheckpointError, CheckpointFolder, load_checkpoint
from primal_dt.training.metrics_log import curve_of, read_metrics
from primal_dt.training.scalars import HEADLINE

__all__ = ["TrainedRun", "describe_run", "open_run"]

Curve = Sequence[tuple[int, float]]


@dataclass(frozen=True)
class TrainedRun:
    """A checkpoint and where it acts. Its weights are mapped into memory: they are read when they are used."""

    path: Path
    """The checkpoint's file."""
    digest: str
    folder: Path | None
    """The run folder; None for a checkpoint that is not in one."""
    checkpoint: Checkpoint
    task: RunTask
    """The checkpoint's, in the version of the environment that it is evaluated in."""
    notes: tuple[str, ...]
    """What a reader of results must know about it."""

    @property
    def name(self) -> str:
        """The run folder's name, or the file's."""
        return self.path.name if self.folder is None else self.folder.name

    @property
    def seed(self) -> int:
        """The seed of its training."""
        return int(self.checkpoint.config["run"]["seed"])

    @property
    def configuration(self) -> str:
        """The digest of all that makes the policy but the seed."""
        return _configuration(self.checkpoint.config, self.checkpoint.task)

    @property
    def evaluations_folder(self) -> Path:
        """Where its episodes are cached."""
        return (self.folder or self.path.parent) / "evaluations"

    def evaluation(self, episodes: Iterable[Episode], *, mode: InferenceMode) -> Evaluation:
        """Its episodes, with what a report says about them."""
        curve = () if self.folder is None else curve_of(read_metrics(self.folder), HEADLINE)
        return describe_run(
            self.checkpoint.config,
            self.task,
            episodes,
            trained_for=self.checkpoint.task,
            step=self.checkpoint.step,
            checkpoint=self.path,
            mode=mode,
            curve=curve,
            notes=self.notes,
        )


def open_run(path: Path, *, mode: InferenceMode = "window", env_id: str | None = None) -> TrainedRun:
    """Open the last checkpoint of a run, or a checkpoint by its file.

    Args:
        path: a run folder or a file.
        mode: how it will be run.
        env_id: another version of the environment to evaluate in.

    Raises:
        CheckpointError: if there is no checkpoint that can be read.
        ValueError: if it cannot be run in this mode.
    """
    file, checkpoint = _newest_checkpoint(path) if path.is_dir() else (path, load_checkpoint(path, mmap=True))
    require_mode(mode, checkpoint.shape)
    in_run = file.parent.name == "checkpoints"
    return TrainedRun(
        path=file,
        digest=file_digest(file),
        folder=file.parent.parent if in_run else None,
        checkpoint=checkpoint,
        task=checkpoint.task if env_id is None else replace(checkpoint.task, env_id=env_id),
        notes=_notes(file, checkpoint, in_run=in_run),
    )


def describe_run(
    config: Mapping[str, Any],
    task: RunTask,
    episodes: Iterable[Episode],
    *,
    step: int,
    checkpoint: Path | str,
    mode: InferenceMode,
    curve: Curve,
    trained_for: RunTask | None = None,
    notes: tuple[str, ...] = (),
) -> Evaluation:
    """A run's episodes, with what a report says about them.

    Args:
        config: how it was trained, as plain values.
        task: where the episodes were run.
        episodes: the result.
        step: the checkpoint's.
        checkpoint: its file.
        mode: of inference.
        curve: normalized returns at the headline target during training, by step.
        trained_for: the task of the training, if that was another version of the environment.
        notes: what a reader must know.
    """
    return Evaluation(
        policy=config["model"]["attention"],
        configuration=_configuration(config, trained_for or task),
        task=task,
        episodes=tuple(episodes),
        settings={**config["model"], **config["optimizer"]},
        seed=int(config["run"]["seed"]),
        step=step,
        mode=mode,
        checkpoint=str(checkpoint),
        curve=tuple(curve),
        notes=notes,
    )


def _configuration(config: Mapping[str, Any], trained_for: RunTask) -> str:
    """Equal for runs that differ in the seed alone."""
    content: dict[str, Any] = {name: config[name] for name in ("model", "optimizer")}
    content |= {"fingerprint": trained_for.fingerprint, "env_id": trained_for.env_id}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def _newest_checkpoint(folder: Path) -> tuple[Path, Checkpoint]:
    """A damaged checkpoint is not silently replaced by an older one."""
    file, checkpoint, problems = CheckpointFolder(folder / "checkpoints").newest(mmap=True)
    if problems:
        raise CheckpointError(f"{'; '.join(problems.values())}. To evaluate the one before it, name it: {file}")
    return file, checkpoint


def _notes(file: Path, checkpoint: Checkpoint, *, in_run: bool) -> tuple[str, ...]:
    """In what way it is not a run's result."""
    notes = []
    planned = checkpoint.config["optimizer"]["steps"]
    if checkpoint.step < planned:
        notes.append(f"its training had reached step {checkpoint.step} of {planned}")
    if in_run and file != CheckpointFolder(file.parent).paths()[-1]:
        notes.append(f"{file.name} is not the last checkpoint of its run")
    return tuple(notes)
