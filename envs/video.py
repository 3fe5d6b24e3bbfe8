"""An episode as an mp4. Needs a renderer, and imageio-ffmpeg from the extra ``video``."""

from pathlib import Path
from typing import Any

import numpy as np

from envs.errors import DataError
from envs.make import make_environment
from envs.tasks import Task
from primal_dt.evaluation.rollout import Episode, Policy, rollout

__all__ = ["check_video", "record_video"]

HOW = (
    "Videos need the extra: pip install -c constraints.txt -e '.[video]'; and without a screen a software renderer: "
    "MUJOCO_GL=egl or MUJOCO_GL=osmesa, with Debian's libegl1 or libosmesa6"
)


FILMED = {"render_mode": "rgb_array", "camera_name": "track"}  # the default camera stays behind


class _Filmed:
    """An environment whose looks go to an encoder, frame by frame."""

    def __init__(self, environment: Any, writer: Any) -> None:
        self._environment = environment
        self._writer = writer

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        answer: tuple[Any, dict[str, Any]] = self._environment.reset(seed=seed)
        self._film()
        return answer

    def step(self, action: Any, /) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        answer: tuple[Any, float, bool, bool, dict[str, Any]] = self._environment.step(action)
        self._film()
        return answer

    def close(self) -> None:
        """It is closed by who made it."""

    def _film(self) -> None:
        self._writer.send(np.ascontiguousarray(self._environment.render()))


def check_video(task: Task) -> None:
    """See whether there is what a video needs.

    Raises:
        DataError: if there is nothing to render or to encode with.
    """
    try:
        import imageio_ffmpeg  # noqa: F401 - optional
    except ImportError as error:
        raise DataError(f"there is no video encoder here: {error}. {HOW}") from error
    try:
        environment = make_environment(task, **FILMED)
        environment.reset(seed=0)
        environment.render()
        environment.close()
    except DataError:
        raise
    except Exception as error:  # each renderer has errors of its own
        raise DataError(f"{task.env_id} cannot be rendered here: {error}. {HOW}") from error


def record_video(policy: Policy, task: Task, path: Path, *, target: float, seed: int) -> Episode:
    """Run an episode and save it as a film, which is there whole or not at all."""
    import imageio_ffmpeg

    environment = make_environment(task, **FILMED)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.stem}.partial.mp4")  # ffmpeg goes by the ending
    try:
        environment.reset(seed=seed)
        height, width, _ = np.asarray(environment.render(), np.uint8).shape
        writer = imageio_ffmpeg.write_frames(
            str(partial), (width, height), fps=environment.metadata["render_fps"], macro_block_size=1
        )
        writer.send(None)
        try:
            (episode,) = rollout(policy, lambda: _Filmed(environment, writer), targets=[target], seeds=[seed])
        finally:
            writer.close()
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
        environment.close()
    return episode
