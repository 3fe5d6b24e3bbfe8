"""One training step of a model that classifies sequences or tokens, and tests of it.

Axes: B batch, L tokens, C classes.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from itertools import islice
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.batches import LabeledBatch
from primal_dt.attention import PenaltyReduction, ksvd_penalty
from primal_dt.training.distributed import Processes

__all__ = ["ONE_PROCESS", "Losses", "accuracy", "task_loss", "top_accuracies", "total_over", "update"]

ONE_PROCESS = Processes(0, 1, torch.device("cpu"))


class ModelOutput(Protocol):
    """What a model returns."""

    @property
    def logits(self) -> Tensor:
        """Scores of the classes, (B, C) or (B, L, C)."""

    @property
    def objectives(self) -> list[Tensor]:
        """J (B,) of each layer that has one; empty if not requested."""


class Losses(NamedTuple):
    """Results of one update, as scalar tensors on the device."""

    total: Tensor
    task: Tensor
    """The loss without the penalty."""
    penalty: Tensor
    """The KSVD penalty, in one process even if its weight eta is zero."""
    correct: Tensor
    """Share of the labels that were predicted correctly."""


def task_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy, the mean over all labels: one for each sequence or token, or shares of the classes (B, C)."""
    if labels.is_floating_point():
        return F.cross_entropy(logits, labels)
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


def _forward(
    network: nn.Module, batch: LabeledBatch, eta: float, penalty: Callable[[Any], Tensor], *, bf16: bool
) -> Losses:
    with torch.autocast(batch.x.device.type, torch.bfloat16) if bf16 else nullcontext():
        # DistributedDataParallel waits for the gradients of all weights that its output depends on.
        asked = eta > 0 or not isinstance(network, DistributedDataParallel)
        output: ModelOutput = network(batch.x, batch.valid, with_objective=asked)
        found = penalty(output)
        task = task_loss(output.logits, batch.labels)
    total = task + eta * found if eta else task  # without a weight, skip the backward pass through J
    labels = batch.labels.argmax(-1) if batch.labels.is_floating_point() else batch.labels
    correct = (output.logits.detach().argmax(-1) == labels).float().mean()
    return Losses(total, task.detach(), found.detach(), correct)


def update(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: LabeledBatch,
    *,
    eta: float,
    penalty: PenaltyReduction = "mean",
    clip: float | None = None,
    accumulate: int = 1,
    bf16: bool = False,
    network: nn.Module | None = None,
    share: Tensor | None = None,
) -> Losses:
    """Make one training step.

    Args:
        model: the model.
        optimizer: its optimizer.
        batch: the sequences and their labels; with several processes, this process's share of them.
        eta: weight of the KSVD penalty.
        penalty: how the penalties of several layers are combined.
        clip: maximum norm of the gradient; None for no limit.
        accumulate: number of parts in which the batch is computed, one after another.
        bf16: compute in bfloat16 where that is safe.
        network: the compiled or distributed model, if it is one.
        share: (), with several processes: the labels of this one, divided by the mean over all processes.
    """
    network = model if network is None else network
    optimizer.zero_grad(set_to_none=True)
    parts = _parts(batch, accumulate)
    sums: list[Tensor] = []
    for number, part in enumerate(parts):
        weight = len(part.labels) / len(batch.labels)
        is_last = number == len(parts) - 1
        later = network.no_sync() if isinstance(network, DistributedDataParallel) and not is_last else nullcontext()
        with later:
            losses = _forward(network, part, eta, lambda output: penalty_of(model, output, penalty), bf16=bf16)
            # DistributedDataParallel averages over processes.
            (losses.total * (weight if share is None else weight * share)).backward()
        sums.append(torch.stack(losses).detach() * weight)
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return Losses(*torch.stack(sums).sum(0))


def penalty_of(model: nn.Module, output: ModelOutput, reduction: PenaltyReduction) -> Tensor:
    """The KSVD penalty of an output, by the model's own definition if it has one."""
    own = getattr(model, "penalty", None)
    if own is not None:
        return cast(Tensor, own(output, reduction))
    return ksvd_penalty(output.objectives, reduction, like=output.logits)


def _parts(batch: LabeledBatch, number: int) -> list[LabeledBatch]:
    """Split a batch into parts of nearly equal size, at most one for each row."""
    if number == 1:
        return [batch]
    if len(batch.x) != len(batch.labels):
        raise ValueError("a batch of pairs cannot be accumulated in parts: accumulate must be 1")
    size = -(-len(batch.x) // number)
    valid = [None] * number if batch.valid is None else batch.valid.split(size)
    return [LabeledBatch(*part) for part in zip(batch.x.split(size), valid, batch.labels.split(size), strict=False)]


def total_over(results: Iterable[Tensor], processes: Processes) -> Tensor:
    """The sum of results over all processes, on the CPU. Each process computes its own."""
    total = torch.stack(list(results)).sum(0)
    if processes.count > 1:
        dist.all_reduce(total)
    return total.cpu()


def accuracy(model: nn.Module, batches: Iterable[LabeledBatch], processes: Processes = ONE_PROCESS) -> float:
    """Compute the percentage of sequences that are classified correctly. Processes take the batches in turn."""
    return top_accuracies(model, batches, processes, tops=(1,))[0]


@torch.inference_mode()
def top_accuracies(
    model: nn.Module, batches: Iterable[LabeledBatch], processes: Processes, *, tops: Sequence[int]
) -> list[float]:
    """Compute the percentages of sequences whose class is among the n highest scores, for each n of ``tops``.

    Processes take the batches in turn.
    """
    model.eval()
    counts = [torch.zeros(1 + len(tops), dtype=torch.int64, device=processes.device)]
    for batch in islice(batches, processes.rank, None, processes.count):
        best = model(batch.x, batch.valid).logits.topk(max(tops)).indices  # (B, largest n)
        right = best == batch.labels[:, None]
        counts.append(torch.stack([torch.full_like(batch.labels[0], len(right)), *(right[:, :n].sum() for n in tops)]))
    model.train()
    number, *correct = total_over(counts, processes).tolist()
    return [100 * count / number for count in correct]
