"""A policy's episodes in the environment of a task."""

import os
from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from envs.behaviour.policies import BehaviourPolicy
from envs.make import make_environment
from envs.tasks import Task
from primal_dt.evaluation.rollout import Episode, Policy, rollout

__all__ = ["BatchedPolicy", "Watch", "choose_workers", "evaluate", "evaluate_episodes"]

ENVIRONMENTS_PER_WORKER = 32
"""Below that, a process of its own costs more than it saves."""


class Watch:
    """Somebody who is told how an evaluation goes. This one does not care."""

    def begin(self, num_episodes: int, episode_limit: int) -> None:
        """So many episodes are to be run, none of them with more steps than that."""

    def step(self, running: int) -> None:
        """A step was made in this many environments."""

    def end_episode(self, episode: Episode) -> None:
        """One has ended."""


def evaluate(
    policy: Policy,
    task: Task,
    *,
    targets: Sequence[float],
    num_episodes: int,
    seed: int,
    watches: Iterable[Watch] = (),
) -> list[Episode]:
    """So many episodes for each target. Episode i is seeded with ``seed + i``, whatever its target."""
    wanted = [(target, seed + i) for target in targets for i in range(num_episodes)]
    return evaluate_episodes(policy, task, wanted, watches=watches)


def evaluate_episodes(
    policy: Policy,
    task: Task,
    wanted: Iterable[tuple[float, int]],
    *,
    num_environments: int = 64,
    num_workers: int | None = None,
    watches: Iterable[Watch] = (),
) -> list[Episode]:
    """An episode for each pair of target and seed.

    Args:
        policy: acts.
        task: where.
        wanted: targets and seeds.
        num_environments: how many run at a time, at most.
        num_workers: processes that step them. By default one for every 32 environments, but not more than there are
            cores; none if that is less than two.
        watches: are told how it goes.
    """
    pairs, told = list(wanted), list(watches)

    def on_step(running: int) -> None:
        for watch in told:
            watch.step(running)

    def on_episode(episode: Episode) -> None:
        for watch in told:
            watch.end_episode(episode)

    for watch in told:
        watch.begin(len(pairs), task.environment.episode_limit)
    if num_workers is None:
        num_workers = choose_workers(min(num_environments, len(pairs)))
    return rollout(
        policy,
        partial(make_environment, task),
        targets=[target for target, _ in pairs],
        seeds=[seed for _, seed in pairs],
        num_environments=num_environments,
        num_workers=num_workers,
        on_step=on_step,
        on_episode=on_episode,
    )


def choose_workers(num_environments: int) -> int:
    """How many processes to step so many environments in; 0 if this one alone is as fast."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = min(cores, num_environments // ENVIRONMENTS_PER_WORKER)
    return workers if workers > 1 else 0


class BatchedPolicy:
    """A behaviour policy as rollouts take it: environment by environment, whatever the target.

    The n-th episode that is begun has random numbers of its own, from (seed, n): it does not depend on how many run at
    a time.

    Args:
        policy: acts in one environment.
        seed: of its random numbers.
    """

    def __init__(self, policy: BehaviourPolicy, seed: int) -> None:
        self._policy = policy
        self._seed = seed
        self._begun = 0
        self._randoms: list[np.random.Generator] = []

    def reset(self, targets: NDArray[np.float64], /) -> None:
        """Begin an episode in each of E environments."""
        numbers = range(self._begun, self._begun + len(targets))
        self._randoms = [np.random.default_rng((self._seed, number)) for number in numbers]
        self._begun += len(targets)

    def act(self, observations: NDArray[np.floating], /) -> NDArray[np.floating]:
        """(E, S) -> (E, A)."""
        return np.stack([self._policy(*each) for each in zip(observations, self._randoms, strict=True)])

    def observe(self, rewards: NDArray[np.float64], /) -> None:
        """It does not care."""

    def keep(self, rows: NDArray[np.bool_], /) -> None:
        """Go on with some of the environments."""
        self._randoms = [random for random, kept in zip(self._randoms, rows, strict=True) if kept]
