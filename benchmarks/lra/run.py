"""The Long-Range Arena: training with the published settings, or the cost of a step at 1K, 2K and 4K tokens (Table 3).

ListOps is generated. The other tasks are read from their standard files (``--folder``): image from CIFAR-10's binary
version, text from the IMDb archive, retrieval from the arena's folder tsv_data, pathfinder from pathfinder32.

Network, sizes, optimizer and schedule are those of the paper's published code. It trains in half precision, and tests
the checkpoint that is best on the validation split. Here training is in single precision, and the last checkpoint is
tested unless ``--select validation`` is given.

With ``--efficiency`` nothing is trained. Every attention stack makes training steps on random tokens, and the tables
show the seconds per 1,000 steps (timed alternately, in one process per length) and the peak memory above the process at
rest (in a fresh process per cell).
"""

import json
import math
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from benchmarks.batches import EpochOrder, Sequences
from benchmarks.blocks import PENALIZED
from benchmarks.encoder import Encoder
from benchmarks.lra.data import TASKS, Task, encoder_shape, load_task
from benchmarks.lra.efficiency import report_efficiency
from benchmarks.published import TABLE_2
from benchmarks.published_encoder import build_encoder
from benchmarks.runs import SavedRun, num_parameters, run_stacks, save_run, spread
from benchmarks.settings import ClassifierFlags, Primal
from benchmarks.step import accuracy
from benchmarks.trainer import Plan, Trainer
from envs.datasets.cache import cache_folder
from primal_dt.system.files import atomic_write, check_writable
from primal_dt.system.provenance import commit
from primal_dt.system.table import format_table
from primal_dt.training.distributed import Processes, choose_device, join_processes

LOG_EVERY_STEPS = 50
SPLITS = ("validation", "test")


