"""Creates environments as policies see them: observations and actions are vectors of numbers."""

import logging
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from envs.errors import DataError
from envs.graphics import import_without_graphics
from envs.spaces import action_bounds, flat_width, flatten_rows, to_action
from envs.specifications import make_specified
from envs.tasks import DEFAULT_LIMIT, Spaces, Task
from primal_dt.evaluation.evaluate import Arena
from primal_dt.task import Specification

with import_without_graphics():
    import mujoco

__all__ = ["check_fits", "make_arena", "make_environment", "make_raw", "spaces_of"]

log = logging.getLogger(__name__)
Env = gymnasium.Env[Any, Any]


def _log_warning(message: str) -> None:
    # HalfCheetah's model file uses settotalmass, which MuJoCo deprecates. The file is gymnasium's, so users cannot act.
    log.log(logging.DEBUG if "settotalmass" in message else logging.WARNING, "MuJoCo: %s", message)


# By default, MuJoCo writes warnings to stderr, where they garble progress bars, and to MUJOCO_LOG.TXT in the working
# folder.
mujoco.set_mju_user_warning(_log_warning)


class VectorInterface(gymnasium.Wrapper[NDArray[np.float32], NDArray[np.floating], Any, Any]):
    """An environment with flat observations (S,), and with actions as entries (A,)."""

    def reset(self, **options: Any) -> tuple[NDArray[np.float32], dict[str, Any]]:
        observation, info = self.env.reset(**options)
        return self._flat(observation), info

    def step(self, action: NDArray[np.floating]) -> tuple[NDArray[np.float32], Any, bool, bool, dict[str, Any]]:
        entries = to_action(self.env.action_space, action)
        observation, reward, terminated, truncated, info = self.env.step(entries)
        return self._flat(observation), reward, terminated, truncated, info

    def _flat(self, observation: Any) -> NDArray[np.float32]:
        return flatten_rows(self.env.observation_space, _with_axis(observation))[0]


def _with_axis(observation: Any) -> Any:
    """An observation with a leading axis of 1 in each part."""
    if isinstance(observation, dict):
        return {name: _with_axis(part) for name, part in observation.items()}
    if isinstance(observation, tuple):
        return tuple(map(_with_axis, observation))
    return np.asarray(observation)[None]


def make_raw(task: Task, **options: Any) -> Env:
    """Create a task's environment with its own spaces.

    Raises:
        DataError: if it cannot be created.
    """
    if task.specification is None:
        raise DataError("the data names no environment to act in: pass --env-id")
    env = make_specified(task.specification, trust=task.trusted, **options)
    if env.spec is not None and env.spec.max_episode_steps is None:
        env = gymnasium.wrappers.TimeLimit(env, DEFAULT_LIMIT)
    return env


def make_environment(task: Task, **options: Any) -> Env:
    """Create a task's environment with vectors as observations and actions.

    Args:
        task: the task.
        **options: passed to ``gymnasium.make``.

    Raises:
        DataError: if it cannot be created, or if its spaces are not the task's.
    """
    env = make_raw(task, **options)
    check_fits(env, task)
    observations, actions = env.observation_space, env.action_space
    are_vectors = isinstance(observations, spaces.Box) and len(observations.shape) == 1
    if are_vectors and isinstance(actions, spaces.Box) and actions.dtype == np.float32 and actions.is_bounded():
        return env
    return VectorInterface(env)


def check_fits(env: Env, task: Task) -> None:
    """Check that an environment's spaces are those of the task.

    Raises:
        DataError: if they are not.
    """
    own = _spaces(env, str(task.specification))
    if own != task.environment.spaces:
        raise DataError(
            f"{task.specification} has {own.state_width} observation entries and as actions {own.actions}; but "
            f"{task.environment.state_width} and {task.environment.actions} are expected"
        )


def spaces_of(specification: Specification, *, trusted: bool = False) -> Spaces:
    """The spaces of an environment, which is created and closed.

    Raises:
        DataError: if it cannot be created, or its spaces are not supported.
    """
    env = make_specified(specification, trust=trusted)
    try:
        return _spaces(env, str(specification))
    finally:
        env.close()


def _spaces(env: Env, where: str) -> Spaces:
    return Spaces(flat_width(env.observation_space, where), action_bounds(env.action_space, where))


def make_arena(task: Task) -> Arena:
    """The task's environment factory and episode limit, as evaluations need them."""
    env = make_raw(task)
    limit = None if env.spec is None else env.spec.max_episode_steps
    env.close()
    return Arena(partial(make_environment, task), limit or DEFAULT_LIMIT)
