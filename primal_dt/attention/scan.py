"""Causal linear attention in linear time: a scan over chunks, with matrix products within each chunk.

Axes: B batch, H heads, L tokens, F features, V value width, G chunks, C tokens per chunk.
"""

import torch.nn.functional as F
from torch import Tensor

__all__ = ["causal_products"]


def causal_products(q: Tensor, k: Tensor, v: Tensor, *, chunk: int = 128) -> Tensor:
    """``o_i = sum_{j <= i} <q_i, k_j> v_j``. q, k (B, H, L, F), v (B, H, L, V) -> (B, H, L, V).

    O(L (C + F) V) time, O(L (1 + F / C) V + L C) memory. Tokens after i enter o_i only as products with an exact zero,
    so they cannot change any bit of it.
    """
    L = q.shape[2]
    C = min(chunk, L)
    G = -(-L // C)

    def chunked(t: Tensor) -> Tensor:
        return F.pad(t, (0, 0, 0, G * C - L)).unflatten(2, (G, C))  # (B, H, G, C, .)

    q, k, v = chunked(q), chunked(k), chunked(v)
    within = (q @ k.mT).tril() @ v  # (B, H, G, C, V)
    if G > 1:
        finished = (k.mT @ v)[:, :, :-1].cumsum(
            2
        )  # (B, H, G - 1, F, V), sums over the chunks before each but the first
        within = within + q @ F.pad(finished, (0, 0, 0, 0, 1, 0))
    return within.flatten(2, 3)[:, :, :L]
