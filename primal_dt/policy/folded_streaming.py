"""Streaming in torch in the fastest way, for any number of episodes at once.

Axes: N rows (one episode each), M new tokens, T tokens per step, K context steps, R = TK places, D width, S state,
A action, H heads, P = D / H.
"""

import torch
from torch import Tensor

from primal_dt.model.transformer import DecisionTransformer, ModelShape
from primal_dt.policy.folded import FoldedPrimal, FoldedSoftmax
from primal_dt.policy.inference import Inference, keep_rows
from primal_dt.policy.streaming_stack import PrimalMemory, Sight, SoftmaxMemory, StreamingStack

__all__ = ["FoldedStreaming"]


class FoldedStreaming(Inference):
    """The function of :class:`~primal_dt.policy.inference.StreamingInference`, with fewer and larger products.

    All rows are one tile, so how they round may depend on their number.

    Args:
        model: the model, in evaluation mode.
        num_rows: N, the number of episodes.
    """

    def __init__(self, model: DecisionTransformer, num_rows: int) -> None:
        super().__init__(model, num_rows)
        self._stack = StreamingStack(model)
        self._sights: dict[int, Sight] = {}
        self._rings: list[_SoftmaxRings | _PrimalRing] = [
            _SoftmaxRings(layer, model.shape, num_rows)
            if isinstance(layer, FoldedSoftmax)
            else _PrimalRing(layer, model.shape, num_rows)
            for layer in self._stack.layers()
        ]

    def keep(self, rows: Tensor, num_rows: int) -> None:
        super().keep(rows, num_rows)
        for ring in self._rings:
            ring.keep(rows, num_rows)

    def _make_room(self) -> None:
        self._memories = [ring.memory(self.timestep) for ring in self._rings]

    def _act(self, rows: slice, states: Tensor, returns: Tensor) -> tuple[Tensor, Tensor]:
        assert len(states) == self.num_rows  # one tile
        timestep = torch.tensor(self.timestep, device=states.device)
        values = {"action": self.actions, "return": returns, "state": states}
        actions, returns = self._stack(values, timestep, self._sight(timestep), self._memories)
        for ring in self._rings:
            ring.store(self.timestep)
        return actions, returns

    def _sight(self, timestep: Tensor) -> Sight:
        """What the tokens of a step see; from step K on, it repeats."""
        K = self.model.shape.context
        number = min(self.timestep, K + self.timestep % K)
        if number not in self._sights:
            sight = self._stack.timetable(timestep)
            self._sights[number] = sight._replace(is_real=None) if number else sight
        return self._sights[number]


class _SoftmaxRings:
    """The rings of a softmax layer's keys and values."""

    def __init__(self, layer: FoldedSoftmax, shape: ModelShape, num_rows: int) -> None:
        self.layer = layer
        self._per_step, self._size = shape.tokens_per_step, shape.tokens_per_step * shape.context
        size = (num_rows, layer.num_heads, self._size, layer.head_width)
        self._keys, self._values = (layer.output.weight.new_zeros(size) for _ in range(2))

    def memory(self, timestep: int) -> SoftmaxMemory:
        """What the layer remembers at a step."""
        self._memory = SoftmaxMemory(self.layer, self._keys.flatten(0, 1), self._values.flatten(0, 1))
        return self._memory

    def store(self, timestep: int) -> None:
        """Store the tokens of the step."""
        begin = self._per_step * timestep % self._size
        for ring, new in zip((self._memory.keys, self._memory.values), self._memory.after(), strict=True):
            ring[:, begin : begin + self._per_step] = new

    def keep(self, rows: Tensor, num_rows: int) -> None:
        """Continue with some of the rows."""
        self._keys, self._values = keep_rows(self._keys, rows, num_rows), keep_rows(self._values, rows, num_rows)


class _PrimalRing:
    """The ring of a primal layer's tokens, and their sum."""

    def __init__(self, layer: FoldedPrimal, shape: ModelShape, num_rows: int) -> None:
        self.layer = layer
        self._per_step, self._size = shape.tokens_per_step, shape.tokens_per_step * shape.context
        self._total = layer.into.weight.new_zeros(num_rows, shape.width)
        self._ring = self._total.new_zeros(num_rows, self._size, shape.width)
        places = torch.arange(1, self._size + 1, device=self._ring.device) % self._size
        self._leaving = places.view(shape.context, self._per_step)

    def memory(self, timestep: int) -> PrimalMemory:
        """What the layer remembers at a step."""
        slot = timestep % len(self._leaving)
        if timestep >= len(self._leaving):  # the oldest step leaves without the action before it, but with its own
            self._total = self._total - self._ring.index_select(1, self._leaving[slot]).sum(1)
        self._memory = PrimalMemory(self.layer, self._total)
        return self._memory

    def store(self, timestep: int) -> None:
        """Store the tokens of the step."""
        begin = self._per_step * timestep % self._size
        self._total, self._ring[:, begin : begin + self._per_step] = self._memory.after()

    def keep(self, rows: Tensor, num_rows: int) -> None:
        """Continue with some of the rows."""
        self._total, self._ring = keep_rows(self._total, rows, num_rows), keep_rows(self._ring, rows, num_rows)
