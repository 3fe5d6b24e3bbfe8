"""Checkpoints: written atomically, self-contained and safe to load.

A checkpoint is a single ``torch.save`` file of tensors and plain values, read with ``weights_only=True``: loading it
executes no code. It contains the model, the normalizer and the task, so that a policy runs without the data set::

    from primal_dt.training.checkpoint import load_checkpoint

    policy = load_checkpoint("runs/RUN").policy()
    policy.reset(3600.0)  # then policy.act(observation), policy.observe(reward)

It also contains the state of the training. No random state is saved, because all randomness of update t is a function
of the seed and t.
"""

import errno
import re
import textwrap
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from primal_dt.data.normalizer import Normalizer
from primal_dt.model.critic import TwinCritic
from primal_dt.model.transformer import DecisionTransformer, ModelShape
from primal_dt.policy.inference import InferenceMode
from primal_dt.policy.policy import DecisionTransformerPolicy
from primal_dt.policy.stepwise import OnBad, PastEnd
from primal_dt.system.files import atomic_write, check_folder, check_regular, move, unused_name
from primal_dt.task import RunTask
from primal_dt.training.checkpoint_schema import FORMAT, check_archive, checked_content
from primal_dt.training.policy_folder import is_policy_folder, read_policy, write_policy
from primal_dt.training.run_folder import CONFIG

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointFolder",
    "load_checkpoint",
    "save_checkpoint",
    "save_policy",
    "unreadable",
]

MESSAGE_WIDTH = 300
NAME = re.compile(r"step-\d{9}\.pt")
SUFFIX = ".pt"
EXPORTED = (".onnx", ".pt2")
"""Suffixes of exported policies."""
NUM_KEPT = 2
"""Number of checkpoints to keep: the newest, and the one before it in case the newest cannot be read."""


class CheckpointError(ValueError):
    """Raised if a checkpoint is missing or cannot be read."""


@dataclass(frozen=True)
class Checkpoint:
    """A model with its normalizer, configuration, task and training state."""

    shape: ModelShape
    weights: Mapping[str, Tensor]
    normalizer: Normalizer
    step: int
    """Number of updates so far."""
    config: Mapping[str, Any]
    """The configuration of the run, as plain values."""
    task: RunTask
    """The task that the model was trained for."""
    training: Mapping[str, Any]
    """The trainer's state, and other values that a resumed run needs."""
    critic: Mapping[str, Tensor] | None = None
    """The weights of the critics that choose among actions, if the model is guided by critics."""
    license: str | None = None
    """The license of the weights, as the hub names it; None if it is not known. Only shared policies have one."""

    def model(self, device: torch.device | str = "cpu") -> DecisionTransformer:
        """Build the model with its weights, in evaluation mode.

        Raises:
            CheckpointError: if a weight is missing, unknown or of another shape.
        """
        model = DecisionTransformer(self.shape)
        _load_weights(model, self.weights)
        return model.to(device).eval()

    def policy(
        self,
        device: torch.device | str = "cpu",
        *,
        mode: InferenceMode = "window",
        reproducible: bool = False,
        on_bad: OnBad = "error",
        past_end: PastEnd = "clamp",
    ) -> DecisionTransformerPolicy:
        """Build a policy from the model. The options are those of :class:`DecisionTransformerPolicy`."""
        return DecisionTransformerPolicy(
            self.model(device),
            self.normalizer,
            mode=mode,
            reproducible=reproducible,
            on_bad=on_bad,
            past_end=past_end,
            critic=self.twin_critic(device),
        )

    def twin_critic(self, device: torch.device | str = "cpu") -> TwinCritic | None:
        """Build the critics with their weights, in evaluation mode; None if the model has none."""
        if self.critic is None:
            return None
        critic = TwinCritic(self.shape)
        _load_weights(critic, self.critic)
        return critic.to(device).eval()


def _load_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    try:
        module.load_state_dict(dict(weights))
    except RuntimeError as error:  # its message has several lines
        raise CheckpointError(f"the weights of the checkpoint do not fit: {' '.join(str(error).split())}") from error


def save_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint atomically: the file is either complete or absent, even after a power failure."""
    with atomic_write(path) as file:
        torch.save(_content(checkpoint), file)


def save_policy(folder: Path, checkpoint: Checkpoint, *, provenance: Mapping[str, Any] | None = None) -> None:
    """Write a checkpoint without the state of its training, as a folder to share that :func:`load_checkpoint` reads.

    Args:
        folder: the folder. It is created if it does not exist.
        checkpoint: the checkpoint.
        provenance: the command, the commit and the versions of the training; None if they are not known.
    """
    write_policy(folder, _content(checkpoint) | {"license": checkpoint.license}, provenance=provenance)


def _content(checkpoint: Checkpoint) -> dict[str, Any]:
    """The content of a checkpoint's file."""
    return {
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
        "critic": None if checkpoint.critic is None else dict(checkpoint.critic),
    }


