"""Trained runs, opened for evaluation."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from primal_dt.config import EARLIER_VALUES, without_earlier_values
from primal_dt.evaluation.report import Evaluation
from primal_dt.evaluation.rollout import Episode
from primal_dt.policy.inference import InferenceMode, require_mode
from primal_dt.system.files import file_digest
from primal_dt.task import RunTask, Specification
from primal_dt.training.checkpoint import Checkpoint, CheckpointError, CheckpointFolder, load_checkpoint
from primal_dt.training.metrics_log import curve_of, missing_points, scan_metrics
from primal_dt.training.policy_folder import POLICY_CONFIG, is_policy_folder
from primal_dt.training.scalars import headline_name

__all__ = ["TrainedRun", "describe_run", "open_run"]


@dataclass(frozen=True)
class TrainedRun:
    """A checkpoint and the task in which it is evaluated. Its weights are memory-mapped: they are read on first use."""

    path: Path
    """The checkpoint's file; for a shared policy, its ``config.json``."""
    digest: str
    """The digest of the file's content."""
    folder: Path | None
    """The run folder; None for a checkpoint that is not in one."""
    checkpoint: Checkpoint
    task: RunTask
    """The checkpoint's task, with the version of the environment in which the policy is evaluated."""
    notes: tuple[str, ...]
    """Caveats for a reader of the results."""
    label: str | None = None
    """The name of a shared policy; None for a run."""
    cache: Path | None = None
    """The folder of the episode cache; None for a folder in the run folder."""

    @property
    def name(self) -> str:
        """The name of the run folder or the shared policy; for a checkpoint outside a run folder, of the file."""
        return self.label or (self.path.name if self.folder is None else self.folder.name)

    @property
    def seed(self) -> int:
        """The training's seed."""
        return int(self.checkpoint.config["run"]["seed"])

    @property
    def configuration(self) -> str:
        """The digest of everything that the trained policy depends on, except the seed."""
        return _configuration(self.checkpoint.config, self.checkpoint.task)

    @property
    def evaluations_folder(self) -> Path:
        """The folder of the episode cache."""
        return self.cache or (self.folder or self.path.parent) / "evaluations"

    def evaluation(self, episodes: Iterable[Episode], *, mode: InferenceMode) -> Evaluation:
        """The evaluation that consists of these episodes."""
        name = headline_name(self.task.reference)  # a curve in another unit is not shown
        lines, problem = ([], "") if self.folder is None else self._metrics()
        return describe_run(
            self.checkpoint.config,
            self.task,
            episodes,
            trained_for=self.checkpoint.task,
            step=self.checkpoint.step,
            checkpoint=self.path,
            mode=mode,
            curve=curve_of(lines, name),
            notes=(*self.notes, f"{problem}; its training curve lacks them") if problem else self.notes,
        )

    def _metrics(self) -> tuple[list[dict[str, Any]], str]:
        """The logged points of the run, and what is wrong with them."""
        assert self.folder is not None
        lines, problem = scan_metrics(self.folder)
        step, config = self.checkpoint.step, self.checkpoint.config
        until_step = step - bool(self.checkpoint.training["pending"])
        missing = missing_points(lines, until_step=until_step, every_steps=config["run"]["log_every_steps"])
        return lines, problem or missing


def open_run(
    path: Path,
    *,
    mode: InferenceMode = "window",
    env_id: str | None = None,
    label: str | None = None,
    cache: Path | None = None,
) -> TrainedRun:
    """Open the last checkpoint of a run, a checkpoint by its file, or a shared policy by its folder.

    Args:
        path: a run folder, a checkpoint file, or the folder of a shared policy.
        mode: the inference mode, which is checked against the model.
        env_id: the environment to evaluate in, the plain one of this id. If None: the one that the run was trained for.
        label: the name of a shared policy. If None: that of its folder.
        cache: the folder of the episode cache of a shared policy, whose own folder may be another program's. If None: a
            folder in its folder.

    Raises:
        CheckpointError: if there is no readable checkpoint, or the last one is damaged.
        ValueError: if the model does not support the mode.
    """
    is_shared = is_policy_folder(path)
    if is_shared:  # config.json has the digest of the weights, so it stands for both files
        file, checkpoint = path / POLICY_CONFIG, load_checkpoint(path)
    else:
        file, checkpoint = _newest_checkpoint(path) if path.is_dir() else (path, load_checkpoint(path, mmap=True))
    require_mode(mode, checkpoint.shape)
    in_run = file.parent.name == "checkpoints"
    task = checkpoint.task if env_id is None else replace(checkpoint.task, env_id=env_id, specification=None)
    return TrainedRun(
        path=file,
        digest=file_digest(file),
        folder=file.parent.parent if in_run else None,
        checkpoint=checkpoint,
        task=task,
        notes=_notes(file, checkpoint, task, in_run=in_run),
        label=(label or path.resolve().name) if is_shared else None,
        cache=cache if is_shared else None,
    )


def describe_run(
    config: Mapping[str, Any],
    task: RunTask,
    episodes: Iterable[Episode],
    *,
    step: int,
    checkpoint: Path | str,
    mode: InferenceMode,
    curve: Sequence[tuple[int, float]],
    trained_for: RunTask | None = None,
    notes: tuple[str, ...] = (),
) -> Evaluation:
    """The evaluation of a run's checkpoint, whose episodes were run in ``task``.

    ``config`` is the configuration of the training as plain values, ``curve`` its headline results by step, and
    ``trained_for`` its task, if that differs from ``task``.
    """
    return Evaluation(
        policy=config["model"]["attention"],
        configuration=_configuration(config, trained_for or task),
        task=task,
        episodes=tuple(episodes),
        settings={**EARLIER_VALUES, **config["model"], **config["optimizer"]},
        seed=int(config["run"]["seed"]),
        step=step,
        mode=mode,
        checkpoint=str(checkpoint),
        curve=tuple(curve),
        notes=notes,
    )


def _configuration(config: Mapping[str, Any], trained_for: RunTask) -> str:
    """A digest that is equal for runs that differ only in their seed."""
    content: dict[str, Any] = {part: without_earlier_values(config[part]) for part in ("model", "optimizer")}
    content |= {"fingerprint": trained_for.fingerprint, "env_id": Specification(trained_for.env_id).bare_id}
    if trained_for.specification is not None and trained_for.specification.differences:
        content["specification"] = trained_for.specification.identity
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def _newest_checkpoint(folder: Path) -> tuple[Path, Checkpoint]:
    """Load the last checkpoint. If it is damaged, raise: it is not silently replaced by an older one."""
    file, checkpoint, problems = CheckpointFolder(folder / "checkpoints").newest(mmap=True)
    if problems:
        raise CheckpointError(f"{'; '.join(problems.values())}. To evaluate an older checkpoint, give its path: {file}")
    return file, checkpoint


def _notes(file: Path, checkpoint: Checkpoint, task: RunTask, *, in_run: bool) -> tuple[str, ...]:
    """The reasons why an evaluation is not the final result of a run."""
    notes = []
    planned = checkpoint.config["optimizer"]["steps"]
    if checkpoint.step < planned:
        notes.append(f"training is unfinished (step {checkpoint.step} of {planned})")
    if in_run and file != CheckpointFolder(file.parent).paths()[-1]:
        notes.append(f"{file.name} is not the last checkpoint of its run")
    if task.environment_text != checkpoint.task.environment_text:
        notes.append(f"trained for {checkpoint.task.environment_text}, evaluated in {task.environment_text}")
    return tuple(notes)
