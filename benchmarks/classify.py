"""Train and test a sequence classifier, and save and load its results.

Axes: B batch, L tokens.
"""

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.encoder import Encoder, EncoderShape
from benchmarks.published_encoder import build_encoder
from primal_dt.attention import PenaltyReduction
from primal_dt.system.files import atomic_write

__all__ = [
    "LabeledBatch",
    "Losses",
    "SavedRun",
    "Sequences",
    "accuracy",
    "num_parameters",
    "save_run",
    "saved_encoder",
    "saved_run",
    "spread",
    "update",
]

CLIP = 4.0
"""Maximum norm of the gradient: the published one of UEA."""
RESULT, WEIGHTS = "encoder.json", "weights.pt"
"""Files of a finished run: its settings and scores, and its weights."""


class LabeledBatch(NamedTuple):
    """A batch of sequences, padded to one length, and their classes."""

    x: Tensor
    """(B, L, ...), the input of the encoder's embedding; (2B, L, ...) for pairs, the first of each pair first."""
    valid: Tensor | None
    """(B, L) or (2B, L) bool, True for real tokens; None if all tokens are real."""
    labels: Tensor
    """(B,) int64."""


@dataclass(frozen=True)
class Sequences:
    """Sequences and their classes."""

    tokens: Sequence[Tensor]
    """One tensor per sequence: (L,) uint8 for symbols, (L, channels) for a time series."""
    labels: Tensor
    """(number of sequences,) int64."""
    others: Sequence[Tensor] | None = None
    """The second sequence of each pair, if the task is to compare two sequences."""

    def batch(self, rows: Sequence[int], device: torch.device) -> LabeledBatch:
        """Make a batch of the sequences at ``rows``, padded on the right to the longest of them.

        Pairs take two rows of the batch: all first sequences come before all second ones.
        """
        chosen = [self.tokens[row] for row in rows]
        if self.others is not None:
            chosen += [self.others[row] for row in rows]
        lengths = torch.tensor([len(tokens) for tokens in chosen])
        x = nn.utils.rnn.pad_sequence(chosen, batch_first=True)
        x = x if x.is_floating_point() else x.long()
        valid = None if bool((lengths == x.shape[1]).all()) else torch.arange(x.shape[1]) < lengths[:, None]
        return LabeledBatch(
            x.to(device), None if valid is None else valid.to(device), self.labels[list(rows)].to(device)
        )

    def batches(self, size: int, device: torch.device, order: Sequence[int] | None = None) -> Iterator[LabeledBatch]:
        """Iterate over all sequences in batches of ``size``, in the given order or as stored."""
        order = range(len(self.tokens)) if order is None else order
        for first in range(0, len(order), size):
            yield self.batch(order[first : first + size], device)

    @property
    def longest(self) -> int:
        """Length of the longest sequence, in tokens."""
        return max(len(tokens) for tokens in (*self.tokens, *(self.others or ())))


class Losses(NamedTuple):
    """Results of one update, as scalar tensors on the device."""

    total: Tensor
    penalty: Tensor
    """The KSVD penalty, computed even if its weight eta is zero."""
    correct: Tensor
    """Number of sequences in the batch that were classified correctly."""


def update(
    model: Encoder,
    optimizer: torch.optim.Optimizer,
    batch: LabeledBatch,
    *,
    eta: float,
    penalty: PenaltyReduction = "mean",
    clip: float | None = CLIP,
) -> Losses:
    """Make one training step.

    Args:
        model: the encoder.
        optimizer: its optimizer.
        batch: the sequences and their classes.
        eta: weight of the KSVD penalty.
        penalty: how the penalties of several layers are combined.
        clip: maximum norm of the gradient; None for no limit.
    """
    output = model(batch.x, batch.valid, with_objective=True)
    found = model.penalty(output, penalty)
    loss = F.cross_entropy(output.logits, batch.labels)
    if eta:  # without a weight, skip the backward pass through J
        loss = loss + eta * found
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    correct = (output.logits.detach().argmax(-1) == batch.labels).sum()
    return Losses(loss.detach(), found.detach(), correct)


@torch.inference_mode()
def accuracy(model: Encoder, batches: Iterable[LabeledBatch]) -> float:
    """Compute the percentage of sequences that are classified correctly."""
    model.eval()
    correct = total = 0
    for batch in batches:
        correct += int((model(batch.x, batch.valid).logits.argmax(-1) == batch.labels).sum())
        total += len(batch.labels)
    model.train()
    return 100 * correct / total


def spread(values: Sequence[float]) -> str:
    """Format the mean and, for several values, the sample standard deviation: ``98.5 ± 0.7``."""
    deviation = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{deviation}"


@dataclass(frozen=True)
class SavedRun:
    """The result of a finished run."""

    scores: Mapping[str, float]
    """Split -> accuracy in percent."""
    commit: str | None
    """The commit of the code that trained it."""
    num_parameters: int
    epoch: int | None = None
    """The epoch whose weights were tested, if it is not the last one."""


def save_run(
    folder: Path, model: Encoder, settings: Mapping[str, Any], run: SavedRun, *, source: Path | None = None
) -> None:
    """Save a finished run: its weights, all settings that its result depends on, the result, and the data's folder."""
    with atomic_write(folder / WEIGHTS) as file:
        torch.save(model.state_dict(), file)
    path = None if source is None else str(source.resolve())
    content = {"settings": settings, "shape": asdict(model.shape), **asdict(run), "source": path}
    with atomic_write(folder / RESULT) as file:  # written last: if it exists, the run is complete
        file.write(json.dumps(content, indent=1).encode())


def saved_run(folder: Path, settings: Mapping[str, Any]) -> SavedRun | None:
    """Read the result of a finished run with exactly these settings; None if there is none."""
    path = folder / RESULT
    if not path.is_file():
        return None
    content = json.loads(path.read_text())
    if content.get("settings") != json.loads(json.dumps(settings)):  # other settings, or an earlier version's file
        return None
    return SavedRun(content["scores"], content["commit"], content["num_parameters"], content["epoch"])


def saved_encoder(folder: Path, embed: nn.Module) -> Encoder:
    """Load a trained encoder.

    Args:
        folder: the run's folder.
        embed: an embedding of the same shape as the trained one. Its weights are overwritten.
    """
    shape = EncoderShape(**json.loads((folder / RESULT).read_text())["shape"])
    model = build_encoder(embed, shape)
    model.load_state_dict(torch.load(folder / WEIGHTS, weights_only=True, map_location="cpu"))
    return model.eval()


def num_parameters(model: nn.Module) -> int:
    """Number of trainable parameters."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
