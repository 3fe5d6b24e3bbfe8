"""Checkpoints and behaviour policies -> their episodes, with all that a report has to say about them."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from envs.behaviour.policies import load_policy
from envs.datasets.checks import DataError
from envs.make import make_environment
from envs.tasks import Task, task_of
from primal_dt.evaluation.episode_cache import KeptEpisodes, digest_of
from primal_dt.evaluation.evaluate import BatchedPolicy, Watch, evaluate_episodes
from primal_dt.evaluation.report import Evaluated
from primal_dt.evaluation.rollout import Episode, RolloutError
from primal_dt.policy.inference import INFERENCE_VERSION, InferenceMode
from primal_dt.policy.policy import DecisionTransformerPolicy
from primal_dt.training.checkpoint import Checkpoint, CheckpointError, CheckpointFolder, load_checkpoint
from primal_dt.training.metrics_log import read_metrics
from primal_dt.training.scalars import HEADLINE

__all__ = ["Plan", "Trained", "describe_trained", "evaluate_behaviour", "evaluate_trained", "open_trained"]


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

    def pairs(self, targets: Sequence[float]) -> list[tuple[float, int]]:
        """Targets and seeds, each once."""
        return [(target, self.seed + i) for target in dict.fromkeys(targets) for i in range(self.num_episodes)]


@dataclass(frozen=True)
class Trained:
    """A checkpoint, and where it is to act. Its weights are read when they are wanted."""

    path: Path
    digest: str
    run_folder: Path | None
    task: Task
    """Where it acts."""
    config: Mapping[str, Any]
    facts: Mapping[str, Any]
    """What the checkpoint says of its task."""
    step: int
    notes: tuple[str, ...]

    @property
    def name(self) -> str:
        """For people."""
        return self.path.name if self.run_folder is None else self.run_folder.name

    @property
    def seed(self) -> int:
        """Of its training."""
        return int(self.config["run"]["seed"])

    @cached_property
    def configuration(self) -> str:
        """The same for runs that differ in nothing that makes a policy but the seed."""
        content: dict[str, Any] = {name: self.config[name] for name in ("model", "optimizer")}
        content |= {"fingerprint": self.facts["fingerprint"], "env_id": self.facts["env_id"]}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]

    def policy(self, mode: InferenceMode, device: torch.device) -> DecisionTransformerPolicy:
        """Read it.

        Raises:
            CheckpointError: if it is no longer what it was when it was opened.
        """
        checkpoint = load_checkpoint(self.path)
        if digest_of(self.path) != self.digest:
            raise CheckpointError(f"{self.path} has changed since the evaluation began: is it still being trained?")
        return checkpoint.policy(device, mode=mode)


def open_trained(
    path: Path, *, env_id: str | None = None, allow_version_mismatch: bool = False, mode: InferenceMode = "window"
) -> Trained:
    """The last checkpoint of a run, or a checkpoint by its file; and whether it can do what it is to do.

    Args:
        path: a run's folder or a file.
        env_id: another version of the environment to act in than the one it is trained for.
        allow_version_mismatch: whether that is meant.
        mode: of inference.

    Raises:
        CheckpointError: if there is none that can be read.
        DataError: if it cannot act there.
        ValueError: if it cannot act in this mode.
    """
    file, checkpoint = _open(path)
    trained_for = checkpoint.task["env_id"]
    task = task_of(env_id or trained_for, checkpoint.task["tier"])
    if task.environment != task_of(trained_for).environment:
        raise DataError(f"{path} is trained for {trained_for} and cannot act in {task.env_id}")
    if task.env_id != trained_for and not allow_version_mismatch:
        raise DataError(
            f"{path} is trained for {trained_for}, which differs from {task.env_id} in physics or reward: "
            "scores are not comparable. If it is meant, say so with --allow-version-mismatch"
        )
    make_environment(task).close()
    checkpoint.policy(mode=mode)
    in_run = file.parent.name == "checkpoints"
    return Trained(
        path=file,
        digest=digest_of(file),
        run_folder=file.parent.parent if in_run else None,
        task=task,
        config=checkpoint.config,
        facts=checkpoint.task,
        step=checkpoint.step,
        notes=_notes(file, checkpoint, in_run=in_run),
    )


def evaluate_trained(
    trained: Trained, plan: Plan, *, mode: InferenceMode, device: torch.device, watches: Iterable[Watch] = ()
) -> Evaluated:
    """Run what is not known yet; every episode is kept beside the run as soon as it ends."""
    task, facts = trained.task, trained.facts
    headline = task.environment.targets[0]
    wanted = plan.pairs((headline, *(plan.targets or facts["targets"])))
    folder = (trained.run_folder or trained.path.parent) / "evaluations"
    kept = KeptEpisodes(folder, _depends_on(trained, plan, mode=mode, device=device), fresh=plan.fresh)
    missing = [pair for pair in wanted if kept.get(*pair) is None]
    if missing:
        evaluate_episodes(
            trained.policy(mode, device),
            task,
            missing,
            num_environments=plan.num_environments,
            num_workers=plan.num_workers,
            watches=[kept, *watches],  # kept before anybody else can fail
        )
    episodes = [episode for pair in wanted if (episode := kept.get(*pair)) is not None]
    return describe_trained(trained, episodes, mode=mode)


def describe_trained(trained: Trained, episodes: Iterable[Episode], *, mode: InferenceMode) -> Evaluated:
    """Its episodes, with all that a report has to say about them."""
    task, facts = trained.task, trained.facts
    headline = task.environment.targets[0]
    return Evaluated(
        dataset=facts["dataset"],
        policy=trained.config["model"]["attention"],
        configuration=trained.configuration,
        settings={**trained.config["model"], **trained.config["optimizer"]},
        environment=task.environment.name,
        env_id=task.env_id,
        data_env_ids=tuple(facts["data_env_ids"]),
        random_return=facts["random_return"],
        expert_return=facts["expert_return"],
        headline=headline,
        seed=trained.seed,
        step=trained.step,
        mode=mode,
        checkpoint=str(trained.path),
        episodes=tuple(episodes),
        curve=_curve(trained.run_folder, headline),
        notes=trained.notes,
    )


def evaluate_behaviour(name: str, task: Task, plan: Plan, *, watches: Iterable[Watch] = ()) -> Evaluated:
    """A behaviour policy, whose returns are the ends of the scale. It is not asked for any.

    If it fails or is stopped, what had ended by then is reported, and that it is not all.
    """
    reference, headline = task.environment.reference, task.environment.targets[0]
    ended = _Collected()
    notes: tuple[str, ...] = ()
    try:
        evaluate_episodes(
            BatchedPolicy(load_policy(name, task), plan.seed),
            task,
            plan.pairs((headline,)),
            num_environments=plan.num_environments,
            num_workers=plan.num_workers,
            watches=[ended, *watches],
        )
    except (RolloutError, KeyboardInterrupt) as error:
        if not ended.episodes:
            raise
        why = "it was stopped" if isinstance(error, KeyboardInterrupt) else str(error)
        notes = (f"only {len(ended.episodes)} of {plan.num_episodes} episodes: {why}",)
    return Evaluated(
        dataset="no data set",
        policy=name,
        configuration=f"{name} {task.env_id}",
        settings={},
        environment=task.environment.name,
        env_id=task.env_id,
        data_env_ids=(),
        random_return=reference.random_return,
        expert_return=reference.expert_return,
        headline=headline,
        seed=None,
        step=None,
        mode=None,
        checkpoint=None,
        episodes=tuple(sorted(ended.episodes, key=lambda episode: episode.seed)),
        notes=notes,
    )


class _Collected(Watch):
    """Remembers the episodes that have ended."""

    def __init__(self) -> None:
        self.episodes: list[Episode] = []

    def end_episode(self, episode: Episode) -> None:
        self.episodes.append(episode)


def _open(path: Path) -> tuple[Path, Checkpoint]:
    """A checkpoint's file and content; a damaged one is not replaced by an older."""
    if not path.is_dir():
        return path, load_checkpoint(path)
    file, checkpoint, problems = CheckpointFolder(path / "checkpoints").newest()
    if problems:
        raise CheckpointError(
            f"{'; '.join(problems.values())}. To evaluate the one before it all the same, name it: {file}"
        )
    return file, checkpoint


