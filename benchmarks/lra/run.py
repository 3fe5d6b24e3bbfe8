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
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from tqdm import tqdm

from benchmarks.classify import (
    SavedRun,
    Sequences,
    accuracy,
    num_parameters,
    save_run,
    saved_run,
    spread,
    update,
)
from benchmarks.encoder import PENALIZED, Encoder
from benchmarks.lra.data import TASKS, Task, encoder_shape, load_task
from benchmarks.lra.efficiency import report_efficiency
from benchmarks.program import check_device
from benchmarks.published import TABLE_2
from benchmarks.published_encoder import build_encoder
from benchmarks.settings import ClassifierFlags, Primal
from envs.datasets.cache import cache_folder
from primal_dt.system.files import atomic_write, check_writable
from primal_dt.system.provenance import commit
from primal_dt.system.table import format_table
from primal_dt.training.metrics_log import MetricsLog

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
        sizes = {"steps": self.steps, "batch_size": self.batch_size}
        sizes |= {"efficiency_batch": self.efficiency_batch, "lengths": min(self.lengths, default=0)}
        if wrong := [name for name, value in sizes.items() if value is not None and value < 1]:
            raise ValueError(f"{wrong[0]} ({sizes[wrong[0]]}) must be at least 1")
        if not 0 < self.lr < math.inf or not 0 < self.efficiency_seconds < math.inf:
            raise ValueError("lr and efficiency_seconds must be finite and above 0")
        if self.task != "listops" and self.folder is None and not self.efficiency:
            raise ValueError(f"{self.task} needs --folder: its files are not generated")

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
        settings += [self.network] if self.network != "published" else []
        settings += ["validated"] if self.select != "last" else []
        return self.out / "__".join([self.task, attention, *settings, f"s{seed}"])


def rows_in_order(number: int, size: int, seed: int) -> Iterator[list[int]]:
    """Yield batches of rows without end. Each pass has a new order and drops the last incomplete batch."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(number, generator=generator).tolist()
        for first in range(0, number - size + 1, size):
            yield order[first : first + size]


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


def train(config: Config, attention: str, seed: int, splits: dict[str, Sequences]) -> SavedRun:
    """Train one classifier and test it on the validation and the test split."""
    task, device, primal = config.published, torch.device(config.device), config.primal(attention)
    settings = config.settings(attention, seed)
    steps, size = settings["steps"], settings["batch_size"]
    torch.manual_seed(seed)
    model = make_model(config, attention).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, eps=1e-6, weight_decay=0.0)
    schedule = make_schedule(optimizer, config.lr, steps, task.warmup_steps / task.steps)
    training = splits["train"]
    rows = rows_in_order(len(training.labels), min(size, len(training.labels)), seed)
    folder = config.run_folder(attention, seed)
    folder.mkdir(parents=True, exist_ok=True)
    version = commit()  # of the code that trains, even if it changes meanwhile
    best, weights, best_step = -1.0, model.state_dict(), None
    with closing(MetricsLog(folder, texts={"settings": f"```json\n{json.dumps(settings, indent=1)}\n```"})) as log:
        for step in tqdm(range(1, steps + 1), desc=f"{attention}, seed {seed}", leave=False, disable=None):
            batch = training.batch(next(rows), device)
            losses = update(model, optimizer, batch, eta=primal.eta, penalty=primal.penalty, clip=None)
            schedule.step()
            if step % LOG_EVERY_STEPS == 0 or step == steps:
                log.write(step, {"train/loss": float(losses.total), "train/penalty": float(losses.penalty)})
            if config.select == "validation" and (step % task.eval_every_steps == 0 or step == steps):
                score = accuracy(model, islice(splits["validation"].batches(size, device), task.num_eval_batches))
                log.write(step, {"validation/accuracy": score})
                if score > best:
                    best, best_step = score, step
                    weights = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(weights)
        scores = {split: accuracy(model, splits[split].batches(size, device)) for split in SPLITS}
        log.write(steps, {f"{split}/accuracy": score for split, score in scores.items()})
    run = SavedRun(scores, version, num_parameters(model), None if best_step == steps else best_step)
    save_run(folder, model, settings, run)
    return run


def table(config: Config, runs: dict[str, list[SavedRun]]) -> str:
    """Table of our accuracies beside the paper's."""
    rows = []
    for attention, seen in runs.items():
        published = TABLE_2[config.task].get(attention)
        cells = [spread([run.scores[split] for run in seen]) for split in SPLITS]
        rows.append([attention, *cells, "" if published is None else f"{published:.1f}"])
    return format_table([config.task, *(f"{split}, %" for split in SPLITS), "paper, test"], rows)


def run_all(config: Config) -> dict[str, list[SavedRun]]:
    """Train every stack with every seed, unless a finished run has the result: stack -> results."""
    config.use_threads()
    splits = load_task(config.task, config.folder or cache_folder() / "lra")
    runs: dict[str, list[SavedRun]] = {attention: [] for attention in config.attention}
    for seed in config.seeds:
        for attention in config.attention:
            folder = config.run_folder(attention, seed)
            saved = None if config.again else saved_run(folder, config.settings(attention, seed))
            run = train(config, attention, seed, splits) if saved is None else saved
            runs[attention].append(run)
            note = "" if saved is None else f" (from {folder}; --again to retrain)"
            shown = ", ".join(f"{split} {run.scores[split]:.2f} %" for split in SPLITS)
            print(f"{attention}, seed {seed}: {shown}{note}", flush=True)
    return runs


def main(config: Config) -> None:
    """Train or measure, print, save."""
    check_writable(config.out)
    check_device(config.device)
    if config.efficiency:
        report_efficiency(
            lengths=config.lengths,
            batch_size=config.efficiency_batch,
            seconds=config.efficiency_seconds,
            device=torch.device(config.device),
            out=config.out,
        )
        return
    runs = run_all(config)
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
