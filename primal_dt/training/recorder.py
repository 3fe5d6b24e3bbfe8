"""Output of a training run: metrics, checkpoints and TensorBoard's table of hyperparameters."""

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from primal_dt.data.normalizer import Normalizer
from primal_dt.task import RunTask
from primal_dt.training.checkpoint import Checkpoint, CheckpointFolder, unreadable
from primal_dt.training.loggers import Logger, LoggerError, LoggerFeed
from primal_dt.training.metrics_log import MetricsLog, curve_of, missing_points
from primal_dt.training.scalars import ABOUT, headline_name
from primal_dt.training.trainer import Trainer, TrainMetrics

__all__ = ["Recorder", "restore"]

log = logging.getLogger(__name__)

COMPARED = ("dataset", "attention", "seed", "rank", "eta")
"""Hyperparameters in which compared runs usually differ: the first columns of TensorBoard's table."""


class Recorder:
    """Logs points and saves checkpoints.

    A point is logged before the checkpoint of its step is saved. A resumed run therefore finds all points up to the
    step of its newest checkpoint, wherever it was interrupted, and computes the later points again.

    Args:
        folder: run folder.
        trainer: a trainer at step 0, or restored from ``checkpoint``.
        normalizer: saved in every checkpoint.
        task: saved in every checkpoint.
        config: configuration as plain values: saved in every checkpoint, and shown in TensorBoard.
        checkpoint: checkpoint that the run resumes from, if any.
        logger: a service that points are also sent to, if any.

    Raises:
        LoggerError: if the logger cannot start.
    """

    def __init__(
        self,
        folder: Path,
        trainer: Trainer,
        *,
        normalizer: Normalizer,
        task: RunTask,
        config: Mapping[str, Any],
        checkpoint: Checkpoint | None = None,
        logger: Logger | None = None,
    ) -> None:
        self.trainer = trainer
        self.normalizer = normalizer
        self.task = task
        self.config = config
        self.checkpoints = CheckpointFolder(folder / "checkpoints")
        self.saved_step = -1 if checkpoint is None else checkpoint.step
        """Step of the newest checkpoint, or -1 if there is none."""
        pending: Mapping[str, float] = {} if checkpoint is None else checkpoint.training["pending"]
        self.unfinished: list[TrainMetrics] = [TrainMetrics(trainer.step, pending)] if pending else []
        """The point whose evaluation a stop request interrupted, if any. It comes before the trainer's points."""
        self._is_saved_whole = not pending
        until = trainer.step - bool(pending)
        self._log = MetricsLog(
            folder,
            texts={"about": ABOUT, "config": f"```json\n{json.dumps(config, indent=2)}\n```"},
            until_step=until,
        )
        if problem := missing_points(self._log.lines, until_step=until, every_steps=trainer.log_every_steps):
            log.warning("%s (%s). The curves lack them", problem, folder)
        self._feed: LoggerFeed | None = None
        if logger is not None:
            try:
                self._feed = LoggerFeed(logger, folder=folder, config=config, points=self._log.lines)
            except LoggerError:
                self._log.close()
                raise

    def close(self) -> None:
        """Flush and close all files, and end the logger's run."""
        try:
            self._log.close()
        finally:
            if self._feed is not None:
                self._feed.end(self._log.last_values())

    @property
    def score_curve(self) -> tuple[tuple[int, float], ...]:
        """Step and headline result of every evaluation so far: a normalized return, or a return without references."""
        return curve_of(self._log.lines, headline_name(self.task.reference))

    def log(self, scalars: Mapping[str, float]) -> None:
        """Log the point of the trainer's step."""
        self._log.write(self.trainer.step, scalars)
        if self._feed is not None:
            self._feed.point(self.trainer.step, scalars)

    def save(self, *, unfinished: Mapping[str, float] | None = None) -> None:
        """Save a checkpoint of the trainer's step, unless it exists already.

        Args:
            unfinished: scalars of this step that could not be logged, because a stop interrupted its evaluation. A
                resumed run evaluates the step again and then logs it.

        Raises:
            BadLossError: if the loss, a gradient or a weight is not finite. Nothing is written then.
        """
        if self.trainer.step == self.saved_step and self._is_saved_whole and not unfinished:
            return
        self.trainer.check()
        model = self.trainer.model
        self.checkpoints.save(
            Checkpoint(
                shape=model.shape,
                weights=model.state_dict(),
                normalizer=self.normalizer,
                step=self.trainer.step,
                config=self.config,
                task=self.task,
                training={"trainer": self.trainer.state_dict(), "pending": dict(unfinished or {})},
                critic=None if self.trainer.critic is None else self.trainer.critic.state_dict(),
            )
        )
        self.saved_step, self._is_saved_whole = self.trainer.step, not unfinished

    def finish(self) -> None:
        """Fill TensorBoard's table of hyperparameters, after the last step."""
        last = self._log.lines[-1] if self._log.lines else {}
        names = [name for name in last if name.startswith(("eval/", "train/action_mse"))]
        names.sort(key=lambda name: (name != headline_name(self.task.reference), name))
        self._log.finish(_flat(self.config), names, first=COMPARED)

    def last_checkpoint(self) -> str:
        """Return the path of the newest checkpoint, or a note that there is none."""
        return "none (nothing was saved yet)" if self.saved_step < 0 else str(self.checkpoints.path(self.saved_step))


def restore(trainer: Trainer, folder: Path, *, on_problem: Callable[[str], None] | None = None) -> Checkpoint | None:
    """Load the newest readable checkpoint of a run into the trainer, if the run has one.

    Args:
        trainer: its model's weights and its own state are restored.
        folder: run folder.
        on_problem: called with a message if there is no checkpoint, and for each damaged one, which is then renamed. If
            not given, damaged checkpoints are left unchanged.

    Raises:
        CheckpointError: if there are checkpoints, but none can be read or the newest does not fit the trainer.
    """
    checkpoints = CheckpointFolder(folder / "checkpoints")
    if not checkpoints.paths():
        if on_problem is not None:
            on_problem(f"{folder} has no checkpoint yet: training restarts from step 0")
        return None
    path, checkpoint, problems = checkpoints.newest(trainer.device)
    if on_problem is not None:
        for damaged, problem in problems.items():
            on_problem(f"{problem}; resuming from {path.name}")
            checkpoints.set_aside(damaged)
    try:
        trainer.model.load_state_dict(dict(checkpoint.weights))
        trainer.load_state_dict(checkpoint.training["trainer"])
    except (ValueError, RuntimeError) as error:
        raise unreadable(path, error) from error
    return checkpoint


def _flat(values: Mapping[str, Any]) -> dict[str, str | float | bool]:
    """Flatten nested values, as TensorBoard's table requires."""
    flat: dict[str, str | float | bool] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value)
        else:
            flat[name] = value if isinstance(value, bool | int | float | str) else str(value)
    return flat
