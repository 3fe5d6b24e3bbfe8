"""Folders of images, one folder for each class, and the batches that a training sees.

Axes: B batch, S side of an image in pixels.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.batches import EpochOrder, LabeledBatch
from primal_dt.training.trainer import mixed_seed

__all__ = ["ImageFolder", "load_splits", "standardized", "training_batches", "whole_batches"]

SUFFIXES = (".jpeg", ".jpg", ".png", ".bmp", ".webp")
TRAIN, TESTS = "train", ("val", "validation", "test")
"""Folder of the training split, and the names that the other may have: the first that exists is used."""
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and standard deviation of ImageNet's colors, which DeiT standardizes every data set with."""
SMALL = 32
"""Up to this side, images are shifted by up to ``SHIFT`` pixels in training; larger ones are cropped."""
SHIFT = 4
AREA, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
"""Share of the image's area, and ratio of width to height, of a random crop."""
TEST_CROP = 0.875
"""Side of the central crop of a test image, as a share of its shorter side."""
CACHE_BYTES = 2**30
"""Decoded images that are stored in memory, if they are small."""


@dataclass
class ImageFolder:
    """The images of one split."""

    paths: Sequence[Path]
    labels: Tensor
    """(number of images,) int64."""
    classes: Sequence[str]
    """Names of the classes, in the order of their numbers."""
    _small: dict[int, np.ndarray] = field(default_factory=dict, init=False, repr=False)
    """Number of an image -> the small image, decoded."""

    def image(self, row: int) -> Image.Image:
        """Decode an image.

        Raises:
            ValueError: if it cannot be decoded.
        """
        if row in self._small:
            return Image.fromarray(self._small[row])
        try:
            with Image.open(self.paths[row]) as file:
                image = file.convert("RGB")
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise ValueError(f"{self.paths[row]} is not an image that can be read: {error}") from error
        if max(image.size) <= SMALL and len(self._small) * SMALL**2 * 3 < CACHE_BYTES:
            self._small[row] = np.asarray(image)
        return image


def load_splits(folder: Path) -> tuple[ImageFolder, ImageFolder]:
    """Find the images of the training and the test split.

    Raises:
        ValueError: if the folder is not laid out as FOLDER/train/CLASS/IMAGE and FOLDER/val/CLASS/IMAGE.
    """
    layout = "images must be in FOLDER/train/CLASS/ and FOLDER/val/CLASS/ (or test/)"
    if not folder.is_dir():
        packed = " Unpack it first." if folder.is_file() else ""
        raise ValueError(f"--data {folder} is not a folder: {layout}.{packed}")
    tests = [name for name in TESTS if (folder / name).is_dir()]
    if not tests or not (folder / TRAIN).is_dir():
        raise ValueError(f"{folder} has no folder {TRAIN if tests else 'val'}: {layout}")
    training, test = (read_split(folder / name) for name in (TRAIN, tests[0]))
    if training.classes != test.classes:
        only = sorted(set(training.classes) ^ set(test.classes))
        raise ValueError(
            f"{folder / TRAIN} and {folder / tests[0]} must have the same classes: {only[0]} is in one only"
        )
    return training, test


def read_split(folder: Path) -> ImageFolder:
    """Find the images of a split.

    Raises:
        ValueError: if there are fewer than two classes, or a class has no image.
    """
    classes = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if len(classes) < 2:
        raise ValueError(f"{folder} must have a folder for each of at least 2 classes, not {len(classes)}")
    paths: list[Path] = []
    labels: list[int] = []
    for number, name in enumerate(classes):
        found = sorted(path for path in (folder / name).iterdir() if path.suffix.lower() in SUFFIXES)
        if not found:
            raise ValueError(f"{folder / name} has no image: files must end in {', '.join(SUFFIXES)}")
        paths += found
        labels += [number] * len(found)
    return ImageFolder(paths, torch.tensor(labels), classes)


def training_view(image: Image.Image, side: int, seed: int) -> np.ndarray:
    """A random crop, flipped in half of the cases: (S, S, 3) uint8. It is a function of the seed."""
    draw = random.Random(seed)
    if side <= SMALL:
        pixels = np.asarray(
            image if image.size == (side, side) else image.resize((side, side), Image.Resampling.BICUBIC)
        )
        padded = np.pad(pixels, ((SHIFT, SHIFT), (SHIFT, SHIFT), (0, 0)))
        top, left = draw.randint(0, 2 * SHIFT), draw.randint(0, 2 * SHIFT)
        view = padded[top : top + side, left : left + side]
    else:
        box = random_box(image.size, draw)
        view = np.asarray(image.resize((side, side), Image.Resampling.BICUBIC, box=box))
    return view[:, ::-1] if draw.random() < 0.5 else view


