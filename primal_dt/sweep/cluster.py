"""Run jobs on a Ray cluster or on this machine. Only this module uses Ray, which the extra ``cluster`` installs."""

import importlib.util
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from primal_dt.sweep.job import Job, JobRecord
from primal_dt.sweep.resources import GIBIBYTE, Resources
from primal_dt.sweep.worker import Programs, run_job

__all__ = ["connected", "nodes", "require_cluster", "require_room", "run_jobs"]

POLL_SECONDS = 1.0
STOP_SECONDS = 150.0
"""Time for jobs to save a checkpoint and exit when the sweep is stopped."""
RETRY_SECONDS, MOST_RETRY_SECONDS = 2.0, 60.0
"""Delay before the first retry of a job, and maximum delay. The delay doubles with each retry."""
MOST_DEATHS = 3
"""Consecutive deaths of a job's machine or worker, without progress in between, after which the job fails."""
PATIENCE = 5
"""Number of retries, one second apart, when the file system raises an OSError."""
LOOK_SECONDS = 30.0
"""Interval between checks for why no job is running."""
CONNECT_SECONDS = 5.0
Result = TypeVar("Result")


def require_cluster(address: str | None) -> None:
    """Check that Ray is installed and that a server answers at the address, without the delay of connecting to Ray.

    Raises:
        ValueError: if Ray is not installed, or if no server answers.
    """
    if importlib.util.find_spec("ray") is None:
        raise ValueError("sweeps need Ray, which is not installed: pip install -c constraints.txt -e '.[cluster]'")
    host_and_port = re.fullmatch(r"(.+):(\d+)", address or "")
    if host_and_port is not None and "//" not in host_and_port[1]:
        try:
            socket.create_connection((host_and_port[1], int(host_and_port[2])), timeout=CONNECT_SECONDS).close()
        except (OSError, OverflowError) as error:
            raise ValueError(
                f"no server answers at --address {address} ({error}): give that of the node that ran ray start --head"
            ) from error


