"""What a sweep would do: its jobs, what they ask for, and how long they would take, by a short trial of each kind."""

import heapq
import sys
from collections.abc import Sequence
from dataclasses import replace

from envs.datasets.checks import DataError
from primal_dt.sweep.cluster import Resources, connected, nodes
from primal_dt.sweep.grid import stand_in
from primal_dt.sweep.job import Job
from primal_dt.sweep.trial import Trial, this_machine, try_job
from primal_dt.sweep.view import counts
from primal_dt.sweep.worker import Programs
from primal_dt.system.table import format_table

__all__ = ["makespan", "show_plan"]


def show_plan(jobs: Sequence[Job], resources: Resources, programs: Programs, *, address: str | None) -> None:
    """Print it.

    Args:
        jobs: of the sweep.
        resources: of each.
        programs: for the trials.
        address: of the cluster that the jobs would run on; None for this machine.
    """
    summary = (
        f"{len(jobs)} jobs ({counts([job.record for job in jobs])}); each asks for {resources}, and runs on "
        f"{resources.threads} threads"
    )
    try:
        trials = _try_kinds(jobs, programs)
    except DataError as error:
        print(format_table(["job", "state"], [[job.name, job.record.state] for job in jobs]))
        print(f"\n{summary}\nno estimate of the time: {error}")
        return
    left = [0.0 if job.record.state == "done" else trials[_kind(job)].seconds_left(job) for job in jobs]
    rows = [
        [job.name, job.record.state, f"{job.progress()[0]:,}", f"{seconds / 60:,.1f}"]
        for job, seconds in zip(jobs, left, strict=True)
    ]
    print(f"{format_table(['job', 'state', 'step', 'minutes left, at most'], rows)}\n\n{summary}\n")
    rows = [
        [name, f"{trial.steps_per_second:.1f}", f"{trial.rollout_steps_per_second:,.0f}", f"{trial.peak_gib:.2f}"]
        for name, trial in trials.items()
    ]
    print(format_table(["trial", "training steps/s", "rollout steps/s", "peak GiB"], rows))
    where, places = _places(resources, address)
    if not places:
        print(f"\n{where} has no room for such a job: no estimate of the time")
        return
    todo = [seconds for seconds in left if seconds]
    minutes = makespan(todo, places) / 60
    long = f"{minutes / 60:,.1f} hours" if minutes >= 100 else f"{minutes:.1f} minutes"
    print(
        f"\nestimate: {long} on {where}, {min(len(todo), places)} jobs at a time, if every one is as fast as a trial "
        "that has this machine for itself, and every episode as long as can be"
    )


def _kind(job: Job) -> str:
    """Jobs of one kind take as long as one another."""
    model = job.config.model
    return model.attention if model.rank is None else f"{model.attention}, rank {model.rank}"


def _try_kinds(jobs: Sequence[Job], programs: Programs) -> dict[str, Trial]:
    """A trial of each kind that is not done, on its first data set, or on what stands in for that here.

    Raises:
        DataError: if one cannot be made.
    """
    trials: dict[str, Trial] = {}
    for job in jobs:
        if job.record.state != "done" and (kind := _kind(job)) not in trials:
            dataset = stand_in(job.config.dataset)
            print(f"trying {kind} for some steps on {dataset}", file=sys.stderr)
            trials[kind] = try_job(replace(job, config=replace(job.config, dataset=dataset)), programs)
    return trials


def _places(resources: Resources, address: str | None) -> tuple[str, int]:
    """Where jobs would run, and how many at a time."""
    if address is None:
        return "this machine", this_machine().room_for(resources)
    with connected(address):
        there = nodes()
    return f"a cluster of {len(there)} nodes", sum(node.room_for(resources) for node in there)


def makespan(jobs: Sequence[float], places: int) -> float:
    """When the last job ends, if each begins as soon as there is a place for it."""
    free = [0.0] * places
    for seconds in jobs:
        heapq.heappush(free, heapq.heappop(free) + seconds)
    return max(free)
