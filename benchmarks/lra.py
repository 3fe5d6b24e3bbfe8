"""The Long-Range Arena: training with the published settings, and what a step costs at 1K, 2K and 4K tokens (Table 3).

ListOps is generated; Image and Text are read from the standard files (``--folder``). With ``--efficiency`` nothing is
learnt: every stack makes training steps on random tokens, in a fresh process for each cell, and the table has the
seconds of 1,000 steps and the peak memory above the process at rest.
"""

import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from tqdm import tqdm

from benchmarks.classify import accuracy, update
from benchmarks.encoder import STACKS, Encoder
from benchmarks.lra_data import TASKS, Sequences, encoder_shape, load_task
from benchmarks.lra_efficiency import report_efficiency
from benchmarks.program import run_program
from benchmarks.published import TABLE_2
from envs.cache import cache_folder
from primal_dt.files import atomic_write
from primal_dt.logbook import Logbook
from primal_dt.table import format_table

LOG_EVERY_STEPS = 50


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
    """Updates; the published number for the task if not given."""
    batch_size: int | None = None
    """Sequences of an update; the published number for the task if not given."""
    lr: float = 1e-4
    """The greatest learning rate of AdamW."""
    warmup: float = 0.2
    """Share of the steps in which the learning rate rises; it falls to zero in the others."""
    efficiency: bool = False
    """Measure what a step costs, instead of training."""
    lengths: tuple[int, ...] = (1024, 2048, 4096)
    """For --efficiency: tokens of a sequence."""
    efficiency_batch: int = 4
    """For --efficiency: sequences of a step. The published 32 would not fit with the matrix in memory."""
    efficiency_seconds: float = 5.0
    """For --efficiency: how long each is timed."""
    device: str = "cpu"
    """cpu, cuda, mps."""
    out: Path = Path("runs/lra")
    """Where curves, tables and results go."""

    def __post_init__(self) -> None:
        if unknown := set(self.attention) - set(STACKS):
            raise ValueError(f"attention can be {', '.join(STACKS)}, not {', '.join(sorted(unknown))}")
        numbers = (self.steps or 1, self.batch_size or 1, self.efficiency_batch, *self.lengths)
        if min(numbers) < 1 or self.lr <= 0 or not 0 < self.warmup < 1 or self.efficiency_seconds <= 0:
            raise ValueError("steps, batch sizes and lengths must be at least 1, lr above 0, warmup between 0 and 1")
        if self.task != "listops" and self.folder is None and not self.efficiency:
            raise ValueError(f"{self.task} needs --folder: its files are not generated")


def rows_in_order(number: int, size: int, seed: int) -> Iterator[list[int]]:
    """Batches of rows, each row once before any comes again, without end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(number, generator=generator).tolist()
        for first in range(0, number - size + 1, size):
            yield order[first : first + size]


def train(config: Config, attention: str, seed: int, splits: dict[str, Sequences]) -> dict[str, float]:
    """Train one classifier. Returns its accuracy on the validation and the test split."""
    task, device = TASKS[config.task], torch.device(config.device)
    steps, size = config.steps or task.steps, config.batch_size or task.batch_size
    torch.manual_seed(seed)
    shape = encoder_shape(num_classes=task.num_classes, max_length=task.max_length, attention=attention)
    model = Encoder(nn.Embedding(task.num_tokens, shape.width), shape).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, config.lr, total_steps=steps, pct_start=config.warmup, anneal_strategy="linear"
    )
    training = splits["train"]
    rows = rows_in_order(len(training.labels), min(size, len(training.labels)), seed)
    folder = config.out / f"{config.task}__{attention}__s{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    logbook = Logbook(folder, texts={"settings": f"{steps:,} steps of {size} sequences, eta {task.eta}"})
    for step in tqdm(range(1, steps + 1), desc=f"{attention}, seed {seed}", leave=False, disable=None):
        losses = update(model, optimizer, training.batch(next(rows), device), eta=task.eta, after_step=schedule.step)
        if step % LOG_EVERY_STEPS == 0 or step == steps:
            logbook.write(step, {"train/loss": float(losses.total), "train/penalty": float(losses.penalty)})
    found = {split: accuracy(model, splits[split].batches(size, device)) for split in ("validation", "test")}
    logbook.write(steps, {f"{split}/accuracy": score for split, score in found.items()})
    logbook.close()
    return found


def table(config: Config, scores: dict[str, list[dict[str, float]]]) -> str:
    """Ours, and the paper's."""
    rows = []
    for attention, seen in scores.items():
        cells = []
        for split in ("validation", "test"):
            values = [one[split] for one in seen]
            spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
            cells.append(f"{statistics.mean(values):.1f}{spread}")
        published = TABLE_2[config.task].get(attention)
        rows.append([attention, *cells, "" if published is None else f"{published:.1f}"])
    return format_table([config.task, "validation, %", "test, %", "paper, test"], rows)


def main(config: Config) -> None:
    """Train or measure, print, save."""
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
            scores[attention].append(train(config, attention, seed, splits))
            found = scores[attention][-1]
            print(
                f"{attention}, seed {seed}: validation {found['validation']:.2f}, test {found['test']:.2f} %",
                flush=True,
            )
    task = TASKS[config.task]
    print(f"\n{table(config, scores)}\n\nsteps: {config.steps or task.steps:,} (published: {task.steps:,})")
    path = config.out / f"{config.task}.json"
    with atomic_write(path) as file:
        facts = {
            "task": config.task,
            "steps": config.steps or task.steps,
            "batch_size": config.batch_size or task.batch_size,
        }
        content = {**facts, "seeds": config.seeds, "torch": torch.__version__, "accuracy": scores}
        file.write(json.dumps(content, indent=1).encode())
    print(f"Saved {path}; curves: tensorboard --logdir {config.out}")


if __name__ == "__main__":
    run_program(main, Config, name="benchmarks.lra", description=__doc__)