@dataclass(frozen=True)
class Config(ClassifierFlags):
    """Settings of the benchmark."""

    seeds: tuple[int, ...] = (0,)
    """Seeds of weights, batches and dropout. Each stack is trained once per seed."""
    task: Literal["listops", "text", "retrieval", "image", "pathfinder"] = "listops"
    """Task to train on."""
    folder: Path | None = None
    """Folder of the task's standard files. ListOps is generated, into the cache."""
    steps: int | None = None
    """Training steps. If not given, the published number for the task. The warm-up keeps its share of the steps."""
    batch_size: int | None = None
    """Sequences, or pairs of them, per step. If not given, the published number for the task."""
    accumulate: int = 1
    """Parts in which a batch is computed, one after another. More parts need less memory. The penalty is then the mean
    over the parts, each with its own mean of J. Not for pairs."""
    lr: float = 1e-4
    """Peak learning rate of AdamW. The rate rises linearly to the peak, then falls linearly."""
    select: Literal["last", "validation"] = "last"
    """Checkpoint to test: the last one, or, as published, the best on the validation split."""
    efficiency: bool = False
    """Measure the cost of a step of all stacks, without training. Uses only the next 3 flags, --device and --out."""
    lengths: tuple[int, ...] = (1024, 2048, 4096)
    """For --efficiency: sequence lengths in tokens."""
    efficiency_batch: int = 4
    """For --efficiency: sequences per step. The published 32 would not fit with the attention matrix in memory."""
    efficiency_seconds: float = 5.0
    """For --efficiency: seconds to time each stack."""
    out: Path = Path("runs/lra")
    """Folder for curves and results."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_at_least_one("steps", "batch_size", "accumulate", "efficiency_batch")
        if (shortest := min(self.lengths, default=0)) < 1:
            raise ValueError(f"lengths ({shortest}) must be at least 1")
        if not 0 < self.lr < math.inf or not 0 < self.efficiency_seconds < math.inf:
            raise ValueError("lr and efficiency_seconds must be finite and above 0")
        if self.task != "listops" and self.folder is None and not self.efficiency:
            raise ValueError(f"{self.task} needs --folder: its files are not generated")
        if self.published.is_pair and self.accumulate > 1:
            raise ValueError(f"accumulate ({self.accumulate}) must be 1 for {self.task}, a task of pairs")

    @property
    def published(self) -> Task:
        """Published settings of the task."""
        return TASKS[self.task]

    def primal(self, attention: str) -> Primal:
        """The primal layers of a stack: the published settings, with the changes that the flags make."""
        return self.with_flags(self.published.primal.get(attention, Primal(30, 0.0)))

    def settings(self, attention: str, seed: int) -> dict[str, Any]:
        """All settings that the result of a training run depends on."""
        return {
            "task": self.task,
            "data": None if self.folder is None else self.folder.name,
            "network": self.network,
            "max_length": self.published.max_length,
            "steps": self.published.steps if self.steps is None else self.steps,
            "batch_size": self.published.batch_size if self.batch_size is None else self.batch_size,
            "accumulate": self.accumulate,
            "lr": self.lr,
            "select": self.select,
            "device": self.device,
            "attention": attention,
            "seed": seed,
            **self.primal_settings(attention, self.primal(attention)),
            "torch": torch.__version__,
        }

    def run_folder(self, attention: str, seed: int) -> Path:
        """Folder of a training run. Different settings have different folders, so that no result is overwritten."""
        own = self.settings(attention, seed)
        settings = [self.primal(attention).label] if attention in PENALIZED else []
        settings += [f"{own['steps']}x{own['batch_size']}-lr{self.lr:g}"]
        settings += [f"parts{self.accumulate}"] if self.accumulate > 1 else []
        settings += [self.network] if self.network != "published" else []
        settings += ["validated"] if self.select != "last" else []
        return self.out / "__".join([self.task, attention, *settings, f"s{seed}"])


def make_model(config: Config, attention: str) -> Encoder:
    """Build the network. The published one has an additional token for padding."""
    task, published = config.published, config.network == "published"
    shape = encoder_shape(
        num_classes=task.num_classes,
        max_length=task.max_length,
        attention=attention,
        primal=config.primal(attention),
        network="lra" if published else "ours",
        is_pair=task.is_pair,
        zero_is_padding=published and task.is_image,
    )
    return build_encoder(nn.Embedding(task.num_tokens + published, shape.width), shape)


def make_schedule(
    optimizer: torch.optim.Optimizer, lr: float, steps: int, warmup: float
) -> torch.optim.lr_scheduler.OneCycleLR:
    """The published schedule: from lr / 25 up to lr in the warm-up, then down to lr / 250,000, both linearly.

    Adam's beta1 moves the other way: from 0.95 down to 0.85, and back.
    """
    return torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=lr, total_steps=steps, pct_start=warmup, anneal_strategy="linear"
    )


def train(config: Config, attention: str, seed: int, splits: dict[str, Sequences], processes: Processes) -> SavedRun:
    """Train one classifier and test it on the validation and the test split."""
    task, device, primal = config.published, processes.device, config.primal(attention)
    settings, folder = config.settings(attention, seed), config.run_folder(attention, seed)
    steps, size = settings["steps"], settings["batch_size"]
    torch.manual_seed(seed)
    model = make_model(config, attention).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, eps=1e-6, weight_decay=0.0)
    training = splits["train"]
    order = EpochOrder(len(training.labels), size, seed)
    validates = config.select == "validation"

    def validation() -> dict[str, float]:
        batches = islice(splits["validation"].batches(size, device), task.num_eval_batches)
        return {"validation/accuracy": accuracy(model, batches, processes)}

    def final() -> dict[str, float]:
        if validates:
            model.load_state_dict(trainer.best.weights)
        tests = {split: splits[split].batches(size, device) for split in SPLITS}
        return {f"{split}/accuracy": accuracy(model, batches, processes) for split, batches in tests.items()}

    version = commit()  # of the code that trains, even if it changes meanwhile
    trainer = Trainer(
        model,
        optimizer,
        lambda step: (training.batch(rows, device) for rows in order.shares(step, processes.rank, processes.count)),
        Plan(
            steps,
            seed,
            eta=primal.eta if attention in PENALIZED else 0.0,
            penalty=primal.penalty,
            accumulate=config.accumulate,
            save_every_steps=20,
            log_every_steps=LOG_EVERY_STEPS,
            evaluate_every_steps=task.eval_every_steps if validates else 0,
            best="validation/accuracy" if validates else None,
        ),
        folder,
        settings=settings,
        processes=processes,
        schedule=make_schedule(optimizer, config.lr, steps, task.warmup_steps / task.steps),
        evaluate=validation,
    )
    found = trainer.run(name=f"{attention}, seed {seed}", final=final, again=config.again)
    scores = {split: found[f"{split}/accuracy"] for split in SPLITS}
    best = trainer.best.step if validates and trainer.best.step < steps else None
    run = SavedRun(scores, version, num_parameters(model), best)
    if processes.is_main:
        save_run(folder, model, settings, run, shape=asdict(model.shape))
    trainer.finish()
    return run


def table(config: Config, runs: dict[str, list[SavedRun]]) -> str:
    """Table of our accuracies beside the paper's."""
    rows = []
    for attention, seen in runs.items():
        published = TABLE_2[config.task].get(attention)
        cells = [spread([run.scores[split] for run in seen]) for split in SPLITS]
        rows.append([attention, *cells, "" if published is None else f"{published:.1f}"])
    return format_table([config.task, *(f"{split}, %" for split in SPLITS), "paper, test"], rows)


def run_all(config: Config, processes: Processes) -> dict[str, list[SavedRun]]:
    """Train every stack with every seed, unless a finished run has the result: stack -> results."""
    config.use_threads()
    splits = load_task(config.task, config.folder or cache_folder() / "lra")
    return run_stacks(
        config,
        lambda attention, seed: train(config, attention, seed, splits, processes),
        lambda run: ", ".join(f"{split} {run.scores[split]:.2f} %" for split in SPLITS),
        processes,
    )


def main(config: Config) -> None:
    """Train or measure, print, save."""
    check_writable(config.out)
    if config.efficiency:
        report_efficiency(
            lengths=config.lengths,
            batch_size=config.efficiency_batch,
            seconds=config.efficiency_seconds,
            device=choose_device(config.device),
            out=config.out,
        )
        return
    with join_processes(config.device) as processes:
        runs = run_all(config, processes)
    if not processes.is_main:
        return
    steps = config.published.steps if config.steps is None else config.steps
    print(f"\n{table(config, runs)}\n\nsteps: {steps:,} (published: {config.published.steps:,})")
    path = config.out / f"{config.task}-{steps}-steps.json"
    every = [
        {**config.settings(attention, seed), **asdict(run)}
        for attention, seen in runs.items()
        for seed, run in zip(config.seeds, seen, strict=True)
    ]
    with atomic_write(path) as file:
        file.write(json.dumps(every, indent=1).encode())
    print(f"Saved {path}; curves: tensorboard --logdir {config.out}")
