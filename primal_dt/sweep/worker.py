"""Runs a job of a sweep on the node where Ray placed it: ``train.py``, then ``evaluate.py``, as processes."""

import ctypes
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from primal_dt.sweep.job import Job, JobRecord
from primal_dt.system.files import open_regular

__all__ = ["Programs", "run_job"]

STOP_SECONDS = 120.0
"""Time for a program to save a checkpoint and exit before it is killed."""
POLL_SECONDS, POLLS_PER_LOOK = 0.1, 20
SHOWN_LINES = 20
"""Number of last log lines that the error message of a failed program shows."""
IS_LINUX = sys.platform.startswith("linux")
PRCTL = ctypes.CDLL(None).prctl if IS_LINUX else None
"""Looked up at import: in a process with threads, no library may be loaded between fork and exec."""
PR_SET_PDEATHSIG = 1
"""Value from Linux's prctl.h."""


@dataclass(frozen=True)
class Programs:
    """The scripts that a job runs, at the same paths on every node."""

    train: Path
    evaluate: Path
    variables: Mapping[str, str]
    """Environment variables for the scripts: the folders of the data sets."""


class FailedError(Exception):
    """A program ended with an error."""


class SupersededError(Exception):
    """A newer attempt was started, since this one seemed dead."""


def run_job(job: Job, programs: Programs) -> JobRecord:
    """Run the unfinished part of a job, and save and return its record.

    A failure does not raise: it is recorded, and the caller decides whether to retry. On KeyboardInterrupt, which a
    sweep uses to stop its jobs, the running program saves a checkpoint and exits. If a newer attempt was started
    elsewhere in the meantime, this one ends at once and records nothing.
    """
    before, begin = job.record, time.monotonic()
    attempt = before.attempts + 1

    def note(**changes: object) -> JobRecord:
        _require_newest(job, attempt)
        return job.note(**changes)

    def end(**changes: object) -> JobRecord:
        return note(seconds=before.seconds + time.monotonic() - begin, **changes)

    try:
        try:
            job.note(state="training", attempts=attempt, node=platform.node())
            if not before.is_trained:
                _remove_unbegun(job.folder)
                _run(job.training_command(programs.train), job, attempt, programs)
            note(state="evaluating", is_trained=True)
            report = json.loads(_run(job.evaluation_command(programs.evaluate), job, attempt, programs))
            group = report["groups"][0]
            return end(state="done", score=group["results"][0]["mean"], is_plain=group["unit"] == "return")
        except KeyboardInterrupt:
            return end(state="stopped")
        except (FailedError, OSError, ValueError, KeyError, IndexError) as error:
            return end(state="failed", errors=(*before.errors, str(error)))
    except SupersededError:
        return job.record


def _require_newest(job: Job, attempt: int) -> None:
    """Raise SupersededError if this is not the newest attempt."""
    if job.record.attempts > attempt:
        raise SupersededError


def _remove_unbegun(folder: Path) -> None:
    """Remove the folder of a run that was killed before it wrote ``config.json``: it cannot be resumed."""
    if folder.exists() and not (folder / "config.json").exists():
        shutil.rmtree(folder)


def _run(command: list[str], job: Job, attempt: int, programs: Programs) -> str:
    """Run a program until it ends, write its output to the job's log, and return its standard output.

    Raises:
        FailedError: if the program fails, with the last lines of its output.
        SupersededError: if a newer attempt was started.
    """
    job.log_path.parent.mkdir(parents=True, exist_ok=True)
    with open_regular(job.log_path, "ab") as log, tempfile.TemporaryFile("w+") as output:
        log.write(f"$ {shlex.join(command)}\n".encode())
        log.flush()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=log,
            env=job.environment(programs.variables),
            start_new_session=True,  # Ctrl-C in a terminal must reach only the sweep, which then stops its jobs
            preexec_fn=partial(_die_with_parent, os.getpid()) if IS_LINUX else None,
        )
        polls = 0
        try:
            while process.poll() is None:
                time.sleep(POLL_SECONDS)  # short: Ray's KeyboardInterrupt does not interrupt a blocking system call
                polls += 1
                if polls % POLLS_PER_LOOK == 0:
                    with suppress(OSError):  # a shared file system may fail for a moment; the next check may succeed
                        _require_newest(job, attempt)
        except SupersededError:
            process.kill()  # not stopped: its checkpoint would conflict with the newer attempt
            process.wait()
            raise
        except BaseException:
            _stop(process)
            raise
        finally:
            output.seek(0)
            printed = output.read()
            log.write(printed.encode())
    if process.returncode:
        lines = job.log_path.read_text(errors="replace").splitlines()[-SHOWN_LINES:]
        shown = [line for line in lines if not line.startswith("$ ")]
        raise FailedError(f"{Path(command[1]).name} ended with code {process.returncode}:\n" + "\n".join(shown))
    return printed


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """Make a program save a checkpoint and exit. Kill it if it does not, or if the wait is interrupted."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    except BaseException:
        process.kill()
        raise


def _die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent dies, for whatever reason.

    Otherwise the program of a killed worker would keep running alongside the attempt that takes over its job.
    """
    assert PRCTL is not None
    PRCTL(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the call above
        os._exit(1)
