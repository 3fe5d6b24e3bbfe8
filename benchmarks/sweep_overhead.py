"""Overhead of sweep.py: the jobs of its demo, run by sweep.py and by hand.

By hand means that each job's train.py and then its evaluate.py run as plain processes, with the number of threads of a
job. The number of parallel jobs is that of the sweep, and the next job starts as soon as cores are free. At the end,
evaluate.py writes the report on all runs. The two ways alternate.
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
"""Maximum overhead of a sweep in percent."""


@dataclass(frozen=True)
class Config:
    """Settings of the benchmark."""

    repeats: int = 1
    """Number of repeats. Each runs both ways, about four minutes each on two cores."""
    flags: tuple[str, ...] = ()
    """Additional flags of sweep.py demo, for example --flags="--steps" 200."""

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ValueError(f"repeats ({self.repeats}) must be at least 1")


def by_sweep(folder: Path, flags: tuple[str, ...]) -> None:
    """Run the demo with one command, sweep.py."""
    check([sys.executable, str(Path(sweep.__file__)), "demo", *flags, "--out", str(folder)], folder, dict(os.environ))


def by_hand(folder: Path, flags: tuple[str, ...]) -> None:
    """Run two commands for each job, and one for the report."""
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
    """Run a program and append its output to printed.log in the folder.

    Raises:
        ValueError: if the program fails.
    """
    with (folder / "printed.log").open("ab") as log:
        if subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment).returncode:
            raise ValueError(f"{' '.join(command[1:3])} failed: {(folder / 'printed.log').read_text()[-2000:]}")


def main(config: Config) -> None:
    """Measure and print."""
    ways = {"sweep.py": by_sweep, "by hand": by_hand}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory(prefix="primal-dt-overhead-") as folder:
        sweep.parse(["demo", *config.flags, "--out", folder])  # records and converts the data before the timing
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
