"""Episodes in raw units: one by itself, and many in flat arrays.

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
    """``R_t = r_t + r_{t+1} + ... + r_T`` of one episode (T,): undiscounted, the current reward included."""
    # Summed in double precision: single precision has few digits left for the last steps of a return in the thousands.
    return np.cumsum(rewards[::-1], dtype=np.float64)[::-1].astype(np.float32)


@dataclass(frozen=True)
class Trajectory:
    """One episode, in raw units."""

    observations: Floats
    """(T, S), what the policy saw before each action. The observation after the last action is not kept."""
    actions: Floats
    """(T, A)."""
    rewards: Floats
    """(T,)."""
    is_complete: bool = True
    """Whether it goes on until the environment or the time limit ended it; False if the recording was cut off."""

    def __post_init__(self) -> None:
        if self.observations.ndim != 2 or self.actions.ndim != 2 or self.rewards.ndim != 1:
            raise ValueError(
                "an episode has observations (T, S), actions (T, A) and rewards (T,), "
                f"not {self.observations.shape}, {self.actions.shape} and {self.rewards.shape}"
            )
        if not len(self.observations) == len(self.actions) == len(self.rewards) >= 1:
            raise ValueError(
                "an episode has one observation, action and reward per step, and at least one step, "
                f"not {len(self.observations)}, {len(self.actions)} and {len(self.rewards)}"
            )


@dataclass(frozen=True)
class Trajectories:
    """Episodes back to back, in raw units. The arrays may be memory maps: nothing here reads them whole."""

    observations: Floats
    """(N, S)."""
    actions: Floats
    """(N, A)."""
    rewards: Floats
    """(N,)."""
    returns_to_go: Floats
    """(N,), what is left of the episode's return at each step, that step's reward included."""
    offsets: NDArray[np.int64]
    """(E + 1,), where each episode begins; the last entry is N."""

    def __post_init__(self) -> None:
        n = len(self.observations)
        for name in ("actions", "rewards", "returns_to_go"):
            if len(getattr(self, name)) != n:
                raise ValueError(f"{name} must have as many rows as observations ({n}), not {len(getattr(self, name))}")
        if len(self.offsets) < 2:
            raise ValueError("there must be at least one episode")
        if self.offsets[0] != 0 or self.offsets[-1] != n or (np.diff(self.offsets) < 1).any():
            raise ValueError(f"offsets must rise from 0 to {n}, the number of transitions, by at least 1 each")

    @classmethod
    def of(cls, episodes: Iterable[Trajectory]) -> Self:
        """Episodes that are in memory, joined."""
        kept = list(episodes)
        if not kept:
            raise ValueError("there must be at least one episode")
        return cls(
            observations=np.concatenate([episode.observations for episode in kept]),
            actions=np.concatenate([episode.actions for episode in kept]),
            rewards=np.concatenate([episode.rewards for episode in kept]),
            returns_to_go=np.concatenate([returns_to_go(episode.rewards) for episode in kept]),
            offsets=np.cumsum([0, *(len(episode.rewards) for episode in kept)], dtype=np.int64),
        )

    @property
    def lengths(self) -> NDArray[np.int64]:
        """(E,), transitions of each episode."""
        return np.diff(self.offsets)

    @property
    def returns(self) -> Floats:
        """(E,), the return of each episode."""
        return self.returns_to_go[self.offsets[:-1]]
