"""Search for the preset ``quick``, by successive halving over several tasks.

The rule, which was written down before any result was seen:

1. Each setting is a change to ``BASE``, the ``quick`` of the time of the search. All settings train for the same time:
   a step of each is timed first, alternately, on two threads, and the number of steps follows from it.
2. Round 1: every setting, on walker2d medium-expert and hopper medium-replay, one seed, for 100 seconds.
3. Round 2: the best three and the base, on medium-expert and medium-replay of all three environments, two
   other seeds, for 150 seconds.
4. A setting's score is the mean over tasks and seeds of the normalized return at the headline target, by the last
   checkpoint, over 20 episodes. The setting with the highest score in round 2 becomes ``quick``.

The data sets are built in. No reported result uses the seeds of the search, which are 100 to 102.

Each result is appended to a CSV file as one line. An interrupted search resumes when it is started again, and so does
each of its runs.
"""

import csv
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.measure import time_interleaved
from benchmarks.program import run_program
from envs.datasets.load import load_dataset
from envs.tasks import ENVIRONMENTS
from primal_dt.data.sampler import WindowSampler
from primal_dt.model.loss import Objective
from primal_dt.model.transformer import DecisionTransformer
from primal_dt.system.files import atomic_write
from primal_dt.system.provenance import commit
from primal_dt.system.table import format_table
from primal_dt.training.arguments import parse_config
from primal_dt.training.metrics_log import read_metrics
from primal_dt.training.trainer import Trainer

ROOT = Path(__file__).parent.parent
PRESENT = "present"
BASE: Mapping[str, Any] = {
    "width": 128,
    "num_heads": 1,
    "num_layers": 3,
    "context": 10,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "action_dropout": 0.0,
    "init": "small",
    "action_loss": "mse",
    "optimizer": "muon",
    "lr": 3e-3,
    "warmup_steps": 200,
    "schedule": "cosine",
    "batch_size": 64,
    "clip": 0.25,
    "weight_decay": 1e-4,
    "sampling": "transitions",
}
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    PRESENT: {},
    "published start": {"init": "published"},
    "dropout 0.1": {"dropout": 0.1, "attention_dropout": 0.1},
    "weight decay 0.1": {"weight_decay": 0.1},
    "sampling by return": {"sampling": "return"},
    "likelihood": {"action_loss": "gaussian"},
    "width 256": {"width": 256},
    "actions hidden in half of the windows": {"action_dropout": 0.5},
    "context 20": {"context": 20},
    "context 5": {"context": 5, "batch_size": 128},
    "context 5, actions hidden": {"context": 5, "batch_size": 128, "action_dropout": 0.5},
    "context 2": {"context": 2, "batch_size": 320},
    "context 2, batches of 128": {"context": 2, "batch_size": 128},
    "context 2, published start": {"context": 2, "batch_size": 320, "init": "published"},
    "context 2, dropout 0.1": {"context": 2, "batch_size": 320, "dropout": 0.1, "attention_dropout": 0.1},
    "context 2, likelihood": {"context": 2, "batch_size": 320, "action_loss": "gaussian"},
    "context 2, sampling by return": {"context": 2, "batch_size": 320, "sampling": "return"},
    "context 2, width 256": {"context": 2, "batch_size": 320, "width": 256},
    "context 2, learning rate 0.001": {"context": 2, "batch_size": 320, "lr": 1e-3},
    "context 2, AdamW": {"context": 2, "batch_size": 320, "optimizer": "adamw", "lr": 1e-3},
    "context 1": {"context": 1, "batch_size": 640},
    "gradients up to norm 1": {"clip": 1.0},
    "likelihood, gradients up to norm 10": {"action_loss": "gaussian", "clip": 10.0},
    "context 1, dropout 0.1": {"context": 1, "batch_size": 640, "dropout": 0.1, "attention_dropout": 0.1},
    "context 1, likelihood, gradients up to norm 10": {
        "context": 1,
        "batch_size": 640,
        "action_loss": "gaussian",
        "clip": 10.0,
    },
}
"""Name -> flags that change ``BASE``."""
COLUMNS = ("round", "setting", "dataset", "seed", "steps", "score", "sensitivity", "action_mse", "commit")
MULTIPLE = 100
"""Numbers of steps are multiples of this, the interval of logging points."""


@dataclass(frozen=True)
class Round:
    """A round of the search."""

    number: int
    seconds: float
    """Training time of each run, on two threads."""
    datasets: tuple[str, ...]
    seeds: tuple[int, ...]


ROUNDS = (
    Round(1, 100.0, ("primal/walker2d/medium-expert-v0", "primal/hopper/medium-replay-v0"), (100,)),
    Round(
        2,
        150.0,
        tuple(f"primal/{name}/{tier}-v0" for name in ENVIRONMENTS for tier in ("medium-expert", "medium-replay")),
        (101, 102),
    ),
)
NUM_SURVIVORS = 3


@dataclass(frozen=True)
class Config:
    """Settings of the search."""

    jobs: int = 2
    """Number of parallel runs, one thread each."""
    episodes: int = 20
    """Evaluation episodes of each run."""
    out: Path = ROOT / "benchmarks" / "results" / "quick_search.csv"
    """CSV file for the results. The times of a step are stored beside it, as JSON."""
    runs: Path = ROOT / "runs" / "quick_search"
    """Folder of the runs."""


def flags_of(setting: str) -> list[str]:
    """The flags of ``train.py`` for a setting."""
    words = []
    for name, value in {**BASE, **SETTINGS[setting]}.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    return words


