"""Jobs on a Ray cluster: this machine by default. The only place that knows Ray, which the extra ``cluster`` brings."""

import importlib.util
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from envs.job_process import Programs, run_job
from envs.jobs import Job, JobRecord

__all__ = ["Resources", "connected", "nodes", "require_cluster", "require_room", "run_jobs"]

POLL_SECONDS = 1.0
STOP_SECONDS = 150.0
"""What jobs get to come to a checkpoint when the sweep is stopped."""
RETRY_SECONDS = 2.0
"""Until a job that failed is tried again: then twice as many, and so on."""
LOOK_SECONDS = 30.0
"""Between looks at whether there is a node for the jobs, if none of them runs."""
CONNECT_SECONDS = 5.0
GIBIBYTE = 2**30


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
        pairs = ((self.cpus, job.cpus), (self.gpus, job.gpus), (self.memory_gib, job.memory_gib))
        return min(int(own / asked + 1e-9) for own, asked in pairs if asked)


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
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ValueError(f"there is no Ray cluster at {address or 'this machine'}: {error}") from error
    try:
        yield
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
    """The step to which it has come when it was last sent."""
    failures: int = 0
    begin_at: float = field(default_factory=time.monotonic)
    """When it may be sent."""

    def count(self, *, died: bool) -> None:
        """A try has failed. One whose machine died under it does not count, if it has come further than the last."""
        step, before = self.job.progress()[0], self.furthest
        self.furthest = max(step, before)
        if not (died and step > before):
            self.failures += 1
        self.begin_at = time.monotonic() + RETRY_SECONDS * 2 ** max(self.failures - 1, 0)


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
        retries: how often a job that fails is tried again. Deaths count only if a job has not come further between two.
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
                if record.state == "failed":
                    tries.count(died=died)
                if record.state != "failed" or tries.failures > retries:
                    ended[tries.job.name] = record
                    on_end(tries.job, record)
                else:
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
        what, died = f"its worker on {job.record.node or 'a node'} has died ({type(error).__name__})", True
    what = f"{what}\nwhat it printed: {job.log_path}"
    return job.note(state="failed", errors=(*job.record.errors, what)), died


def _why_none_runs(jobs: Sequence[Job], resources: Resources) -> str:
    """For people; nothing if one does."""
    if not jobs or any(job.record.is_running for job in jobs):
        return ""
    try:
        require_room(resources)
    except ValueError as error:
        return f"waiting: {error}"
    return "waiting for a node that has room: others have it"


def _stop(running: Mapping[Any, _Tries]) -> None:
    """Have all jobs save a checkpoint and end."""
    import ray

    for reference in running:
        ray.cancel(reference)  # a KeyboardInterrupt there
    if running:
        ray.wait(list(running), num_returns=len(running), timeout=STOP_SECONDS)
    for tries in running.values():
        if tries.job.record.is_running:  # it died, or could not be stopped: its last checkpoint is what there is
            tries.job.note(state="stopped")
