"""Runs a policy in several environments at once. It knows gymnasium's interface, and nothing of transformers.

Axes: E environments, S state, A action.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from primal_dt.evaluation.vector import Environment, EnvironmentFailedError, Environments

__all__ = ["Environment", "Episode", "Policy", "RolloutError", "rollout"]


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


class RolloutError(RuntimeError):
    """An episode could not go on: its environment failed, or its action is not finite."""


def rollout(
    policy: Policy,
    make_environment: Callable[[], Environment],
    *,
    targets: Sequence[float],
    seeds: Sequence[int],
    num_environments: int = 64,
    num_workers: int = 0,
    on_step: Callable[[int], None] = lambda running: None,
    on_episode: Callable[[Episode], None] = lambda episode: None,
) -> list[Episode]:
    """One episode for each pair of target and seed, in the order in which they are given.

    An episode is a function of the policy, its target and its seed, if the policy is one of its history alone: how many
    run at once, and in how many processes, makes no difference.

    Args:
        policy: acts in all environments at once.
        make_environment: called once for each environment that runs at a time; with workers, in their processes.
        targets: the return to ask for in each episode.
        seeds: that the environment of each episode is reset with.
        num_environments: how many run at a time, at most.
        num_workers: processes that step them; 0 for this one alone.
        on_step: told after each step how many still run.
        on_episode: told of each episode when it ends, so that it is not lost if a later one fails.

    Raises:
        RolloutError: if an environment fails or an action is not finite.
    """
    if len(targets) != len(seeds):
        raise ValueError(f"there must be one target for each seed, not {len(targets)} for {len(seeds)}")
    if num_environments < 1:
        raise ValueError(f"num_environments ({num_environments}) must be at least 1")
    count = min(num_environments, len(seeds))
    episodes: list[Episode] = []
    try:
        with Environments(make_environment, count, num_workers=min(num_workers, count)) as environments:
            for first in range(0, len(seeds), num_environments):
                part = slice(first, first + num_environments)
                episodes += _run(policy, environments, targets[part], seeds[part], on_step, on_episode)
    except EnvironmentFailedError as error:
        raise RolloutError(str(error)) from error
    return episodes


def _run(
    policy: Policy,
    environments: Environments,
    targets: Sequence[float],
    seeds: Sequence[int],
    on_step: Callable[[int], None],
    on_episode: Callable[[Episode], None],
) -> list[Episode]:
    """Episodes side by side; those that have ended leave the batch."""
    count = len(seeds)
    total, length = np.zeros(count), 0
    episodes: dict[int, Episode] = {}
    running = np.arange(count)
    observations = environments.reset(seeds)
    policy.reset(np.asarray(targets, np.float64))
    while len(running):
        actions = policy.act(observations)
        named = [seeds[i] for i in running.tolist()]
        _check("action", actions, named, step=length, observations=observations)
        observations, rewards, ended, failures = environments.step(running, actions)
        _check("reward", rewards[:, None], named, step=length, observations=observations)
        total[running] += rewards
        length += 1
        policy.observe(rewards)
        if ended.any():
            for i in running[ended].tolist():
                episodes[i] = Episode(float(targets[i]), int(seeds[i]), float(total[i]), length)
                on_episode(episodes[i])
            policy.keep(~ended)
            running, observations = running[~ended], observations[~ended]
        if failures:
            raise RolloutError(failures[0])
        on_step(len(running))
    return [episodes[i] for i in range(count)]


def _check(
    what: str,
    values: NDArray[np.floating],
    seeds: Sequence[int],
    *,
    step: int,
    observations: NDArray[np.floating],
) -> None:
    """An environment would go on with a NaN, and its return would mean nothing."""
    bad = ~np.isfinite(values).all(axis=1)
    if bad.any():
        row = int(bad.argmax())
        seen = "is finite" if np.isfinite(observations[row]).all() else "is not finite either"
        raise RolloutError(
            f"the {what} at step {step} of the episode with seed {seeds[row]} is not finite: {values[row].tolist()}; "
            f"the observation that goes with it {seen}"
        )
