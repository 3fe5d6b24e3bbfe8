"""Checkpoints: whole, self-contained, safe to load.

A checkpoint is one file of ``torch.save`` with tensors and plain values only, read with ``weights_only=True``: loading
executes nothing. It has the model, its units and its task, so that a policy runs where the data is not::

    from primal_dt.training.checkpoint import load_checkpoint

    policy = load_checkpoint("runs/RUN").policy()
    policy.reset([3600.0])  # then policy.act(observations), policy.observe(rewards)

and the state of the training. There are no random states in it, since there are none to keep: all that is random in
update t is a function of the seed and t.
"""

import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from primal_dt.data.normalizer import Normalizer
from primal_dt.model.transformer import DecisionTransformer, ModelShape
from primal_dt.policy.inference import InferenceMode
from primal_dt.policy.policy import DecisionTransformerPolicy
from primal_dt.system.files import atomic_write
from primal_dt.task import RunTask

__all__ = ["Checkpoint", "CheckpointError", "CheckpointFolder", "load_checkpoint", "save_checkpoint"]

FORMAT = 2
NUM_KEPT = 2
"""The newest checkpoint, and the one before it in case it cannot be read."""


class CheckpointError(ValueError):
    """A checkpoint that is not there or cannot be read."""


@dataclass(frozen=True)
class Checkpoint:
    """A model, and all that belongs to it."""

    shape: ModelShape
    weights: Mapping[str, Tensor]
    normalizer: Normalizer
    step: int
    """How many updates made the weights."""
    config: Mapping[str, Any]
    """How it was trained: the configuration as plain values."""
    task: RunTask
    """What it was trained for."""
    training: Mapping[str, Any]
    """The trainer's state, and what else the training wants back."""

    def model(self, device: torch.device | str = "cpu") -> DecisionTransformer:
        """The model with its weights, ready to act."""
        model = DecisionTransformer(self.shape)
        model.load_state_dict(dict(self.weights))
        return model.to(device).eval()

    def policy(
        self, device: torch.device | str = "cpu", *, mode: InferenceMode = "window"
    ) -> DecisionTransformerPolicy:
        """The model as a policy."""
        return DecisionTransformerPolicy(self.model(device), self.normalizer, mode=mode)


def save_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write a file that is there whole or not at all, also if the power fails."""
    content = {
        "format": FORMAT,
        "shape": asdict(checkpoint.shape),
        "weights": dict(checkpoint.weights),
        "state_mean": torch.from_numpy(checkpoint.normalizer.state_mean),
        "state_std": torch.from_numpy(checkpoint.normalizer.state_std),
        "return_scale": checkpoint.normalizer.return_scale,
        "step": checkpoint.step,
        "config": dict(checkpoint.config),
        "task": checkpoint.task.to_dict(),
        "training": dict(checkpoint.training),
    }
    with atomic_write(path) as file:
        torch.save(content, file)


def load_checkpoint(path: str | Path, device: torch.device | str = "cpu", *, mmap: bool = False) -> Checkpoint:
    """Read a checkpoint, or the newest whole one of a run.

    Args:
        path: the file, or the run's folder.
        device: where to put the tensors.
        mmap: map the tensors into memory instead of reading them: for many checkpoints, or if only their description
            is needed. On the CPU.

    Raises:
        CheckpointError: if there is none, or it is damaged, or of another version.
    """
    path = Path(path)
    if path.is_dir():
        found, checkpoint, problems = CheckpointFolder(path / "checkpoints").newest(device)
        for problem in problems.values():
            warnings.warn(f"{problem}; this is {found.name}", stacklevel=2)
        return checkpoint
    if not path.is_file():
        raise CheckpointError(f"there is no checkpoint {path}")
    try:
        with zipfile.ZipFile(path) as archive:  # torch does not compare checksums
            damaged = archive.testzip()
        if damaged is not None:
            raise CheckpointError(f"the checkpoint {path} is damaged: {damaged} has changed since it was written")
        content = torch.load(path, map_location=device, weights_only=True, mmap=mmap)
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            own = content.get("format") if isinstance(content, dict) else type(content).__name__
            raise CheckpointError(f"the checkpoint {path} has format {own}; this version reads {FORMAT}")
        return _checkpoint(content)
    except CheckpointError:
        raise
    except Exception as error:  # whatever torch and zipfile raise for bytes that are none of theirs
        raise CheckpointError(f"the checkpoint {path} is damaged or not a checkpoint: {error!r}") from error


def _checkpoint(content: Mapping[str, Any]) -> Checkpoint:
    """From what :func:`save_checkpoint` wrote."""
    return Checkpoint(
        shape=ModelShape(**content["shape"]),
        weights=content["weights"],
        normalizer=Normalizer(
            np.asarray(content["state_mean"].cpu()), np.asarray(content["state_std"].cpu()), content["return_scale"]
        ),
        step=content["step"],
        config=content["config"],
        task=RunTask.from_dict(content["task"]),
        training=content["training"],
    )


class CheckpointFolder:
    """The checkpoints of a run, ``step-000012000.pt`` and so on.

    The newest two stay: what is older is removed once a new one is whole.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def paths(self) -> list[Path]:
        """What is there, the oldest first."""
        return sorted(self.folder.glob("step-*.pt"))

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is, or would be."""
        return self.folder / f"step-{step:09d}.pt"

    def save(self, checkpoint: Checkpoint) -> Path:
        """Add one, and remove what is too old."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.path(checkpoint.step)
        save_checkpoint(path, checkpoint)
        for old in self.paths()[:-NUM_KEPT]:
            old.unlink()
        return path

    def set_aside(self, path: Path) -> None:
        """Take away one that cannot be read, but keep it: under another name it counts no more."""
        path.rename(path.with_name(f"{path.name}.damaged"))

    def newest(
        self, device: torch.device | str = "cpu", *, mmap: bool = False
    ) -> tuple[Path, Checkpoint, dict[Path, str]]:
        """The newest one that can be read, and what is wrong with those that are newer.

        Raises:
            CheckpointError: if there is none.
        """
        problems: dict[Path, str] = {}
        for path in reversed(self.paths()):
            try:
                return path, load_checkpoint(path, device, mmap=mmap), problems
            except CheckpointError as error:
                problems[path] = str(error)
        found = "; ".join(problems.values()) if problems else "it has none yet"
        raise CheckpointError(f"there is no checkpoint that can be read in {self.folder}: {found}")
