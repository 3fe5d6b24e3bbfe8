"""The five tasks of the Long-Range Arena, as sequences of small integers, and their published settings.

ListOps is generated (``listops.py``). Image, Pathfinder, Retrieval and Text are read from their standard files
(``files.py``).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.batches import Sequences
from benchmarks.encoder import EncoderShape, Network
from benchmarks.lra.files import load_image, load_pathfinder, load_retrieval, load_text
from benchmarks.lra.listops import NUM_CLASSES, TOKENS, load_listops
from benchmarks.settings import Primal

__all__ = ["OPTIONS", "TASKS", "Task", "encoder_shape", "load_task"]


@dataclass(frozen=True)
class Task:
    """Published settings of a task."""

    max_length: int
    """Number of learned positions: the length of the longest sequence, rounded up to a power of two."""
    num_tokens: int
    """Size of our vocabulary. The published code has 32 tokens for ListOps and 512 elsewhere; the rest are unused."""
    num_classes: int
    batch_size: int
    """Sequences per step; pairs of sequences if the task has pairs."""
    steps: int
    warmup_steps: int
    eval_every_steps: int
    """How often the published code evaluates on the validation split to choose its checkpoint."""
    num_eval_batches: int
    """Number of batches in each of these evaluations. It can be more than one pass over the validation split."""
    primal: Mapping[str, Primal]
    """Stack -> its rank and eta."""
    is_pair: bool = False
    """Whether the task is to compare two sequences."""
    is_image: bool = False
    """Whether tokens are pixels, among which 0 is black, and padding in the published code."""


TASKS = {
    "listops": Task(
        max_length=2048,
        num_tokens=len(TOKENS),
        num_classes=NUM_CLASSES,
        batch_size=32,
        steps=5_000,
        warmup_steps=1_000,
        eval_every_steps=50,
        num_eval_batches=62,
        primal={"primal-plus": Primal(30, 0.05), "primalformer": Primal(20, 0.1)},
    ),
    "image": Task(
        max_length=1024,
        num_tokens=256,
        num_classes=10,
        batch_size=256,
        steps=35_000,
        warmup_steps=175,
        eval_every_steps=175,
        num_eval_batches=20,
        primal={"primal-plus": Primal(30, 0.1), "primalformer": Primal(30, 0.1)},
        is_image=True,
    ),
    "pathfinder": Task(
        max_length=1024,
        num_tokens=256,
        num_classes=2,
        batch_size=256,
        steps=62_400,
        warmup_steps=312,
        eval_every_steps=312,
        num_eval_batches=312,
        primal={"primal-plus": Primal(20, 0.05), "primalformer": Primal(30, 0.1)},
        is_image=True,
    ),
    "retrieval": Task(
        max_length=4096,
        num_tokens=256,
        num_classes=2,
        batch_size=32,
        steps=30_000,
        warmup_steps=800,
        eval_every_steps=300,
        num_eval_batches=565,
        primal={"primal-plus": Primal(20, 0.05), "primalformer": Primal(30, 0.0)},
        is_pair=True,
    ),
    "text": Task(
        max_length=4096,
        num_tokens=256,
        num_classes=2,
        batch_size=32,
        steps=20_000,
        warmup_steps=8_000,
        eval_every_steps=500,
        num_eval_batches=781,
        primal={"primal-plus": Primal(30, 0.1), "primalformer": Primal(20, 0.05)},
    ),
}


OPTIONS: dict[str, dict[str, Any]] = {
    "softmax": {"attention_dropout": 0.1},
    "linformer": {"num_rows": 256},
    "performer": {"num_features": 256},
    "reformer": {"num_rounds": 2},
    "nystromformer": {"num_landmarks": 64},
}
"""Kind of attention -> its published size. (The published Performer has ReLU features, where ours estimates softmax,
and the published Nystromformer adds a convolution of the values.)"""


def encoder_shape(
    *,
    num_classes: int,
    max_length: int,
    attention: str,
    primal: Primal,
    network: Network = "lra",
    softmax: Mapping[str, Any] = OPTIONS["softmax"],
    is_pair: bool = False,
    zero_is_padding: bool = False,
) -> EncoderShape:
    """The published sizes: 2 layers, width 64, 2 heads, MLP 128.

    Args:
        num_classes: the task's number of classes.
        max_length: the number of learned positions.
        attention: the attention stack, one of ``STACKS``.
        primal: the primal layers.
        network: ``lra``, the published network, or ``ours``.
        softmax: additional arguments of softmax attention.
        is_pair: whether the task is to compare two sequences.
        zero_is_padding: whether token 0 counts as padding.
    """
    return EncoderShape(
        num_classes=num_classes,
        max_length=max_length,
        attention=attention,
        num_layers=2,
        width=64,
        num_heads=2,
        mlp_width=128,
        options={**OPTIONS, "primal": primal.options, "softmax": softmax},
        network=network,
        is_pair=is_pair,
        zero_is_padding=zero_is_padding,
    )


def load_task(name: str, folder: Path) -> dict[str, Sequences]:
    """Load a task: split (train, validation, test) -> sequences.

    Args:
        name: the task's name.
        folder: the folder with the standard files. For ListOps, the folder that caches the generated data.
    """
    return LOADERS[name](folder)


def _load_listops(folder: Path) -> dict[str, Sequences]:
    return {
        split: Sequences(
            [torch.from_numpy(part.expression(number)) for number in range(len(part))], torch.from_numpy(part.values)
        )
        for split, part in load_listops(folder).items()
    }


LOADERS: dict[str, Callable[[Path], dict[str, Sequences]]] = {
    "listops": _load_listops,
    "image": load_image,
    "pathfinder": load_pathfinder,
    "retrieval": load_retrieval,
    "text": load_text,
}
