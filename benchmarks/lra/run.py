"""The Long-Range Arena: training with the published settings, and what a step costs at 1K, 2K and 4K tokens (Table 3).

ListOps is generated; Image and Text are read from the standard files (``--folder``). With ``--efficiency`` nothing is
learned: every stack makes training steps on random tokens, and the table has the seconds of 1,000 steps (by turns, in
one process for each length) and the peak memory above the process at rest (in a fresh process for each cell).
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from tqdm import tqdm

from benchmarks.classify import Sequences, accuracy, keep, kept_scores, spread, update
from benchmarks.encoder import PENALIZED, Encoder, check_stacks
from benchmarks.lra.data import TASKS, Penalized, Task, encoder_shape, load_task
from benchmarks.lra.efficiency import report_efficiency
from benchmarks.program import check_device
from benchmarks.published import TABLE_2
from envs.datasets.cache import cache_folder
from primal_dt.system.files import atomic_write, check_writable
from primal_dt.system.table import format_table
from primal_dt.training.metrics_log import MetricsLog

LOG_EVERY_STEPS = 50
SPLITS = ("validation", "test")


@dataclass(frozen=True)
class Config:
    """What to do."""

    task: Literal["listops", "image", "text"] = "listops"
    """Which task."""
    folder: Path | None = None
    """Where its files are: CIFAR-10's binary version, or the unpacked IMDb archive. ListOps is kept in the cache."""
    attention: tuple[str, ...] = ("softmax", "primal-plus", "primalformer")
    """Stacks: softmax; primal-plus (last layer); primalformer (all layers); or another kind in all layers."""
    seeds: tuple[int, ...] = (0,)
    """Of weights, batches and dropout: one training each."""
    steps: int | None = None
    """Updates; the published number for the task if not given. The warm-up keeps its share of them."""
    batch_size: int | None = None
    """Sequences of an update; the published number for the task if not given."""
    lr: float = 1e-4
    """The greatest learning rate of AdamW; it rises linearly to it, then falls linearly to zero."""
    rank: int | None = None
    """Directions of Primal-Attention; the published number for the task and stack if not given."""
    eta: float | None = None
    """Weight of the KSVD penalty; the published one for the task and stack if not given."""
    efficiency: bool = False
    """Measure what a step costs of all stacks, instead of training. Only the three flags below then count."""
    lengths: tuple[int, ...] = (1024, 2048, 4096)
    """For --efficiency: tokens of a sequence."""
    efficiency_batch: int = 4
    """For --efficiency: sequences of a step. The published 32 would not fit with the matrix in memory."""
    efficiency_seconds: float = 5.0
    """For --efficiency: how long each is timed."""
    device: str = "cpu"
    """cpu, cuda, mps."""
    again: bool = False
    """Train again what was trained with the same settings before. Otherwise its result is read from its folder."""
    out: Path = Path("runs/lra")
    """Where curves, tables and results go."""

    def __post_init__(self) -> None:
        check_stacks(self.attention, self.seeds)
        least = {"steps": self.steps, "batch_size": self.batch_size, "rank": self.rank}
        least |= {"efficiency_batch": self.efficiency_batch, "lengths": min(self.lengths, default=0)}
        if wrong := [name for name, value in least.items() if value is not None and value < 1]:
            raise ValueError(f"{wrong[0]} ({least[wrong[0]]}) must be at least 1")
        if self.lr <= 0 or self.efficiency_seconds <= 0 or (self.eta is not None and self.eta < 0):
            raise ValueError("lr and efficiency_seconds must be above 0, and eta not below")
        if self.task != "listops" and self.folder is None and not self.efficiency:
            raise ValueError(f"{self.task} needs --folder: its files are not generated")

    @property
    def published(self) -> Task:
        """The task's settings."""
        return TASKS[self.task]

    def penalized(self, attention: str) -> Penalized:
        """What Primal-Attention is told in a stack."""
        paper = self.published.primal.get(attention, Penalized(30, 0.0))
        return Penalized(paper.rank if self.rank is None else self.rank, paper.eta if self.eta is None else self.eta)

    def facts(self, attention: str, seed: int) -> dict[str, Any]:
        """What a training depends on."""
        told = asdict(self.penalized(attention)) if attention in PENALIZED else {}
        return {
            "task": self.task,
            "data": None if self.folder is None else str(self.folder.resolve()),
            "steps": self.published.steps if self.steps is None else self.steps,
            "batch_size": self.published.batch_size if self.batch_size is None else self.batch_size,
            "lr": self.lr,
            "device": self.device,
            "attention": attention,
            "seed": seed,
            **told,
            "torch": torch.__version__,
        }

    def run_folder(self, attention: str, seed: int) -> Path:
        """Where a training writes: another one for other settings, so that neither is lost."""
        facts, told = self.facts(attention, seed), self.penalized(attention)
        settings = [f"r{told.rank}-eta{told.eta:g}"] if attention in PENALIZED else []
        settings += [f"{facts['steps']}x{facts['batch_size']}-lr{self.lr:g}"]
        return self.out / "__".join([self.task, attention, *settings, f"s{seed}"])


