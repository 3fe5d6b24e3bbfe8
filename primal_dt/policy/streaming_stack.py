"""The model for streaming, with few and large products: each token is computed once, when it is new.

Exported policies and the fastest way in torch use it. It is the same function as
:class:`~primal_dt.policy.inference.StreamingInference`, with other rounding.

The tokens of the last K steps are in rings of R = TK places. Those of step t, its last action first, belong to the
places from T (t modulo K) on. During step t these places still have the tokens of step t - K, which nothing sees.

Axes: N rows, M new tokens, T tokens per step, K context steps, R = TK places, D width, H heads, P = D / H, S state,
A action.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from primal_dt.model.transformer import DecisionTransformer, ModelShape
from primal_dt.policy.folded import FoldedBlock, FoldedEmbedding, FoldedPrimal, FoldedSoftmax, fold_blocks

__all__ = ["Memory", "PrimalMemory", "Sight", "SoftmaxMemory", "StreamingStack", "Timetable"]


class Sight(NamedTuple):
    """What the tokens of a step see."""

    bias: Tensor
    """(T, R + T), 0 where a token sees a place of the ring or a token of its own step, else -inf."""
    share: Tensor
    """(1, T, 1), 1 / number of real tokens that a token sees, itself included."""
    is_real: Tensor | None
    """(1, T, 1), 0 for the action before the first step, which does not exist, else 1. None if all are real."""


class Timetable(nn.Module):
    """Timestep () -> :class:`Sight`."""

    slot: Tensor
    is_action: Tensor
    own: Tensor
    share: Tensor
    is_real: Tensor

    def __init__(self, shape: ModelShape, dtype: torch.dtype) -> None:
        super().__init__()
        T, K = shape.tokens_per_step, shape.context
        self.context = K
        places, tokens, steps = torch.arange(T * K), torch.arange(T), torch.arange(K)[:, None]
        own = torch.full((T, T), -1).masked_fill(tokens > tokens[:, None], K)  # -1: seen at all steps, K: at none
        own[1:, 0] = 0  # from step 1 on
        counts = torch.where(steps == 0, tokens.clamp(min=1), T * steps + tokens)  # (K, T), without the first action
        is_real = torch.ones(K, T, 1)
        is_real[0, 0] = 0
        self.register_buffer("slot", places // T, persistent=False)
        self.register_buffer("is_action", (places % T == 0).long(), persistent=False)
        self.register_buffer("own", own, persistent=False)
        self.register_buffer("share", (1 / counts.to(dtype))[..., None], persistent=False)
        self.register_buffer("is_real", is_real.to(dtype), persistent=False)

    def forward(self, timestep: Tensor) -> Sight:
        K, before = self.context, timestep - 1
        age = torch.remainder(before - self.slot, K)  # (R,), 0 for the step before this one, K - 1 for this one
        # The oldest step in the window is without its last action, which belongs to the step before.
        age = torch.cat(((age + self.is_action).expand(len(self.own), -1), self.own), 1)  # (T, R + T)
        bias = torch.where(age <= before.clamp(max=K - 2), 0.0, float("-inf"))
        number = timestep.clamp(max=K - 1)
        share, is_real = self.share.index_select(0, number), self.is_real.index_select(0, number)
        return Sight(bias.to(share.dtype), share, is_real)


class SoftmaxMemory:
    """Keys and values of a softmax layer: those in the rings, and those of this step's tokens so far.

    Args:
        layer: the layer.
        keys: (N H, R, P), the ring of the keys.
        values: (N H, R, P), the ring of the values.
    """

    def __init__(self, layer: FoldedSoftmax, keys: Tensor, values: Tensor) -> None:
        self.layer = layer
        self.keys, self.values = keys, values
        self._new: tuple[Tensor, Tensor] | None = None

    def after(self) -> tuple[Tensor, Tensor]:
        """The keys and values (N H, T, P) of this step's tokens."""
        assert self._new is not None
        return self._new

    def attend(self, x: Tensor, new: slice, sight: Sight, *, is_top: bool) -> Tensor:
        """New tokens (N M, D), normalized -> the layer's output at all of them or, in the top layer, the last."""
        q, k, v = self.layer.project_rows(x, new.stop - new.start)  # (N H, M, P) each
        if self._new is not None:
            k, v = (torch.cat(pair, 1) for pair in zip(self._new, (k, v), strict=True))
        self._new = k, v
        bias = sight.bias
        if is_top:
            q, bias = q[:, -1:], bias[-1:]
        scores = torch.cat((torch.bmm(q, self.keys.mT), torch.bmm(q, k.mT)), 2) + bias
        past, own = scores.softmax(2).split((self.keys.shape[1], new.stop), 2)
        return self.layer.output_rows(torch.baddbmm(torch.bmm(own, v), past, self.values))


