"""Step-by-step inference for a policy, with caches of earlier results.

At step t of an episode T tokens are new: the action a_{t-1}, and the return-to-go R_t and the state s_t in the model's
order. The model's window then holds the TK - 1 tokens from step t - K + 1 on, all of them real. A model that predicts
R_t from s_t gets the new tokens in two parts.

Axes: N rows (one environment each), n rows of a tile, M new tokens, K context steps, T tokens per step, D width,
S state, A action, H heads, P = D / H.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from primal_dt.attention import CausalPrimalAttention, PrimalState, SoftmaxAttention
from primal_dt.config import InferenceMode
from primal_dt.model.transformer import Block, DecisionTransformer, ModelShape
from primal_dt.policy.folded import FoldedBlock, FoldedSoftmax
from primal_dt.policy.tiles import Tiles

__all__ = [
    "INFERENCE_VERSION",
    "Inference",
    "InferenceMode",
    "StreamingInference",
    "WindowInference",
    "keep_rows",
    "make_inference",
    "require_mode",
]

INFERENCE_VERSION = 1
"""Version of the policy's results. Increase it with every change that alters any bit of an action: cached episodes are
then run again."""

LAST = slice(-1, None)
ALIGNED = 16
"""Number of float32 values in a cache line."""


def require_mode(mode: InferenceMode, shape: ModelShape) -> None:
    """Check that a model supports an inference mode.

    Raises:
        ValueError: if the mode is unknown or the model does not support it.
    """
    if mode not in ("window", "streaming"):
        raise ValueError(f"mode must be window or streaming, not {mode!r}")
    if mode == "streaming" and (other := sorted(set(shape.layer_kinds) - {"softmax", "primal"})):
        raise ValueError(f"mode streaming supports only softmax and primal layers, not {other[0]}: use mode window")
    if mode == "streaming" and "primal" in shape.layer_kinds and shape.feature_map != "cosine":
        raise ValueError(f"mode streaming supports only the cosine map, not {shape.feature_map}: use mode window")


def make_inference(mode: InferenceMode, model: DecisionTransformer, num_rows: int) -> "Inference":
    """Build inference in mode ``window`` (exact) or ``streaming`` (computes each token once).

    Args:
        mode: the mode.
        model: the model, in evaluation mode.
        num_rows: N, the number of episodes.
    """
    require_mode(mode, model.shape)
    if mode == "window" or model.shape.context == 1:  # a context of one step has nothing to stream
        return WindowInference(model, num_rows)
    return StreamingInference(model, num_rows)


class Inference(ABC):
    """Base class of inference for N parallel episodes, all at the same step.

    Args:
        model: the model, in evaluation mode.
        num_rows: N, the number of episodes.
    """

    def __init__(self, model: DecisionTransformer, num_rows: int) -> None:
        self.model = model
        self.num_rows = num_rows
        self.timestep = 0
        self.actions = self._zeros(model.shape.action_width)
        """(N, A), the actions of the last step. They become tokens at the next step, so they may be changed first."""
        self.returns = self._zeros(1)
        """(N, 1), the returns-to-go that the last actions follow, scaled: those given, or those predicted."""

    def step(self, states: Tensor, returns: Tensor, tiles: Tiles) -> Tensor:
        """Compute the actions of the next step.

        Args:
            states: (N, S), standardized.
            returns: (N, 1), the returns-to-go, scaled. For a model that predicts them: factors of its predictions.
            tiles: how to divide the rows.

        Returns:
            The actions (N, A).
        """

        def run(rows: slice) -> None:
            self.actions[rows], self.returns[rows] = self._act(rows, states[rows], returns[rows])

        self._make_room()
        tiles.run(run, self.num_rows)
        self.timestep += 1
        return self.actions

    def keep(self, rows: Tensor, num_rows: int) -> None:
        """Continue with the rows of these indices, moved to the front of ``num_rows`` rows."""
        self.actions = keep_rows(self.actions, rows, num_rows)
        self.returns = keep_rows(self.returns, rows, num_rows)
        self.num_rows = num_rows

    @abstractmethod
    def _make_room(self) -> None:
        """Prepare the caches for the tokens of the next step."""

    @abstractmethod
    def _act(self, rows: slice, states: Tensor, returns: Tensor) -> tuple[Tensor, Tensor]:
        """States (n, S) and returns (n, 1) -> actions (n, A) and the returns that they follow (n, 1)."""

    def _zeros(self, *entries: int) -> Tensor:
        return self.model.embed_norm.weight.new_zeros(self.num_rows, *entries)


class BlockwiseInference(Inference):
    """Base class of inference with the model's own embeddings, in tiles of any size.

    Args:
        model: the model, in evaluation mode.
        num_rows: N, the number of episodes.
        blocks: its blocks, folded or not; None for its own.
    """

    def __init__(
        self, model: DecisionTransformer, num_rows: int, blocks: Sequence[Block | FoldedBlock] | None = None
    ) -> None:
        super().__init__(model, num_rows)
        self.blocks = [block for block in model.blocks if isinstance(block, Block)] if blocks is None else blocks

    def _act(self, rows: slice, states: Tensor, returns: Tensor) -> tuple[Tensor, Tensor]:
        """States (n, S) and returns (n, 1) -> actions (n, A) and the returns that they follow (n, 1)."""
        model, last = self.model, self.model.shape.tokens_per_step
        values = {"action": self.actions[rows], "return": returns, "state": states}
        if model.shape.conditioning == "max-return":  # the state first: its output predicts the return
            at_state = self._newest(rows, self._embed(values, last - 1), last - 1)  # (n, 1, D)
            cap = model.return_cap[self._time(0)]
            returns = (returns * model.return_head(at_state[:, 0])).clamp(max=cap)
            token = model.embed_norm(model.embed_return(returns) + model.embed_timestep.weight[self._time(0)])
            x = self._newest(rows, token[:, None], last)
        else:
            x = self._newest(rows, self._embed(values, last), last)  # (n, 1, D)
        return model.actions_at(x[:, 0]), returns

    def _embed(self, values: Mapping[str, Tensor], end: int) -> Tensor:
        """The first ``end`` of the step's new tokens (n, M, D): one fewer at the first step, without a last action."""
        model = self.model
        time = model.embed_timestep.weight
        tokens = [model.embed(kind, values[kind]) + time[self._time(0)] for kind in model.shape.kinds[: end - 1]]
        if self.timestep:
            tokens.insert(0, model.embed("action", values["action"]) + time[self._time(1)])
        return model.embed_norm(torch.stack(tokens, dim=1))

    def _time(self, age: int) -> int:
        """The timestep ``age`` steps ago, at most the model's last."""
        return min(self.timestep - age, self.model.shape.max_timesteps - 1)

    @abstractmethod
    def _newest(self, rows: slice, x: Tensor, end: int) -> Tensor:
        """New tokens (n, M, D) -> the output of the last block at the newest of them (n, 1, D).

        They are those of the step's T tokens (the last action first) that come before number ``end``, counted from 0,
        and are not in the caches yet.
        """


