"""A short trial of a job, to tell how long it will take and how much memory it will need."""

import math
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from envs.datasets.checks import DataError
from envs.tasks import ENVIRONMENTS
from primal_dt.evaluation.report import Evaluated
from primal_dt.evaluation.trained_run import Plan, evaluate_trained, open_trained
from primal_dt.sweep.cluster import Resources
from primal_dt.sweep.job import Job
from primal_dt.sweep.worker import Programs
from primal_dt.training.metrics_log import read_metrics

__all__ = ["Trial", "this_machine", "try_job"]

STEPS, LOG_EVERY_STEPS = 40, 10
EPISODES = 8
SHARE_OF_MEMORY = 0.7
"""That Ray gives to tasks; it keeps the rest for objects."""


@dataclass(frozen=True)
class Trial:
    """What a job takes."""

    steps_per_second: float
    """Of training; the last points of a short one."""
    rollout_steps_per_second: float
    """Of all environments together, in an evaluation."""
    start_seconds: float
    """From the command to the first step."""
    peak_gib: float
    """Of resident memory."""
    num_targets: int
    """That a policy is evaluated with."""
    episode_limit: int
    """Steps of the longest episode."""

    def seconds_left(self, job: Job) -> float:
        """Of a job, if every episode that is to come had the most steps that it can have."""
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
        """For each target."""
        return episodes * self.num_targets * self.episode_limit / self.rollout_steps_per_second


def this_machine() -> Resources:
    """What jobs can have of it: about what Ray would give them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return Resources(cores, torch.cuda.device_count(), SHARE_OF_MEMORY * memory)


def try_job(job: Job, programs: Programs) -> Trial:
    """Train it for some steps, evaluate it for some episodes, in a folder that is removed again.

    Raises:
        DataError: if the programs fail, with what they say.
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
        rolling, evaluated = _rolled_out(small)
    limit = ENVIRONMENTS[evaluated.environment].episode_limit
    return Trial(
        steps_per_second=rate,
        rollout_steps_per_second=sum(episode.length for episode in evaluated.episodes) / rolling,
        start_seconds=max(seconds - STEPS / rate, 0.0),
        peak_gib=peak,
        num_targets=len(evaluated.summaries()),
        episode_limit=limit,
    )


def _rolled_out(job: Job) -> tuple[float, Evaluated]:
    """Seconds of some episodes, and what they gave."""
    trained = open_trained(job.folder)
    plan = Plan((), EPISODES, seed=0, num_environments=2 * EPISODES, num_workers=0, fresh=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(job.config.run.threads or threads)
    try:
        begin = time.monotonic()
        evaluated = evaluate_trained(trained, plan, mode="window", device=torch.device("cpu"))
        return time.monotonic() - begin, evaluated
    finally:
        torch.set_num_threads(threads)


def _timed(command: list[str], job: Job, programs: Programs, output: Path) -> tuple[float, float]:
    """Seconds and GiB of a program."""
    begin = time.monotonic()
    with output.open("wb") as out, output.with_suffix(".err").open("wb") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, env=job.environment(programs.variables))
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise DataError(f"a trial of {job.name} failed: {output.with_suffix('.err').read_text().strip()}")
    kibibytes = usage.ru_maxrss / (1024 if sys.platform == "darwin" else 1)  # bytes there
    return time.monotonic() - begin, kibibytes / 2**20
