"""Warm start: a training that begins with another run's weights, for fine-tuning on new data.

The units of the other run are kept: the mean and standard deviation of its states, its return scale, the scale of
actions without bounds, and the unit of its critics. Its weights were trained for inputs and outputs in these units.
With the units of the new data, the same state would be another input, and the policy another one at step 0.
"""

from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np

from primal_dt.config import ModelConfig
from primal_dt.data.normalizer import Normalizer
from primal_dt.model.transformer import DecisionTransformer, ModelShape
from primal_dt.schema import require_keys
from primal_dt.system.files import file_digest
from primal_dt.training.checkpoint import Checkpoint, CheckpointError, CheckpointFolder, load_checkpoint, unreadable
from primal_dt.training.guidance import Guidance
from primal_dt.training.policy_folder import POLICY_CONFIG, is_policy_folder
from primal_dt.training.run_folder import InitialWeights, RunRecord

__all__ = ["WarmStart", "read_warm_start", "resume_warm_start"]

FREE = ("dropout", "attention_dropout", "action_dropout", "init", "primal_init")
"""Fields of ``ModelShape`` that may differ: what a trained policy does is independent of them."""
PRIMAL = ("rank", "feature_map", "scores")
"""Fields of ``ModelShape`` that matter only if there is a primal layer."""
FAR = 100.0
"""Standard deviations of the other run's data: inputs of this size are far outside what the weights were trained on."""


@dataclass(frozen=True)
class WarmStart:
    """A checkpoint whose weights and units a training begins with."""

    source: InitialWeights
    checkpoint: Checkpoint
    """The other run's checkpoint. If the run is resumed, its own."""

    @property
    def normalizer(self) -> Normalizer:
        """The other run's normalizer, which the new run keeps."""
        saved = self.checkpoint.normalizer  # the checkpoint is memory-mapped
        return Normalizer(saved.state_mean.copy(), saved.state_std.copy(), saved.return_scale)

    def fit(self, own: ModelShape) -> ModelShape:
        """Return the model's shape for the new data, in the units of the other run.

        The timestep table may be larger than the new data needs. Actions without bounds have the other run's scale.

        Raises:
            ValueError: if the weights do not fit. The message lists all differences.
        """
        theirs = self.checkpoint.shape
        fitted = replace(own, max_timesteps=max(own.max_timesteps, theirs.max_timesteps))
        if own.unbounded and own.unbounded == theirs.unbounded:
            low, high = (self._scaled(own, name) for name in ("action_low", "action_high"))
            fitted = replace(fitted, action_low=low, action_high=high)
        skipped = FREE if "primal" in own.layer_kinds + theirs.layer_kinds else FREE + PRIMAL
        names = [item.name for item in fields(ModelShape) if item.name not in skipped]
        differing = [name for name in names if getattr(fitted, name) != getattr(theirs, name)]
        if differing:
            words = "; ".join(f"{name} is {getattr(own, name)}, there {getattr(theirs, name)}" for name in differing)
            settings = [item.name for item in fields(ModelConfig) if item.name in differing]
            flags = " ".join(f"--{name.replace('_', '-')} {getattr(theirs, name)}" for name in settings)
            advice = f". To agree with it: {flags}" if len(settings) == len(differing) else ""
            raise ValueError(f"the weights of {self.source.path} do not fit this run: {words}{advice}")
        return fitted

    def _scaled(self, own: ModelShape, name: str) -> tuple[float, ...]:
        """A bound of every action: the other run's where there are no bounds, so that it is only a scale."""
        pairs = zip(getattr(own, name), getattr(self.checkpoint.shape, name), own.unbounded, strict=True)
        return tuple(theirs if is_free else bound for bound, theirs, is_free in pairs)

    def load_model(self, model: DecisionTransformer) -> None:
        """Load the weights."""
        model.load_state_dict(dict(self.checkpoint.weights))

    def load_critics(self, guidance: Guidance) -> None:
        """Load the critics, if the other run has some. Their optimizer starts from zero."""
        if self.checkpoint.critic is None:
            return
        if Path(self.source.path).name == POLICY_CONFIG:
            raise ValueError(
                f"{self.source.path} is a shared policy: it has critics, but not the state to train them further. "
                "Give its run to --init-from, or leave --critic-weight at 0"
            )
        try:
            guidance.load_weights(
                require_keys(self.checkpoint.training["trainer"], ("guidance",), where="it")["guidance"]
            )
        except (ValueError, RuntimeError) as error:
            raise unreadable(Path(self.source.path), error) from error

    def problem(self, own: Normalizer) -> str | None:
        """A message if states of the new data are far outside those of the other run, else None.

        Args:
            own: the normalizer of the new data.
        """
        theirs = self.checkpoint.normalizer
        size = (np.abs(own.state_mean - theirs.state_mean) + own.state_std) / theirs.state_std
        far = np.flatnonzero(size > FAR)
        if not len(far):
            return None
        return (
            f"state entries {', '.join(map(str, far[:10]))}{' ...' if len(far) > 10 else ''} of the new data are up to "
            f"{size.max():.3g} standard deviations away from the data that {self.source.path} was trained on: an entry "
            "may have been constant there, or have another meaning"
        )


def read_warm_start(path: str | Path) -> WarmStart:
    """Read the last checkpoint of a run, a checkpoint file, or a shared policy, by its folder or its ``config.json``.

    Raises:
        CheckpointError: if it is missing or damaged. A damaged last checkpoint is not replaced by an older one.
    """
    path = Path(path)
    folder = path.parent if path.name == POLICY_CONFIG else path
    if is_policy_folder(folder):  # config.json has the digest of the weights, so it stands for both files
        file, checkpoint = folder / POLICY_CONFIG, load_checkpoint(folder)
    elif path.is_dir():
        file, checkpoint, problems = CheckpointFolder(path / "checkpoints").newest(mmap=True)
        if problems:
            raise CheckpointError(f"{'; '.join(problems.values())}. To use an older checkpoint, give its path: {file}")
    else:
        file, checkpoint = path, load_checkpoint(path, mmap=True)
    return WarmStart(InitialWeights(str(file.resolve()), file_digest(file), checkpoint.step), checkpoint)


def resume_warm_start(folder: Path, record: RunRecord) -> WarmStart | None:
    """Return what a resumed run began with, from its own checkpoint; None if it began with new weights.

    The other run is needed only if this run was killed before it saved its first checkpoint, at step 0.

    Raises:
        CheckpointError: if there is no checkpoint yet, and that of the other run is missing or has changed.
    """
    source = record.initial_weights
    if source is None:
        return None
    checkpoints = CheckpointFolder(folder / "checkpoints")
    if checkpoints.paths():
        return WarmStart(source, checkpoints.newest(mmap=True)[1])
    start = read_warm_start(source.path)
    if start.source.digest != source.digest:
        raise CheckpointError(f"{folder} has no checkpoint yet, and {source.path} has changed since: start a new run")
    return start
