"""Checkpoints and behaviour policies -> their episodes, with all that a report has to say about them."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from envs.behaviour import load_policy
from envs.episodes import DataError
from envs.evaluation import BatchedPolicy, Watch, evaluate_episodes
from envs.results import KeptEpisodes, digest_of
from envs.tasks import Task, task_of
from primal_dt.checkpoint import Checkpoint, CheckpointError, CheckpointFolder, load_checkpoint
from primal_dt.inference import InferenceMode
from primal_dt.logbook import read_metrics
from primal_dt.report import Evaluated
from primal_dt.rollout import Episode
from primal_dt.scalars import HEADLINE

__all__ = ["Plan", "Trained", "evaluate_behaviour", "evaluate_trained", "open_trained"]


@dataclass(frozen=True)
class Plan:
    """Which episodes to run, and how."""

    targets: tuple[float, ...]
    """Returns to ask for, besides the task's headline; none for those of the training."""
    num_episodes: int
    """For each target. Episode i is seeded with ``seed + i``."""
    seed: int
    num_environments: int
    num_workers: int | None
    fresh: bool
    """Whether to run again what is known."""


@dataclass(frozen=True)
class Trained:
    """A checkpoint, and where it is to act."""

    path: Path
    run_folder: Path | None
    checkpoint: Checkpoint
    task: Task

    @property
    def name(self) -> str:
        """For people."""
        return self.path.name if self.run_folder is None else self.run_folder.name


def open_trained(path: Path, *, env_id: str | None, allow_version_mismatch: bool) -> Trained:
    """The last checkpoint of a run, or a checkpoint by its file.

    Args:
        path: a run's folder or a file.
        env_id: another version of the environment to act in than the data's.
        allow_version_mismatch: whether that is meant.

    Raises:
        CheckpointError: if there is none that can be read.
        DataError: if it cannot act there.
    """
    problems: dict[Path, str] = {}
    if path.is_dir():
        file, checkpoint, problems = CheckpointFolder(path / "checkpoints").newest()
    else:
        file, checkpoint = path, load_checkpoint(path)
    if problems:
        raise CheckpointError(
            f"{'; '.join(problems.values())}. To evaluate the one before it all the same, name it: {file}"
        )
    trained_for = checkpoint.task["env_id"]
    task = task_of(env_id or trained_for, checkpoint.task["tier"])
    if task.environment != task_of(trained_for).environment:
        raise DataError(f"{path} is trained for {trained_for} and cannot act in {task.env_id}")
    if task.env_id != trained_for and not allow_version_mismatch:
        raise DataError(
            f"{path} is trained on data of {trained_for}, which differs from {task.env_id} in physics or reward: "
            "scores are not comparable. If it is meant, say so with --allow-version-mismatch"
        )
    in_run = file.parent.name == "checkpoints"
    return Trained(file, file.parent.parent if in_run else None, checkpoint, task)


def evaluate_trained(
    trained: Trained,
    plan: Plan,
    *,
    mode: InferenceMode,
    device: torch.device,
    watches: Iterable[Watch] = (),
) -> Evaluated:
    """Run what is not known yet; every episode is kept beside the run as soon as it ends."""
    checkpoint, task = trained.checkpoint, trained.task
    headline = task.environment.targets[0]
    targets = plan.targets or tuple(checkpoint.task["targets"])
    folder = (trained.run_folder or trained.path.parent) / "evaluations"
    kept = KeptEpisodes(folder / f"{digest_of(trained.path)}-{task.env_id}-{mode}.jsonl", fresh=plan.fresh)
    wanted = _wanted(plan, (headline, *targets))
    missing = [pair for pair in wanted if kept.get(*pair) is None]
    if missing:
        evaluate_episodes(
            checkpoint.policy(device, mode=mode),
            task,
            missing,
            num_environments=plan.num_environments,
            num_workers=plan.num_workers,
            watches=[kept, *watches],  # kept before anybody else can fail
        )
    run, model = checkpoint.config["run"], checkpoint.config["model"]
    return Evaluated(
        dataset=checkpoint.task["dataset"],
        policy=model["attention"],
        configuration=_configuration(checkpoint),
        environment=task.environment.name,
        tier=task.tier,
        env_id=task.env_id,
        trained_env_id=checkpoint.task["env_id"],
        random_return=checkpoint.task["random_return"],
        expert_return=checkpoint.task["expert_return"],
        headline=headline,
        seed=run["seed"],
        step=checkpoint.step,
        mode=mode,
        checkpoint=str(trained.path),
        episodes=tuple(episode for pair in wanted if (episode := kept.get(*pair)) is not None),
        curve=_curve(trained.run_folder),
    )


def evaluate_behaviour(name: str, task: Task, plan: Plan, *, watches: Iterable[Watch] = ()) -> Evaluated:
    """A behaviour policy, whose returns are the ends of the scale. It is not asked for any."""
    reference, headline = task.environment.reference, task.environment.targets[0]
    episodes: list[Episode] = evaluate_episodes(
        BatchedPolicy(load_policy(name, task), plan.seed),
        task,
        _wanted(plan, (headline,)),
        num_environments=plan.num_environments,
        num_workers=plan.num_workers,
        watches=watches,
    )
    return Evaluated(
        dataset="no data set",
        policy=name,
        configuration=name,
        environment=task.environment.name,
        tier=None,
        env_id=task.env_id,
        trained_env_id=task.env_id,
        random_return=reference.random_return,
        expert_return=reference.expert_return,
        headline=headline,
        seed=None,
        step=None,
        mode=None,
        checkpoint=None,
        episodes=tuple(episodes),
    )


def _wanted(plan: Plan, targets: Sequence[float]) -> list[tuple[float, int]]:
    """Targets and seeds, each once, the headline first."""
    return [(target, plan.seed + i) for target in dict.fromkeys(targets) for i in range(plan.num_episodes)]


def _configuration(checkpoint: Checkpoint) -> str:
    """The same for runs that differ in nothing that makes a policy but the seed."""
    content: dict[str, Any] = {name: checkpoint.config[name] for name in ("model", "optimizer")}
    content |= {"fingerprint": checkpoint.task["fingerprint"], "env_id": checkpoint.task["env_id"]}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def _curve(folder: Path | None) -> tuple[tuple[int, float], ...]:
    if folder is None:
        return ()
    return tuple((line["step"], line[HEADLINE]) for line in read_metrics(folder) if HEADLINE in line)
