"""DeiT's random augmentations of a batch of images, with kornia.

Axes: B batch, S side of an image in pixels, C classes.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.batches import LabeledBatch
from benchmarks.images.data import standardized

__all__ = ["Augmentation", "AugmentationSettings"]

GROUP = 16
"""Images that get the same operations of RandAugment. kornia draws them once for a call, timm for each image."""
OPERATIONS = [
    ("auto_contrast", 0, 1),
    ("equalize", 0, 1),
    ("invert", 0, 1),
    ("rotate", -30.0, 30.0),
    ("posterize", 4.0, 8.0),
    ("solarize", 0.0, 1.0),
    ("solarize_add", 0.0, 0.43),
    ("color", 0.1, 1.9),
    ("contrast", 0.1, 1.9),
    ("brightness", 0.1, 1.9),
    ("sharpness", 0.1, 1.9),
    ("shear_x", -0.3, 0.3),
    ("shear_y", -0.3, 0.3),
    ("translate_x", -0.45, 0.45),
    ("translate_y", -0.45, 0.45),
]
"""Operations of RandAugment in kornia's names, with the ranges that timm gives them for DeiT."""
LARGEST_MAGNITUDE, KORNIA_MAGNITUDE = 10.0, 30.0
"""Magnitude at which an operation has the end of its range, in timm and in kornia."""


@dataclass(frozen=True)
class AugmentationSettings:
    """The settings of DeiT, by default."""

    operations: int = 2
    """Operations of RandAugment for each image. 0: none."""
    magnitude: float = 9.0
    """Their magnitude, from 0 to 10."""
    magnitude_std: float = 0.5
    """Standard deviation of the magnitude."""
    erasing: float = 0.25
    """Probability that a rectangle of an image is replaced by noise."""
    mixup: float = 0.8
    """Parameter of the beta distribution of the share of the first image, where two are averaged. 0: never."""
    cutmix: float = 1.0
    """The same, where a rectangle of the second image is put into the first. 0: never."""
    smoothing: float = 0.1
    """Share of a label that is spread over all classes."""


class Augmentation:
    """Pixels (B, 3, S, S) uint8 and classes (B,) -> standardized colors and shares of the classes (B, C).

    RandAugment, random erasing with noise, then for each batch either Mixup or CutMix with the batch in reverse order,
    and label smoothing. Differences from DeiT's training: :data:`GROUP` images get the same operations, which are drawn
    without replacement; posterize, solarize and solarize_add have their usual ranges; all interpolation is bilinear.

    Args:
        settings: what is drawn.
        num_classes: C.

    Raises:
        ValueError: if kornia is needed and not installed.
    """

    def __init__(self, settings: AugmentationSettings, num_classes: int) -> None:
        self.settings = settings
        self.num_classes = num_classes
        self._policy, self._erase = _kornia(settings)

    def __call__(self, batch: LabeledBatch) -> LabeledBatch:
        colors = batch.x.float() / 255
        if self._policy is not None:
            groups = [self._randomly_changed(group) for group in colors.split(GROUP)]
            colors = torch.cat(groups).clamp(0, 1)
        x = standardized(colors)
        if self._erase is not None:
            kept = self._erase(torch.ones_like(x[:, :1]))  # (B, 1, S, S)
            x = torch.where(kept > 0, x, torch.randn_like(x))
        return LabeledBatch(*self._mixed(x, batch.labels))

    def _randomly_changed(self, colors: Tensor) -> Tensor:
        drawn = self.settings.magnitude + self.settings.magnitude_std * float(torch.randn(()))  # on the CPU
        level = min(max(drawn, 0.0), LARGEST_MAGNITUDE) / LARGEST_MAGNITUDE
        self._policy.m = min(max(level * KORNIA_MAGNITUDE, 1e-3), KORNIA_MAGNITUDE - 1e-3)
        changed: Tensor = self._policy(colors)
        return changed

    def _mixed(self, x: Tensor, labels: Tensor) -> tuple[Tensor, None, Tensor]:
        settings, off = self.settings, self.settings.smoothing / self.num_classes
        shares = F.one_hot(labels, self.num_classes) * (1 - settings.smoothing) + off  # (B, C)
        kinds = [(mix, alpha) for mix, alpha in ((_average, settings.mixup), (_cut, settings.cutmix)) if alpha]
        if not kinds:
            return x, None, shares
        mix, alpha = kinds[int(torch.randint(len(kinds), ()))]
        drawn = float(torch.distributions.Beta(alpha, alpha).sample())
        x, own = mix(x, x.flip(0), drawn)
        return x, None, own * shares + (1 - own) * shares.flip(0)


def _average(x: Tensor, other: Tensor, own: float) -> tuple[Tensor, float]:
    """Mixup: the average of two batches, and the share of the first."""
    return own * x + (1 - own) * other, own


def _cut(x: Tensor, other: Tensor, own: float) -> tuple[Tensor, float]:
    """CutMix: a rectangle of the second batch in the first, and the share of the first that is left."""
    side = x.shape[-1]
    size = round(side * (1 - own) ** 0.5)
    center = torch.randint(side, (2,)).tolist()
    (top, bottom), (left, right) = ((max(at - size // 2, 0), min(at + size // 2, side)) for at in center)
    mixed = x.clone()
    mixed[:, :, top:bottom, left:right] = other[:, :, top:bottom, left:right]
    return mixed, 1 - (bottom - top) * (right - left) / side**2


def _kornia(settings: AugmentationSettings) -> tuple[Any, Any]:
    """RandAugment and random erasing, or None for what the settings leave out."""
    if not settings.operations and not settings.erasing:
        return None, None
    try:
        from kornia.augmentation import RandomErasing
        from kornia.augmentation.auto import RandAugment
    except ImportError as error:
        raise ValueError("augmentations need kornia: pip install -c constraints.txt -e '.[images]'") from error
    policy: Any = [[operation] for operation in OPERATIONS]
    return (
        RandAugment(settings.operations, 9, policy=policy) if settings.operations else None,
        RandomErasing(p=settings.erasing) if settings.erasing else None,
    )
