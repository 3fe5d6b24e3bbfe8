"""Policies -> evaluations: plan the episodes, take cached ones from the cache and run the others."""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import torch

from primal_dt.evaluation.callbacks import Callback, EpisodeList
from primal_dt.evaluation.episode_cache import EpisodeCache
from primal_dt.evaluation.plan import EpisodePlan
from primal_dt.evaluation.report import Evaluation
from primal_dt.evaluation.rollout import Environment, Episode, Policy, RolloutError, rollout
from primal_dt.evaluation.trained_run import TrainedRun
from primal_dt.policy.inference import INFERENCE_VERSION, InferenceMode
from primal_dt.task import RunTask, Specification

__all__ = ["Arena", "evaluate_episodes", "evaluate_policy", "evaluate_run", "target_seed_pairs"]

ENVIRONMENTS_PER_WORKER = 32
"""Environments for each worker process. With fewer, a process costs more than it saves."""


@dataclass(frozen=True)
class Arena:
    """The environment in which policies act."""

    make: Callable[[], Environment]
    """Creates an environment. It is sent to worker processes, so it must be picklable."""
    episode_limit: int
    """Maximum number of steps of an episode."""


def target_seed_pairs(targets: Iterable[float], *, num_episodes: int, seed: int) -> list[tuple[float | None, int]]:
    """The target and seed of every episode: each distinct target with the seeds ``seed``, ``seed + 1``, ...

    Without targets: one episode for each seed, with the target None.
    """
    distinct: list[float | None] = list(dict.fromkeys(targets))
    return [(target, seed + i) for target in distinct or [None] for i in range(num_episodes)]


def evaluate_episodes(
    policy: Policy,
    arena: Arena,
    pairs: Sequence[tuple[float | None, int]],
    *,
    num_environments: int = 64,
    num_workers: int | None = None,
    callbacks: Sequence[Callback] = (),
) -> list[Episode]:
    """Run one episode for each pair of target and seed, and return them in this order.

    Args:
        policy: the policy.
        arena: the environment in which it acts.
        pairs: the target and seed of each episode.
        num_environments: maximum number of environments that run at the same time.
        num_workers: number of processes that step the environments. If None: see :func:`choose_workers`.
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
    """The number of worker processes for ``num_environments`` environments; 0 for none.

    It is one for every 32 environments, at most one for each CPU core. A single worker would save nothing, so it is
    never 1.
    """
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
    """Evaluate a run. Only episodes that are not cached are run; each is cached as soon as it ends."""
    targets = run.task.targets
    if plan.targets == "auto" and targets:
        targets = (targets[0], *run.task.spread_targets())
    elif plan.targets and plan.targets != "auto":
        targets = (*targets[:1], *plan.targets)
    pairs = target_seed_pairs(targets, num_episodes=plan.num_episodes, seed=plan.seed)
    cache = EpisodeCache(run.evaluations_folder, _depends_on(run, plan, mode=mode, device=device), fresh=plan.fresh)
    missing = [pair for pair in pairs if cache.get(*pair) is None]
    if missing:
        evaluate_episodes(
            run.checkpoint.policy(device, mode=mode, reproducible=True, past_end="error"),
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
    """Evaluate a policy that is not a trained run and ignores the target return, such as a behavior policy.

    If a rollout fails or is stopped, the evaluation has the finished episodes and a note with the reason. If no episode
    has finished, the error is raised.
    """
    ended = EpisodeList()
    notes: tuple[str, ...] = ()
    try:
        evaluate_episodes(
            policy,
            arena,
            target_seed_pairs((), num_episodes=plan.num_episodes, seed=plan.seed),
            num_environments=plan.num_environments,
            num_workers=plan.num_workers,
            callbacks=[ended, *callbacks],
        )
    except (RolloutError, KeyboardInterrupt) as error:
        if not ended.episodes:
            raise
        reason = "the evaluation was stopped" if isinstance(error, KeyboardInterrupt) else str(error)
        notes = (f"only {len(ended.episodes)} of {plan.num_episodes} episodes finished: {reason}",)
    return Evaluation(
        policy=name,
        configuration=f"{name} {task.environment_text}",
        task=replace(task, targets=()),
        episodes=tuple(sorted(ended.episodes, key=lambda episode: episode.seed)),
        notes=notes,
    )


def _depends_on(run: TrainedRun, plan: EpisodePlan, *, mode: InferenceMode, device: torch.device) -> dict[str, Any]:
    """The key of the cache: all that an episode depends on, apart from its target and seed."""
    specification = run.task.specification
    return {
        **({"specification": specification.identity} if specification and specification.differences else {}),
        "checkpoint": run.digest,
        "env_id": Specification(run.task.env_id).bare_id,
        "mode": mode,
        "device": device.type,
        # Except on a CPU, all environments share one forward pass, whose rounding depends on their number.
        "num_environments": None if device.type == "cpu" else plan.num_environments,
        "inference": INFERENCE_VERSION,
        "versions": {name: version(name) for name in ("torch", "mujoco", "gymnasium", "numpy")},
    }
