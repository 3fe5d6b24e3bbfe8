"""Records an episode as an mp4 video. Needs a renderer, and imageio-ffmpeg from the extra ``video``."""

import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from envs.errors import DataError
from envs.graphics import VARIABLE, choose_graphics, graphics_problem
from envs.make import Env, make_environment
from envs.tasks import Task
from primal_dt.evaluation.rollout import Episode, Policy, rollout
from primal_dt.system.files import check_regular, move

__all__ = ["check_video", "record_video"]

CAMERA = {"camera_name": "track"}  # of MuJoCo's walkers, whose default camera does not follow them
ENOUGH_FPS = 30
"""Frames per second that are enough. Hopper makes 125 steps per second: a software renderer takes minutes for them all.
"""


class _Filmed:
    """An environment that sends every n-th rendered frame to a video encoder, and the last one."""

    def __init__(self, environment: Any, writer: Any, every_steps: int) -> None:
        self._environment = environment
        self._writer = writer
        self._every_steps = every_steps
        self._step = 0

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        answer: tuple[Any, dict[str, Any]] = self._environment.reset(seed=seed)
        self._step = 0
        self._film()
        return answer

    def step(self, action: Any, /) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        answer: tuple[Any, float, bool, bool, dict[str, Any]] = self._environment.step(action)
        self._step += 1
        if self._step % self._every_steps == 0 or answer[2] or answer[3]:
            self._film()
        return answer

    def close(self) -> None:
        """Do nothing: :func:`record_video` closes the environment."""

    def _film(self) -> None:
        self._writer.send(np.ascontiguousarray(self._environment.render()))


def _make_filmed(task: Task) -> Env:
    """Create an environment that renders frames, if possible with the camera that follows the robot."""
    choose_graphics()
    try:
        return make_environment(task, render_mode="rgb_array", **CAMERA)
    except DataError:
        return make_environment(task, render_mode="rgb_array")


def check_video(task: Task) -> None:
    """Check that videos can be rendered and encoded on this machine.

    Raises:
        DataError: if the renderer or the encoder is missing.
    """
    try:
        import imageio_ffmpeg  # noqa: F401 - optional
    except ImportError as error:
        raise DataError(
            f"there is no video encoder: {error}. Install the extra video: pip install -c constraints.txt -e '.[video]'"
        ) from error
    environment = _make_filmed(task)
    uses_mujoco = hasattr(environment.unwrapped, "mujoco_renderer")
    if uses_mujoco and (problem := graphics_problem()):
        raise DataError(f"{task.env_id} cannot be rendered here: {problem}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the renderer, which then fails
            environment.reset(seed=0)
            environment.render()
        environment.close()
    except Exception as error:  # each renderer raises its own exceptions
        advice = (
            f". {VARIABLE} is {os.environ.get(VARIABLE) or 'not set'}: try egl, osmesa or glfw" if uses_mujoco else ""
        )
        raise DataError(f"{task.env_id} cannot be rendered here: {error}{advice}") from error


def record_video(policy: Policy, task: Task, path: Path, *, target: float | None, seed: int) -> Episode:
    """Run an episode and save it as a video in real time. The file appears only when it is complete.

    Args:
        policy: the policy to run.
        task: the task whose environment the policy acts in.
        path: the path of the mp4 file.
        target: the target return; None if the policy follows none.
        seed: the seed that the environment is reset with.

    Returns:
        The episode.
    """
    import imageio_ffmpeg

    environment = _make_filmed(task)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.stem}.partial.mp4")  # ffmpeg selects the format by the suffix
    check_regular(path)
    partial.unlink(missing_ok=True)  # ffmpeg would write through a link
    try:
        environment.reset(seed=seed)
        height, width, _ = np.asarray(environment.render(), np.uint8).shape
        fps = environment.metadata["render_fps"]
        every_steps = max(1, round(fps / ENOUGH_FPS))
        writer = imageio_ffmpeg.write_frames(str(partial), (width, height), fps=fps / every_steps, macro_block_size=1)
        writer.send(None)
        try:
            (episode,) = rollout(
                policy, lambda: _Filmed(environment, writer, every_steps), targets=[target], seeds=[seed]
            )
        finally:
            writer.close()
        move(partial, path)
    finally:
        partial.unlink(missing_ok=True)
        environment.close()
    return episode
