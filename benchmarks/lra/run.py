"""The Long-Range Arena: training with the published settings, or the cost of a step at 1K, 2K and 4K tokens (Table 3).

ListOps is generated. Image and Text are read from the standard files (``--folder``).

With ``--efficiency`` nothing is trained. Every attention stack makes training steps on random tokens, and the tables
show the seconds per 1,000 steps (timed alternately, in one process per length) and the peak memory above the process at
rest (in a fresh process per cell).
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
    """Settings of the benchmark."""

    task: Literal["listops", "image", "text"] = "listops"
    """Task to train on."""
    folder: Path | None = None
    """Folder of CIFAR-10's binary version or of the unpacked IMDb archive. ListOps is generated, into the cache."""
    attention: tuple[str, ...] = ("softmax", "primal-plus", "primalformer")
    """Attention stacks: softmax, primal-plus (primal in the last layer), primalformer (primal in all), another kind."""
    seeds: tuple[int, ...] = (0,)
    """Seeds of weights, batches and dropout. Each stack is trained once per seed."""
    steps: int | None = None
    """Training steps. If not given, the published number for the task. The warm-up keeps its share of the steps."""
    batch_size: int | None = None
    """Sequences per step. If not given, the published number for the task."""
    lr: float = 1e-4
    """Peak learning rate of AdamW. The rate rises linearly to the peak, then falls linearly to zero."""
    rank: int | None = None
    """Rank of Primal-Attention. If not given, the published rank for the task and stack."""
    eta: float | None = None
    """Weight of the KSVD penalty. If not given, the published weight for the task and stack."""
    efficiency: bool = False
    """Measure the cost of a step of all stacks, without training. Uses only the next 3 flags, --device and --out."""
    lengths: tuple[int, ...] = (1024, 2048, 4096)
    """For --efficiency: sequence lengths in tokens."""
    efficiency_batch: int = 4
    """For --efficiency: sequences per step. The published 32 would not fit with the attention matrix in memory."""
    efficiency_seconds: float = 5.0
    """For --efficiency: seconds to time each stack."""
    device: str = "cpu"
    """Torch device: cpu, cuda or mps."""
    again: bool = False
    """Train again even if a finished run has the same settings. Otherwise its result is read from its folder."""
    out: Path = Path("runs/lra")
    """Folder for curves and results."""

    def __post_init__(self) -> None:
        check_stacks(self.attention, self.seeds)
        sizes = {"steps": self.steps, "batch_size": self.batch_size, "rank": self.rank}
        sizes |= {"efficiency_batch": self.efficiency_batch, "lengths": min(self.lengths, default=0)}
        if wrong := [name for name, value in sizes.items() if value is not None and value < 1]:
            raise ValueError(f"{wrong[0]} ({sizes[wrong[0]]}) must be at least 1")
        if self.lr <= 0 or self.efficiency_seconds <= 0 or (self.eta is not None and self.eta < 0):
            raise ValueError("lr and efficiency_seconds must be above 0, and eta at least 0")
        if self.task != "listops" and self.folder is None and not self.efficiency:
            raise ValueError(f"{self.task} needs --folder: its files are not generated")

    @property
    def published(self) -> Task:
        """Published settings of the task."""
        return TASKS[self.task]

    def penalized(self, attention: str) -> Penalized:
        """Hyperparameters of Primal-Attention in a stack: the given ones, or the published ones."""
        paper = self.published.primal.get(attention, Penalized(30, 0.0))
        return Penalized(paper.rank if self.rank is None else self.rank, paper.eta if self.eta is None else self.eta)

    def facts(self, attention: str, seed: int) -> dict[str, Any]:
        """All settings that the result of a training run depends on."""
        primal = asdict(self.penalized(attention)) if attention in PENALIZED else {}
        return {
            "task": self.task,
            "data": None if self.folder is None else str(self.folder.resolve()),
            "steps": self.published.steps if self.steps is None else self.steps,
            "batch_size": self.published.batch_size if self.batch_size is None else self.batch_size,
            "lr": self.lr,
            "device": self.device,
            "attention": attention,
            "seed": seed,
            **primal,
            "torch": torch.__version__,
        }

    def run_folder(self, attention: str, seed: int) -> Path:
        """Folder of a training run. Different settings have different folders, so that no result is overwritten."""
        facts, primal = self.facts(attention, seed), self.penalized(attention)
        settings = [f"r{primal.rank}-eta{primal.eta:g}"] if attention in PENALIZED else []
        settings += [f"{facts['steps']}x{facts['batch_size']}-lr{self.lr:g}"]
        return self.out / "__".join([self.task, attention, *settings, f"s{seed}"])


def rows_in_order(number: int, size: int, seed: int) -> Iterator[list[int]]:
    """Yield batches of rows without end. Each pass has a new order and drops the last incomplete batch."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(number, generator=generator).tolist()
        for first in range(0, number - size + 1, size):
            yield order[first : first + size]


def train(config: Config, attention: str, seed: int, splits: dict[str, Sequences]) -> dict[str, float]:
    """Train one classifier and return its accuracy on the validation and the test split."""
    task, device, primal = config.published, torch.device(config.device), config.penalized(attention)
    facts = config.facts(attention, seed)
    steps, size = facts["steps"], facts["batch_size"]
    torch.manual_seed(seed)
    shape = encoder_shape(
        num_classes=task.num_classes, max_length=task.max_length, attention=attention, rank=primal.rank
    )
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
        losses = update(model, optimizer, training.batch(next(rows), device), eta=primal.eta)
        schedule.step()
        if step % LOG_EVERY_STEPS == 0 or step == steps:
            logbook.write(step, {"train/loss": float(losses.total), "train/penalty": float(losses.penalty)})
    found = {split: accuracy(model, splits[split].batches(size, device)) for split in SPLITS}
    logbook.write(steps, {f"{split}/accuracy": score for split, score in found.items()})
    logbook.close()
    keep(folder, model, facts, found)
    return found


def table(config: Config, scores: dict[str, list[dict[str, float]]]) -> str:
    """Table of our accuracies beside the paper's."""
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
            saved = None if config.again else kept_scores(folder, config.facts(attention, seed))
            found = train(config, attention, seed, splits) if saved is None else saved
            scores[attention].append(found)
            note = "" if saved is None else f" (from {folder}; --again to retrain)"
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