def rows_in_order(number: int, size: int, seed: int) -> Iterator[list[int]]:
    """Batches of rows, each row once before any comes again, without end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(number, generator=generator).tolist()
        for first in range(0, number - size + 1, size):
            yield order[first : first + size]


def train(config: Config, attention: str, seed: int, splits: dict[str, Sequences]) -> dict[str, float]:
    """Train one classifier. Returns its accuracy on the validation and the test split."""
    task, device, told = config.published, torch.device(config.device), config.penalized(attention)
    facts = config.facts(attention, seed)
    steps, size = facts["steps"], facts["batch_size"]
    torch.manual_seed(seed)
    shape = encoder_shape(num_classes=task.num_classes, max_length=task.max_length, attention=attention, rank=told.rank)
    model = Encoder(nn.Embedding(task.num_tokens, shape.width), shape).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, eps=1e-6, weight_decay=0.0)
    warmup = steps * task.warmup_steps / task.steps
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda done: min((done + 1) / max(warmup, 1), (steps - done) / max(steps - warmup, 1))
    )
    training = splits["train"]
    rows = rows_in_order(len(training.labels), min(size, len(training.labels)), seed)
    folder = config.run_folder(attention, seed)
    folder.mkdir(parents=True, exist_ok=True)
    logbook = MetricsLog(folder, texts={"settings": f"```json\n{json.dumps(facts, indent=1)}\n```"})
    for step in tqdm(range(1, steps + 1), desc=f"{attention}, seed {seed}", leave=False, disable=None):
        losses = update(model, optimizer, training.batch(next(rows), device), eta=told.eta)
        schedule.step()
        if step % LOG_EVERY_STEPS == 0 or step == steps:
            logbook.write(step, {"train/loss": float(losses.total), "train/penalty": float(losses.penalty)})
    found = {split: accuracy(model, splits[split].batches(size, device)) for split in SPLITS}
    logbook.write(steps, {f"{split}/accuracy": score for split, score in found.items()})
    logbook.close()
    keep(folder, model, facts, found)
    return found


def table(config: Config, scores: dict[str, list[dict[str, float]]]) -> str:
    """Ours, and the paper's."""
    rows = []
    for attention, seen in scores.items():
        published = TABLE_2[config.task].get(attention)
        cells = [spread([one[split] for one in seen]) for split in SPLITS]
        rows.append([attention, *cells, "" if published is None else f"{published:.1f}"])
    return format_table([config.task, *(f"{split}, %" for split in SPLITS), "paper, test"], rows)


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
    splits = load_task(config.task, config.folder or cache_folder() / "lra")
    scores: dict[str, list[dict[str, float]]] = {attention: [] for attention in config.attention}
    for seed in config.seeds:
        for attention in config.attention:
            folder = config.run_folder(attention, seed)
            kept = None if config.again else kept_scores(folder, config.facts(attention, seed))
            found = train(config, attention, seed, splits) if kept is None else kept
            scores[attention].append(found)
            note = "" if kept is None else f" (from {folder}; --again to train anew)"
            shown = ", ".join(f"{split} {found[split]:.2f} %" for split in SPLITS)
            print(f"{attention}, seed {seed}: {shown}{note}", flush=True)
    steps = config.published.steps if config.steps is None else config.steps
    print(f"\n{table(config, scores)}\n\nsteps: {steps:,} (published: {config.published.steps:,})")
    path = config.out / f"{config.task}-{steps}-steps.json"
    every = [
        {**config.facts(attention, seed), **found}
        for attention, seen in scores.items()
        for seed, found in zip(config.seeds, seen, strict=True)
    ]
    with atomic_write(path) as file:
        file.write(json.dumps(every, indent=1).encode())
    print(f"Saved {path}; curves: tensorboard --logdir {config.out}")
