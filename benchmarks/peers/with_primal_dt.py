"""Ours: the sampler and the trainer of ``train.py``."""

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from serve import Episodes, Extras, Request, Step, serve
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from primal_dt.config import OptimizerConfig
from primal_dt.data import Trajectories, Trajectory, WindowSampler
from primal_dt.logbook import Logbook
from primal_dt.memory import keep_freed_memory
from primal_dt.model import DecisionTransformer, ModelShape
from primal_dt.normalizer import Normalizer
from primal_dt.scalars import training_scalars
from primal_dt.trainer import Trainer

LOG_EVERY_STEPS = 100
PROFILED_STEPS = 20


def build(request: Request, episodes: Episodes) -> tuple[Step, Extras]:
    """A training step, batch included."""
    torch.set_num_threads(request.threads)
    keep_freed_memory()  # as train.py does
    columns = (episodes.observations, episodes.actions, episodes.rewards)
    trajectories = Trajectories.of(Trajectory(*arrays) for arrays in zip(*columns, strict=True))
    normalizer = Normalizer.of(trajectories.observations, return_scale=1000.0)
    sampler = WindowSampler(trajectories, normalizer, context=request.context, batch_size=request.batch_size, seed=0)
    num_actions = episodes.actions.shape[-1]
    model = DecisionTransformer(
        ModelShape(
            state_width=episodes.observations.shape[-1],
            action_low=(-1.0,) * num_actions,
            action_high=(1.0,) * num_actions,
            attention=request.attention,
            width=request.width,
            num_heads=request.num_heads,
            num_layers=request.num_layers,
            context=request.context,
            dropout=request.dropout,
        )
    )
    config = OptimizerConfig(lr=1e-4, warmup_steps=0)
    trainer = Trainer(model, sampler, config, eta=0.05, seed=0, log_every_steps=LOG_EVERY_STEPS)
    model.train()

    def step() -> None:
        trainer.update(sampler.batch(trainer.step))

    extras: dict[str, Callable[[], Any]] = {
        "flops": lambda: _flops(step),
        "parts": lambda: _parts(trainer, sampler, step),
    }
    return step, extras


def _clocked(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _flops(step: Step) -> int:
    """Of the matrix products of a step, forward and backward, counted from their shapes."""
    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops()


def _parts(trainer: Trainer, sampler: WindowSampler, step: Step) -> dict[str, float]:
    """Seconds of each part of a step, means over some steps."""
    data = [_clocked(partial(sampler.batch, number)) for number in range(PROFILED_STEPS)]
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(PROFILED_STEPS):
            step()
    seconds = {
        event.key.removeprefix("train/"): event.cpu_time_total / 1e6 / PROFILED_STEPS
        for event in profiler.key_averages()
        if event.key.startswith("train/")
    }
    return {"data": float(np.median(data)), **seconds, "logging": _logging_seconds(trainer) / LOG_EVERY_STEPS}


def _logging_seconds(trainer: Trainer) -> float:
    """Of a logging point: seeing that all is finite, the means, and writing them down."""
    with tempfile.TemporaryDirectory() as folder:
        logbook = Logbook(Path(folder), texts={})

        def log() -> None:
            trainer.check()
            logbook.write(trainer.step, training_scalars(trainer.metrics(1.0)))

        seconds = [_clocked(log) for _ in range(PROFILED_STEPS)]
        logbook.close()
    return float(np.median(seconds))


serve(build)
