"""An episode as an mp4. Needs a renderer, and imageio with ffmpeg from the extra ``video``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from envs.episodes import DataError
from envs.mujoco import make_environment
from envs.tasks import Task
from primal_dt.rollout import Episode, Policy, rollout

__all__ = ["record_video"]

HOW = (
    "Videos need the extra: pip install -c constraints.txt -e '.[video]'; and without a screen a software renderer, "
    "such as Debian's libosmesa6 with MUJOCO_GL=osmesa, or libegl1 with MUJOCO_GL=egl"
)


class _Filmed:
    """An environment that writes down what it looks like."""

    def __init__(self, environment: Any, frames: list[NDArray[np.uint8]]) -> None:
        self._environment = environment
        self._frames = frames

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        answer: tuple[Any, dict[str, Any]] = self._environment.reset(seed=seed)
        self._frames.append(self._environment.render())
        return answer

    def step(self, action: Any, /) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        answer: tuple[Any, float, bool, bool, dict[str, Any]] = self._environment.step(action)
        self._frames.append(self._environment.render())
        return answer

    def close(self) -> None:
        self._environment.close()


def record_video(policy: Policy, task: Task, path: Path, *, target: float, seed: int) -> Episode:
    """Run an episode and save it as a film.

    Raises:
        DataError: if there is nothing to render or to encode with.
    """
    try:
        import imageio_ffmpeg
    except ImportError as error:
        raise DataError(f"there is no video encoder here: {error}. {HOW}") from error
    frames: list[NDArray[np.uint8]] = []
    try:
        environment = make_environment(task, render_mode="rgb_array")
        environment.reset(seed=seed)
        environment.render()
    except DataError:
        raise
    except Exception as error:  # each renderer has errors of its own
        raise DataError(f"{task.env_id} cannot be rendered here: {error}. {HOW}") from error
    (episode,) = rollout(policy, lambda: _Filmed(environment, frames), targets=[target], seeds=[seed])
    _encode(imageio_ffmpeg, frames, path, frames_per_second=int(environment.metadata["render_fps"]))
    return episode


def _encode(encoder: Any, frames: Sequence[NDArray[np.uint8]], path: Path, *, frames_per_second: int) -> None:
    """Write beside the file first, so that what has its name is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.stem}.partial.mp4")  # ffmpeg goes by the ending
    height, width, _ = frames[0].shape
    writer = encoder.write_frames(str(partial), (width, height), fps=frames_per_second, macro_block_size=1)
    writer.send(None)
    try:
        for frame in frames:
            writer.send(np.ascontiguousarray(frame))
    finally:
        writer.close()
    partial.replace(path)
