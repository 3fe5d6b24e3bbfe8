"""What decoders of Hugging Face transformers pass to their self-attention: a causal mask and a cache.

transformers is not imported: its classes are recognized by name.

Axes: B batch, L tokens so far, M new tokens, D width.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from primal_dt.attention.causal import PrimalState

__all__ = ["DECODERS", "StateLayer", "state_layer", "valid_from_causal_mask"]

DECODERS = {
    "GPT2Block": "attn",
    "LlamaDecoderLayer": "self_attn",
    "MistralDecoderLayer": "self_attn",
    "Qwen2DecoderLayer": "self_attn",
    "Qwen3DecoderLayer": "self_attn",
}
"""Class of a decoder layer -> name of its causal self-attention."""


class StateLayer:
    """Layer of a transformers cache that holds a state of fixed size in place of keys and values.

    Its attributes and methods are those that ``DynamicCache`` and ``generate`` use.
    """

    is_compileable = is_croppable = is_sliding = supports_early_init = False

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all tokens."""
        self.state: PrimalState | None = None
        self.num_tokens = 0

    def store(self, state: PrimalState | None, num_new: int) -> None:
        """Replace the state by the one after ``num_new`` more tokens, padding included."""
        self.state = state
        self.num_tokens += num_new
        self._change(torch.clone)  # a state is a view of the sums at all new tokens, which need not stay in memory

    def get_seq_length(self) -> int:
        """The number of tokens so far: positions and masks of the whole model depend on it."""
        return self.num_tokens

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """The length of the keys that a mask would need, and the position of the first one."""
        # The first releases of transformers 5 pass the positions of the new tokens.
        new = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.num_tokens + new, 0

    def get_max_length(self) -> int:
        """-1: there is no limit."""
        return -1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Follow the beams that a beam search has chosen."""
        self._change(lambda part: part.index_select(0, beam_idx.to(part.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Select sequences."""
        self._change(lambda part: part[indices])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence."""
        self._change(lambda part: part.repeat_interleave(repeats, dim=0))

    def crop(self, tokens_to_remove: int) -> None:
        """Raise an error, unless there is nothing to remove."""
        if tokens_to_remove:
            raise ValueError(
                f"crop({tokens_to_remove}) is not supported, and neither is assisted generation: the state of a "
                "replaced layer is a sum, from which past tokens cannot be removed"
            )

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.state is not None:
            total, num_tokens, log_key_sum = self.state
            log_key_sum = None if log_key_sum is None else change(log_key_sum)
            self.state = PrimalState(change(total), change(num_tokens), log_key_sum)


def state_layer(cache: Any, index: int) -> StateLayer:
    """The layer of a cache for the replaced attention layer ``index``. The first call puts it into the cache."""
    cache = getattr(cache, "self_attention_cache", cache)  # with cross-attention there are two caches
    if "DynamicCache" not in {parent.__name__ for parent in type(cache).__mro__} or cache.offloading:
        name = ("offloaded " if getattr(cache, "offloading", False) else "") + type(cache).__name__
        raise ValueError(f"the cache ({name}) must be a DynamicCache that is not offloaded, which is the default")
    while len(cache.layers) <= index:  # a cache that was built without a configuration adds its layers when needed
        cache.layers.append(cache.layer_class_to_replicate())
    layer = cache.layers[index]
    if isinstance(layer, StateLayer):
        return layer
    if num_tokens := layer.get_seq_length():
        raise ValueError(
            f"the cache has keys and values of {num_tokens} tokens in layer {index}, whose attention has been "
            "replaced: start with an empty cache"
        )
    # Cache takes lengths only from instances of this abstract class. Registration makes ours one.
    base: Any = next(parent for parent in type(layer).__mro__ if parent.__name__ == "CacheLayerMixin")
    base.register(StateLayer)
    new = cache.layers[index] = StateLayer()
    return new


def valid_from_causal_mask(mask: Tensor | None, x: Tensor) -> Tensor | None:
    """Convert the mask of a decoder to ``valid`` (B, M), for the new tokens x (B, M, D).

    The mask is (B, L), 1 at tokens; or (B or 1, 1, M, L), True (bool) or 0 (float) where a query may look at a key. The
    last M of the L keys are the new tokens.
    """
    if mask is None:
        return None
    B, M, _ = x.shape
    if not isinstance(mask, Tensor):
        raise TypeError(
            f"attention_mask must be a tensor, as sdpa and eager attention have it, not {type(mask).__name__}"
        )
    if mask.dim() == 2 and mask.shape[1] >= M:
        return mask[:, -M:].bool().expand(B, M)
    if mask.dim() != 4 or mask.shape[1:3] != (1, M) or mask.shape[3] < M:
        raise ValueError(
            f"attention_mask must have shape (batch, tokens) or (batch, 1, {M}, tokens), not {tuple(mask.shape)}"
        )
    among_new = mask[:, 0, :, -M:]  # (B or 1, M, M)

    def looks_back(steps: int) -> Tensor:
        """(B or 1, M - |steps|), whether a token may look at the one ``steps`` before it."""
        entries = among_new.diagonal(-steps, 1, 2)
        return entries if entries.dtype == torch.bool else entries == 0

    valid = looks_back(0)  # real tokens see themselves, padding sees nothing
    if M > 1:  # single tokens of a generation need no check, so they do not wait for the device
        misses = (looks_back(1) != valid[:, :-1]) & valid[:, 1:]  # padding may look at any earlier token
        if (misses | looks_back(-1)).any():
            raise ValueError(
                "attention_mask must be a causal mask, with or without padding: the layer sees all earlier tokens of "
                "its row, so it supports neither packed sequences nor other masks over pairs of tokens"
            )
    return valid.expand(B, M)