class WindowInference(BlockwiseInference):
    """Exact inference: the model's output for the last K steps. Supports every attention stack.

    Embeddings are cached, since they do not depend on the rest of the window. In a stack of several layers whose first
    layer is softmax attention, its queries, keys and values are cached too. Everything else is computed again at each
    step, the top layer for the newest state token only.
    """

    def __init__(
        self, model: DecisionTransformer, num_rows: int, blocks: Sequence[Block | FoldedBlock] | None = None
    ) -> None:
        super().__init__(model, num_rows, blocks)
        shape = model.shape
        self._per_step = shape.tokens_per_step
        self._length = self._per_step * shape.context - 1
        capacity = 3 * self._length  # so that the window is rarely moved back to the front
        self._end = 0
        self._tokens = self._zeros(capacity, shape.width)  # (N, capacity, D)
        first, *above = (block.attention for block in self.blocks)
        self._first = first if isinstance(first, SoftmaxAttention | FoldedSoftmax) and above else None
        heads = (shape.num_heads, capacity, shape.width // shape.num_heads)
        self._projected = [] if self._first is None else [self._zeros(*heads) for _ in range(3)]  # q, k and v

    def keep(self, rows: Tensor, num_rows: int) -> None:
        super().keep(rows, num_rows)
        self._tokens = keep_rows(self._tokens, rows, num_rows)
        self._projected = [keep_rows(cache, rows, num_rows) for cache in self._projected]

    def _make_room(self) -> None:
        num_new = self._per_step - (self.timestep == 0)
        if self._end + num_new > self._tokens.shape[1]:
            last = slice(self._end - self._length, self._end)
            self._tokens[:, : self._length] = self._tokens[:, last]
            for cache in self._projected:
                cache[:, :, : self._length] = cache[:, :, last]
            self._end = self._length
        self._end += num_new

    def _newest(self, rows: slice, x: Tensor, end: int) -> Tensor:
        *below, top = self.blocks
        stop = self._end - self._per_step + end
        new, within = slice(stop - x.shape[1], stop), slice(max(0, self._end - self._length), stop)
        self._tokens[rows, new] = x
        window = self._tokens[rows, within]  # (n, L, D)
        if self._first is not None:
            block = below.pop(0)
            for cache, projected in zip(self._projected, self._first.project(block.attention_norm(x)), strict=True):
                cache[rows, :, new] = projected  # (N, H, capacity, P)
            q, k, v = (cache[rows, :, within] for cache in self._projected)  # (n, H, L, P)
            window = block.finish(window, self._first.attend(q, k, v, seen=None))
        x = window
        for block in below:
            x, _ = block(x, None)
        x, _ = top(x, None, positions=LAST)
        return x


class StreamingInference(BlockwiseInference):
    """Computes each token once, when it is new. Supports stacks of softmax and Causal Primal-Attention.

    Softmax layers cache the keys and values of the window's tokens in a ring buffer. Primal layers cache the sum over
    the window: new tokens are added and the oldest subtracted. Until the window slides, the result equals the model's
    output for the window. Afterwards it is a different function from the trained one: the model computes a window from
    that window alone, while the cached values of a token were computed when it was new, from tokens that have since
    left the window.
    """

    def __init__(self, model: DecisionTransformer, num_rows: int) -> None:
        super().__init__(model, num_rows)
        self._memories = [_memory_of(block.attention, model.shape, num_rows) for block in self.blocks]

    def keep(self, rows: Tensor, num_rows: int) -> None:
        super().keep(rows, num_rows)
        for memory in self._memories:
            memory.keep(rows, num_rows)

    def _make_room(self) -> None:
        for memory in self._memories:
            memory.make_room(self.timestep)

    def _newest(self, rows: slice, x: Tensor, end: int) -> Tensor:
        *below, top = self.blocks
        *memories, top_memory = self._memories
        for block, memory in zip(below, memories, strict=True):
            x = block.finish(x, memory.attend(rows, block.attention_norm(x), end, positions=None))
        return top.finish(x[:, LAST], top_memory.attend(rows, top.attention_norm(x), end, positions=LAST))


class _SoftmaxMemory:
    """Keys and values of the last K steps. The tokens that are new at step t are in slot t modulo K."""

    def __init__(self, layer: SoftmaxAttention, shape: ModelShape, num_rows: int) -> None:
        self.layer = layer
        self.context, self._per_step = shape.context, shape.tokens_per_step
        num_tokens = self._per_step * self.context
        # Rounded up, so that the rows of every product start at a cache line: how a product rounds can depend on the
        # alignment.
        ring = (num_rows, layer.num_heads, -(-num_tokens // ALIGNED) * ALIGNED, layer.head_width)
        self._keys, self._values = (layer.output.weight.new_zeros(ring) for _ in range(2))
        self._masks: dict[int, Tensor] = {}

    def make_room(self, timestep: int) -> None:
        self._begin = self._per_step * (timestep % self.context)
        number = min(timestep, self.context + timestep % self.context)  # from step K on, the masks repeat
        if number not in self._masks:
            self._masks[number] = self._mask(timestep).to(self._keys.device)
        self._seen = self._masks[number]  # (T, ring)

    def _mask(self, timestep: int) -> Tensor:
        """(T, ring) bool, True where a new token attends to a token in the ring."""
        slot, num_steps = timestep % self.context, min(timestep + 1, self.context)
        own = slice(self._per_step * slot, self._per_step * (slot + 1))
        # The slot of the oldest step starts with the action before that step, which is not in the window. Step 0 has no
        # action before it: the first entry of its slot is empty.
        oldest = 0 if timestep < self.context else (timestep + 1) % self.context
        seen = torch.zeros(self._per_step, self._keys.shape[2], dtype=torch.bool)
        seen[:, : self._per_step * num_steps] = True
        seen[:, self._per_step * oldest] = False
        seen[:, own] &= torch.ones(self._per_step, self._per_step, dtype=torch.bool).tril()
        return seen

    def attend(self, rows: slice, x: Tensor, end: int, *, positions: slice | None) -> Tensor:
        """New tokens (n, M, D) before token ``end`` of the slot, normalized -> the output at the chosen positions."""
        q, k, v = self.layer.project(x)
        first = end - x.shape[1]
        new = slice(self._begin + first, self._begin + end)
        self._keys[rows, :, new], self._values[rows, :, new] = k, v
        seen = self._seen[first:end]
        if positions is not None:
            q, seen = q[:, :, positions], seen[positions]
        return self.layer.attend(q, self._keys[rows], self._values[rows], seen=seen)

    def keep(self, rows: Tensor, num_rows: int) -> None:
        self._keys, self._values = keep_rows(self._keys, rows, num_rows), keep_rows(self._values, rows, num_rows)


class _PrimalMemory:
    """The running sum over the window, and the window's tokens, to subtract those that leave. Slots as above."""

    def __init__(self, layer: CausalPrimalAttention, shape: ModelShape, num_rows: int) -> None:
        self.layer = layer
        self.context, self._per_step = shape.context, shape.tokens_per_step
        self._total, self._count, _ = layer.initial_state(num_rows)
        size = self._per_step * self.context
        self._ring = self._total.new_zeros(num_rows, size, layer.width)
        places = torch.arange(1, size + 1, device=self._ring.device) % size
        self._leaving = places.view(self.context, self._per_step).unbind()

    def make_room(self, timestep: int) -> None:
        slot = timestep % self.context
        self._begin = self._per_step * slot
        if timestep >= self.context:  # the oldest step leaves: its slot without the action before it, and its action
            leaving = self._ring.index_select(1, self._leaving[slot])
            state = PrimalState(self._total, self._count, None).without(leaving)
            self._total, self._count, _ = state

    def attend(self, rows: slice, x: Tensor, end: int, *, positions: slice | None) -> Tensor:
        """New tokens (n, M, D) before token ``end`` of the slot, normalized -> the output at the chosen positions."""
        state = PrimalState(self._total[rows], self._count[rows], None)
        hidden, state = self.layer.advance(x, state, positions=positions)
        self._total[rows], self._count[rows] = state.total, state.num_tokens
        self._ring[rows, self._begin + end - x.shape[1] : self._begin + end] = x.to(self._ring.dtype)
        return hidden

    def keep(self, rows: Tensor, num_rows: int) -> None:
        self._total, self._count, self._ring = (
            keep_rows(buffer, rows, num_rows) for buffer in (self._total, self._count, self._ring)
        )


def _memory_of(layer: nn.Module, shape: ModelShape, num_rows: int) -> _SoftmaxMemory | _PrimalMemory:
    if isinstance(layer, SoftmaxAttention):
        return _SoftmaxMemory(layer, shape, num_rows)
    assert isinstance(layer, CausalPrimalAttention), type(layer)
    return _PrimalMemory(layer, shape, num_rows)


def keep_rows(buffer: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """Move the chosen rows to the front; return the first ``num_rows`` rows."""
    buffer[: len(rows)] = buffer[rows]
    return buffer[:num_rows]
