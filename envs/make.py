"""Makes environments."""

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

__all__ = ["check_environment", "make_arena", "make_environment"]

log = logging.getLogger(__name__)
Env = gymnasium.Env[NDArray[np.float64], NDArray[np.float32]]


def _log_warning(message: str) -> None:
    # HalfCheetah's model file has an attribute that MuJoCo will drop one day: gymnasium's matter.
    log.log(logging.DEBUG if "settotalmass" in message else logging.WARNING, "MuJoCo: %s", message)


# By itself MuJoCo writes to stderr, through progress bars, and to a file MUJOCO_LOG.TXT where one happens to be.
mujoco.set_mju_user_warning(_log_warning)


def make_environment(task: Task, **options: Any) -> Env:
    """The environment of a task, as gymnasium makes it.

    Raises:
        DataError: if this version of it cannot be made, or is not as the table says.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # "out of date": -v4 is what D4RL's data goes with
        try:
            env = gymnasium.make(task.env_id, disable_env_checker=True, **options)
        except (gymnasium.error.Error, ImportError) as error:
            name = task.environment.gymnasium_name
            raise DataError(
                f"the environment {task.env_id} cannot be made: {error}. "
                f"{name}-v5 and {name}-v4 can; to go with another version than the data set's is to be asked for"
            ) from error
    widths = (task.environment.state_width, task.environment.action_width)
    if (env.observation_space.shape, env.action_space.shape) != ((widths[0],), (widths[1],)):
        raise DataError(
            f"{task.env_id} has observations {env.observation_space.shape} and actions {env.action_space.shape}, "
            f"and not of the widths {widths[0]} and {widths[1]}"
        )
    return env


def check_environment(task: Task) -> None:
    """Check that the environment of a task can be made here.

    Raises:
        DataError: if it cannot.
    """
    make_environment(task).close()


def make_arena(task: Task) -> Arena:
    """Where policies of a task act."""
    return Arena(partial(make_environment, task), task.environment.episode_limit)
