"""How a model sees and predicts actions: entries within bounds, entries without, or choices among finitely many.

Axes: ... any leading axes, A action entries, F encoded features, O outputs of the head.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["ActionSpace", "BoxActions", "CategoricalActions"]


class ActionSpace(nn.Module, ABC):
    """Base class of action spaces."""

    num_features: int
    """F, the width of encoded actions."""
    num_outputs: int
    """O, the width of the head's output."""

    @abstractmethod
    def encode(self, actions: Tensor) -> Tensor:
        """Actions (..., A) -> what the model embeds and critics see, (..., F)."""

    @abstractmethod
    def predict(self, outputs: Tensor) -> Tensor:
        """Outputs of the head (..., O) -> the prediction in encoded form, (..., F), differentiable."""

    @abstractmethod
    def decode(self, outputs: Tensor) -> Tensor:
        """Outputs of the head (..., O) -> the actions that a policy takes, (..., A)."""


class BoxActions(ActionSpace):
    """``center + radius * tanh(output)``, which is within the bounds; without tanh for entries without bounds.

    Args:
        low: (A,), the lower bounds; for an entry without bounds, the data's mean minus its standard deviation.
        high: (A,), the upper bounds; for an entry without bounds, the mean plus the standard deviation.
        unbounded: (A,), True for entries without bounds. If empty: all have bounds.
    """

    center: Tensor
    radius: Tensor
    unbounded: Tensor

    def __init__(self, low: Sequence[float], high: Sequence[float], unbounded: Sequence[bool] = ()) -> None:
        super().__init__()
        lows, highs = torch.tensor(low), torch.tensor(high)
        self.num_features = self.num_outputs = len(lows)
        self.has_unbounded = any(unbounded)
        center, radius = (lows + highs) / 2, (highs - lows) / 2
        while (is_beyond := (center + radius > highs) | (center - radius < lows)).any():  # by rounding
            radius = torch.where(is_beyond, radius.nextafter(torch.zeros_like(radius)), radius)
        self.register_buffer("center", center, persistent=False)
        self.register_buffer("radius", radius, persistent=False)
        self.register_buffer("unbounded", torch.tensor(tuple(unbounded), dtype=torch.bool), persistent=False)

    def encode(self, actions: Tensor) -> Tensor:
        return actions

    def predict(self, outputs: Tensor) -> Tensor:
        bounded = torch.tanh(outputs)
        scaled = torch.where(self.unbounded, outputs, bounded) if self.has_unbounded else bounded
        return self.center + self.radius * scaled

    def decode(self, outputs: Tensor) -> Tensor:
        return self.predict(outputs)


class CategoricalActions(ActionSpace):
    """Choices: entry i is one of 0, ..., ``categories[i] - 1``. They are encoded as one-hot vectors, back to back.

    The prediction is the probability of each choice. A policy takes the likeliest.

    Args:
        categories: (A,), the number of choices of each entry.
    """

    def __init__(self, categories: Sequence[int]) -> None:
        super().__init__()
        self.categories = tuple(categories)
        self.num_features = self.num_outputs = sum(self.categories)

    def encode(self, actions: Tensor) -> Tensor:
        entries = zip(actions.long().unbind(-1), self.categories, strict=True)
        return torch.cat([F.one_hot(entry, number) for entry, number in entries], dim=-1).to(actions.dtype)

    def predict(self, outputs: Tensor) -> Tensor:
        return torch.cat([part.softmax(-1) for part in self.split(outputs)], dim=-1)

    def decode(self, outputs: Tensor) -> Tensor:
        return torch.stack([part.argmax(-1) for part in self.split(outputs)], dim=-1).to(outputs.dtype)

    def split(self, outputs: Tensor) -> tuple[Tensor, ...]:
        """The outputs (..., O) by entry."""
        return outputs.split(self.categories, dim=-1)
