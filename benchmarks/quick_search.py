"""Search for the preset ``quick``: the settings that learn most in a given time on a CPU.

Every setting of the grid trains for the same time. The search first times a training step of all settings alternately,
on two threads, and derives the number of steps of each. It then trains each setting with ``train.py`` on the built-in
data, with seeds that no reported result uses, and evaluates it at the last step.

Each result is appended to a CSV file as one line. An interrupted search resumes when it is started again.
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
from primal_dt.model.loss import Objective
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
"""The grid: one change to ``BASE`` at a time, except with AdamW, which has its own best learning rates."""
COLUMNS = ("dataset", *BASE, "seed", "seconds", "steps", "score", "score_std", "second_score", "action_mse")


@dataclass(frozen=True)
class Config:
    """Settings of the search."""

    seconds: float = 150.0
    """Training time of each setting in seconds, on two threads."""
    datasets: tuple[str, ...] = ("primal/hopper/medium-expert-v0",)
    """Data sets to train on."""
    seeds: tuple[int, ...] = (100,)
    """Training seeds. Do not use the seeds of published results."""
    settings: tuple[int, ...] = tuple(range(len(CHANGES)))
    """Settings to run, by their numbers in the grid, from 0."""
    jobs: int = 2
    """Number of parallel runs, one thread each."""
    episodes: int = 20
    """Evaluation episodes per target return-to-go."""
    out: Path = ROOT / "benchmarks" / "results" / "quick_search.csv"
    """CSV file for the results."""


def seconds_per_step(settings: list[dict[str, Any]], dataset_name: str) -> list[float]:
    """Time a training step of each setting, alternately, on two threads."""
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
        trainer = Trainer(
            DecisionTransformer(shape), sampler, optimizer, objective=Objective(), seed=0, log_every_steps=1
        )
        points = iter(trainer)
        calls[str(number)] = lambda points=points: next(points)
    timings = time_interleaved(calls, seconds=1.0, device=torch.device("cpu"))
    return [timing.median for timing in timings.values()]


def train(dataset: str, setting: dict[str, Any], *, seed: int, steps: int, config: Config) -> dict[str, Any]:
    """Run ``train.py`` once and return its line of results."""
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
    """The fields that identify an experiment."""
    return tuple(str(line[name]) for name in ("dataset", *BASE, "seed", "seconds"))


def read(path: Path) -> list[dict[str, Any]]:
    """Read the results so far."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def search(config: Config) -> Iterator[dict[str, Any]]:
    """Run the settings that have no result yet, and yield each result as it finishes."""
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
    """Search, save each result, and print all results."""
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
