"""Attention-SH (ICLR 2023): each head attends to keys and values downsampled by its own stride.

Axes: B batch, H heads (here: those of one stride), L tokens, P per head, V value width, G pooling windows.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from primal_dt.attention.layer import DualAttention
from primal_dt.attention.padding import valid_counts, valid_indices, valid_order

__all__ = ["ScaledHeadAttention"]


class ScaledHeadAttention(DualAttention):
    """``K = softmax(q pool_s(k)' / sqrt(P))`` on ``pool_s(v)``, with s the stride of the head.

    ``pool_s`` averages each run of s valid tokens (the last run may be shorter). In the causal layer a token attends to
    the runs that ended before it, and to itself; with stride 1 this is canonical causal attention.

    Args:
        strides: strides of the heads, in order; repeated if there are more heads.
    """

    shown_options: ClassVar[tuple[str, ...]] = ("strides",)

    def __init__(
        self,
        *,
        width: int,
        num_heads: int,
        causal: bool = False,
        strides: Sequence[int] = (1, 2, 4, 8),
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        # A bias on the keys would add a constant to each row of scores, to which the softmax is invariant.
        super().__init__(width=width, num_heads=num_heads, causal=causal, dropout=dropout, bias=bias, keys="unbiased")
        if not strides or not all(isinstance(stride, int) and stride >= 1 for stride in strides):
            raise ValueError(f"strides ({tuple(strides)}) must be one or more integers, each at least 1")
        self.strides = tuple(strides[head % len(strides)] for head in range(num_heads))

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None) -> Tensor:
        mixed: list[Tensor] = [q] * self.num_heads
        for stride in sorted(set(self.strides)):
            heads = [head for head, s in enumerate(self.strides) if s == stride]
            # Slices, not q[:, heads], which would copy the list of indices to the device at every call.
            own_q, own_k, own_v = (torch.stack([z[:, head] for head in heads], 1) for z in (q, k, v))
            group = self._mix_pooled(own_q, own_k, own_v, valid, stride)
            for head, tensor in zip(heads, group.unbind(1), strict=True):
                mixed[head] = tensor
        return torch.stack(mixed, 1)

    def _mix_pooled(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, stride: int) -> Tensor:
        q = q * q.shape[-1] ** -0.5
        scores = q @ _pool(k, valid, stride).mT  # (B, H, L, G)
        pooled_v = _pool(v, valid, stride)  # (B, H, G, V)
        run = torch.arange(scores.shape[-1], device=q.device)  # (G,)
        least = torch.finfo(q.dtype).min
        if not self.causal:
            started = run * stride < valid_counts(q[:, 0], valid).clamp(min=1)[:, None]  # (B, G)
            return scores.masked_fill(~started[:, None, None], least).softmax(-1) @ pooled_v
        ended = (run + 1) * stride <= valid_indices(q[:, 0], valid)[..., None]  # (B, L, G)
        own = (q * k).sum(-1, keepdim=True)  # (B, H, L, 1)
        weights = torch.cat((scores.masked_fill(~ended[:, None], least), own), -1).softmax(-1)
        return weights[..., :-1] @ pooled_v + weights[..., -1:] * v


def _pool(x: Tensor, valid: Tensor | None, stride: int) -> Tensor:
    """(B, H, L, .) -> (B, H, G, .), the mean of each run of ``stride`` valid tokens."""
    L = x.shape[2]
    if valid is None:
        counts = x.new_ones(1, L)
    else:
        order = valid_order(valid)  # (B, L), valid tokens first
        counts = valid.gather(1, order).to(x.dtype)  # (B, L)
        x = x.gather(2, order[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])) * counts[:, None, :, None]
    runs = -(-L // stride)
    padding = runs * stride - L
    total = F.pad(x, (0, 0, 0, padding)).unflatten(2, (runs, stride)).sum(3)  # (B, H, G, .)
    size = F.pad(counts, (0, padding)).unflatten(1, (runs, stride)).sum(2)  # (B or 1, G)
    return total / size.clamp(min=1)[:, None, :, None]
