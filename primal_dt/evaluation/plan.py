"""Which episodes an evaluation runs. Standard library only."""

from dataclasses import dataclass
from typing import Literal

__all__ = ["EpisodePlan"]


@dataclass(frozen=True)
class EpisodePlan:
    """The episodes to run, and how to run them."""

    targets: tuple[float, ...] | Literal["auto"]
    """Target returns in addition to the headline target. If empty: the targets of the training run.
    ``auto``: eight targets, from the data's lowest return to above its highest."""
    num_episodes: int
    """Number of episodes for each target. Episode i is reset with ``seed + i``."""
    seed: int
    num_environments: int
    """Maximum number of environments that run at the same time."""
    num_workers: int | None
    """Number of processes that step the environments. If None: ``evaluate.py`` chooses."""
    fresh: bool
    """Whether to run cached episodes again."""
