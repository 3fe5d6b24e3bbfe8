"""Episodes in raw units: a single episode, and many episodes in flat arrays.

Axes: N transitions, E episodes, T transitions of one episode, S state, A action.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

__all__ = ["Trajectories", "Trajectory", "returns_to_go"]

Floats = NDArray[np.float32]


def returns_to_go(rewards: NDArray[np.floating]) -> Floats:
    """``R_t = r_t + r_{t+1} + ... + r_T`` of one episode, (T,): undiscounted, including the current reward."""
    # Sum in double precision: in single precision, few digits of the last steps survive in a return of thousands.
    return np.cumsum(rewards[::-1], dtype=np.float64)[::-1].astype(np.float32)


@dataclass(frozen=True)
class Trajectory:
    """One episode, in raw units."""

    observations: Floats
    """(T, S), the observation before each action. The one after the last action is not stored."""
    actions: Floats
    """Actions, (T, A)."""
    rewards: Floats
    """Rewards, (T,)."""
    is_complete: bool = True
    """Whether the environment or the time limit ended the episode. False if the recording was cut off."""

    def __post_init__(self) -> None:
        if self.observations.ndim != 2 or self.actions.ndim != 2 or self.rewards.ndim != 1:
            raise ValueError(
                "an episode must have observations (T, S), actions (T, A) and rewards (T,), "
                f"not {self.observations.shape}, {self.actions.shape} and {self.rewards.shape}"
            )
        if not len(self.observations) == len(self.actions) == len(self.rewards) >= 1:
            raise ValueError(
                "an episode must have one observation, action and reward per step, and at least one step, "
                f"not {len(self.observations)}, {len(self.actions)} and {len(self.rewards)}"
            )


@dataclass(frozen=True)
class Trajectories:
    """Episodes in flat arrays, one after another, in raw units. Arrays may be memory maps and are never read whole."""

    observations: Floats
    """Observations, (N, S)."""
    actions: Floats
    """Actions, (N, A)."""
    rewards: Floats
    """Rewards, (N,)."""
    returns_to_go: Floats
    """Sum of the rewards from each step to the end of its episode, (N,), including that step's reward."""
    offsets: NDArray[np.int64]
    """Index of the first transition of each episode, (E + 1,). The last entry is N."""

    def __post_init__(self) -> None:
        n = len(self.observations)
        for name in ("actions", "rewards", "returns_to_go"):
            if len(getattr(self, name)) != n:
                raise ValueError(f"{name} must have as many rows as observations ({n}), not {len(getattr(self, name))}")
        if len(self.offsets) < 2:
            raise ValueError("there must be at least one episode")
        if self.offsets[0] != 0 or self.offsets[-1] != n or (np.diff(self.offsets) < 1).any():
            raise ValueError(f"offsets must increase strictly from 0 to {n}, the number of transitions")

    @classmethod
    def of(cls, episodes: Iterable[Trajectory]) -> Self:
        """Concatenate episodes that are in memory."""
        collected = list(episodes)
        if not collected:
            raise ValueError("there must be at least one episode")
        return cls(
            observations=np.concatenate([episode.observations for episode in collected]),
            actions=np.concatenate([episode.actions for episode in collected]),
            rewards=np.concatenate([episode.rewards for episode in collected]),
            returns_to_go=np.concatenate([returns_to_go(episode.rewards) for episode in collected]),
            offsets=np.cumsum([0, *(len(episode.rewards) for episode in collected)], dtype=np.int64),
        )

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of transitions of each episode, (E,)."""
        return np.diff(self.offsets)

    @property
    def returns(self) -> Floats:
        """Return of each episode, (E,)."""
        return self.returns_to_go[self.offsets[:-1]]
