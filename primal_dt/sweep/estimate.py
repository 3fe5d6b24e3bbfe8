"""Plan a sweep: list its jobs, the resources they request, and the time they take, by a short trial of each kind."""

import heapq
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from primal_dt.evaluation.plan import EpisodePlan
from primal_dt.evaluation.report import Evaluation
from primal_dt.evaluation.trained_run import TrainedRun, open_run
from primal_dt.sweep.cluster import connected, nodes
from primal_dt.sweep.job import Job
from primal_dt.sweep.resources import Resources
from primal_dt.sweep.view import counts
from primal_dt.sweep.worker import Programs
from primal_dt.system.table import format_table
from primal_dt.training.metrics_log import read_metrics

__all__ = ["Trial", "makespan", "show_plan", "this_machine", "try_job"]

STEPS, LOG_EVERY_STEPS = 40, 10
EPISODES = 8
SHARE_OF_MEMORY = 0.7
"""Share of a node's memory that Ray gives to tasks; the rest is for its object store."""


RollOut = Callable[[TrainedRun, EpisodePlan], Evaluation]
"""Evaluates a run. The caller supplies it, since this package does not depend on any environment."""


@dataclass(frozen=True)
class Trial:
    """Time and memory of a job, measured in a short trial."""

    steps_per_second: float
    """Training steps per second, from the last logging point of the trial."""
    rollout_steps_per_second: float
    """Environment steps per second in an evaluation, summed over all environments."""
    start_seconds: float
    """Time that the training program spends outside its training steps, mostly to start."""
    peak_gib: float
    """Peak resident memory of the training program."""
    num_targets: int
    """Number of target returns that a policy is evaluated at."""
    episode_limit: int
    """Maximum number of steps in an episode."""

    def seconds_left(self, job: Job) -> float:
        """Return the remaining time of a job, assuming that every remaining episode has the maximum length."""
        if job.record.state == "done":
            return 0.0
        seconds = self.start_seconds + self._rollout_seconds(job.episodes)
        if not job.record.is_trained:
            steps, every = job.config.optimizer.steps, job.config.evaluation.eval_every_steps
            done = min(job.progress()[0], steps)
            evaluations = math.ceil(steps / every) - done // every if every else 0
            seconds += self.start_seconds + (steps - done) / self.steps_per_second
            seconds += self._rollout_seconds(evaluations * job.config.evaluation.eval_episodes)
        return seconds

    def _rollout_seconds(self, episodes: int) -> float:
        """Return the time of ``episodes`` episodes for each target."""
        return episodes * self.num_targets * self.episode_limit / self.rollout_steps_per_second


def show_plan(
    jobs: Sequence[Job],
    resources: Resources,
    programs: Programs,
    *,
    address: str | None,
    stand_in: Callable[[str], str],
    roll_out: RollOut,
) -> None:
    """Print the jobs, the resources they request, and an estimate of how long they will take.

    Args:
        jobs: all jobs of the sweep.
        resources: the resources that each job requests.
        programs: the scripts, and the environment variables for them.
        address: the Ray cluster that the jobs would run on; None for this machine.
        stand_in: maps a data set to the one that its trial uses.
        roll_out: evaluates a run in a trial.
    """
    summary = (
        f"jobs: {len(jobs)} ({counts([job.record for job in jobs])}); each requests {resources}; "
        f"threads per job: {resources.threads}"
    )
    try:
        trials = _try_kinds(jobs, programs, stand_in, roll_out)
    except ValueError as error:
        print(format_table(["job", "state"], [[job.name, job.record.state] for job in jobs]))
        print(f"\n{summary}\nno time estimate: {error}")
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
        print(f"\n{where} cannot run such a job: no time estimate")
        return
    todo = [seconds for seconds in left if seconds]
    minutes = makespan(todo, places) / 60
    long = f"{minutes / 60:,.1f} hours" if minutes >= 100 else f"{minutes:.1f} minutes"
    print(
        f"\nestimate: {long} on {where} (jobs at a time: {min(len(todo), places)}), assuming that every job is as "
        "fast as a trial that has this machine to itself, and that every episode has the maximum length"
    )