@contextmanager
def connected(address: str | None) -> Iterator[None]:
    """Connect to the Ray cluster at an address, or start Ray on this machine if the address is None.

    Raises:
        ValueError: if Ray is not installed, or if the cluster is unavailable or stops responding.
    """
    require_cluster(address)
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")  # Ray's messages on dead workers would break up our table
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # do not hide GPUs from jobs that request none
    import ray

    where: dict[str, Any] = {"address": address} if address else {"address": "local", "include_dashboard": False}
    try:
        ray.init(**where, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise ValueError(f"cannot use Ray on {address or 'this machine'}: {error}") from error
    try:
        yield
    except ray.exceptions.RayError as error:
        raise ValueError(f"the Ray cluster no longer responds: {error}") from error
    finally:
        ray.shutdown()


def nodes() -> list[Resources]:
    """Return the resources of each live node of the cluster."""
    import ray

    every: list[Mapping[str, float]] = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return [Resources(node.get("CPU", 0.0), node.get("GPU", 0.0), node.get("memory", 0.0) / GIBIBYTE) for node in every]


def require_room(job: Resources) -> None:
    """Check that some node can run a job, instead of waiting forever without a message.

    Raises:
        ValueError: if no node has the resources.
    """
    available = nodes()
    if not any(node.room_for(job) for node in available):
        raise ValueError(
            f"a job requests {job}, but no node has that much ({'; '.join(map(str, available))}): "
            "lower --cpus-per-job, --gpus-per-job or --memory-per-job"
        )


@dataclass
class _Tries:
    """Counts the attempts at one job in this sweep that did not finish it."""

    job: Job
    furthest: int
    """Highest step that the job had reached before the current attempt."""
    failures: int = 0
    deaths: int = 0
    """Consecutive deaths of the machine or the worker, without progress in between."""
    begin_at: float = field(default_factory=time.monotonic)
    """Earliest time of the next attempt, on the monotonic clock."""

    def count(self, *, died: bool) -> None:
        """Count an attempt that ended before the job was done, and schedule the next one."""
        step = _patiently(self.job.progress)[0]
        if not died:
            self.failures += 1
        self.deaths = self.deaths + 1 if died and step <= self.furthest else 0
        self.furthest = max(step, self.furthest)
        again = max(self.failures, self.deaths, 1)
        self.begin_at = time.monotonic() + min(RETRY_SECONDS * 2 ** (again - 1), MOST_RETRY_SECONDS)


def run_jobs(
    jobs: Sequence[Job],
    programs: Programs,
    resources: Resources,
    *,
    retries: int,
    on_poll: Callable[[], None],
    on_end: Callable[[Job, JobRecord], None],
    on_wait: Callable[[str], None],
) -> dict[str, JobRecord]:
    """Run jobs on the connected cluster, as many at a time as its resources allow.

    If a worker or a node dies, its job resumes elsewhere from the last checkpoint. A job that fails is retried after a
    delay. If this function ends early, by Ctrl-C or an error, all running jobs first save a checkpoint and stop.

    Args:
        jobs: the jobs to run.
        programs: the scripts, and the environment variables for them.
        resources: the resources that each job requests.
        retries: how often a failed job is retried. The death of its machine or worker does not count as a failure, but
            a job ends after three consecutive deaths without progress.
        on_poll: called about once a second.
        on_end: called with a job and its record when the job is done or has failed for the last time.
        on_wait: called with the reason why no job is running, or with ``""`` if one is.

    Returns:
        The final record of each job, by the job's name.
    """
    import ray

    remote = ray.remote(run_job).options(**resources.options(), max_retries=0)
    waiting = [_Tries(job, job.progress()[0]) for job in jobs]
    running: dict[Any, _Tries] = {}
    ended: dict[str, JobRecord] = {}
    looked = time.monotonic()
    try:
        while waiting or running:
            for tries in [tries for tries in waiting if tries.begin_at <= time.monotonic()]:
                waiting.remove(tries)
                running[remote.remote(tries.job, programs)] = tries
            for reference in _ended(list(running)):
                tries = running.pop(reference)
                record, died = _outcome(reference, tries.job)
                if record.state != "done":
                    tries.count(died=died)
                if record.state == "done" or tries.failures > retries or tries.deaths >= MOST_DEATHS:
                    ended[tries.job.name] = record
                    on_end(tries.job, record)
                else:
                    _patiently(partial(tries.job.note, state="queued"))
                    waiting.append(tries)
            if time.monotonic() - looked > LOOK_SECONDS:
                looked = time.monotonic()
                on_wait(_why_none_runs([tries.job for tries in running.values()], resources))
            on_poll()
    except BaseException:
        _stop(running)
        raise
    return ended


def _ended(references: list[Any]) -> list[Any]:
    """Wait up to ``POLL_SECONDS`` for a task to end, and return the tasks that have ended."""
    import ray

    if not references:
        time.sleep(POLL_SECONDS)
        return []
    ready, _ = ray.wait(references, timeout=POLL_SECONDS)
    return list(ready)


def _outcome(reference: Any, job: Job) -> tuple[JobRecord, bool]:
    """Return the record after an attempt, and whether the attempt ended because its machine or worker died."""
    import ray

    try:
        record: JobRecord = ray.get(reference)
        return record, False
    except ray.exceptions.RayTaskError as error:  # the attempt could not start there
        what, died = str(error).strip().splitlines()[-1], False
    except ray.exceptions.RayError as error:
        node = _patiently(lambda: job.record).node or "a node"
        what, died = f"its worker on {node} died ({type(error).__name__})", True

    def fail() -> JobRecord:
        return job.note(state="failed", errors=(*job.record.errors, f"{what}; its output is in {job.log_path}"))

    return _patiently(fail), died


def _patiently(call: Callable[[], Result]) -> Result:
    """Call a function that uses the file system, with retries: a shared file system may fail for a moment."""
    for _ in range(PATIENCE):
        try:
            return call()
        except OSError:
            time.sleep(1.0)
    return call()


def _why_none_runs(jobs: Sequence[Job], resources: Resources) -> str:
    """Return a message that says why no job is running, or ``""`` if one is."""
    try:
        if not jobs or any(job.record.is_running for job in jobs):
            return ""
        require_room(resources)
    except OSError:  # the next check may succeed
        return ""
    except ValueError as error:
        return f"waiting: {error}"
    return "waiting: no job has started yet; the nodes may be busy with other work"


def _stop(running: Mapping[Any, _Tries]) -> None:
    """Make all running jobs save a checkpoint and exit."""
    import ray

    for reference in running:
        with suppress(ray.exceptions.RayError):
            ray.cancel(reference)  # raises KeyboardInterrupt in the worker
    if running:
        with suppress(ray.exceptions.RayError):
            ray.wait(list(running), num_returns=len(running), timeout=STOP_SECONDS)
    for tries in running.values():
        with suppress(OSError):
            if tries.job.record.is_running:  # it died or did not stop in time: it will resume from its last checkpoint
                tries.job.note(state="stopped")
