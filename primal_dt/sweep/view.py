"""The display of a running sweep: a table that is redrawn in a terminal, plain lines elsewhere."""

import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import TextIO

from primal_dt.sweep.job import Job, JobRecord
from primal_dt.system.terminal import SECONDS_BETWEEN_LINES
from primal_dt.training.scalars import score_text

__all__ = ["SweepView", "counts"]

REDRAW_SECONDS = 2.0
LEAST_ROWS, OTHER_LINES = 3, 5
"""Minimum number of job rows in the terminal's table, and number of lines reserved for everything else."""


def counts(records: Sequence[JobRecord]) -> str:
    """Count the jobs in each state, as in ``3 queued, 2 running, 1 done, 0 failed``."""
    number = Counter("running" if record.is_running else record.state for record in records)
    shown = [f"{number[state]} {state}" for state in ("queued", "running", "done", "failed")]
    return ", ".join([*shown, *([f"{number['stopped']} stopped"] if number["stopped"] else [])])


class SweepView:
    """Shows the progress of a sweep's jobs.

    Args:
        jobs: all jobs of the sweep, including those that are already done.
        out: the stream to write to.
    """

    def __init__(self, jobs: Sequence[Job], out: TextIO = sys.stderr) -> None:
        self._jobs = jobs
        self._out = out
        self._is_terminal = out.isatty()
        self._begin = time.monotonic()
        self._last_drawn = self._last_line = -1e9
        self._drawn_lines = 0
        self._why = ""
        self._shown: dict[str, tuple[str, int]] = {}

    def poll(self) -> None:
        """Read the jobs' records and show them, at most once every ``REDRAW_SECONDS``."""
        if time.monotonic() - self._last_drawn < REDRAW_SECONDS:
            return
        self._last_drawn = time.monotonic()
        try:
            self._show()
        except BrokenPipeError:  # the reader is gone: the sweep should stop
            raise
        except OSError:  # a shared file system may fail for a moment; the next poll may succeed
            return

    def wait(self, why: str) -> None:
        """Set the reason why no job is running, or ``""`` if one is."""
        if why and why != self._why and not self._is_terminal:
            self._print(f"{self._clock()}  {why}")
        self._why = why

    def _show(self) -> None:
        records = {job.name: job.record for job in self._jobs}
        if self._is_terminal:
            self._draw(self._table(records).splitlines())
            return
        for job in self._jobs:
            self._report_change(job, records[job.name])
        if time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            self._print(f"{self._clock()}  {counts(list(records.values()))}{self._steps(records)}")

    def end(self, job: Job, record: JobRecord) -> None:
        """Show at once that a job is done or has failed for the last time."""
        self._last_drawn = -1e9
        if not self._is_terminal:
            self._report_change(job, record)

    def close(self) -> None:
        """Show the final state, and leave it on the screen."""
        self._last_drawn = -1e9
        self._last_line = -1e9
        self.poll()
        self._drawn_lines = 0

    def _table(self, records: dict[str, JobRecord]) -> str:
        """Format the jobs that fit on the screen, running ones first. Long names are cut at the start."""
        order = {"training": 0, "evaluating": 0, "failed": 1, "stopped": 2, "done": 3, "queued": 4}
        jobs = sorted(self._jobs, key=lambda job: order[records[job.name].state])
        size = shutil.get_terminal_size()
        room = max(LEAST_ROWS, size.lines - OTHER_LINES)
        header = ("state", f"step of {jobs[0].config.optimizer.steps:,}", "score", "job")
        rows = [header, *(self._row(job, records[job.name]) for job in jobs[:room])]
        first, second, third = (max(len(row[column]) for row in rows) for column in range(3))
        lines = [f"{self._clock()}  {counts(list(records.values()))}", self._why]
        for state, step, score, job in rows:
            line = f"{state:{first}}  {step:>{second}}  {score:>{third}}  "
            left = max(size.columns - 1 - len(line), 2)
            lines.append(line + (job if len(job) <= left else f"…{job[1 - left :]}"))
        lines += [f"... and {len(jobs) - room} more"] if len(jobs) > room else []
        return "\n".join(lines)

    def _row(self, job: Job, record: JobRecord) -> tuple[str, str, str, str]:
        step, score = job.progress()
        score = score if record.score is None else score_text(record.score, is_plain=record.is_plain)
        again = f", attempt {record.attempts}" if record.attempts > 1 else ""
        name = job.name.removesuffix(f"__{job.identity}")
        return record.state + again, f"{step:,}", score.removeprefix("score "), name

    def _draw(self, lines: list[str]) -> None:
        size = shutil.get_terminal_size()
        lines = [line[: size.columns - 1] for line in lines[: size.lines - 1]]
        up = f"\x1b[{self._drawn_lines}A" if self._drawn_lines else ""
        self._out.write(up + "".join(f"\x1b[2K{line}\n" for line in lines) + "\x1b[J")
        self._out.flush()
        self._drawn_lines = len(lines)

    def _report_change(self, job: Job, record: JobRecord) -> None:
        """Print a line if the job's state or attempt has changed."""
        seen = (record.state, record.attempts)
        if self._shown.get(job.name, ("queued", 0)) == seen:
            return
        self._shown[job.name] = seen
        text = f"{self._clock()}  {record.state:10s}  {job.name}"
        if record.is_running:
            text += f"  on {record.node}" + (f", attempt {record.attempts}" if record.attempts > 1 else "")
        elif record.state == "done":
            text += "" if record.score is None else f"  {score_text(record.score, is_plain=record.is_plain)}"
        elif record.state in ("failed", "queued") and record.errors:
            text += f"  {record.errors[-1].strip().splitlines()[-1]}"
        self._print(text)

    def _steps(self, records: dict[str, JobRecord]) -> str:
        text = ""
        for job in self._jobs:
            if records[job.name].is_running:
                step, score = job.progress()
                text += f"\n           {job.name}  step {step:,}" + (score and f", {score}")
        return text

    def _clock(self) -> str:
        seconds = int(time.monotonic() - self._begin)
        return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"

    def _print(self, text: str) -> None:
        print(text, file=self._out, flush=True)
