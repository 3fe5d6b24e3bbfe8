"""The training loop of all models outside reinforcement learning: time series, long sequences, images and text.

A training continues where it was interrupted, and its result is then the same, bit for bit: all randomness of a step is
a function of the seed, the step and the process. Several processes started by ``torchrun`` share each batch.
"""

import json
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from benchmarks.batches import LabeledBatch
from benchmarks.step import Losses, update
from primal_dt.attention import PenaltyReduction
from primal_dt.system.files import atomic_write, lock_folder
from primal_dt.system.process import catch_signals
from primal_dt.training.distributed import Processes
from primal_dt.training.metrics_log import MetricsLog
from primal_dt.training.trainer import mixed_seed

__all__ = ["CHECKPOINT", "Best", "Curves", "Plan", "Trainer"]

CHECKPOINT = "checkpoint.pt"
STEPS_PER_STOP_CHECK = 10
"""With several processes, how often they ask each other whether to stop."""
Curves = dict[str, float]


@dataclass(frozen=True)
class Plan:
    """How a model is trained."""

    steps: int
    seed: int
    eta: float = 0.0
    penalty: PenaltyReduction = "mean"
    clip: float | None = None
    accumulate: int = 1
    bf16: bool = False
    compile: bool = False
    log_every_steps: int = 50
    save_every_steps: int = 200
    evaluate_every_steps: int = 0
    """Steps between evaluations on the way; 0: none."""
    best: str | None = None
    """A curve: the weights are stored where it is best, which is highest for an accuracy and lowest for a loss."""


@dataclass
class Best:
    """The point with the best value of a curve, and the weights there."""

    step: int = 0
    value: float = math.nan
    weights: dict[str, Tensor] = field(default_factory=dict)

    def see(self, step: int, name: str, value: float, model: nn.Module) -> None:
        """Store a point if its value is the best so far."""
        is_better = value > self.value if name.endswith("accuracy") else value < self.value
        if is_better or not self.weights:
            self.step, self.value = step, value
            self.weights = {name: weight.detach().clone() for name, weight in model.state_dict().items()}