def load_checkpoint(path: str | Path, device: torch.device | str = "cpu", *, mmap: bool = False) -> Checkpoint:
    """Load a checkpoint file, the newest readable checkpoint of a run, or a policy that was saved to be shared.

    Args:
        path: checkpoint file, run folder, or folder of a shared policy, which has no state of the training.
        device: device of the tensors.
        mmap: memory-map the tensors instead of reading them. Use it for many checkpoints, or if only their metadata is
            needed. CPU only. Shared policies are always read.

    Raises:
        CheckpointError: if the checkpoint is missing, damaged or of another format version.
        OSError: if there is not enough memory, or the file may not be read.
    """
    path = Path(path)
    if is_policy_folder(path):
        return _load_policy_folder(path, device)
    if path.is_dir():
        found, checkpoint, problems = CheckpointFolder(path / "checkpoints").newest(device, mmap=mmap)
        for problem in problems.values():
            warnings.warn(f"{problem}; using {found.name} instead", stacklevel=2)
        return checkpoint
    if not path.is_file():
        problem = "is not a regular file" if path.exists() else "does not exist"
        raise CheckpointError(f"the checkpoint {path} {problem}")
    try:
        check_archive(path)
        content = torch.load(path, map_location=device, weights_only=True, mmap=mmap)
        return Checkpoint(**checked_content(content, size=path.stat().st_size))
    except Exception as error:  # torch and zipfile raise many types of errors for foreign bytes
        if _is_shortage(error):
            raise OSError(errno.ENOMEM, "there is not enough memory to load the checkpoint", str(path)) from error
        if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE):
            raise
        raise unreadable(path, error) if path.suffix == SUFFIX else _another_file(path) from error


def _load_policy_folder(folder: Path, device: torch.device | str) -> Checkpoint:
    try:
        content, size = read_policy(folder, device)
        return Checkpoint(**checked_content(content, size=size))
    except ValueError as error:
        raise unreadable(folder, error, kind="policy") from error


def unreadable(path: Path, error: Exception, *, kind: str = "checkpoint") -> CheckpointError:
    """The error of a checkpoint, or of a shared policy, that has wrong bytes or wrong content."""
    words = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    reason = textwrap.shorten(words.partition("\n")[0], MESSAGE_WIDTH, placeholder=" ...")
    return CheckpointError(f"the {kind} {path} is damaged or not a {kind} of this version: {reason}")


def _another_file(path: Path) -> CheckpointError:
    """The error of a file that cannot be read and is not named as a checkpoint: what it is, and what is expected."""
    folder = path.parent
    if is_policy_folder(folder):
        return CheckpointError(f"{path} is a file of the shared policy {folder}: give the folder")
    if (folder / "checkpoints").is_dir():
        return CheckpointError(f"{path} is a file of the run {folder}: give the folder")
    if path.suffix in EXPORTED:
        return CheckpointError(
            f"{path} is an exported policy, which has no checkpoint in it: give the run or the policy that it was "
            "exported from"
        )
    return CheckpointError(
        f"{path} is not a checkpoint: give a run folder, a checkpoint file ({SUFFIX}), or the folder of a shared policy"
    )


def _is_shortage(error: Exception) -> bool:
    """Whether an error is about missing memory. Torch has no type of error for that on a CPU."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or bool(
        re.search(r"(can't|cannot|unable to) (allocate|mmap) .*memory", str(error), re.IGNORECASE)
    )


class CheckpointFolder:
    """The checkpoints of a run: ``step-000012000.pt`` and so on.

    The newest two are stored. Older ones are removed after a new one is complete.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def paths(self) -> list[Path]:
        """List the checkpoint files, oldest first. Files of other names are not the run's own."""
        return sorted(path for path in self.folder.glob("step-*.pt") if NAME.fullmatch(path.name))

    def path(self, step: int) -> Path:
        """Return the path of a step's checkpoint, whether or not it exists."""
        return self.folder / f"step-{step:09d}.pt"

    def save(self, checkpoint: Checkpoint) -> Path:
        """Save a checkpoint, remove old ones, and return its path."""
        path = self.path(checkpoint.step)
        save_checkpoint(path, checkpoint)
        older = [other for other in self.paths() if other < path]
        for old in older[: len(older) + 1 - NUM_KEPT]:
            old.unlink()
        return path

    def set_aside(self, path: Path) -> None:
        """Rename an unreadable checkpoint to ``*.damaged``, so that it is ignored but not deleted."""
        move(path, unused_name(path.with_name(f"{path.name}.damaged")))

    def newest(
        self, device: torch.device | str = "cpu", *, mmap: bool = False
    ) -> tuple[Path, Checkpoint, dict[Path, str]]:
        """Load the newest readable checkpoint.

        Returns:
            Its path, the checkpoint, and path -> problem of newer checkpoints, which cannot be read.

        Raises:
            CheckpointError: if there is no readable checkpoint.
        """
        problems: dict[Path, str] = {}
        for path in reversed(self.paths()):
            try:
                check_regular(path)
                checkpoint = load_checkpoint(path, device, mmap=mmap)
                if path != self.path(checkpoint.step):
                    raise CheckpointError(f"the checkpoint {path} is damaged: it is that of step {checkpoint.step}")
                return path, checkpoint, problems
            except CheckpointError as error:
                problems[path] = str(error)
            except OSError as error:
                if error.errno != errno.EINVAL:  # of check_regular
                    raise
                problems[path] = f"the checkpoint {path} cannot be used: {error.strerror}"
        check_folder(self.folder)
        run = self.folder.parent
        if not self.folder.exists() and not (run / CONFIG).exists():
            raise CheckpointError(
                f"{run} is not a run or a shared policy: it has no {CONFIG} and no folder checkpoints"
            )
        found = "; ".join(problems.values()) if problems else "none was saved yet"
        raise CheckpointError(f"there is no readable checkpoint in {self.folder}: {found}. Start a new run")
