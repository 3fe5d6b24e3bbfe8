"""This project's Decision Transformer, with the sampler and the trainer of ``train.py``."""

import resource
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from serve import Episodes, Extras, Request, Step, serve
from torch import Tensor, nn
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from primal_dt.attention import SoftmaxAttention
from primal_dt.attention.dropout import Dropout
from primal_dt.attention.layer import select
from primal_dt.config import OptimizerConfig
from primal_dt.data.normalizer import Normalizer
from primal_dt.data.sampler import WindowSampler
from primal_dt.data.trajectories import Trajectories, Trajectory
from primal_dt.model.loss import Objective
from primal_dt.model.transformer import Block, DecisionTransformer, ModelShape
from primal_dt.system.process import keep_freed_memory
from primal_dt.training import trainer as trainer_module
from primal_dt.training.metrics_log import MetricsLog
from primal_dt.training.trainer import Trainer

LOG_EVERY_STEPS = 100
PROFILED_STEPS, GROWTH_STEPS = 20, 2_000
CPU_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *rest, **named: sdpa_flop_count(
        q, k, v
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda out, q, k, v, *rest, **named: sdpa_backward_flop_count(out, q, k, v)
    ),
}
"""Floating-point operations of fused attention on a CPU, from its shapes: torch's counter does not count it."""


def build(request: Request, episodes: Episodes) -> tuple[Step, Extras]:
    """Build a training step, including its batch."""
    torch.set_num_threads(request.threads)
    leave_out(request.without)
    if request.without != "kept memory":
        keep_freed_memory()  # as train.py does
    columns = (episodes.observations, episodes.actions, episodes.rewards)
    trajectories = Trajectories.of(Trajectory(*arrays) for arrays in zip(*columns, strict=True))
    normalizer = Normalizer.of(trajectories.observations, return_scale=1000.0)
    sampler = WindowSampler(trajectories, normalizer, context=request.context, batch_size=request.batch_size, seed=0)
    num_actions = episodes.actions.shape[-1]
    shape = ModelShape(
        state_width=episodes.observations.shape[-1],
        action_low=(-1.0,) * num_actions,
        action_high=(1.0,) * num_actions,
        attention=request.attention,
        width=request.width,
        num_heads=request.num_heads,
        num_layers=request.num_layers,
        context=request.context,
        dropout=request.dropout,
        attention_dropout=request.dropout,
    )
    config = OptimizerConfig(
        optimizer="muon" if request.optimizer == "muon" else "adamw",
        lr=1e-4,
        warmup_steps=0,
        steps=GROWTH_STEPS,
        shards=1 if request.without == "shards" else None,
        compile=request.without == "eager",
    )

    def make_trainer(config: OptimizerConfig) -> Trainer:
        model = DecisionTransformer(shape)
        if request.without == "right padding":
            for layer in model.modules():
                if isinstance(layer, SoftmaxAttention):
                    layer.right_padded = False
        trainer = Trainer(model, sampler, config, objective=Objective(), seed=0, log_every_steps=LOG_EVERY_STEPS)
        model.train()
        return trainer

    trainer = make_trainer(config)

    def step() -> None:
        trainer.update(sampler.batch(trainer.step))

    extras: dict[str, Callable[[], Any]] = {
        "flops": lambda: _flops(make_trainer(replace(config, shards=1))),
        "parts": lambda: _parts(trainer, step),
        "growth": lambda: [_resident_mib() for _ in trainer],
    }
    return step, extras


def leave_out(name: str | None) -> None:
    """Remove one optimization in this process."""
    if name == "cheap dropout":
        Dropout.forward = nn.Dropout.forward  # type: ignore[method-assign, assignment]
    elif name == "state positions":

        def everywhere(self: Block, x: Tensor, valid: Tensor, *, positions: Any, **options: Any) -> Any:
            hidden, objective = forward(self, x, valid, positions=None, **options)
            return select(hidden, positions), objective

        forward = Block.forward
        Block.forward = everywhere  # type: ignore[method-assign, assignment]
    elif name == "fused optimizer":
        trainer_module.make_optimizers = lambda model, config: [
            torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=config.weight_decay)
        ]
    elif name not in (None, "kept memory", "shards", "right padding", "eager"):
        raise ValueError(f"unknown optimization {name!r}")


def _clocked(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _flops(trainer: Trainer) -> int:
    """Floating-point operations of a step's matrix products, forward and backward, counted from their shapes.

    Causal attention is counted as full attention.
    """
    with FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION) as counter:
        trainer.update(trainer.sampler.batch(0))
    return counter.get_total_flops()


def _parts(trainer: Trainer, step: Step) -> dict[str, float]:
    """Seconds of each part of a step: medians for data and logging, means for the other parts.

    The means are over ``PROFILED_STEPS`` steps and, where shards run in parallel, over the shards.
    """
    data = [_clocked(partial(trainer.sampler.batch, number)) for number in range(PROFILED_STEPS)]
    everywhere = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=everywhere) as profiler:
        for _ in range(PROFILED_STEPS):
            step()
    seconds = {
        event.key.removeprefix("train/"): event.cpu_time_total / 1e6 / event.count
        for event in profiler.key_averages()
        if event.key.startswith("train/")
    }
    return {"data": float(np.median(data)), **seconds, "logging": _logging_seconds(trainer) / LOG_EVERY_STEPS}


def _resident_mib() -> float:
    """Current resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def _logging_seconds(trainer: Trainer) -> float:
    """Seconds of a logging point: checking that all values are finite, computing the means, and writing them."""
    with tempfile.TemporaryDirectory() as folder:
        logbook = MetricsLog(Path(folder), texts={})

        def log() -> None:
            trainer.check()
            logbook.write(trainer.step, trainer.metrics(1.0).scalars)

        seconds = [_clocked(log) for _ in range(PROFILED_STEPS)]
        logbook.close()
    return float(np.median(seconds))


serve(build)
