"""The tasks of the Long-Range Arena that are here: ListOps, Image and Text, as sequences of small numbers.

Image is CIFAR-10 in its binary version (``data_batch_1.bin`` to ``data_batch_5.bin``, ``test_batch.bin``), each picture
1,024 gray pixels in reading order. Text is the IMDb reviews as they are published (``train/pos/*.txt`` and so on), byte
by byte. (CIFAR-10's Python version is made of pickles, which run code when they are read.)

Axes: B batch, L tokens.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.classify import Sequences
from benchmarks.encoder import EncoderShape
from benchmarks.lra.listops import NUM_CLASSES, TOKENS, load_listops

__all__ = ["OPTIONS", "TASKS", "Penalized", "Task", "encoder_shape", "load_image", "load_task", "load_text"]

IMAGE_PIXELS, IMAGE_CLASSES, PICTURE_BYTES = 1024, 10, 3 * 1024
TRAINING_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
VALIDATION_PICTURES = 5_000
GREY = np.array([0.299, 0.587, 0.114])
"""Weights of red, green and blue (ITU-R BT.601)."""
TEXT_CLASSES = ("neg", "pos")


@dataclass(frozen=True)
class Penalized:
    """What Primal-Attention is told."""

    rank: int
    eta: float


@dataclass(frozen=True)
class Task:
    """What the published settings say of a task."""

    max_length: int
    num_tokens: int
    """Different ones."""
    num_classes: int
    batch_size: int
    steps: int
    warmup_steps: int
    primal: Mapping[str, Penalized]
    """Stack -> its rank and eta."""


TASKS = {
    "listops": Task(
        max_length=2048,
        num_tokens=len(TOKENS),
        num_classes=NUM_CLASSES,
        batch_size=32,
        steps=5_000,
        warmup_steps=1_000,
        primal={"primal-plus": Penalized(30, 0.05), "primalformer": Penalized(20, 0.1)},
    ),
    "image": Task(
        max_length=IMAGE_PIXELS,
        num_tokens=256,
        num_classes=IMAGE_CLASSES,
        batch_size=256,
        steps=35_000,
        warmup_steps=175,
        primal={"primal-plus": Penalized(30, 0.1), "primalformer": Penalized(30, 0.1)},
    ),
    "text": Task(
        max_length=4096,
        num_tokens=256,
        num_classes=len(TEXT_CLASSES),
        batch_size=32,
        steps=20_000,
        warmup_steps=8_000,
        primal={"primal-plus": Penalized(30, 0.1), "primalformer": Penalized(20, 0.05)},
    ),
}


OPTIONS: dict[str, dict[str, Any]] = {
    "softmax": {"attention_dropout": 0.1},
    "linformer": {"num_rows": 256},
    "performer": {"num_features": 256},
    "reformer": {"num_rounds": 2},
    "nystromformer": {"num_landmarks": 64},
}
"""Kind of attention -> the published settings."""


def encoder_shape(
    *,
    num_classes: int,
    max_length: int,
    attention: str,
    rank: int = 30,
    softmax: Mapping[str, Any] = OPTIONS["softmax"],
) -> EncoderShape:
    """The published network: 2 layers, width 64, 2 heads, MLP 128.

    Args:
        num_classes: of the task.
        max_length: of a sequence.
        attention: one of ``STACKS``.
        rank: of primal layers.
        softmax: what softmax attention is told.
    """
    return EncoderShape(
        num_classes=num_classes,
        max_length=max_length,
        attention=attention,
        num_layers=2,
        width=64,
        num_heads=2,
        mlp_width=128,
        options={**OPTIONS, "primal": {"rank": rank, "rank_multi": 10}, "softmax": softmax},
    )


def load_task(name: str, folder: Path) -> dict[str, Sequences]:
    """Split -> sequences.

    Args:
        name: of the task.
        folder: where the standard files are; for ListOps, where what is generated is kept.
    """
    if name == "image":
        return load_image(folder)
    if name == "text":
        return load_text(folder)
    splits = load_listops(folder)
    return {
        split: _sequences([own.expression(number) for number in range(len(own))], own.values)
        for split, own in splits.items()
    }


def _sequences(tokens: Iterable[np.ndarray], labels: np.ndarray) -> Sequences:
    return Sequences([torch.from_numpy(own) for own in tokens], torch.from_numpy(labels))


def load_image(folder: Path) -> dict[str, Sequences]:
    """CIFAR-10's training files, of which the last 5,000 pictures are for validation, and its test file.

    Raises:
        ValueError: if a file is missing or is not of that format.
    """
    training = [_pictures(folder / name) for name in TRAINING_FILES]
    pixels = np.concatenate([pixels for pixels, _ in training])
    labels = np.concatenate([labels for _, labels in training])
    first = len(labels) - min(VALIDATION_PICTURES, len(labels) // 10)  # of those for validation
    test_pixels, test_labels = _pictures(folder / "test_batch.bin")
    return {
        "train": _sequences(pixels[:first], labels[:first]),
        "validation": _sequences(pixels[first:], labels[first:]),
        "test": _sequences(test_pixels, test_labels),
    }


def _pictures(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Grey pixels (number, 1024) uint8, and classes."""
    if not path.is_file():
        raise ValueError(f"there is no {path}: CIFAR-10's binary version is wanted, with its .bin files in this folder")
    data = np.fromfile(path, np.uint8)
    if len(data) == 0 or len(data) % (1 + PICTURE_BYTES):
        raise ValueError(
            f"{path} is not one of CIFAR-10's binary files: it has {len(data):,} bytes, not a multiple of 3,073"
        )
    rows = data.reshape(-1, 1 + PICTURE_BYTES)
    labels = rows[:, 0].astype(np.int64)
    if labels.max() >= IMAGE_CLASSES:
        raise ValueError(f"{path} is not one of CIFAR-10's binary files: it has a class {labels.max()}, not 0 to 9")
    colors = rows[:, 1:].reshape(-1, 3, IMAGE_PIXELS)
    gray = np.einsum("c,ncp->np", GREY, colors)
    return np.rint(gray).astype(np.uint8), labels


def load_text(folder: Path) -> dict[str, Sequences]:
    """The IMDb reviews: 25,000 to train with, of which a tenth is for validation, and 25,000 to test with.

    Raises:
        ValueError: if the folders are not there.
    """
    (tokens, labels), test = _reviews(folder / "train"), _reviews(folder / "test")
    order = np.random.default_rng(0).permutation(len(labels))  # files come class by class
    held_back = max(1, len(order) // 10)

    def choose(rows: np.ndarray) -> Sequences:
        return _sequences([tokens[row] for row in rows], labels[rows])

    return {"train": choose(order[held_back:]), "validation": choose(order[:held_back]), "test": _sequences(*test)}


def _reviews(folder: Path) -> tuple[list[np.ndarray], np.ndarray]:
    """Bytes of the reviews of a split, and whether they are positive."""
    tokens: list[np.ndarray] = []
    labels: list[int] = []
    for number, name in enumerate(TEXT_CLASSES):
        paths = sorted((folder / name).glob("*.txt"))
        if not paths:
            raise ValueError(
                f"there are no reviews in {folder / name}: give the folder that the IMDb archive unpacks to"
            )
        for path in paths:
            text = path.read_bytes()[: TASKS["text"].max_length] or b" "
            tokens.append(np.frombuffer(text, np.uint8).copy())
            labels.append(number)
    return tokens, np.array(labels, np.int64)
