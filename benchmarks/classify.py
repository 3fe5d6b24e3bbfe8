"""Training and testing of a classifier of sequences, whatever the sequences are, and what is kept of it.

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
"""The gradient's norm is kept at or below it: far above what is usual, against accidents."""
FACTS, WEIGHTS = "encoder.json", "weights.pt"
"""Files of a training that came to its end."""


class LabeledBatch(NamedTuple):
    """Sequences of one length, padded, and their classes."""

    x: Tensor
    """(B, L, ...), what the encoder's embedding takes."""
    valid: Tensor | None
    """(B, L) bool, True for real tokens; None if all are."""
    labels: Tensor
    """(B,) int64."""


@dataclass(frozen=True)
class Sequences:
    """Sequences and their classes."""

    tokens: Sequence[Tensor]
    """(L,) uint8 of symbols, or (L, channels) of a time series, each."""
    labels: Tensor
    """(number,) int64."""

    def batch(self, rows: Sequence[int], device: torch.device) -> LabeledBatch:
        """These sequences, padded on the right to the longest of them."""
        chosen = [self.tokens[row] for row in rows]
        lengths = torch.tensor([len(tokens) for tokens in chosen])
        x = nn.utils.rnn.pad_sequence(chosen, batch_first=True)
        x = x if x.is_floating_point() else x.long()
        valid = None if bool((lengths == x.shape[1]).all()) else torch.arange(x.shape[1]) < lengths[:, None]
        return LabeledBatch(
            x.to(device), None if valid is None else valid.to(device), self.labels[list(rows)].to(device)
        )

    def batches(self, size: int, device: torch.device, order: Sequence[int] | None = None) -> Iterator[LabeledBatch]:
        """All of them, in an order."""
        order = range(len(self.tokens)) if order is None else order
        for first in range(0, len(order), size):
            yield self.batch(order[first : first + size], device)

    @property
    def longest(self) -> int:
        """Tokens."""
        return max(len(tokens) for tokens in self.tokens)


class Losses(NamedTuple):
    """Of one update, on the device."""

    total: Tensor
    penalty: Tensor
    """``sum_l mean(J_l^2)``, also if its weight is zero."""
    correct: Tensor
    """How many of the batch were classified as they should be."""


def update(model: Encoder, optimizer: torch.optim.Optimizer, batch: LabeledBatch, *, eta: float) -> Losses:
    """One step of training."""
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
    """The share of sequences that get their class, in percent."""
    model.eval()
    correct = total = 0
    for batch in batches:
        correct += int((model(batch.x, batch.valid).logits.argmax(-1) == batch.labels).sum())
        total += len(batch.labels)
    model.train()
    return 100 * correct / total


def spread(values: Sequence[float]) -> str:
    """``98.5 ± 0.7``: mean and sample standard deviation, the latter if there are several."""
    deviation = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{deviation}"


def keep(folder: Path, model: Encoder, facts: Mapping[str, Any], scores: Mapping[str, float]) -> None:
    """Write down a training that came to its end.

    Args:
        folder: its own.
        model: trained.
        facts: all that it depends on.
        scores: split -> accuracy.
    """
    with atomic_write(folder / WEIGHTS) as file:
        torch.save(model.state_dict(), file)
    keep_scores(folder, facts, scores, shape=asdict(model.shape))  # last: where they are, all is


def keep_scores(folder: Path, facts: Mapping[str, Any], scores: Mapping[str, float], **more: Any) -> None:
    """Write down what a training came to, without what it learned."""
    with atomic_write(folder / FACTS) as file:
        file.write(json.dumps({"facts": facts, **more, "scores": scores}, indent=1).encode())


def kept_scores(folder: Path, facts: Mapping[str, Any]) -> dict[str, float] | None:
    """The scores of a training that depended on just this, if there was one."""
    path = folder / FACTS
    if not path.is_file():
        return None
    content = json.loads(path.read_text())
    scores: dict[str, float] = content["scores"]
    return scores if content["facts"] == json.loads(json.dumps(facts)) else None


def kept_encoder(folder: Path, embed: nn.Module) -> Encoder:
    """A trained encoder.

    Args:
        folder: of its training.
        embed: as it was trained with, any weights.
    """
    shape = EncoderShape(**json.loads((folder / FACTS).read_text())["shape"])
    model = Encoder(embed, shape)
    model.load_state_dict(torch.load(folder / WEIGHTS, weights_only=True, map_location="cpu"))
    return model.eval()
