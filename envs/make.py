"""Creates the environments of tasks."""

import logging
import warnings
from functools import partial
from typing import Any

import gymnasium
import mujoco
import numpy as np
from numpy.typing import NDArray

from envs.errors import DataError
from envs.tasks import Task
from primal_dt.evaluation.evaluate import Arena

__all__ = ["make_arena", "make_environment"]

log = logging.getLogger(__name__)
Env = gymnasium.Env[NDArray[np.float64], NDArray[np.float32]]


def _log_warning(message: str) -> None:
    # HalfCheetah's model file uses settotalmass, which MuJoCo deprecates. The file is gymnasium's, so users cannot act.
    log.log(logging.DEBUG if "settotalmass" in message else logging.WARNING, "MuJoCo: %s", message)


# By default, MuJoCo writes warnings to stderr, where they garble progress bars, and to MUJOCO_LOG.TXT in the working
# folder.
mujoco.set_mju_user_warning(_log_warning)


def make_environment(task: Task, **options: Any) -> Env:
    """Create a task's environment with gymnasium.

    Args:
        task: the task.
        **options: passed to ``gymnasium.make``.

    Raises:
        DataError: if gymnasium cannot create this version, or if its widths differ from the table's.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # "out of date": D4RL's data needs -v4
        try:
            env = gymnasium.make(task.env_id, disable_env_checker=True, **options)
        except (gymnasium.error.Error, ImportError) as error:
            name = task.environment.gymnasium_name
            raise DataError(
                f"the environment {task.env_id} cannot be created: {error}. {name}-v5 and {name}-v4 are available; "
                "choose one with --env-id. A version other than the data's must be allowed explicitly"
            ) from error
    widths = (task.environment.state_width, task.environment.action_width)
    if (env.observation_space.shape, env.action_space.shape) != ((widths[0],), (widths[1],)):
        raise DataError(
            f"{task.env_id} must have observations and actions of widths {widths[0]} and {widths[1]}, "
            f"not of shapes {env.observation_space.shape} and {env.action_space.shape}"
        )
    return env


def make_arena(task: Task) -> Arena:
    """The task's environment factory and episode limit, as evaluations need them."""
    return Arena(partial(make_environment, task), task.environment.episode_limit)