def _notes(file: Path, checkpoint: Checkpoint, *, in_run: bool) -> tuple[str, ...]:
    """In what way it is not a run's result."""
    notes = []
    planned = checkpoint.config["optimizer"]["steps"]
    if checkpoint.step < planned:
        notes.append(f"its training had come to step {checkpoint.step} of {planned}")
    if in_run and file != CheckpointFolder(file.parent).paths()[-1]:
        notes.append(f"{file.name} is not the last checkpoint of its run")
    return tuple(notes)


def _depends_on(trained: Trained, plan: Plan, *, mode: InferenceMode, device: torch.device) -> dict[str, Any]:
    """What an episode depends on, besides its target and seed."""
    return {
        "checkpoint": trained.digest,
        "env_id": trained.task.env_id,
        "mode": mode,
        "device": device.type,
        # Elsewhere than on a CPU, all environments are one forward pass, whose size makes a difference.
        "num_environments": None if device.type == "cpu" else plan.num_environments,
        "inference": INFERENCE_VERSION,
        "versions": {name: version(name) for name in ("torch", "mujoco", "gymnasium", "numpy")},
    }


def _curve(folder: Path | None, headline: float) -> tuple[tuple[int, float], ...]:
    if folder is None:
        return ()
    name = f"{HEADLINE}/target_{headline:g}"
    return tuple((line["step"], line[name]) for line in read_metrics(folder) if name in line)
