"""ESTIMATE of the time of a sweep on GPUs, from the shapes of its training steps, data sheets, and measured rollouts.

Training: the operations of a step of each attention stack are counted on the meta device (see benchmarks.roofline), and
run at an assumed share of the data sheet's peak. Jobs on one GPU share its arithmetic, but launch their operations in
parallel.

Evaluation: evaluations during training run on the GPU. Each environment step takes a forward pass, counted as the
launches of a whole training step. The final evaluation runs on one CPU core, at the rollout rate that is measured on
this machine with a model of the sweep's size.

Each job goes to the first GPU that becomes free.
"""

import statistics
from dataclasses import astuple, dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.measure import time_interleaved
from benchmarks.policy_alone import STEPS_PER_CALL
from benchmarks.program import run_program
from benchmarks.rollout import TASK, Session
from benchmarks.roofline import GPUS, Gpu, Step, step_of
from envs.make import make_arena, make_environment
from primal_dt.config import PRESETS
from primal_dt.config import Config as Training
from primal_dt.data.normalizer import Normalizer
from primal_dt.evaluation.vector import Environments
from primal_dt.model.transformer import DecisionTransformer, ModelShape
from primal_dt.policy.policy import DecisionTransformerPolicy
from primal_dt.sweep.estimate import makespan
from primal_dt.sweep.grid import SWEEPS, Grid
from primal_dt.system.table import format_table

ENVIRONMENTS = 64


@dataclass(frozen=True)
class Config:
    """Settings of the estimate."""

    sweep: Literal["table4", "table7"] = "table4"
    """Sweep to estimate."""
    gpus: tuple[int, ...] = (1, 8, 64)
    """Numbers of GPUs."""
    jobs_per_gpu: int = 4
    """Jobs that share a GPU (4 is ``--gpus-per-job 0.25`` of sweep.py)."""
    share_of_peak: float = 0.35
    """Share of the data sheet's peak that kernels reach. This is an assumption."""
    launch_microseconds: float = 5.0
    """Microseconds that the host takes to launch one operation. This is an assumption."""
    seconds: float = 5.0
    """Seconds to time rollouts."""

    def __post_init__(self) -> None:
        if min((self.jobs_per_gpu, *self.gpus)) < 1 or not 0 < self.share_of_peak <= 1 or self.seconds <= 0:
            raise ValueError("gpus and jobs_per_gpu must be at least 1, share_of_peak in (0, 1], seconds above 0")


def shape_of(training: Training, attention: str, rank: int | None) -> ModelShape:
    """Model shape of the sweep, with HalfCheetah's state and action widths."""
    environment, model = TASK.environment, training.model
    return ModelShape(
        state_width=environment.state_width,
        action_low=(-1.0,) * environment.action_width,
        action_high=(1.0,) * environment.action_width,
        attention=attention,
        width=model.width,
        num_heads=model.num_heads,
        num_layers=model.num_layers,
        context=model.context,
        rank=rank or 96,
        dropout=model.dropout,
        attention_dropout=model.attention_dropout,
    )


def rollout_rate(shape: ModelShape, seconds: float) -> float:
    """Measure the environment steps per second on one core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        units = Normalizer(np.zeros(shape.state_width, np.float32), np.ones(shape.state_width, np.float32), 1000.0)
        policy = DecisionTransformerPolicy(DecisionTransformer(shape), units, reproducible=True)
        with Environments(partial(make_environment, TASK), ENVIRONMENTS, num_workers=0) as environments:
            session = Session(policy, environments, warm_up=shape.context)
            timing = time_interleaved({"rollout": session.steps}, seconds=seconds, device=torch.device("cpu"))
        return ENVIRONMENTS * STEPS_PER_CALL / timing["rollout"].median
    finally:
        torch.set_num_threads(threads)


@dataclass(frozen=True)
class JobTime:
    """Estimated seconds of one job that shares its GPU."""

    training: float
    watching: float
    """Evaluations during training."""
    evaluation: float
    """Final evaluation, on one CPU core."""

    @property
    def total(self) -> float:
        """Seconds of the whole job."""
        return self.training + self.watching + self.evaluation


def job_time(step: Step, training: Training, grid: Grid, gpu: Gpu, config: Config, rate: float) -> JobTime:
    """Estimate the time of a job.

    Args:
        step: the work of one training step.
        training: gives the number of training steps and how often to evaluate.
        grid: gives the number of episodes in the final evaluation.
        gpu: the GPU that the job shares.
        config: gives the number of jobs per GPU and the assumptions.
        rate: environment steps per second on one core.
    """
    limit, targets = make_arena(TASK).episode_limit, len(TASK.environment.targets)
    launching = 1e-6 * config.launch_microseconds * len(step.work)
    computing = config.jobs_per_gpu * step.device_seconds(gpu) / config.share_of_peak
    evaluations = training.optimizer.steps // training.evaluation.eval_every_steps
    return JobTime(
        training=training.optimizer.steps * max(launching, computing),
        watching=evaluations * limit * launching,  # all episodes run in parallel
        evaluation=grid.episodes * targets * limit / rate,
    )


def main(config: Config) -> None:
    """Count operations, measure rollouts, print."""
    grid = SWEEPS[config.sweep]
    training = PRESETS[grid.preset][1]
    points = list(grid.points())
    rank = max(grid.ranks, key=lambda each: each or 0)
    shapes = {attention: shape_of(training, attention, rank) for attention in grid.attention}
    steps = {
        attention: step_of(shape, training.optimizer.batch_size)
        for attention, shape in tqdm(shapes.items(), desc="counting", leave=False, disable=None)
    }
    rate = rollout_rate(shapes["primal-plus"], config.seconds)

    print("ESTIMATES from shapes and data sheets, float32; only the rollout rate is measured, on one core here.\n")
    rows = []
    for gpu in GPUS:
        times = {name: job_time(step, training, grid, gpu, config, rate) for name, step in steps.items()}
        jobs = [times[point["arm"].attention] for point in points]
        every = [job.total for job in jobs]
        rows.append(
            [
                gpu.name,
                *(f"{statistics.mean(part) / 60:.1f}" for part in zip(*map(astuple, jobs), strict=True)),
                *(f"{makespan(every, number * config.jobs_per_gpu) / 3600:,.1f}" for number in config.gpus),
            ]
        )
    header = ["", "minutes per job: training", "evaluation during training", "final evaluation"]
    print(format_table([*header, *(f"hours on {number}" for number in config.gpus)], rows))
    millions = statistics.mean(step.num_parameters for step in steps.values()) / 1e6
    print(
        f"\n{config.sweep}: {len(points)} jobs of {training.optimizer.steps:,} steps, {millions:.1f} M parameters, "
        f"jobs per GPU: {config.jobs_per_gpu}; rollouts: {rate:,.0f} steps per second on one core"
    )


if __name__ == "__main__":
    run_program(main, Config, name="benchmarks.scale", description=__doc__)
