"""Jobs on a Ray cluster: this machine by default. The only place that knows Ray, which the extra ``cluster`` brings."""

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from envs.job_process import Programs, run_job
from envs.jobs import Job, JobRecord

__all__ = ["Resources", "connected", "require_room", "run_jobs"]

POLL_SECONDS = 1.0
STOP_SECONDS = 150.0
"""What jobs get to come to a checkpoint when the sweep is stopped."""
GIBIBYTE = 2**30


@dataclass(frozen=True)
class Resources:
    """What a job asks for."""

    cpus: float
    gpus: float
    memory_gib: float

    @property
    def threads(self) -> int:
        """Of a job's programs."""
        return max(1, int(self.cpus))

    def options(self) -> dict[str, Any]:
        """As Ray calls them."""
        return {"num_cpus": self.cpus, "num_gpus": self.gpus, "memory": int(self.memory_gib * GIBIBYTE)}


@contextmanager
def connected(address: str | None) -> Iterator[None]:
    """A cluster: a running one by its address, or this machine.

    Raises:
        ValueError: if Ray is not installed, or there is no cluster.
    """
    try:
        import ray
    except ImportError as error:
        raise ValueError("sweeps run on Ray: pip install -c constraints.txt -e '.[cluster]'") from error
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # a job without GPUs sees what its node has
    where: dict[str, Any] = {"address": address} if address else {"address": "local", "include_dashboard": False}
    try:
        ray.init(**where, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ValueError(f"there is no Ray cluster at {address or 'this machine'}: {error}") from error
    try:
        yield
    finally:
        ray.shutdown()


def require_room(resources: Resources) -> None:
    """Tell at once that no node can ever run a job, instead of waiting for one for ever.

    Raises:
        ValueError: if that is so.
    """
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    asked = {"CPU": resources.cpus, "GPU": resources.gpus, "memory": resources.memory_gib * GIBIBYTE}
    if any(all(node.get(name, 0.0) >= amount for name, amount in asked.items()) for node in nodes):
        return
    shown = "; ".join(
        f"{node.get('CPU', 0):g} cores, {node.get('GPU', 0):g} GPUs, {node.get('memory', 0) / GIBIBYTE:.1f} GiB"
        for node in nodes
    )
    raise ValueError(
        f"a job asks for {resources.cpus:g} cores, {resources.gpus:g} GPUs and {resources.memory_gib:g} GiB, and no "
        f"node has that ({shown}): change --cpus-per-job, --gpus-per-job or --memory-per-job"
    )


def run_jobs(
    jobs: Sequence[Job],
    programs: Programs,
    resources: Resources,
    *,
    retries: int,
    on_poll: Callable[[], None],
    on_end: Callable[[Job, JobRecord], None],
) -> dict[str, JobRecord]:
    """Run jobs on the cluster that is connected, as many at a time as there is room for.

    A job whose worker or node dies is sent elsewhere by Ray, where it goes on from its last checkpoint; one that fails
    is tried again. Ctrl-C has all jobs save a checkpoint and stop.

    Args:
        jobs: what is to be done.
        programs: where things are.
        resources: of each job.
        retries: how often a job is tried again.
        on_poll: called about once a second.
        on_end: called when a job has been tried for the last time, or is done.

    Returns:
        Name of a job -> how it ended.

    Raises:
        KeyboardInterrupt: after all have stopped.
    """
    import ray

    remote = ray.remote(run_job).options(**resources.options(), max_retries=retries)
    running = {remote.remote(job, programs): job for job in jobs}
    tries = dict.fromkeys((job.name for job in jobs), 1)
    ended: dict[str, JobRecord] = {}
    try:
        while running:
            ready, _ = ray.wait(list(running), timeout=POLL_SECONDS)
            for reference in ready:
                job = running.pop(reference)
                record = _outcome(reference, job)
                if record.state == "failed" and tries[job.name] <= retries:
                    tries[job.name] += 1
                    running[remote.remote(job, programs)] = job
                    continue
                ended[job.name] = record
                on_end(job, record)
            on_poll()
    except KeyboardInterrupt:
        for reference in running:
            ray.cancel(reference)  # a KeyboardInterrupt there
        give_up = time.monotonic() + STOP_SECONDS
        while any(job.record.is_running for job in running.values()) and time.monotonic() < give_up:
            time.sleep(POLL_SECONDS / 5)
        raise
    return ended


def _outcome(reference: Any, job: Job) -> JobRecord:
    """How a job's try ended."""
    import ray

    try:
        record: JobRecord = ray.get(reference)
        return record
    except ray.exceptions.RayError as error:  # its workers died once too often, or it could not be sent at all
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return job.note(state="failed", errors=(*job.record.errors, f"{type(error).__name__}: {lines[-1]}"))