class PrimalMemory:
    """The sum of a primal layer over the window's tokens, and the tokens of this step so far.

    Args:
        layer: the layer.
        total: (N, D), the sum over the tokens of earlier steps in the window.
    """

    def __init__(self, layer: FoldedPrimal, total: Tensor) -> None:
        self.layer = layer
        self.total = total
        self._new: list[Tensor] = []  # (N, M, D) each

    def after(self) -> tuple[Tensor, Tensor]:
        """The sum (N, D) with this step's tokens, and these tokens (N, T, D)."""
        return self.total, self._new[0] if len(self._new) == 1 else torch.cat(self._new, 1)

    def attend(self, x: Tensor, new: slice, sight: Sight, *, is_top: bool) -> Tensor:
        """New tokens (N M, D), normalized -> the layer's output at all of them or, in the top layer, the last."""
        x = x.view(-1, new.stop - new.start, x.shape[1])
        if sight.is_real is not None:
            x = x * sight.is_real
        self._new.append(x)
        if is_top:
            self.total = self.total + x.sum(1)
            return self.layer.map_rows(self.total * sight.share[:, -1])
        totals = self.total[:, None] + x.cumsum(1)  # (N, M, D)
        self.total = totals[:, -1]
        return self.layer.map_rows((totals * sight.share).flatten(0, 1))


Memory = SoftmaxMemory | PrimalMemory


class StreamingStack(nn.Module):
    """A model of softmax and primal layers, whose steps take and change what the layers remember.

    Args:
        model: the model, in evaluation mode.
    """

    back: Tensor

    def __init__(self, model: DecisionTransformer) -> None:
        super().__init__()
        self.model = model
        self.shape = model.shape
        self.blocks = [block for block in fold_blocks(model.blocks) if isinstance(block, FoldedBlock)]
        assert len(self.blocks) == model.shape.num_layers
        self.timetable = Timetable(model.shape, model.head.weight.dtype)
        kinds = ("action", *model.shape.kinds[:-1])
        parts = (kinds[:-1], kinds[-1:]) if model.shape.conditioning == "max-return" else (kinds,)
        self.embeddings = [FoldedEmbedding(model, part) for part in parts]
        self.registered = nn.ModuleList([*self.blocks, *self.embeddings])
        self.register_buffer("back", torch.tensor([kind == "action" for kind in kinds]).long(), persistent=False)
        self.to(model.head.weight.device)

    def layers(self) -> "list[FoldedSoftmax | FoldedPrimal]":
        """The attention layers, from bottom to top."""
        return [block.attention for block in self.blocks]

    def forward(
        self, values: Mapping[str, Tensor], timestep: Tensor, sight: Sight, memories: Sequence[Memory]
    ) -> tuple[Tensor, Tensor]:
        """Compute the actions of a step.

        Args:
            values: the newest ``action`` (N, A), any finite one at timestep 0, ``state`` (N, S), standardized, and
                ``return`` (N, 1), scaled; for a model that predicts returns: factors of its predictions.
            timestep: (), that of this step.
            sight: what its tokens see.
            memories: what each layer remembers. They get the new tokens.

        Returns:
            The actions (N, A), and the returns that they follow (N, 1), scaled.
        """
        times = (timestep - self.back).clamp(0, self.shape.max_timesteps - 1)  # (T,)
        time = self.model.embed_timestep(times)  # (T, D)
        first, *rest = self.embeddings
        new, returns = slice(0, len(first.kinds)), values["return"]
        x = self._newest(first(values, time[new]), new, sight, memories)
        for embedding in rest:  # the state's output predicts the return, which is the last token
            new = slice(new.stop, len(times))
            returns = torch.minimum(returns * self.model.return_head(x), self.model.return_cap[times[-1]])
            x = self._newest(embedding({"return": returns}, time[new]), new, sight, memories)
        return self.model.actions_at(x), returns

    def _newest(self, x: Tensor, new: slice, sight: Sight, memories: Sequence[Memory]) -> Tensor:
        """New tokens (N M, D), those of these numbers in the step -> the last block's output at the newest (N, D)."""
        places = self.timetable.slot.shape[0] + new.stop
        is_real = None if sight.is_real is None else sight.is_real[:, new]
        own = Sight(sight.bias[new, :places], sight.share[:, new], is_real)
        for block, memory in zip(self.blocks, memories, strict=True):
            is_top = memory is memories[-1]
            hidden = memory.attend(block.attention_norm(x), new, own, is_top=is_top)
            x = block.finish(x.view(-1, new.stop - new.start, x.shape[1])[:, -1] if is_top else x, hidden)
        return x
