"""Small real files: D4RL's layout by h5py, Minari's by Minari."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from envs.datasets.minari import RecordedEpisode, write_minari
from envs.tasks import ENVIRONMENTS, Task, task_of


def d4rl_arrays(
    lengths: tuple[int, ...] = (4, 1, 3), *, environment: str = "hopper", seed: int = 0
) -> dict[str, np.ndarray]:
    """Episodes of an environment's widths; all but the first end by themselves."""
    n, random = sum(lengths), np.random.default_rng(seed)
    widths = ENVIRONMENTS[environment]
    terminals, timeouts = np.zeros(n, bool), np.zeros(n, bool)
    ends = np.cumsum(lengths) - 1
    timeouts[ends[0]] = True
    terminals[ends[1:]] = True
    observations = random.normal(size=(n, widths.state_width)).astype(np.float32)
    return {
        "observations": observations,
        "next_observations": observations + 1,
        "actions": random.uniform(-1, 1, size=(n, widths.action_width)).astype(np.float32),
        "rewards": random.normal(size=n).astype(np.float32),
        "terminals": terminals,
        "timeouts": timeouts,
    }


def write_d4rl(path: Path, arrays: dict[str, np.ndarray], **attributes: Any) -> Path:
    with h5py.File(path, "w") as file:
        for key, array in arrays.items():
            file.create_dataset(key, data=array)
        file.attrs.update(attributes)
    return path


def recorded_episodes(
    lengths: tuple[int, ...] = (4, 1, 3), *, environment: str = "hopper", seed: int = 0
) -> Iterator[RecordedEpisode]:
    random, widths = np.random.default_rng(seed), ENVIRONMENTS[environment]
    for number, length in enumerate(lengths):
        yield RecordedEpisode(
            observations=random.normal(size=(length + 1, widths.state_width)),
            actions=random.uniform(-1, 1, size=(length, widths.action_width)).astype(np.float32),
            rewards=random.normal(size=length),
            terminated=number > 0,
            truncated=number == 0,
            seed=number,
        )


def write_small_minari(dataset_id: str, task: Task | None = None, **options: Any) -> Path:
    task = task or task_of("Hopper-v5")
    episodes = recorded_episodes(environment=task.environment.name, **options)
    return write_minari(dataset_id, episodes, task=task, algorithm="none", description="for a test", facts={"seed": 7})
