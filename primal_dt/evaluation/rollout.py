"""Rollouts: run a policy in several environments at once. They use gymnasium's interface and know no transformer.

Axes: E environments, S state, A action.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from primal_dt.evaluation.vector import Environment, EnvironmentFailedError, Environments
from primal_dt.policy.readings import BadReadingError
from primal_dt.policy.stepwise import BadActionError

__all__ = ["Environment", "Episode", "Policy", "RolloutError", "rollout"]


class Policy(Protocol):
    """A policy that acts in several environments at once.

    It may also have ``predicted_returns``: the predicted returns-to-go (E,) that its last actions follow, or None.
    """

    def reset(self, targets: NDArray[np.float64], /) -> None:
        """Begin an episode in each of E environments, with the target returns (E,)."""

    def act(self, observations: NDArray[np.floating], /) -> NDArray[np.floating]:
        """Observations (E, S) -> actions (E, A)."""

    def observe(self, rewards: NDArray[np.float64], /) -> None:
        """Receive the rewards (E,) of the last actions."""

    def keep(self, rows: NDArray[np.bool_], /) -> None:
        """Continue with the environments where ``rows`` (E,) is True. The episodes of the others have ended."""


@dataclass(frozen=True)
class Episode:
    """The result of an episode."""

    target: float | None
    """The target return; None if the policy follows none."""
    seed: int
    total_reward: float
    length: int
    predicted: float | None = None
    """The return that the policy predicted at the first step; None if it predicts none."""
    success: bool | None = None
    """Whether the environment reported success at any step; None if it says nothing about success."""


class RolloutError(RuntimeError):
    """An episode could not continue: its environment failed, or an action or a reward is not finite."""


def rollout(
    policy: Policy,
    make_environment: Callable[[], Environment],
    *,
    targets: Sequence[float | None],
    seeds: Sequence[int],
    num_environments: int = 64,
    num_workers: int = 0,
    on_step: Callable[[int], None] = lambda running: None,
    on_episode: Callable[[Episode], None] = lambda episode: None,
) -> list[Episode]:
    """Run one episode for each pair of target and seed, and return them in this order.

    If the policy's actions depend only on the history of their own episode, an episode depends only on the policy, its
    target and its seed: the number of environments and the number of workers make no difference.

    Args:
        policy: the policy.
        make_environment: creates an environment. It is called once for each environment that runs at the same time;
            with workers, in the worker processes.
        targets: the target return of each episode; None for a policy that follows none.
        seeds: the seed with which the environment is reset, for each episode.
        num_environments: maximum number of environments that run at the same time.
        num_workers: number of processes that step the environments; 0 steps them in this process.
        on_step: called after each step, with the number of episodes that are still running.
        on_episode: called with each episode when it ends, so that it is not lost if a later one fails.

    Raises:
        RolloutError: if an environment fails, or an action or a reward is not finite.
    """
    if len(targets) != len(seeds):
        raise ValueError(f"targets ({len(targets)}) and seeds ({len(seeds)}) must have the same length")
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
    targets: Sequence[float | None],
    seeds: Sequence[int],
    on_step: Callable[[int], None],
    on_episode: Callable[[Episode], None],
) -> list[Episode]:
    """Run episodes side by side. Those that end leave the batch."""
    count = len(seeds)
    total, length = np.zeros(count), 0
    success = np.full(count, np.nan)
    episodes: dict[int, Episode] = {}
    running = np.arange(count)
    observations = environments.reset(seeds)
    policy.reset(np.array([np.nan if target is None else target for target in targets], np.float64))
    predicted: list[float | None] = [None] * count
    while len(running):
        running_seeds = [seeds[i] for i in running.tolist()]
        with _naming_episode(running_seeds, step=length):
            actions = policy.act(observations)
        if length == 0 and (first := getattr(policy, "predicted_returns", None)) is not None:
            predicted = list(first.tolist())
        _check("action", actions, running_seeds, step=length, observations=observations)
        observations, rewards, ended, reported, failures = environments.step(running, actions)
        _check("reward", rewards[:, None], running_seeds, step=length, observations=observations)
        total[running] += rewards
        success[running] = np.fmax(success[running], reported)  # NaN only if both are
        with _naming_episode(running_seeds, step=length):
            policy.observe(rewards)
        length += 1
        if ended.any():
            for i in running[ended].tolist():
                succeeded = None if np.isnan(success[i]) else bool(success[i] > 0)
                episodes[i] = Episode(targets[i], int(seeds[i]), float(total[i]), length, predicted[i], succeeded)
                on_episode(episodes[i])
            policy.keep(~ended)
            running, observations = running[~ended], observations[~ended]
        if failures:
            raise RolloutError(failures[0])
        on_step(len(running))
    return [episodes[i] for i in range(count)]


@contextmanager
def _naming_episode(seeds: Sequence[int], *, step: int) -> Iterator[None]:
    """Raise what a policy refuses, or cannot compute, as an error of the episode."""
    try:
        yield
    except (BadReadingError, BadActionError) as error:
        raise RolloutError(f"step {step} of the episode with seed {seeds[error.environment]}: {error}") from error


def _check(
    what: str,
    values: NDArray[np.floating],
    seeds: Sequence[int],
    *,
    step: int,
    observations: NDArray[np.floating],
) -> None:
    """Raise if a value is not finite: an environment would continue with a NaN, and the return would be meaningless."""
    bad = ~np.isfinite(values).all(axis=1)
    if bad.any():
        row = int(bad.argmax())
        seen = "is finite" if np.isfinite(observations[row]).all() else "is not finite either"
        raise RolloutError(
            f"the {what} at step {step} of the episode with seed {seeds[row]} is not finite: {values[row].tolist()}; "
            f"the observation {seen}"
        )
