"""A policy's episodes in the environment of a task."""

from collections.abc import Callable, Sequence

from envs.mujoco import make_environment
from envs.tasks import Task
from primal_dt.rollout import Episode, Policy, rollout

__all__ = ["evaluate"]


def evaluate(
    policy: Policy,
    task: Task,
    *,
    targets: Sequence[float],
    num_episodes: int,
    seed: int,
    on_step: Callable[[int], None] = lambda running: None,
) -> list[Episode]:
    """So many episodes for each target. Episode i is seeded with ``seed + i``, whatever its target."""
    return rollout(
        policy,
        lambda: make_environment(task),
        targets=[target for target in targets for _ in range(num_episodes)],
        seeds=[seed + i for _ in targets for i in range(num_episodes)],
        on_step=on_step,
    )
