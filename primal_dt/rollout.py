"""Runs a policy in several environments at once. It knows gymnasium's interface, and nothing of transformers.

Axes: E environments, S state, A action.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, SupportsFloat

import numpy as np
from numpy.typing import NDArray

__all__ = ["Environment", "Episode", "Policy", "rollout"]


class Environment(Protocol):
    """What is used of a ``gymnasium.Env``."""

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode: its first observation (S,)."""

    def step(self, action: Any, /) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Observation, reward, terminated, truncated."""

    def close(self) -> Any:
        """Give back what it holds."""


class Policy(Protocol):
    """What is run."""

    def reset(self, targets: NDArray[np.float64], /) -> None:
        """Begin an episode in each of E environments, with the return (E,) to ask for."""

    def act(self, observations: NDArray[np.floating], /) -> NDArray[np.floating]:
        """(E, S) -> (E, A)."""

    def observe(self, rewards: NDArray[np.float64], /) -> None:
        """Rewards (E,) of the last actions."""

    def keep(self, rows: NDArray[np.bool_], /) -> None:
        """Go on with some of the environments."""


@dataclass(frozen=True)
class Episode:
    """How one ended."""

    target: float
    seed: int
    total_reward: float
    length: int


def rollout(
    policy: Policy,
    make_environment: Callable[[], Environment],
    *,
    targets: Sequence[float],
    seeds: Sequence[int],
    num_environments: int = 64,
    on_step: Callable[[int], None] = lambda running: None,
) -> list[Episode]:
    """One episode for each pair of target and seed, in the order in which they are given.

    Args:
        policy: acts in all environments at once.
        make_environment: called once for each environment that runs at a time.
        targets: the return to ask for in each episode.
        seeds: that the environment of each episode is reset with.
        num_environments: how many run at a time, at most.
        on_step: told after each step how many still run.
    """
    if len(targets) != len(seeds):
        raise ValueError(f"there must be one target for each seed, not {len(targets)} for {len(seeds)}")
    environments = [make_environment() for _ in range(min(num_environments, len(seeds)))]
    try:
        episodes: list[Episode] = []
        for first in range(0, len(seeds), num_environments):
            part = slice(first, first + num_environments)
            episodes += _run(policy, environments, targets[part], seeds[part], on_step)
        return episodes
    finally:
        for environment in environments:
            environment.close()


def _run(
    policy: Policy,
    environments: Sequence[Environment],
    targets: Sequence[float],
    seeds: Sequence[int],
    on_step: Callable[[int], None],
) -> list[Episode]:
    """Episodes side by side; those that have ended leave the batch."""
    count = len(seeds)
    total, length = np.zeros(count), np.zeros(count, int)
    running = np.arange(count)
    observations = np.stack([environments[i].reset(seed=seeds[i])[0] for i in range(count)])
    policy.reset(np.asarray(targets, np.float64))
    while len(running):
        actions = policy.act(observations)
        steps = [environments[i].step(action) for i, action in zip(running.tolist(), actions, strict=True)]
        observations = np.stack([step[0] for step in steps])
        rewards = np.array([float(step[1]) for step in steps])
        goes_on = np.array([not (step[2] or step[3]) for step in steps])
        total[running] += rewards
        length[running] += 1
        policy.observe(rewards)
        if not goes_on.all():
            policy.keep(goes_on)
            running, observations = running[goes_on], observations[goes_on]
        on_step(len(running))
    return [Episode(float(targets[i]), int(seeds[i]), float(total[i]), int(length[i])) for i in range(count)]
