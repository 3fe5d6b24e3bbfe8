"""Jobs on a Ray cluster: this machine by default. The only place that knows Ray, which the extra ``cluster`` brings."""

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
from primal_dt.sweep.worker import Programs, run_job

__all__ = ["Resources", "connected", "nodes", "require_cluster", "require_room", "run_jobs"]

POLL_SECONDS = 1.0
STOP_SECONDS = 150.0
"""What jobs get to come to a checkpoint when the sweep is stopped."""
RETRY_SECONDS, MOST_RETRY_SECONDS = 2.0, 60.0
"""Until a job is tried again: then twice as many, and so on."""
MOST_DEATHS = 3
"""Of machines or workers under a job that has not come further meanwhile."""
PATIENCE = 5
"""How often a file system that does not answer is asked again, a second later."""
LOOK_SECONDS = 30.0
"""Between looks at whether there is a node for the jobs, if none of them runs."""
CONNECT_SECONDS = 5.0
GIBIBYTE = 2**30
Result = TypeVar("Result")


@dataclass(frozen=True)
class Resources:
    """What a job asks for, or what a node has."""

    cpus: float
    gpus: float
    memory_gib: float

    def __str__(self) -> str:
        return f"{self.cpus:g} cores, {self.gpus:g} GPUs and {self.memory_gib:.3g} GiB"

    @property
    def threads(self) -> int:
        """Of a job's programs."""
        return max(1, int(self.cpus))

    def options(self) -> dict[str, Any]:
        """As Ray calls them."""
        return {"num_cpus": self.cpus, "num_gpus": self.gpus, "memory": int(self.memory_gib * GIBIBYTE)}

    def room_for(self, job: "Resources") -> int:
        """How many jobs a node of these resources can run at a time."""

        def times(own: float, asked: float) -> int:
            return int(own / asked + 1e-9)

        room = min(times(self.cpus, job.cpus), times(self.memory_gib, job.memory_gib))
        return min(room, int(self.gpus) * times(1, job.gpus)) if job.gpus else room  # a job is on one GPU


def require_cluster(address: str | None) -> None:
    """Find out at once, and quickly, that there is no Ray or that nobody answers at an address.

    Raises:
        ValueError: if that is so.
    """
    if importlib.util.find_spec("ray") is None:
        raise ValueError("sweeps run on Ray: pip install -c constraints.txt -e '.[cluster]'")
    host_and_port = re.fullmatch(r"(.+):(\d+)", address or "")
    if host_and_port is not None and "//" not in host_and_port[1]:
        try:
            socket.create_connection((host_and_port[1], int(host_and_port[2])), timeout=CONNECT_SECONDS).close()
        except (OSError, OverflowError) as error:
            raise ValueError(
                f"nobody answers at --address {address} ({error}): give that of a node where ray start --head was run"
            ) from error


@contextmanager
def connected(address: str | None) -> Iterator[None]:
    """A cluster: a running one by its address, or this machine.

    Raises:
        ValueError: if Ray is not installed, or there is no cluster.
    """
    require_cluster(address)
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")  # what it says of workers that die would cut our table
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # a job without GPUs sees what its node has
    import ray

    where: dict[str, Any] = {"address": address} if address else {"address": "local", "include_dashboard": False}
    try:
        ray.init(**where, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise ValueError(f"there is no Ray cluster at {address or 'this machine'}: {error}") from error
    try:
        yield
    except ray.exceptions.RayError as error:
        raise ValueError(f"the Ray cluster does not answer any more: {error}") from error
    finally:
        ray.shutdown()


def nodes() -> list[Resources]:
    """What the nodes of the cluster have, those that are alive."""
    import ray

    every: list[Mapping[str, float]] = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return [Resources(node.get("CPU", 0.0), node.get("GPU", 0.0), node.get("memory", 0.0) / GIBIBYTE) for node in every]


def require_room(job: Resources) -> None:
    """Tell that no node can run a job, instead of waiting for one in silence.

    Raises:
        ValueError: if that is so.
    """
    there = nodes()
    if not any(node.room_for(job) for node in there):
        raise ValueError(
            f"a job asks for {job}, and no node has that ({'; '.join(map(str, there))}): "
            "change --cpus-per-job, --gpus-per-job or --memory-per-job"
        )


@dataclass
class _Tries:
    """Of one job, in this sweep."""

    job: Job
    furthest: int
    """The step to which it had come when it was last sent."""
    failures: int = 0
    deaths: int = 0
    """One after the other, of the machine or the worker, without coming further."""
    begin_at: float = field(default_factory=time.monotonic)
    """When it may be sent."""

    def count(self, *, died: bool) -> None:
        """A try has ended, and the job is not done."""
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
    """Run jobs on the cluster that is connected, as many at a time as there is room for.

    A job whose worker or node dies is sent elsewhere, where it goes on from its last checkpoint; one that fails is
    tried again, after a pause. Whatever ends this early, Ctrl-C or an error, all jobs first save a checkpoint and stop.

    Args:
        jobs: what is to be done.
        programs: where things are.
        resources: of each job.
        retries: how often a job that fails is tried again. That its machine dies is no failure; but three deaths after
            which it has not come further are the end.
        on_poll: called about once a second.
        on_end: called when a job has been tried for the last time, or is done.
        on_wait: told why no job runs, or ``""`` if one does.

    Returns:
        Name of a job -> how it ended.
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
    """Tasks that have ended, after waiting a little for one."""
    import ray

    if not references:
        time.sleep(POLL_SECONDS)
        return []
    ready, _ = ray.wait(references, timeout=POLL_SECONDS)
    return list(ready)


def _outcome(reference: Any, job: Job) -> tuple[JobRecord, bool]:
    """How a job's try ended, and whether its machine, or its worker there, has died under it."""
    import ray

    try:
        record: JobRecord = ray.get(reference)
        return record, False
    except ray.exceptions.RayTaskError as error:  # it could not even be begun there
        what, died = str(error).strip().splitlines()[-1], False
    except ray.exceptions.RayError as error:
        node = _patiently(lambda: job.record).node or "a node"
        what, died = f"its worker on {node} has died ({type(error).__name__})", True

    def fail() -> JobRecord:
        return job.note(state="failed", errors=(*job.record.errors, f"{what}; what it printed is in {job.log_path}"))

    return _patiently(fail), died


def _patiently(call: Callable[[], Result]) -> Result:
    """What a file system answers, which may take it some time if it is shared."""
    for _ in range(PATIENCE):
        try:
            return call()
        except OSError:
            time.sleep(1.0)
    return call()


def _why_none_runs(jobs: Sequence[Job], resources: Resources) -> str:
    """For people; nothing if one does."""
    try:
        if not jobs or any(job.record.is_running for job in jobs):
            return ""
        require_room(resources)
    except OSError:  # it will be looked at again
        return ""
    except ValueError as error:
        return f"waiting: {error}"
    return "waiting: no job has begun yet, and others may have what the nodes have"


def _stop(running: Mapping[Any, _Tries]) -> None:
    """Have all jobs save a checkpoint and end."""
    import ray

    for reference in running:
        with suppress(ray.exceptions.RayError):
            ray.cancel(reference)  # a KeyboardInterrupt there
    if running:
        with suppress(ray.exceptions.RayError):
            ray.wait(list(running), num_returns=len(running), timeout=STOP_SECONDS)
    for tries in running.values():
        with suppress(OSError):
            if tries.job.record.is_running:  # it died, or could not be stopped: its last checkpoint is what there is
                tries.job.note(state="stopped")
