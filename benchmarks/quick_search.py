"""The search behind the preset ``quick``: what learns most in a given time on a CPU.

Every setting of the grid trains for the same time: how many steps that is, is measured first, all settings by turns, on
two threads. Then each is trained by ``train.py``, on the built-in data, on seeds that no result is reported for, and
evaluated at its last step. All results are kept, a line each; a search that was stopped goes on.
"""

import csv
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.measure import time_interleaved
from benchmarks.program import run_program
from envs.datasets.load import load_dataset
from primal_dt.config import OptimizerConfig
from primal_dt.data.sampler import WindowSampler
from primal_dt.model.transformer import DecisionTransformer, ModelShape
from primal_dt.system.table import format_table
from primal_dt.training.trainer import Trainer

ROOT = Path(__file__).parent.parent
BASE: dict[str, Any] = {
    "optimizer": "muon",
    "lr": 3e-3,
    "context": 5,
    "width": 128,
    "batch_size": 64,
    "dropout": 0.0,
    "sampling": "transitions",
    "schedule": "cosine",
}
CHANGES: list[dict[str, Any]] = [
    {},
    {"lr": 1e-3},
    {"lr": 1e-2},
    {"context": 3},
    {"context": 10},
    {"context": 20},
    {"optimizer": "adamw", "lr": 1e-3, "context": 10},
    {"optimizer": "adamw", "lr": 3e-3},
    {"optimizer": "adamw", "lr": 3e-3, "context": 10},
    {"dropout": 0.1},
    {"batch_size": 128},
    {"batch_size": 32},
    {"width": 64},
    {"width": 256},
    {"sampling": "return"},
    {"schedule": "constant"},
]
"""The grid: one thing at a time, but for AdamW, which has its own best rates."""
COLUMNS = ("dataset", *BASE, "seed", "seconds", "steps", "score", "score_std", "second_score", "action_mse")


@dataclass(frozen=True)
class Config:
    """What to search."""

    seconds: float = 150.0
    """Training time of each setting, on two threads."""
    datasets: tuple[str, ...] = ("primal/hopper/medium-expert-v0",)
    """Where."""
    seeds: tuple[int, ...] = (100,)
    """Not those of published results."""
    settings: tuple[int, ...] = tuple(range(len(CHANGES)))
    """Which lines of the grid."""
    jobs: int = 2
    """Runs at a time, one thread each."""
    episodes: int = 20
    """For each target."""
    out: Path = ROOT / "benchmarks" / "results" / "quick_search.csv"
    """Where results are kept."""


def seconds_per_step(settings: list[dict[str, Any]], dataset_name: str) -> list[float]:
    """Of each setting, measured by turns on two threads."""
    torch.set_num_threads(2)
    dataset = load_dataset(dataset_name)
    calls = {}
    for number, setting in enumerate(settings):
        environment = dataset.task.environment
        shape = ModelShape(
            environment.state_width,
            (-1.0,) * environment.action_width,
            (1.0,) * environment.action_width,
            width=setting["width"],
            context=setting["context"],
            dropout=setting["dropout"],
        )
        optimizer = OptimizerConfig(
            steps=10**9, **{name: setting[name] for name in ("optimizer", "lr", "batch_size")}, warmup_steps=0
        )
        sampler = WindowSampler(
            dataset.trajectories,
            dataset.normalizer,
            context=setting["context"],
            batch_size=setting["batch_size"],
            seed=0,
        )
        trainer = Trainer(DecisionTransformer(shape), sampler, optimizer, eta=0.05, seed=0, log_every_steps=1)
        points = iter(trainer)
        calls[str(number)] = lambda points=points: next(points)
    timings = time_interleaved(calls, seconds=1.0, device=torch.device("cpu"))
    return [timing.median for timing in timings.values()]


def train(dataset: str, setting: dict[str, Any], *, seed: int, steps: int, config: Config) -> dict[str, Any]:
    """Run ``train.py`` once; the line of results."""
    every = 100
    steps = max(every, steps // every * every)
    flags = [word for name, value in setting.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    out = ROOT / "runs" / "quick_search"
    command = [sys.executable, str(ROOT / "train.py"), "quick", "--dataset", dataset, *flags]
    command += ["--steps", str(steps), "--seed", str(seed), "--threads", "1", "--out", str(out)]
    command += ["--log-every-steps", str(every), "--eval-every-steps", str(steps), "--save-every-steps", str(steps)]
    command += ["--spectrum-every-steps", "0", "--eval-episodes", str(config.episodes), "--warmup-steps", "200"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
    folder = Path(done.stdout.splitlines()[0].partition("run folder: ")[2])
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    scores = [value for name, value in last.items() if name.startswith("eval/normalized_return/")]
    spread = done.stdout.split("±")[2].split()[0]
    return {
        "dataset": dataset,
        **setting,
        "seed": seed,
        "seconds": config.seconds,
        "steps": steps,
        "score": round(scores[0], 1),
        "score_std": float(spread),
        "second_score": round(scores[1], 1),
        "action_mse": round(last["train/action_mse"], 5),
    }


def identity(line: dict[str, Any]) -> tuple[str, ...]:
    """What makes two lines the same experiment."""
    return tuple(str(line[name]) for name in ("dataset", *BASE, "seed", "seconds"))


def read(path: Path) -> list[dict[str, Any]]:
    """Results so far."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def search(config: Config) -> Iterator[dict[str, Any]]:
    """Run what has not been run yet, and yield its results as they come."""
    settings = [BASE | CHANGES[number] for number in config.settings]
    done = {identity(line) for line in read(config.out)}
    with ThreadPoolExecutor(config.jobs) as pool:
        futures = []
        for dataset in config.datasets:
            times = seconds_per_step(settings, dataset)
            for seed in config.seeds:
                for setting, each in zip(settings, times, strict=True):
                    line = {"dataset": dataset, **setting, "seed": seed, "seconds": config.seconds}
                    if identity(line) not in done:
                        steps = int(config.seconds / each)
                        futures.append(pool.submit(train, dataset, setting, seed=seed, steps=steps, config=config))
        for future in tqdm(as_completed(futures), total=len(futures), desc="search", unit=" runs", disable=None):
            yield future.result()


def main(config: Config) -> None:
    """Search, keep, and show what there is."""
    config.out.parent.mkdir(parents=True, exist_ok=True)
    for line in search(config):
        new = not config.out.exists()
        with config.out.open("a", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            if new:
                writer.writeheader()
            writer.writerow(line)
    lines = sorted(read(config.out), key=lambda line: (line["dataset"], -float(line["score"])))
    print(format_table(COLUMNS, [[line[name] for name in COLUMNS] for line in lines]))


if __name__ == "__main__":
    run_program(main, Config, name="benchmarks.quick_search", description=__doc__)