class Trainer:
    """Trains a model, logs its curves in ``metrics.jsonl`` and for TensorBoard, and saves checkpoints.

    Args:
        model: the model, on its device.
        optimizer: its optimizer.
        batches: first step -> the batches from that step on, of this process's share.
        plan: how it is trained.
        folder: the run's folder.
        settings: all settings that the result depends on, as plain values. A checkpoint of others is not used.
        processes: the processes that share each batch.
        schedule: schedule of the learning rate, which takes one step after each update.
        evaluate: returns the curves of an evaluation on the way. All processes call it.
        prepare: applied to each batch on the device, such as random augmentations.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        batches: Callable[[int], Iterator[LabeledBatch]],
        plan: Plan,
        folder: Path,
        *,
        settings: Mapping[str, Any],
        processes: Processes,
        schedule: torch.optim.lr_scheduler.LRScheduler | None = None,
        evaluate: Callable[[], Curves] | None = None,
        prepare: Callable[[LabeledBatch], LabeledBatch] | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.batches = batches
        self.plan = plan
        self.folder = folder
        self.settings = json.loads(json.dumps(settings))
        self.processes = processes
        self.schedule = schedule
        self.evaluate = evaluate
        self.prepare = prepare
        self.step = 0
        self.best = Best()
        self.lines: list[Curves] = []
        """The points of the curves so far, each with its ``step``."""
        self._sums = torch.zeros(len(Losses._fields), device=processes.device)
        self._network = self._wrapped()

    def _wrapped(self) -> nn.Module:
        network = self.model
        if self.plan.compile:
            network = torch.compile(network)  # type: ignore[assignment]
        if self.processes.count > 1:  # without a penalty, some weights of primal layers have no gradient
            devices = None if self.processes.device.type == "cpu" else [self.processes.device]
            network = DistributedDataParallel(network, device_ids=devices, find_unused_parameters=not self.plan.eta)
        return network

    def run(self, *, name: str, final: Callable[[], Curves], again: bool = False) -> Curves:
        """Train until the last step, from the checkpoint in the folder if there is one.

        Args:
            name: shown at the progress bar.
            final: called after the last step; returns the scores, which are logged. All processes call it.
            again: start at step 0 even if there is a checkpoint.

        Returns:
            The scores.

        Raises:
            SystemExit: after Ctrl-C or SIGTERM. A checkpoint has then been saved.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        main = self.processes.is_main
        lock = lock_folder(self.folder, f"{self.folder} is in use by another process") if main else nullcontext()
        with lock, catch_signals(lambda: None) as request:
            if self.checkpoint.is_file() and not again:
                self._load()
            with self._log() as log:
                self._train(log, name, lambda: request.signal is not None)
                if self.step < self.plan.steps:
                    self._save()
                    if main:
                        print(f"stopped at step {self.step:,} of {self.plan.steps:,}: the same command continues")
                    raise SystemExit(128 + (request.signal or signal.SIGTERM))
                scores = final()
                self._write(log, scores)
        return scores

    def _log(self) -> AbstractContextManager[MetricsLog | None]:
        """The log of rank 0, up to the current step."""
        if not self.processes.is_main:
            return nullcontext()
        texts = {"settings": f"```json\n{json.dumps(self.settings, indent=1)}\n```"}
        log = MetricsLog(self.folder, texts=texts, until_step=self.step)
        self.lines = log.lines
        return closing(log)

    def finish(self) -> None:
        """Remove the checkpoint, once the result has been saved."""
        if self.processes.is_main:
            self.checkpoint.unlink(missing_ok=True)

    @property
    def checkpoint(self) -> Path:
        """The file of the checkpoint."""
        return self.folder / CHECKPOINT

    def _train(self, log: MetricsLog | None, name: str, wants_stop: Callable[[], bool]) -> None:
        plan, start, first = self.plan, time.perf_counter(), self.step
        shown = None if self.processes.is_main else True  # None: in a terminal only
        self.model.train()
        with tqdm(total=plan.steps, initial=self.step, desc=name, leave=False, disable=shown) as bar:
            for batch in self.batches(self.step):
                if self.step == plan.steps or self._all_stop(wants_stop):
                    return
                self._update(batch)
                bar.update()
                curves: Curves = {}
                if self._is_time(plan.log_every_steps):
                    curves |= self._curves()
                    curves["train/steps_per_second"] = (self.step - first) / (time.perf_counter() - start)
                if self.evaluate is not None and self._is_time(plan.evaluate_every_steps):
                    self.model.eval()
                    curves |= self.evaluate()
                    self.model.train()
                if curves:
                    self._write(log, curves)
                    start, first = time.perf_counter(), self.step
                if self.step % plan.save_every_steps == 0 and self.step < plan.steps:
                    self._save()

    def _is_time(self, every: int) -> bool:
        """Whether the current step is one of every so many, or the last. With 0, none is."""
        return bool(every) and (self.step % every == 0 or self.step == self.plan.steps)

    def _all_stop(self, wants_stop: Callable[[], bool]) -> bool:
        if self.processes.count > 1 and self.step % STEPS_PER_STOP_CHECK:
            return False
        return not self.processes.agree(not wants_stop())

    def _update(self, batch: LabeledBatch) -> None:
        torch.manual_seed(mixed_seed(self.plan.seed, self.step, self.processes.rank))
        if self.prepare is not None:
            batch = self.prepare(batch)
        plan, share = self.plan, None
        if self.processes.count > 1:
            labels = torch.tensor(float(len(batch.labels)), device=self.processes.device)
            mean = labels.clone()
            dist.all_reduce(mean)
            share = labels * self.processes.count / mean
        losses = update(
            self.model,
            self.optimizer,
            batch,
            eta=plan.eta,
            penalty=plan.penalty,
            clip=plan.clip,
            accumulate=plan.accumulate,
            bf16=plan.bf16,
            network=self._network,
            share=share,
        )
        if self.schedule is not None:
            self.schedule.step()
        self._sums += torch.stack(losses) if share is None else torch.stack(losses) * share
        self.step += 1

    def _curves(self) -> Curves:
        """The means since the last point. Waits for the device.

        Raises:
            ValueError: if the loss is not finite, and no earlier weights are stored.
        """
        steps = self.step % self.plan.log_every_steps or self.plan.log_every_steps
        if self.processes.count > 1:
            dist.all_reduce(self._sums)
        total, task, penalty, correct = (self._sums / (steps * self.processes.count)).tolist()
        self._sums.zero_()
        if not math.isfinite(total) and not self.best.weights:
            raise ValueError(
                f"the loss is not finite by step {self.step}: lower the learning rate. "
                + (f"The checkpoint before it is {self.checkpoint}" if self.checkpoint.is_file() else "")
            )
        curves = {"train/loss": total, "train/task_loss": task, "train/accuracy": 100 * correct}
        return curves | {"train/penalty": penalty, "train/learning_rate": self.optimizer.param_groups[0]["lr"]}

    def _write(self, log: MetricsLog | None, curves: Curves) -> None:
        if log is not None:
            log.write(self.step, curves)
        if self.plan.best is not None and self.plan.best in curves:
            self.best.see(self.step, self.plan.best, curves[self.plan.best], self.model)

    def _save(self) -> None:
        sums = self._sums.clone()
        if self.processes.count > 1:
            dist.all_reduce(sums)
        if not self.processes.is_main:
            return
        content = {
            "settings": self.settings,
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": None if self.schedule is None else self.schedule.state_dict(),
            "sums": sums,
            "best": vars(self.best),
        }
        with atomic_write(self.checkpoint) as file:
            torch.save(content, file)

    def _load(self) -> None:
        """Restore the checkpoint.

        Raises:
            ValueError: if it cannot be read, or is that of another training.
        """
        again = "--again starts from step 0"
        try:
            content = torch.load(self.checkpoint, map_location=self.processes.device, weights_only=True)
            settings = content["settings"]
        except Exception as error:  # torch raises errors of many types for foreign bytes
            raise ValueError(f"{self.checkpoint} is damaged or not a checkpoint of this program: {again}") from error
        changed = [name for name in self.settings.keys() | settings if self.settings.get(name) != settings.get(name)]
        if changed:
            names = ", ".join(sorted(changed))
            raise ValueError(f"{self.checkpoint} is of a training with other settings ({names}): {again}")
        self.model.load_state_dict(content["model"])
        self.optimizer.load_state_dict(content["optimizer"])
        if self.schedule is not None:
            self.schedule.load_state_dict(content["schedule"])
        self._sums.copy_(content["sums"] * self.processes.is_main)  # they are those of all processes
        self.best = Best(**content["best"])
        self.step = content["step"]
