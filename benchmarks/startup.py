"""Time of ``train.py`` from the command to its first training step, on a million transitions.

The data set is noise with HalfCheetah's state and action widths, in D4RL's file layout. The first run checks, converts
and stores it. The later runs memory-map the stored copy.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.data import write_d4rl
from benchmarks.program import run_program, save_report
from envs.tasks import task_of
from primal_dt.system.table import format_table

PROGRAM = Path(__file__).parent.parent / "train.py"
FLAGS = {"steps": 1, "log-every-steps": 1, "save-every-steps": 1, "eval-every-steps": 0, "spectrum-every-steps": 0}
BAR = 5.0


@dataclass(frozen=True)
class Config:
    """Settings of the benchmark."""

    steps: int = 1_000_000
    """Transitions in the data set."""
    runs: int = 5
    """Runs after the first one, with the data set already stored."""
    out: Path = Path("runs/benchmarks")
    """Folder for startup.json."""

    def __post_init__(self) -> None:
        if self.steps < 1_000 or self.runs < 1:
            raise ValueError("steps must be at least 1,000 and runs at least 1")


def seconds_to_first_step(data: Path, folder: Path) -> float:
    """Measure the seconds from the command to the line that reports the first step.

    Raises:
        ChildProcessError: if train.py does not print that line. The message has the end of its output.
    """
    flags = [word for name, value in FLAGS.items() for word in (f"--{name}", str(value))]
    start = time.perf_counter()
    seconds: float | None = None
    printed: list[str] = []
    with subprocess.Popen(
        [sys.executable, PROGRAM, "--dataset", data, "--out", folder / "runs", *flags],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PRIMAL_DT_CACHE": str(folder / "cache")},
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            printed.append(line)
            if seconds is None and line.startswith("step 1 of 1"):
                seconds = time.perf_counter() - start
    if seconds is None:
        raise ChildProcessError(f"train.py made no step: {''.join(printed).strip()[-500:]}")
    return seconds


def main(config: Config) -> None:
    """Measure, print, save."""
    with tempfile.TemporaryDirectory(prefix="primal-dt-benchmark-") as name:
        folder = Path(name)
        data = folder / "noise.hdf5"
        write_d4rl(data, config.steps, task_of("HalfCheetah-v5"))
        first, *later = [seconds_to_first_step(data, folder) for _ in range(1 + config.runs)]
    median = statistics.median(later)
    rows = [
        ["first run, which stores the data", f"{first:.1f}", ""],
        [f"{len(later)} later runs, median", f"{median:.1f}", f"{min(later):.1f} to {max(later):.1f}"],
    ]
    report = format_table(["from the command to the first step", "seconds", "range"], rows)
    mark = "met" if median <= BAR else "MISSED"
    report += f"\n\n* [{mark}] first step after {median:.1f} s (bar: at most {BAR:.0f} s)"
    print(report)
    raw = {"transitions": config.steps, "first": first, "later": later}
    save_report(config.out / "startup.json", report, raw)
    print(f"\nSaved startup.json in {config.out}")


if __name__ == "__main__":
    run_program(main, Config, name="benchmarks.startup", description=__doc__)
