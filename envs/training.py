"""What a configuration and a data set ask for together: the model, its batches, and what it must know of its task."""

import os
from collections.abc import Iterable, Mapping
from typing import Any

from envs.datasets.load import Dataset
from envs.tasks import parse_name
from primal_dt.config import Config
from primal_dt.data.sampler import WindowSampler
from primal_dt.model.transformer import ModelShape

__all__ = ["dataset_again", "make_sampler", "model_shape", "task_facts"]

DEFAULT_RANK = 32


def make_sampler(
    config: Config, dataset: Dataset, *, batch_size: int | None = None, process: int = 0, num_processes: int = 1
) -> WindowSampler:
    """Batches of windows, in the model's units."""
    return WindowSampler(
        dataset.trajectories,
        dataset.normalizer,
        context=config.model.context,
        batch_size=batch_size or config.optimizer.batch_size,
        seed=config.run.seed,
        weighting=config.optimizer.sampling,
        process=process,
        num_processes=num_processes,
    )


def model_shape(config: Config, dataset: Dataset) -> ModelShape:
    """The model."""
    environment, model = dataset.task.environment, config.model
    longest = int(dataset.trajectories.lengths.max())
    return ModelShape(
        state_width=environment.state_width,
        action_low=(environment.action_box.low,) * environment.action_width,
        action_high=(environment.action_box.high,) * environment.action_width,
        attention=model.attention,
        width=model.width,
        num_heads=model.num_heads,
        num_layers=model.num_layers,
        context=model.context,
        rank=model.rank or dataset.task.paper_rank or DEFAULT_RANK,
        dropout=model.dropout,
        max_timesteps=max(environment.episode_limit, longest),
    )


def task_facts(config: Config, dataset: Dataset) -> dict[str, Any]:
    """What a policy has to know of its task where the data is not."""
    environment = dataset.task.environment
    return {
        "env_id": dataset.task.env_id,
        "tier": dataset.task.tier,
        "dataset": config.dataset,
        "data_env_ids": sorted({part.env_id for part in dataset.parts}),
        "fingerprint": dataset.store.fingerprint,
        "targets": list(dict.fromkeys((environment.targets[0], *(config.evaluation.targets or environment.targets)))),
        "random_return": environment.reference.random_return,
        "expert_return": environment.reference.expert_return,
    }


def dataset_again(parts: Iterable[Mapping[str, str]]) -> str:
    """What to load to have a run's data again, also from another working folder than the first time.

    Args:
        parts: ``name`` and ``path`` of each, as they were found then.
    """
    return "+".join(
        part["name"] if parse_name(part["name"]) or not os.path.exists(part["path"]) else part["path"] for part in parts
    )
