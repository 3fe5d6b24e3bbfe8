"""Policies -> evaluations: which episodes to run, those that are cached, those that are run now."""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch

from primal_dt.evaluation.callbacks import Callback, EpisodeList
from primal_dt.evaluation.episode_cache import EpisodeCache
from primal_dt.evaluation.report import Evaluation
from primal_dt.evaluation.rollout import Environment, Episode, Policy, RolloutError, rollout
from primal_dt.evaluation.trained_run import TrainedRun
from primal_dt.policy.inference import INFERENCE_VERSION, InferenceMode
from primal_dt.task import RunTask

__all__ = [
    "Arena",
    "EpisodePlan",
    "choose_workers",
    "evaluate_episodes",
    "evaluate_policy",
    "evaluate_run",
    "target_seed_pairs",
]

ENVIRONMENTS_PER_WORKER = 32
"""With fewer, a process of its own costs more than it saves."""


@dataclass(frozen=True)
class Arena:
    """Where policies act."""

    make: Callable[[], Environment]
    """Makes an environment. It is sent to other processes, so it must be picklable."""
    episode_limit: int
    """The most steps of an episode."""


@dataclass(frozen=True)
class EpisodePlan:
    """Which episodes to run, and how."""

    targets: tuple[float, ...]
    """Returns to ask for beside the headline; none for those of the training."""
    num_episodes: int
    """Episodes for each target. Episode i is seeded with ``seed + i``."""
    seed: int
    num_environments: int
    num_workers: int | None
    fresh: bool
    """Whether to run cached episodes again."""


def target_seed_pairs(targets: Iterable[float], *, num_episodes: int, seed: int) -> list[tuple[float, int]]:
    """The target and the seed of every episode. Each target counts once, and has seeds from ``seed`` on."""
    return [(target, seed + i) for target in dict.fromkeys(targets) for i in range(num_episodes)]


def evaluate_episodes(
    policy: Policy,
    arena: Arena,
    pairs: Sequence[tuple[float, int]],
    *,
    num_environments: int = 64,
    num_workers: int | None = None,
    callbacks: Sequence[Callback] = (),
) -> list[Episode]:
    """Run an episode for each pair of target and seed.

    Args:
        policy: acts.
        arena: where.
        pairs: targets and seeds.
        num_environments: how many run at a time, at most.
        num_workers: processes that step them. If not given: one for every 32 environments, at most one for each core;
            none if that is less than two.
        callbacks: called in this order.
    """

    def on_step(running: int) -> None:
        for callback in callbacks:
            callback.step(running)

    def on_episode(episode: Episode) -> None:
        for callback in callbacks:
            callback.end_episode(episode)

    for callback in callbacks:
        callback.begin(len(pairs), arena.episode_limit)
    if num_workers is None:
        num_workers = choose_workers(min(num_environments, len(pairs)))
    return rollout(
        policy,
        arena.make,
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


def evaluate_run(
    run: TrainedRun,
    arena: Arena,
    plan: EpisodePlan,
    *,
    mode: InferenceMode,
    device: torch.device,
    callbacks: Sequence[Callback] = (),
) -> Evaluation:
    """Run the episodes that are not cached. Each is cached beside the run as soon as it ends."""
    targets = (run.task.headline, *(plan.targets or run.task.targets))
    pairs = target_seed_pairs(targets, num_episodes=plan.num_episodes, seed=plan.seed)
    cache = EpisodeCache(run.evaluations_folder, _depends_on(run, plan, mode=mode, device=device), fresh=plan.fresh)
    missing = [pair for pair in pairs if cache.get(*pair) is None]
    if missing:
        evaluate_episodes(
            run.checkpoint.policy(device, mode=mode),
            arena,
            missing,
            num_environments=plan.num_environments,
            num_workers=plan.num_workers,
            callbacks=[cache, *callbacks],  # cached before another callback can fail
        )
    return run.evaluation([episode for pair in pairs if (episode := cache.get(*pair)) is not None], mode=mode)


def evaluate_policy(
    policy: Policy, name: str, arena: Arena, task: RunTask, plan: EpisodePlan, *, callbacks: Sequence[Callback] = ()
) -> Evaluation:
    """Evaluate a policy that was not trained here, and that is not asked for a return.

    If it fails or is stopped, the evaluation has the episodes that had ended, and a note that says so.
    """
    ended = EpisodeList()
    notes: tuple[str, ...] = ()
    try:
        evaluate_episodes(
            policy,
            arena,
            target_seed_pairs((task.headline,), num_episodes=plan.num_episodes, seed=plan.seed),
            num_environments=plan.num_environments,
            num_workers=plan.num_workers,
            callbacks=[ended, *callbacks],
        )
    except (RolloutError, KeyboardInterrupt) as error:
        if not ended.episodes:
            raise
        reason = "it was stopped" if isinstance(error, KeyboardInterrupt) else str(error)
        notes = (f"only {len(ended.episodes)} of {plan.num_episodes} episodes: {reason}",)
    return Evaluation(
        policy=name,
        configuration=f"{name} {task.env_id}",
        task=task,
        episodes=tuple(sorted(ended.episodes, key=lambda episode: episode.seed)),
        notes=notes,
    )


def _depends_on(run: TrainedRun, plan: EpisodePlan, *, mode: InferenceMode, device: torch.device) -> dict[str, Any]:
    """What an episode depends on, beside its target and seed."""
    return {
        "checkpoint": run.digest,
        "env_id": run.task.env_id,
        "mode": mode,
        "device": device.type,
        # Except on a CPU, all environments are one forward pass, whose size makes a difference.
        "num_environments": None if device.type == "cpu" else plan.num_environments,
        "inference": INFERENCE_VERSION,
        "versions": {name: version(name) for name in ("torch", "mujoco", "gymnasium", "numpy")},
    }
