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
from torch import Tensor, nn

from benchmarks.encoder import Encoder, EncoderShape, classification_loss
from primal_dt.system.files import atomic_write

__all__ = [
    "LabeledBatch",
    "Losses",
    "Sequences",
    "accuracy",
    "keep",
    "keep_scores",
    "kept_encoder",
    "kept_scores",
    "spread",
    "update",
]

CLIP = 4.0
"""Maximum norm of the gradient. Usual norms are far below it; it only catches outliers."""
FACTS, WEIGHTS = "encoder.json", "weights.pt"
"""Files of a finished run: its settings and scores, and its weights."""


class LabeledBatch(NamedTuple):
    """A batch of sequences, padded to one length, and their classes."""

    x: Tensor
    """(B, L, ...), the input of the encoder's embedding."""
    valid: Tensor | None
    """(B, L) bool, True for real tokens; None if all tokens are real."""
    labels: Tensor
    """(B,) int64."""


@dataclass(frozen=True)
class Sequences:
    """Sequences and their classes."""

    tokens: Sequence[Tensor]
    """One tensor per sequence: (L,) uint8 for symbols, (L, channels) for a time series."""
    labels: Tensor
    """(number of sequences,) int64."""

    def batch(self, rows: Sequence[int], device: torch.device) -> LabeledBatch:
        """Make a batch of the sequences at ``rows``, padded on the right to the longest of them."""
        chosen = [self.tokens[row] for row in rows]
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
        return max(len(tokens) for tokens in self.tokens)


class Losses(NamedTuple):
    """Results of one update, as scalar tensors on the device."""

    total: Tensor
    penalty: Tensor
    """``sum_l mean(J_l^2)``, computed even if its weight eta is zero."""
    correct: Tensor
    """Number of sequences in the batch that were classified correctly."""


def update(model: Encoder, optimizer: torch.optim.Optimizer, batch: LabeledBatch, *, eta: float) -> Losses:
    """Make one training step."""
    output = model(batch.x, batch.valid, with_objective=True)
    loss = classification_loss(output, batch.labels, eta=eta)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    penalty = sum((objective.detach().square().mean() for objective in output.objectives), loss.new_zeros(()))
    correct = (output.logits.detach().argmax(-1) == batch.labels).sum()
    return Losses(loss.detach(), penalty, correct)


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


def keep(folder: Path, model: Encoder, facts: Mapping[str, Any], scores: Mapping[str, float]) -> None:
    """Save a finished run: its weights, settings and scores.

    Args:
        folder: the run's folder.
        model: the trained model.
        facts: all settings that the result depends on.
        scores: split -> accuracy in percent.
    """
    with atomic_write(folder / WEIGHTS) as file:
        torch.save(model.state_dict(), file)
    keep_scores(folder, facts, scores, shape=asdict(model.shape))  # written last: if it exists, the run is complete


def keep_scores(folder: Path, facts: Mapping[str, Any], scores: Mapping[str, float], **more: Any) -> None:
    """Save the settings and scores of a finished run, without its weights."""
    with atomic_write(folder / FACTS) as file:
        file.write(json.dumps({"facts": facts, **more, "scores": scores}, indent=1).encode())


def kept_scores(folder: Path, facts: Mapping[str, Any]) -> dict[str, float] | None:
    """Read the scores of a finished run with exactly these settings; None if there is none."""
    path = folder / FACTS
    if not path.is_file():
        return None
    content = json.loads(path.read_text())
    scores: dict[str, float] = content["scores"]
    return scores if content["facts"] == json.loads(json.dumps(facts)) else None


def kept_encoder(folder: Path, embed: nn.Module) -> Encoder:
    """Load a trained encoder.

    Args:
        folder: the run's folder.
        embed: an embedding of the same shape as the trained one. Its weights are overwritten.
    """
    shape = EncoderShape(**json.loads((folder / FACTS).read_text())["shape"])
    model = Encoder(embed, shape)
    model.load_state_dict(torch.load(folder / WEIGHTS, weights_only=True, map_location="cpu"))
    return model.eval()
