"""What a sweep would take on GPUs, ESTIMATED: from the shapes of its training steps, data sheets, and rollouts here.

Training: every attention stack's step, counted on the meta device (``benchmarks.roofline``), at a share of a data
sheet's peak that has to be assumed. Jobs that share a GPU share its arithmetic, but launch operations side by side.
Evaluation runs on CPU cores, at the rate that a model of the sweep's size is rolled out at here, on one core.
"""

import statistics
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.measure import time_interleaved
from benchmarks.program import run_program
from benchmarks.rollout import STEPS_PER_CALL, TASK, Session
from benchmarks.roofline import GPUS, Gpu, Step, step_of
from envs.mujoco import make_environment
from envs.sweeps import SWEEPS, Grid
from primal_dt.config import PRESETS
from primal_dt.config import Config as Training
from primal_dt.model import DecisionTransformer, ModelShape
from primal_dt.normalizer import Normalizer
from primal_dt.policy import DecisionTransformerPolicy
from primal_dt.table import format_table
from primal_dt.vector import Environments

ENVIRONMENTS = 64


@dataclass(frozen=True)
class Config:
    """What to estimate."""

    sweep: Literal["table4", "table7"] = "table4"
    """Which sweep."""
    gpus: tuple[int, ...] = (1, 8, 64)
    """How many there are."""
    jobs_per_gpu: int = 4
    """That run at a time (``--gpus-per-job 0.25`` is four)."""
    share_of_peak: float = 0.35
    """Of a data sheet's numbers that kernels reach: an assumption."""
    launch_microseconds: float = 5.0
    """What a host takes to launch one operation: an assumption."""
    seconds: float = 5.0
    """How long rollouts are timed."""

    def __post_init__(self) -> None:
        if min((self.jobs_per_gpu, *self.gpus)) < 1 or not 0 < self.share_of_peak <= 1 or self.seconds <= 0:
            raise ValueError("gpus and jobs_per_gpu must be at least 1, share_of_peak above 0 and at most 1")


def shape_of(training: Training, attention: str, rank: int | None) -> ModelShape:
    """A model of the sweep, in HalfCheetah's widths."""
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
    )


def rollout_rate(shape: ModelShape, seconds: float) -> float:
    """Environment steps in a second, on one core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        units = Normalizer(np.zeros(shape.state_width, np.float32), np.ones(shape.state_width, np.float32), 1000.0)
        policy = DecisionTransformerPolicy(DecisionTransformer(shape), units)
        with Environments(partial(make_environment, TASK), ENVIRONMENTS, num_workers=0) as environments:
            session = Session(policy, environments, warm_up=shape.context)
            timing = time_interleaved({"rollout": session.steps}, seconds=seconds, device=torch.device("cpu"))
        return ENVIRONMENTS * STEPS_PER_CALL / timing["rollout"].median
    finally:
        torch.set_num_threads(threads)


def gpu_hours(steps: dict[str, Step], jobs: dict[str, int], training: Training, gpu: Gpu, config: Config) -> float:
    """Of the whole sweep on one GPU."""
    total = 0.0
    for attention, step in steps.items():
        launching = 1e-6 * config.launch_microseconds * len(step.work) / config.jobs_per_gpu
        computing = step.device_seconds(gpu) / config.share_of_peak
        total += jobs[attention] * training.optimizer.steps * max(launching, computing)
    return total / 3600


def evaluated_steps(training: Training, grid: Grid) -> int:
    """Environment steps of a job's evaluations, if all episodes were as long as can be."""
    evaluation = training.evaluation
    points = training.optimizer.steps // evaluation.eval_every_steps
    episodes = points * evaluation.eval_episodes + grid.episodes
    return episodes * len(TASK.environment.targets) * TASK.environment.episode_limit


def main(config: Config) -> None:
    """Count, measure, print."""
    grid = SWEEPS[config.sweep]
    training = PRESETS[grid.preset][1]
    points = list(grid.points())
    jobs = {attention: sum(point["attention"] == attention for point in points) for attention in grid.attention}
    shapes = {attention: shape_of(training, attention, max(grid.ranks, key=lambda r: r or 0)) for attention in jobs}
    steps = {
        attention: step_of(shape, training.optimizer.batch_size)
        for attention, shape in tqdm(shapes.items(), desc="counting", leave=False, disable=None)
    }
    rate = rollout_rate(shapes["primal-plus"], config.seconds)
    core_hours = len(points) * evaluated_steps(training, grid) / rate / 3600

    print("ESTIMATES: from shapes and data sheets, float32; only the rate of rollouts is measured, on one core here.\n")
    rows = []
    for gpu in GPUS:
        hours = gpu_hours(steps, jobs, training, gpu, config)
        cores = core_hours / hours
        rows.append([gpu.name, f"{hours:,.0f}", *(f"{hours / number:,.1f}" for number in config.gpus), f"{cores:.1f}"])
    header = ["", "GPU hours", *(f"hours on {number}" for number in config.gpus), "cores per GPU for evaluation"]
    print(format_table(header, rows))
    millions = statistics.mean(step.num_parameters for step in steps.values()) / 1e6
    print(f"\n{config.sweep}: {len(points)} jobs of {training.optimizer.steps:,} steps, {millions:.1f} M parameters")
    most = evaluated_steps(training, grid)
    print(f"evaluation: at most {most:,} environment steps a job, {rate:,.0f} in a second on a core")
    print(f"            {core_hours:,.0f} core hours in all")


if __name__ == "__main__":
    run_program(main, Config, name="benchmarks.scale", description=__doc__)
