"""Episodes in raw units: a single episode, and many episodes in flat arrays.

Axes: N transitions, E episodes, T transitions of one episode, S state, A action.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

__all__ = ["Trajectories", "Trajectory", "best_episodes", "highest_returns", "hold_out", "returns_to_go"]

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


def _no_files() -> None:
    """The check of arrays that are in memory."""


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
    check_files: Callable[[], None] = _no_files
    """Raises an error if files behind the arrays have changed. Call it before reading, as often as for each batch."""

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


def hold_out(num_episodes: int, fraction: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Divide episodes into those to train on and those held out, as indices in rising order.

    The choice is random but always the same, so that runs with different seeds have the same split. If the fraction is
    above 0, at least one episode is held out, and at least one is not.

    Raises:
        ValueError: if there is only one episode to divide.
    """
    order = np.random.default_rng(0).permutation(num_episodes)
    count = min(max(1, round(fraction * num_episodes)), num_episodes - 1) if fraction > 0 else 0
    if fraction > 0 and num_episodes < 2:
        raise ValueError("validation needs at least two episodes: one to train on and one to hold out")
    return np.sort(order[count:]), np.sort(order[:count])


def highest_returns(trajectories: Trajectories, num_timesteps: int) -> Floats:
    """The highest return-to-go at each timestep, (num_timesteps,). After the longest episode: that of its last step."""
    timesteps = np.arange(len(trajectories.rewards)) - np.repeat(trajectories.offsets[:-1], trajectories.lengths)
    highest = np.full(max(num_timesteps, int(trajectories.lengths.max())), -np.inf, np.float32)
    np.maximum.at(highest, timesteps, trajectories.returns_to_go)
    highest[trajectories.lengths.max() :] = highest[trajectories.lengths.max() - 1]
    return highest[:num_timesteps]


def best_episodes(trajectories: Trajectories, episodes: NDArray[np.int64], fraction: float) -> NDArray[np.int64]:
    """The episodes with the highest returns that together have at least this fraction of the steps, in rising order."""
    ranked = episodes[np.argsort(-trajectories.returns[episodes], kind="stable")]
    steps = np.cumsum(trajectories.lengths[ranked])
    return np.sort(ranked[: int(np.searchsorted(steps, fraction * steps[-1])) + 1])