def step_times(path: Path) -> dict[str, float]:
    """Seconds of a training step of each setting, on two threads. They are measured once, and then read from a file."""
    times: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}
    if times.keys() >= SETTINGS.keys():
        return times
    torch.set_num_threads(2)
    dataset = load_dataset(ROUNDS[0].datasets[0])
    calls = {}
    for setting in SETTINGS:
        config = parse_config(["quick", *flags_of(setting)])
        sampler = WindowSampler(
            dataset.trajectories,
            dataset.normalizer,
            context=config.model.context,
            batch_size=config.optimizer.batch_size,
            seed=0,
        )
        trainer = Trainer(
            DecisionTransformer(dataset.model_shape(config.model)).train(),
            sampler,
            replace(config.optimizer, steps=10**9),
            objective=Objective(eta=config.model.eta),
            seed=0,
            log_every_steps=1,
        )
        calls[setting] = partial(update, trainer)
    timings = time_interleaved(calls, seconds=1.0, device=torch.device("cpu"))
    times = {setting: timing.median for setting, timing in timings.items()}
    with atomic_write(path) as file:
        file.write(json.dumps(times, indent=1).encode())
    return times


def update(trainer: Trainer) -> None:
    """Perform one training step, with the batch that belongs to it."""
    trainer.update(trainer.sampler.batch(trainer.step))


def train(line: dict[str, Any], config: Config) -> dict[str, Any]:
    """Run ``train.py`` once and return its line of results."""
    steps = str(line["steps"])
    name = f"{line['round']}__{line['setting']}__{line['dataset']}__s{line['seed']}".replace("/", "-")
    command = [sys.executable, str(ROOT / "train.py"), "quick", *flags_of(line["setting"])]
    command += ["--dataset", line["dataset"], "--seed", str(line["seed"]), "--steps", steps, "--threads", "1"]
    command += ["--eval-every-steps", steps, "--save-every-steps", steps, "--spectrum-every-steps", "0"]
    command += ["--log-every-steps", str(MULTIPLE), "--eval-episodes", str(config.episodes)]
    command += ["--targets", str(ENVIRONMENTS[line["dataset"].split("/")[1]].targets[0])]  # the headline target only
    command += ["--out", str(config.runs), "--name", name]
    if (config.runs / name / "config.json").exists():  # an interrupted search left it, finished or not
        command = [sys.executable, str(ROOT / "train.py"), "--resume", str(config.runs / name)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    if done.returncode:
        raise ValueError(f"a run of the search failed: {' '.join(command)}\n{done.stderr}")
    last = read_metrics(config.runs / name)[-1]
    return line | {
        "score": round(last["eval/normalized_return"], 1),
        "sensitivity": round(last["train/return_sensitivity"], 3),
        "action_mse": round(last["train/action_mse"], 4),
        "commit": commit(),
    }


def identity(line: Mapping[str, Any]) -> tuple[str, ...]:
    """The fields that identify a run."""
    return tuple(str(line[name]) for name in ("round", "setting", "dataset", "seed"))


def read(path: Path) -> list[dict[str, Any]]:
    """Read the results so far."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def append(path: Path, line: Mapping[str, Any]) -> None:
    """Add a result to the file."""
    new = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if new:
            writer.writeheader()
        writer.writerow(line)


def scores(lines: Sequence[Mapping[str, Any]], number: int) -> dict[str, float]:
    """Setting -> mean score in a round, the best first."""
    by_setting: dict[str, list[float]] = {}
    for line in lines:
        if int(line["round"]) == number:
            by_setting.setdefault(line["setting"], []).append(float(line["score"]))
    means = {setting: statistics.mean(values) for setting, values in by_setting.items()}
    return dict(sorted(means.items(), key=lambda item: -item[1]))


def survivors(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """The settings of round 2: the best of round 1 other than the present one, and the present one."""
    ranked = [setting for setting in scores(lines, 1) if setting != PRESENT]
    return [PRESENT, *ranked[:NUM_SURVIVORS]]


def run_round(round_: Round, settings: Sequence[str], times: Mapping[str, float], config: Config) -> None:
    """Run what has no result yet in a round, and save each result as it finishes."""
    lock = Lock()

    def run(line: dict[str, Any]) -> None:
        result = train(line, config)
        with lock:
            append(config.out, result)

    done = {identity(line) for line in read(config.out)}
    lines = [
        {
            "round": round_.number,
            "setting": setting,
            "dataset": dataset,
            "seed": seed,
            "steps": max(1, int(round_.seconds / times[setting] / MULTIPLE)) * MULTIPLE,
        }
        for dataset in round_.datasets
        for seed in round_.seeds
        for setting in settings
    ]
    with ThreadPoolExecutor(config.jobs) as pool:
        futures = [pool.submit(run, line) for line in lines if identity(line) not in done]
        try:
            for future in tqdm(as_completed(futures), total=len(futures), desc=f"round {round_.number}", disable=None):
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # the runs that have begun can be resumed
            raise


def main(config: Config) -> None:
    """Run both rounds, and print their results."""
    times = step_times(config.out.with_suffix(".json"))
    for round_ in ROUNDS:
        settings = list(SETTINGS) if round_.number == 1 else survivors(read(config.out))
        run_round(round_, settings, times, config)
        means = scores(read(config.out), round_.number)
        rows = [[setting, f"{mean:.1f}", f"{1000 * times[setting]:.0f}"] for setting, mean in means.items()]
        print(f"\n{format_table([f'round {round_.number}', 'score', 'ms per step'], rows)}")
    print(f"\nchosen: {next(iter(scores(read(config.out), 2)))}")


if __name__ == "__main__":
    run_program(main, Config, name="benchmarks.quick_search", description=__doc__)