def random_box(size: tuple[int, int], draw: random.Random) -> tuple[int, int, int, int]:
    """A random part of an image: 8 to 100 % of its area, from 3:4 to 4:3. After ten misses, the largest such part."""
    width, height = size
    for _ in range(10):
        area = width * height * draw.uniform(*AREA)
        ratio = float(np.exp(draw.uniform(*np.log(RATIO))))
        w, h = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
        if 0 < w <= width and 0 < h <= height:
            left, top = draw.randint(0, width - w), draw.randint(0, height - h)
            return left, top, left + w, top + h
    w, h = min(width, round(height * RATIO[1])), min(height, round(width / RATIO[0]))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def central_view(image: Image.Image, side: int) -> np.ndarray:
    """The central crop: (S, S, 3) uint8. Small images are used whole."""
    width, height = image.size
    if side <= SMALL:
        return np.asarray(image if image.size == (side, side) else image.resize((side, side), Image.Resampling.BICUBIC))
    crop = TEST_CROP * min(width, height)
    box = ((width - crop) / 2, (height - crop) / 2, (width + crop) / 2, (height + crop) / 2)
    return np.asarray(image.resize((side, side), Image.Resampling.BICUBIC, box=box))


def stacked(views: Sequence[np.ndarray], labels: Tensor) -> LabeledBatch:
    """Views -> a batch of (B, 3, S, S) uint8."""
    return LabeledBatch(torch.from_numpy(np.stack(views)).permute(0, 3, 1, 2), None, labels)


@dataclass
class _Views(Dataset[LabeledBatch]):
    """The batches of a training, by step: for torch's DataLoader, whose processes decode images ahead."""

    folder: ImageFolder
    order: EpochOrder
    side: int
    rank: int
    count: int

    def __getitem__(self, step: int) -> LabeledBatch:
        epoch, rows = step // self.order.steps_per_epoch, self.order.rows(step)[self.rank :: self.count]
        seeds = [mixed_seed(self.order.seed, epoch, row) for row in rows]
        views = [training_view(self.folder.image(row), self.side, seed) for row, seed in zip(rows, seeds, strict=True)]
        return stacked(views, self.folder.labels[rows])


def training_batches(
    folder: ImageFolder,
    order: EpochOrder,
    *,
    side: int,
    steps: range,
    device: torch.device,
    workers: int = 0,
    rank: int = 0,
    count: int = 1,
) -> Iterator[LabeledBatch]:
    """Yield the training batches of some steps, on the device.

    Args:
        folder: the training split.
        order: its order.
        side: S.
        steps: the steps.
        device: where the batches are needed.
        workers: processes that decode images; 0: this one.
        rank: this process's number.
        count: the number of processes that share each batch.
    """
    views = _Views(folder, order, side, rank, count)
    loader: DataLoader[LabeledBatch] = DataLoader(
        views,
        batch_size=None,
        sampler=steps,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        multiprocessing_context="forkserver" if workers else None,
    )
    for x, _, labels in loader:
        yield LabeledBatch(x.to(device, non_blocking=True), None, labels.to(device, non_blocking=True))


def whole_batches(folder: ImageFolder, *, side: int, size: int, device: torch.device) -> Iterator[LabeledBatch]:
    """Yield the whole split in batches, standardized, on the device."""
    for first in range(0, len(folder.paths), size):
        rows = range(first, min(first + size, len(folder.paths)))
        batch = stacked([central_view(folder.image(row), side) for row in rows], folder.labels[first : first + size])
        yield LabeledBatch(standardized(batch.x.to(device)), None, batch.labels.to(device))


def standardized(x: Tensor) -> Tensor:
    """Pixels (B, 3, S, S) uint8, or float from 0 to 1 -> colors of mean 0 and standard deviation 1 on ImageNet."""
    colors = x if x.is_floating_point() else x.float() / 255
    mean, std = (torch.tensor(values, device=x.device).view(3, 1, 1) for values in (MEAN, STD))
    return (colors - mean) / std
