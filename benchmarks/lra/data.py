"""Three tasks of the Long-Range Arena: ListOps, Image and Text, as sequences of small integers.

Image is CIFAR-10 in its binary version (``data_batch_1.bin`` to ``data_batch_5.bin``, ``test_batch.bin``). Each picture
is 1,024 gray pixels in reading order. CIFAR-10's Python version is not used: it consists of pickles, which can run code
when they are loaded. Text is the IMDb reviews as published (``train/pos/*.txt`` and so on), one token per byte.

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
GRAY = np.array([0.299, 0.587, 0.114])
"""Weights of red, green and blue (ITU-R BT.601)."""
TEXT_CLASSES = ("neg", "pos")


@dataclass(frozen=True)
class Penalized:
    """Hyperparameters of Primal-Attention and its penalty."""

    rank: int
    eta: float


@dataclass(frozen=True)
class Task:
    """Published settings of a task."""

    max_length: int
    num_tokens: int
    """Size of the vocabulary."""
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
"""Kind of attention -> its published settings."""


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
        num_classes: the task's number of classes.
        max_length: the maximum sequence length.
        attention: the attention stack, one of ``STACKS``.
        rank: the rank of Primal-Attention.
        softmax: additional arguments of softmax attention.
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
    """Load a task: split -> sequences.

    Args:
        name: the task's name.
        folder: the folder with the standard files. For ListOps, the folder that caches the generated data.
    """
    if name == "image":
        return load_image(folder)
    if name == "text":
        return load_text(folder)
    splits = load_listops(folder)
    return {
        split: _sequences([part.expression(number) for number in range(len(part))], part.values)
        for split, part in splits.items()
    }


def _sequences(tokens: Iterable[np.ndarray], labels: np.ndarray) -> Sequences:
    return Sequences([torch.from_numpy(one) for one in tokens], torch.from_numpy(labels))


def load_image(folder: Path) -> dict[str, Sequences]:
    """Load CIFAR-10's training files, with the last 5,000 pictures as the validation split, and its test file.

    Raises:
        ValueError: if a file is missing or in another format.
    """
    training = [_pictures(folder / name) for name in TRAINING_FILES]
    pixels = np.concatenate([pixels for pixels, _ in training])
    labels = np.concatenate([labels for _, labels in training])
    first = len(labels) - min(VALIDATION_PICTURES, len(labels) // 10)  # the first validation picture
    test_pixels, test_labels = _pictures(folder / "test_batch.bin")
    return {
        "train": _sequences(pixels[:first], labels[:first]),
        "validation": _sequences(pixels[first:], labels[first:]),
        "test": _sequences(test_pixels, test_labels),
    }


def _pictures(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read gray pixels, (number, 1024) uint8, and classes."""
    if not path.is_file():
        raise ValueError(f"{path} is missing: the folder must contain the .bin files of CIFAR-10's binary version")
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
    gray = np.einsum("c,ncp->np", GRAY, colors)
    return np.rint(gray).astype(np.uint8), labels


def load_text(folder: Path) -> dict[str, Sequences]:
    """Load the IMDb reviews: 25,000 for training, a tenth of which is the validation split, and 25,000 for testing.

    Raises:
        ValueError: if a folder of reviews is missing or empty.
    """
    (tokens, labels), test = _reviews(folder / "train"), _reviews(folder / "test")
    order = np.random.default_rng(0).permutation(len(labels))  # the files are sorted by class
    held_back = max(1, len(order) // 10)

    def choose(rows: np.ndarray) -> Sequences:
        return _sequences([tokens[row] for row in rows], labels[rows])

    return {"train": choose(order[held_back:]), "validation": choose(order[:held_back]), "test": _sequences(*test)}


def _reviews(folder: Path) -> tuple[list[np.ndarray], np.ndarray]:
    """Read the bytes of the reviews of a split, and their labels: 1 for positive."""
    tokens: list[np.ndarray] = []
    labels: list[int] = []
    for number, name in enumerate(TEXT_CLASSES):
        paths = sorted((folder / name).glob("*.txt"))
        if not paths:
            raise ValueError(
                f"{folder / name} has no reviews: --folder must be the folder that the IMDb archive unpacks to"
            )
        for path in paths:
            text = path.read_bytes()[: TASKS["text"].max_length] or b" "
            tokens.append(np.frombuffer(text, np.uint8).copy())
            labels.append(number)
    return tokens, np.array(labels, np.int64)
