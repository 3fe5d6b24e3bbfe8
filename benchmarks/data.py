"""Speed of the data layer: recording and loading data sets, and sampling batches.

The loaded data is noise with HalfCheetah's state and action widths, as a file in D4RL's layout and as a Minari data
set. Each load runs in a fresh process. First loads (check, convert and store) and second loads (memory-map the stored
copy) alternate. Memory is the peak resident memory of the process above its memory before the load.
"""

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
import torch
from tqdm import tqdm

from benchmarks.measure import peak_memory_mib, run_alone, time_interleaved
from benchmarks.program import run_program, save_report
from envs.behavior.policies import load_policy
from envs.behavior.record import run_episode
from envs.datasets.load import load_dataset
from envs.datasets.minari import RecordedEpisode, write_minari
from envs.make import make_environment
from envs.tasks import ENVIRONMENTS, Task, task_of
from primal_dt.data.sampler import WindowSampler
from primal_dt.system.table import format_table

EPISODE = 1000


@dataclass(frozen=True)
class Config:
    """Settings of the benchmark."""

    steps: int = 1_000_000
    """Transitions in the synthetic data set."""
    rounds: int = 3
    """Number of measurements of each load."""
    record_seconds: float = 10.0
    """Seconds to record in each environment."""
    out: Path = Path("runs/benchmarks")
    """Folder for data.json."""
    sampler_seconds: float = 3.0
    """Seconds to time each sampler."""


def record_rates(seconds: float) -> Iterator[list[str]]:
    """Measure recording in one process with the expert policies, one episode per environment in turn."""
    tasks = [task_of(f"{environment.gymnasium_name}-v5") for environment in ENVIRONMENTS.values()]
    made = {
        task.env_id: (make_environment(task), load_policy(f"{task.environment.name}/expert", task)) for task in tasks
    }
    spent = dict.fromkeys(made, 0.0)
    steps = dict.fromkeys(made, 0)
    seed = 0
    while min(spent.values()) < seconds:
        seed += 1
        for name, (env, policy) in made.items():
            start = time.perf_counter()
            steps[name] += len(run_episode(env, policy, seed=seed).rewards)
            spent[name] += time.perf_counter() - start
    for name in made:
        rate = steps[name] / spent[name]
        yield [name, f"{rate:,.0f}", f"{100_000 / rate:.0f}"]


def synthetic_episodes(num_steps: int, task: Task) -> Iterator[RecordedEpisode]:
    """Generate noise in the shape of an environment's data."""
    random, width = np.random.default_rng(0), task.environment
    for number in tqdm(range(num_steps // EPISODE), desc="writing", unit=" episodes", leave=False, disable=None):
        yield RecordedEpisode(
            observations=random.standard_normal((EPISODE + 1, width.state_width)),
            actions=random.uniform(-1, 1, (EPISODE, width.action_width)).astype(np.float32),
            rewards=random.standard_normal(EPISODE),
            terminated=False,
            truncated=True,
            seed=number,
        )


def write_d4rl(path: Path, num_steps: int, task: Task) -> None:
    """Write the same noise to a file in D4RL's layout, compressed as D4RL's files are."""
    widths = {"observations": (task.environment.state_width,), "actions": (task.environment.action_width,)}
    with h5py.File(path, "w") as file:
        for key in ("observations", "actions", "rewards", "terminals", "timeouts"):
            dtype = "?" if key in ("terminals", "timeouts") else "<f4"
            file.create_dataset(key, (num_steps, *widths.get(key, ())), dtype, chunks=True, compression="gzip")
        file.attrs["env_id"] = task.env_id
        for number, episode in enumerate(synthetic_episodes(num_steps, task)):
            rows = slice(number * EPISODE, (number + 1) * EPISODE)
            file["observations"][rows] = episode.observations[:-1]
            file["actions"][rows] = episode.actions
            file["rewards"][rows] = episode.rewards
            file["timeouts"][rows.stop - 1] = True


def timed_load(name: str) -> tuple[float, float]:
    """Load a data set and return the seconds and the peak MiB, without the time of imports."""
    seconds = 0.0

    def load() -> None:
        nonlocal seconds
        start = time.perf_counter()
        load_dataset(name)
        seconds = time.perf_counter() - start

    memory = peak_memory_mib(lambda: None, load, torch.device("cpu"))
    return seconds, memory


def load_times(names: dict[str, str], cache: Path, rounds: int) -> Iterator[list[str]]:
    """Measure the first and the second load of each data set."""
    seen: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for _ in tqdm(range(rounds), desc="loading", leave=False, disable=None):
        shutil.rmtree(cache, ignore_errors=True)
        for turn in ("first", "second"):
            for label, name in names.items():
                seen.setdefault((label, turn), []).append(run_alone(timed_load, name))
    for (label, turn), values in seen.items():
        times, memory = zip(*values, strict=True)
        spread = f"{min(times):.2f} to {max(times):.2f}"
        yield [f"{label}, {turn}", f"{statistics.median(times):.2f}", spread, f"{statistics.median(memory):.0f}"]


def sampler_times(name: str, seconds: float) -> Iterator[list[str]]:
    """Measure the milliseconds per batch of 64 windows of 20 steps, for each weighting."""
    dataset = load_dataset(name)
    samplers = {
        weighting: WindowSampler(
            dataset.trajectories, dataset.normalizer, context=20, batch_size=64, seed=0, weighting=weighting
        )
        for weighting in ("transitions", "length", "return")
    }
    steps = iter(range(10**9))
    calls = {label: lambda sampler=sampler: sampler.batch(next(steps)) for label, sampler in samplers.items()}
    timings = time_interleaved(calls, seconds=seconds, device=torch.device("cpu"))
    for label, timing in timings.items():
        quartiles = f"{1e3 * timing.lower_quartile:.2f} to {1e3 * timing.upper_quartile:.2f}"
        yield [label, f"{1e3 * timing.median:.2f}", quartiles]


def main(config: Config) -> None:
    """Measure the data layer and print the tables."""
    rates = list(record_rates(config.record_seconds))
    report = ["Recording with the expert policies in one process:"]
    report += [format_table(["environment", "steps per second", "seconds per 100,000"], rates)]
    task = task_of("HalfCheetah-v5")
    with tempfile.TemporaryDirectory(prefix="primal-dt-benchmark-") as folder:
        root = Path(folder)
        os.environ |= {"PRIMAL_DT_CACHE": str(root / "cache"), "MINARI_DATASETS_PATH": str(root / "minari")}
        write_d4rl(root / "synthetic.hdf5", config.steps, task)
        episodes = synthetic_episodes(config.steps, task)
        write_minari("synthetic/noise-v0", episodes, task=task, algorithm="none", description="noise", metadata={})
        names = {"D4RL file": str(root / "synthetic.hdf5"), "Minari": "synthetic/noise-v0"}
        loads = list(load_times(names, root / "cache", config.rounds))
        report += [f"Loading {config.steps:,} transitions, each load in a fresh process, {config.rounds} rounds:"]
        report += [format_table(["load", "seconds", "range", "peak memory, MiB"], loads)]
        times = list(sampler_times(names["D4RL file"], config.sampler_seconds))
        report += ["Drawing a batch of 64 windows of 20 steps from them:"]
        report += [format_table(["weighting", "milliseconds per batch", "quartiles"], times)]
    text = "\n\n".join(report)
    print(text)
    save_report(config.out / "data.json", text, {"record": rates, "load": loads, "sample": times})
    print(f"\nSaved data.json in {config.out}")


if __name__ == "__main__":
    run_program(main, Config, name="benchmarks.data", description=__doc__)
