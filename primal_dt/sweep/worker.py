"""A job of a sweep as processes: ``train.py``, then ``evaluate.py``, wherever the job has been sent to."""

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

__all__ = ["Programs", "run_job"]

STOP_SECONDS = 120.0
"""What a program gets to come to a checkpoint, before it is killed."""
POLL_SECONDS, POLLS_PER_LOOK = 0.1, 20
SHOWN_LINES = 20
"""Of what a program that failed has printed last."""
IS_LINUX = sys.platform.startswith("linux")
PRCTL = ctypes.CDLL(None).prctl if IS_LINUX else None
"""Looked up now: between fork and exec, in a process with threads, nothing may be loaded."""
PR_SET_PDEATHSIG = 1
"""From Linux's prctl.h."""


@dataclass(frozen=True)
class Programs:
    """Where things are, on every machine that runs jobs."""

    train: Path
    evaluate: Path
    variables: Mapping[str, str]
    """Of the environment: where data sets are."""


class FailedError(Exception):
    """A program ended with an error."""


class SupersededError(Exception):
    """Somebody believed that this attempt was dead, and has begun another."""


def run_job(job: Job, programs: Programs) -> JobRecord:
    """Do what is left of a job, and write down how it went.

    An exception is no way out of here: what fails is written down, for somebody to decide whether it is tried again.
    A KeyboardInterrupt, which is how a sweep is stopped, has the running program save a checkpoint and end. Where
    another attempt has been begun meanwhile, elsewhere, this one ends at once and writes down nothing.
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
            return end(state="done", score=report["groups"][0]["results"][0]["mean"])
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
    """A folder that was made for a run which was killed before it had written down what it is."""
    if folder.exists() and not (folder / "config.json").exists():
        shutil.rmtree(folder)


def _run(command: list[str], job: Job, attempt: int, programs: Programs) -> str:
    """Run a program to its end; what it prints goes to the job's log. Returns its standard output.

    Raises:
        FailedError: if it ends with an error, with what it has said last.
        SupersededError: if another attempt has been begun.
    """
    job.log_path.parent.mkdir(parents=True, exist_ok=True)
    with job.log_path.open("ab") as log, tempfile.TemporaryFile("w+") as output:
        log.write(f"$ {shlex.join(command)}\n".encode())
        log.flush()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=log,
            env=job.environment(programs.variables),
            start_new_session=True,  # Ctrl-C in a terminal is for the sweep, which then stops its jobs
            preexec_fn=partial(_die_with_parent, os.getpid()) if IS_LINUX else None,
        )
        polls = 0
        try:
            while process.poll() is None:
                time.sleep(POLL_SECONDS)  # in steps: Ray's KeyboardInterrupt does not end a wait in the system
                polls += 1
                if polls % POLLS_PER_LOOK == 0:
                    with suppress(OSError):  # shared file systems have such moments: the next look may succeed
                        _require_newest(job, attempt)
        except SupersededError:
            process.kill()  # a checkpoint of its own would be in the way of the other
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
        said = [line for line in lines if not line.startswith("$ ")]
        raise FailedError(f"{Path(command[1]).name} ended with code {process.returncode}:\n" + "\n".join(said))
    return printed


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """Have a program save a checkpoint and end; if it does not, or one cannot wait for it, end it."""
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
    """Have the system kill this process when its parent dies, however that happens.

    Otherwise a program whose worker was killed would go on beside the one that takes over its job elsewhere.
    """
    assert PRCTL is not None
    PRCTL(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has died already
        os._exit(1)
