"""Small real files: D4RL's layout written with h5py, Minari's with Minari."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from envs.datasets.checks import ActionCheck
from envs.datasets.minari import RecordedEpisode, open_minari, write_minari
from envs.spaces import unit_box
from envs.tasks import ENVIRONMENTS, task_of
from primal_dt.data.trajectories import Trajectory

HOPPER_ACTIONS = unit_box(3)
NAME = "test/hopper/small-v0"
"""The name of a small Minari data set."""


def d4rl_arrays(
    lengths: tuple[int, ...] = (4, 1, 3), *, environment: str = "hopper", seed: int = 0
) -> dict[str, np.ndarray]:
    """Random episodes with an environment's widths. The first is truncated; the others terminate."""
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


def cut_off_arrays() -> dict[str, np.ndarray]:
    """The same episodes in a recording that stops before the last one ends."""
    arrays = d4rl_arrays()
    arrays["terminals"][-1] = False
    return arrays


def write_d4rl(path: Path, arrays: dict[str, np.ndarray], **attributes: Any) -> Path:
    with h5py.File(path, "w") as file:
        for key, array in arrays.items():
            file.create_dataset(key, data=array)
        file.attrs.update(attributes)
    return path


def recorded_episodes(lengths: tuple[int, ...] = (4, 1, 3)) -> Iterator[RecordedEpisode]:
    """Random episodes of Hopper. The first is truncated; the others terminate."""
    random = np.random.default_rng(0)
    for number, length in enumerate(lengths):
        yield RecordedEpisode(
            observations=random.normal(size=(length + 1, 11)),
            actions=random.uniform(-1, 1, size=(length, 3)).astype(np.float32),
            rewards=random.normal(size=length),
            terminated=number > 0,
            truncated=number == 0,
            seed=number,
        )


def write_small_minari(name: str = NAME, lengths: tuple[int, ...] = (4, 1, 3), *, replace: bool = False) -> Path:
    return write_minari(
        name,
        recorded_episodes(lengths),
        task=task_of("Hopper-v5"),
        algorithm="none",
        description="for a test",
        metadata={"seed": 7},
        replace=replace,
    )


def read_minari(folder: Path) -> list[Trajectory]:
    return list(open_minari(folder).episodes(ActionCheck(HOPPER_ACTIONS)))
