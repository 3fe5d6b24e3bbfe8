"""What sweep.py costs: the jobs of the demo run by it, and the same programs started by hand, as many at a time.

By hand means: each job's train.py and then its evaluate.py as plain processes, with the threads that a job has, the
next one as soon as there is a core for it; then evaluate.py over all runs for the report. The two take turns.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import sweep
from benchmarks.program import run_program
from primal_dt.sweep.estimate import this_machine
from primal_dt.sweep.job import Job

BAR = 5.0
"""Percent that a sweep may take longer."""


@dataclass(frozen=True)
class Config:
    """How often to measure."""

    repeats: int = 1
    """Turns: each is both, some four minutes each on two cores."""
    flags: tuple[str, ...] = ()
    """For sweep.py demo, besides: --flags="--steps" 200, say."""

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ValueError(f"repeats ({self.repeats}) must be at least 1")


def by_sweep(folder: Path, flags: tuple[str, ...]) -> None:
    """One command."""
    check([sys.executable, str(Path(sweep.__file__)), "demo", *flags, "--out", str(folder)], folder, dict(os.environ))


def by_hand(folder: Path, flags: tuple[str, ...]) -> None:
    """Two commands for each job, and one for the report."""
    config, jobs = sweep.parse(["demo", *flags, "--out", str(folder)])
    programs = sweep.programs()

    def both(job: Job) -> None:
        for command in (job.training_command(programs.train), job.evaluation_command(programs.evaluate)):
            check(command, folder, job.environment(programs.variables))

    with ThreadPoolExecutor(this_machine().room_for(config.resources)) as places:
        list(places.map(both, jobs))
    report = ["--episodes", str(jobs[0].episodes), "--device", "cpu", "--out", str(folder / "report")]
    runs = [str(job.folder) for job in jobs]
    check([sys.executable, str(programs.evaluate), *runs, *report], folder, dict(os.environ))


def check(command: list[str], folder: Path, environment: dict[str, str]) -> None:
    """Run a program; what it prints goes to a file.

    Raises:
        ValueError: if it fails.
    """
    with (folder / "printed.log").open("ab") as log:
        if subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment).returncode:
            raise ValueError(f"{' '.join(command[1:3])} failed: {(folder / 'printed.log').read_text()[-2000:]}")


def main(config: Config) -> None:
    """Measure, print."""
    ways = {"sweep.py": by_sweep, "by hand": by_hand}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory(prefix="primal-dt-overhead-") as folder:
        sweep.parse(["demo", *config.flags, "--out", folder])  # the data is recorded and converted before
    for turn in range(config.repeats):
        for name, run in list(ways.items())[:: -1 if turn % 2 else 1]:
            with tempfile.TemporaryDirectory(prefix="primal-dt-overhead-") as folder:
                begin = time.monotonic()
                run(Path(folder), config.flags)
                seconds[name].append(time.monotonic() - begin)
            print(f"{name}: {seconds[name][-1]:.1f} s", flush=True)
    ratios = [swept / plain for swept, plain in zip(seconds["sweep.py"], seconds["by hand"], strict=True)]
    overhead = 100 * (statistics.median(ratios) - 1)
    print(
        f"* [{'met' if overhead <= BAR else 'MISSED'}] overhead of a sweep: {overhead:.1f} % (bar: at most {BAR:g} %)"
    )


if __name__ == "__main__":
    run_program(main, Config, name="benchmarks.sweep_overhead", description=__doc__)