def _kind(job: Job) -> str:
    """Return what a job's speed depends on most. Jobs that share it are assumed to be equally fast."""
    model = job.config.model
    words: list[str] = [model.attention]
    words += [f"rank {model.rank}"] if model.rank is not None else []
    words += [f"conditioning {model.conditioning}"] if model.conditioning != "return" else []
    words += ["critics"] if job.config.optimizer.critic_weight else []
    return ", ".join(words)


def _try_kinds(
    jobs: Sequence[Job], programs: Programs, stand_in: Callable[[str], str], roll_out: RollOut
) -> dict[str, Trial]:
    """Run a trial for each kind of unfinished job, on the data set of the first such job or on its stand-in.

    Raises:
        ValueError: if a trial fails.
    """
    trials: dict[str, Trial] = {}
    for job in jobs:
        if job.record.state != "done" and (kind := _kind(job)) not in trials:
            dataset = stand_in(job.config.dataset)
            print(f"trial of {kind} on {dataset}, {STEPS} training steps", file=sys.stderr)
            trials[kind] = try_job(replace(job, config=replace(job.config, dataset=dataset)), programs, roll_out)
    return trials


def _places(resources: Resources, address: str | None) -> tuple[str, int]:
    """Return where jobs would run, and how many at a time."""
    if address is None:
        return "this machine", this_machine().room_for(resources)
    with connected(address):
        available = nodes()
    return f"a {len(available)}-node cluster", sum(node.room_for(resources) for node in available)


def makespan(jobs: Sequence[float], places: int) -> float:
    """Return the time until the last job ends, if each starts as soon as one of the places is free."""
    free = [0.0] * places
    for seconds in jobs:
        heapq.heappush(free, heapq.heappop(free) + seconds)
    return max(free)


def this_machine() -> Resources:
    """Return the resources that this machine has for jobs: about what Ray would offer."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return Resources(cores, torch.cuda.device_count(), SHARE_OF_MEMORY * memory)


def try_job(job: Job, programs: Programs, roll_out: RollOut) -> Trial:
    """Train a job for ``STEPS`` steps and evaluate it for ``EPISODES`` episodes per target, in a temporary folder.

    Raises:
        ValueError: if the training fails, with its error output.
    """
    config = job.config
    with tempfile.TemporaryDirectory(prefix="primal-dt-trial-") as folder:
        short = replace(
            config,
            optimizer=replace(config.optimizer, steps=STEPS),
            evaluation=replace(config.evaluation, eval_every_steps=0),
            run=replace(
                config.run,
                out=folder,
                log_every_steps=LOG_EVERY_STEPS,
                save_every_steps=STEPS,
                spectrum_every_steps=0,
            ),
        )
        small = replace(job, config=short, episodes=EPISODES)
        seconds, peak = _timed(small.training_command(programs.train), small, programs, Path(folder) / "output")
        rate = float(read_metrics(small.folder)[-1]["train/steps_per_second"])
        run = open_run(small.folder)
        rolling, evaluation = _timed_rollout(run, roll_out, threads=config.run.threads)
    return Trial(
        steps_per_second=rate,
        rollout_steps_per_second=sum(episode.length for episode in evaluation.episodes) / rolling,
        start_seconds=max(seconds - STEPS / rate, 0.0),
        peak_gib=peak,
        num_targets=len(evaluation.summaries()),
        episode_limit=run.checkpoint.shape.max_timesteps,
    )


def _timed_rollout(run: TrainedRun, roll_out: RollOut, *, threads: int | None) -> tuple[float, Evaluation]:
    """Evaluate a run for ``EPISODES`` episodes per target; return the seconds taken and the evaluation."""
    plan = EpisodePlan((), EPISODES, seed=0, num_environments=2 * EPISODES, num_workers=0, fresh=True)
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        begin = time.monotonic()
        evaluation = roll_out(run, plan)
        return time.monotonic() - begin, evaluation
    finally:
        torch.set_num_threads(before)


def _timed(command: list[str], job: Job, programs: Programs, output: Path) -> tuple[float, float]:
    """Run a program; return the seconds taken and its peak resident memory in GiB."""
    begin = time.monotonic()
    with output.open("wb") as out, output.with_suffix(".err").open("wb") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, env=job.environment(programs.variables))
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise ValueError(f"the trial of {job.name} failed: {output.with_suffix('.err').read_text().strip()}")
    kibibytes = usage.ru_maxrss / (1024 if sys.platform == "darwin" else 1)  # macOS reports bytes
    return time.monotonic() - begin, kibibytes / 2**20
