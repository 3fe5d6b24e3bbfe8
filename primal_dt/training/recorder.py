"""The side effects of a training run: what is evaluated, logged, saved and shown, and when."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from primal_dt.config import Config
from primal_dt.data.normalizer import Normalizer
from primal_dt.data.sampler import Batch
from primal_dt.evaluation.rollout import Episode, Policy
from primal_dt.evaluation.score import summarize
from primal_dt.policy.policy import DecisionTransformerPolicy
from primal_dt.system.stopping import StopRequest, StopRequestedError
from primal_dt.training.checkpoint import Checkpoint, CheckpointFolder
from primal_dt.training.metrics_log import Logbook, read_metrics
from primal_dt.training.progress import Progress
from primal_dt.training.scalars import ABOUT, HEADLINE, evaluation_scalars, spectrum_scalars, training_scalars
from primal_dt.training.trainer import Trainer

__all__ = ["Run"]

Evaluate = Callable[[Policy], list[Episode]]
COMPARED = ("dataset", "attention", "seed", "rank", "eta")
"""Hyper-parameters in which runs that are compared usually differ."""


class Run:
    """Trains; at each logging point it adds what is due, writes it down, and saves.

    A point is written to the logbook before a checkpoint of its step is saved. So whatever happens in between, a run
    that goes on from its newest checkpoint finds all points up to there, and makes the later ones again.

    Args:
        folder: the run's, with its configuration in it.
        config: how often to do what.
        trainer: at its first step, or where ``checkpoint`` has left it.
        normalizer: of the data.
        task: facts that go into checkpoints: ``random_return`` and ``expert_return`` of the reference among them.
        evaluate: runs a policy's episodes; it raises StopRequestedError if a stop is requested meanwhile.
        spectrum_batch: for looking at the spectra of the layers.
        checkpoint: that the run goes on from.
        request: whether somebody asked to stop.
    """

    def __init__(
        self,
        folder: Path,
        config: Config,
        trainer: Trainer,
        *,
        normalizer: Normalizer,
        task: Mapping[str, Any],
        evaluate: Evaluate,
        spectrum_batch: Batch,
        checkpoint: Checkpoint | None,
        request: StopRequest,
    ) -> None:
        self.folder = folder
        self.config = config
        self.trainer = trainer
        self.normalizer = normalizer
        self.task = task
        self.request = request
        self.checkpoints = CheckpointFolder(folder / "checkpoints")
        self.saved_step = -1 if checkpoint is None else checkpoint.step
        """Of the newest checkpoint."""
        self.episodes: list[Episode] = []
        """Of the last evaluation, if there was one."""
        self._evaluate = evaluate
        self._spectrum_batch = spectrum_batch
        self._pending: dict[str, float] = {} if checkpoint is None else dict(checkpoint.training["pending"])
        """Scalars of a point that a stop left unfinished: its evaluation is still to be done."""
        self._logbook = Logbook(
            folder,
            texts={"about": ABOUT, "config": f"```json\n{json.dumps(asdict(config), indent=2)}\n```"},
            until_step=trainer.step - bool(self._pending),
        )
        self._progress = Progress(steps=config.optimizer.steps, done=trainer.step)

    def train(self) -> None:
        """Train to the end, or until a stop is requested, and leave a checkpoint behind.

        Raises:
            BadLossError: if the loss is no longer finite. What was saved before is good.
        """
        try:
            if self._pending:
                self._finish_point(self._pending)
            for metrics in self.trainer:
                self._progress.update(metrics)
                self._finish_point(training_scalars(metrics))
            if not self._pending and self.trainer.step != self.saved_step:
                self._save()
            if self.trainer.step == self.config.optimizer.steps and not self._pending:
                self._logbook.finish(_flat(asdict(self.config)), self._names_of_scores(), first=COMPARED)
        finally:
            self._progress.close()
            self._logbook.close()

    def last_good_checkpoint(self) -> str:
        """Its path, or that there is none."""
        return "none: no step was saved yet" if self.saved_step < 0 else str(self.checkpoints.path(self.saved_step))

    def _finish_point(self, scalars: dict[str, float]) -> None:
        step, last = self.trainer.step, self.trainer.step == self.config.optimizer.steps
        assert not self._pending or self._pending is scalars  # a point that waits must not be forgotten
        self._pending = {}
        try:
            scalars = scalars | self._evaluation(last) | self._spectra()
        except StopRequestedError:  # who goes on with the run will finish this point
            self._pending = scalars
            self._save()
            return
        self._logbook.write(step, scalars)
        if last or step % self.config.run.save_every_steps == 0:
            self._save()

    def _evaluation(self, last: bool) -> dict[str, float]:
        """Scalars of rollouts, if they are due."""
        every = self.config.evaluation.eval_every_steps
        if not every or not (last or self.trainer.step % every == 0):
            return {}
        policy = DecisionTransformerPolicy(self.trainer.model, self.normalizer)
        with self._progress.evaluating():
            self.episodes = self._evaluate(policy)
        summaries = summarize(
            self.episodes, random_return=self.task["random_return"], expert_return=self.task["expert_return"]
        )
        scalars = evaluation_scalars(summaries)
        self._progress.score(scalars[HEADLINE])
        return scalars

    def _spectra(self) -> dict[str, float]:
        """Scalars of the layers' kernels, if they are due."""
        every = self.config.run.spectrum_every_steps
        return (
            spectrum_scalars(self.trainer.model, self._spectrum_batch)
            if every and not self.trainer.step % every
            else {}
        )

    def _save(self) -> None:
        self.trainer.check()
        model = self.trainer.model
        self.checkpoints.save(
            Checkpoint(
                shape=model.shape,
                weights=model.state_dict(),
                normalizer=self.normalizer,
                step=self.trainer.step,
                config=asdict(self.config),
                task=self.task,
                training={"trainer": self.trainer.state_dict(), "pending": self._pending},
            )
        )
        self.saved_step = self.trainer.step

    def _names_of_scores(self) -> list[str]:
        """The headline first. From the record, since the last evaluation may have been in an earlier process."""
        names = [name for name in read_metrics(self.folder)[-1] if name.startswith(("eval/", "train/action_mse"))]
        return sorted(names, key=lambda name: (name != HEADLINE, name))


def _flat(values: Mapping[str, Any]) -> dict[str, str | float | bool]:
    """Nested values under their own names, as the table of hyper-parameters takes them."""
    flat: dict[str, str | float | bool] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value)
        else:
            flat[name] = value if isinstance(value, bool | int | float | str) else str(value)
    return flat
