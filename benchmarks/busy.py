"""Speed on a machine with other work: training and evaluation beside busy processes, and d3rlpy under the same load.

Each subject runs in its own process. While one is measured, the others wait. The load is a number of
processes that compute without pause. The fair share is what the scheduler gives to a program of as many threads as
there are cores: cores / (cores + busy processes) of its quiet rate. "spinning" is the same program with the threads of
OpenMP waiting actively, which is their default outside this project's programs.
"""

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import platformdirs
import torch
from tqdm import tqdm

from benchmarks.program import run_program, save_report
from benchmarks.workers import Job, Worker, environment_python, ours, working, write_episodes
from primal_dt.system.start import PASSIVE
from primal_dt.system.table import format_table

BAR = 0.70
"""Least share of the fair share, at every load."""
ACTIVE = {"OMP_WAIT_POLICY": "ACTIVE"}
OURS = ("training", "evaluation")


@dataclass(frozen=True)
class Config:
    """Settings of the benchmark."""

    loads: tuple[int, ...] = (0, 2, 4, 8)
    """Numbers of busy processes. The first must be 0: the quiet rate."""
    seconds: float = 8.0
    """Seconds of each measurement, after a tenth of them."""
    rounds: int = 3
    """Measurements of each subject at each load. The median is reported."""
    peer: bool = True
    """Also measure d3rlpy, in its own virtual environment."""
    width: int = 128
    """Model width."""
    context: int = 10
    """Context length K in environment steps."""
    environments: Path = Path(platformdirs.user_cache_dir("primal-dt")) / "peers"
    """Folder for the virtual environment of d3rlpy. Later runs reuse it."""
    threads: int = torch.get_num_threads()
    """Torch threads in each process."""
    out: Path = Path("runs/benchmarks")
    """Folder for busy.json."""

    def __post_init__(self) -> None:
        if self.loads[:1] != (0,) or len(set(self.loads)) < len(self.loads) or min(self.loads) < 0:
            raise ValueError(f"loads must be different numbers, the first of them 0, not {list(self.loads)}")
        if min(self.rounds, self.threads, self.width, self.context) < 1 or not 0 < self.seconds < 3600:
            raise ValueError("rounds, threads, width and context must be at least 1, and seconds above 0")


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def fair_share(load: int) -> float:
    """The share of its quiet rate that a program of as many threads as cores has beside busy processes."""
    return num_cores() / (num_cores() + load)


def spin() -> None:
    """Compute without pause."""
    while True:
        sum(range(10_000))


@contextmanager
def busy(number: int) -> Iterator[None]:
    """Run busy processes meanwhile."""
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=spin, daemon=True) for _ in range(number)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def rate(worker: Worker, seconds: float) -> float:
    """Steps per second of a worker, in a row."""
    deadline = time.perf_counter() + seconds / 10
    while time.perf_counter() < deadline:
        worker.ask("step")
    steps, begin = 0, time.perf_counter()
    while (took := time.perf_counter() - begin) < seconds or not steps:
        worker.ask("step")
        steps += 1
    return steps / took


def jobs(config: Config) -> list[Job]:
    """The subjects."""
    python = ours("primal-plus").python
    rollouts = Job("evaluation", python, "with_rollouts.py", {"attention": "primal-plus"}, PASSIVE)
    training = Job("training", python, "with_primal_dt.py", {"attention": "primal-plus", "optimizer": "muon"}, PASSIVE)
    found = [training, rollouts]
    found += [
        Job(f"{job.name}, spinning", job.python, job.program, job.options, ACTIVE) for job in (training, rollouts)
    ]
    if config.peer:
        found.append(Job("d3rlpy", environment_python("d3rlpy", config.environments), "with_d3rlpy.py", {}))
    return found


Rates = dict[str, dict[int, list[float]]]
"""Subject -> load -> steps per second of each round."""


def measure(config: Config) -> Rates:
    """Measure all subjects at all loads, round after round."""
    rates: Rates = {}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "episodes.npz"
        write_episodes(data)
        sizes = {"threads": config.threads, "width": config.width, "num_heads": 1, "context": config.context}
        with working(jobs(config), data, **sizes) as workers:
            turns = [(load, worker) for _ in range(config.rounds) for load in config.loads for worker in workers]
            for load, worker in tqdm(turns, desc="busy", leave=False, disable=None):
                with busy(load):
                    found = rate(worker, config.seconds)
                rates.setdefault(worker.name, {}).setdefault(load, []).append(found)
    return rates


def table(rates: Rates) -> str:
    """Steps per second, and the share of the fair share, by subject and load."""
    rows = []
    for name, by_load in rates.items():
        quiet = statistics.median(by_load[0])
        for load, seen in by_load.items():
            median, fair = statistics.median(seen), quiet * fair_share(load)
            rows.append([name, str(load), f"{median:.2f}", f"{fair:.2f}", f"{100 * median / fair:.0f} %"])
    return format_table(["subject", "busy processes", "steps/s", "fair share", "of it"], rows)


def findings(rates: Rates) -> list[str]:
    """Whether training and evaluation have their share at every load, and whether passive waiting costs speed."""
    lines = []
    for name in OURS:
        quiet = statistics.median(rates[name][0])
        least = min(statistics.median(seen) / (quiet * fair_share(load)) for load, seen in rates[name].items())
        verdict = "met" if least >= BAR else "MISSED"
        lines.append(f"* [{verdict}] {name}: at least {100 * least:.0f} % of the fair share (bar: {100 * BAR:.0f} %)")
        ratio = quiet / statistics.median(rates[f"{name}, spinning"][0])
        lines.append(f"* {name}: when quiet, {ratio:.2f} times as fast as with spinning threads")
    return lines


def main(config: Config) -> None:
    """Measure, print, save."""
    rates = measure(config)
    report = "\n".join([table(rates), "", *findings(rates)])
    print(report)
    raw = {name: {str(load): seen for load, seen in by_load.items()} for name, by_load in rates.items()}
    save_report(config.out / "busy.json", report, {"cores": num_cores(), "rates": raw})
    print(f"\nSaved {config.out / 'busy.json'}")


if __name__ == "__main__":
    run_program(main, Config, name="benchmarks.busy", description=__doc__)
