"""Canonical attention, and Attention-BN, which is canonical attention with normalized queries and keys.

Axes: B batch, L tokens, M chosen tokens, H heads, D width, P = D / H, V value width.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from primal_dt.attention.dropout import Dropout
from primal_dt.attention.layer import AttentionOutput, DualAttention, Positions, select
from primal_dt.attention.padding import attention_mask

__all__ = ["BatchNormAttention", "SoftmaxAttention"]


def softmax_mix(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    valid: Tensor | None,
    positions: Positions,
    *,
    causal: bool,
    fused: bool = True,
    dropout: Dropout | None = None,
) -> Tensor:
    """``softmax(q k' / sqrt(P)) v``, by a fused kernel or with the M x L matrix in memory.

    q (B, H, M, P) at the chosen positions, k (B, H, L, P), v (B, H, L, V) -> (B, H, M, V).
    """
    dropped = dropout.p if dropout is not None and dropout.training else 0.0
    # On a CPU torch has no fused kernel with dropout, and its masks would not come from the generator of this thread.
    fused = fused and not (dropped and q.device.type == "cpu")
    if fused and causal and valid is None and positions is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropped)
    mask = attention_mask(k[:, 0], valid, positions, causal=causal)
    if fused:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropped)
    scores = (q * q.shape[-1] ** -0.5) @ k.mT  # (B, H, M, L)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    weights = scores.softmax(-1)
    return (weights if dropout is None else dropout(weights)) @ v


class SoftmaxAttention(DualAttention):
    """``K_ij = softmax_j(<q_i, k_j> / sqrt(P))``: canonical attention.

    Args:
        fused: use ``scaled_dot_product_attention``; otherwise compute the attention matrix in memory.
        attention_dropout: dropout probability of the attention weights; ``dropout`` is after the output projection.
            On a CPU, training with it computes the attention matrix in memory.
        right_padded: for causal layers, a promise that padding comes after all real tokens and holds finite numbers.
            Real tokens then never see padding, and the layer omits the mask. This is faster, and on a GPU it allows the
            fused kernel that takes no mask. Outputs at padding are not set to zero.
    """

    shown_options: ClassVar[tuple[str, ...]] = ("fused", "attention_dropout", "right_padded")
    mixes_in_half_precision = True

    def __init__(
        self,
        *,
        width: int,
        num_heads: int,
        causal: bool = False,
        fused: bool = True,
        attention_dropout: float = 0.0,
        right_padded: bool = False,
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        super().__init__(width=width, num_heads=num_heads, causal=causal, dropout=dropout, bias=bias)
        if not 0.0 <= attention_dropout < 1.0:
            raise ValueError(f"attention_dropout ({attention_dropout}) must be at least 0 and below 1")
        if right_padded and not causal:
            raise ValueError("right_padded=True is for causal layers: in other layers every token sees the padding")
        self.fused = fused
        self.attention_dropout = attention_dropout
        self.weight_dropout = Dropout(attention_dropout)
        self.right_padded = right_padded

    def forward(
        self,
        x: Tensor,
        valid: Tensor | None = None,
        *,
        positions: Positions = None,
        with_objective: bool = False,
    ) -> AttentionOutput:
        """Compute attention, as in the base class, but ignore ``valid`` if ``right_padded`` is set."""
        mask = None if self.right_padded else valid
        return super().forward(x, mask, positions=positions, with_objective=with_objective)

    def _attend(
        self, x: Tensor, valid: Tensor | None, positions: Positions, with_objective: bool
    ) -> tuple[Tensor, Tensor | None]:
        q = self._split(self.query(select(x, positions)))  # (B, H, M, P), at the chosen positions only
        k, v = self._split(self.key(x)), self._split(self.value(x))  # (B, H, L, P)
        mixed = softmax_mix(
            q, k, v, valid, positions, causal=self.causal, fused=self.fused, dropout=self.weight_dropout
        )
        return mixed.transpose(1, 2), None

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, L, D) -> queries, keys and values, (B, H, L, P) each, which can be cached for past tokens."""
        return self._split(self.query(x)), self._split(self.key(x)), self._split(self.value(x))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, seen: Tensor | None) -> Tensor:
        """Compute the output (B, M, D) from queries, keys and values of any tokens.

        Args:
            q: (B, H, M, P), queries of the tokens to compute outputs for.
            k: (B, H, L, P), keys of the tokens that they may attend to.
            v: (B, H, L, P), values of the same tokens.
            seen: (M, L) bool, True where a query attends to a key; None for causal attention within one sequence. With
                a mask, the M x L matrix is in memory: M should be small, where torch's fused kernel is slower.
        """
        if seen is None:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = ((q * q.shape[-1] ** -0.5) @ k.mT).masked_fill_(~seen, float("-inf"))  # (B, H, M, L)
            mixed = scores.softmax(-1) @ v
        return self._emit(mixed.transpose(1, 2), None)

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None) -> Tensor:
        return softmax_mix(q, k, v, valid, None, causal=self.causal)


class BatchNormAttention(DualAttention):
    """``K_ij = softmax_j(<(q_i - beta mu) / sd, (k_j - beta mu) / sd> / sqrt(P))``: Attention-BN (ICLR 2023).

    mu and sd are the mean and standard deviation of the keys over the valid tokens; in the causal layer,
    for query i, over the keys up to i. beta, one per head, is learned.

    Adding one vector to all keys of row i adds a constant to its scores, to which the softmax is invariant. So mu need
    not be subtracted from the keys, and the result is canonical attention with the query ``(q_i - beta mu) / sd^2``.
    """

    variance_floor = 1e-5  # added to the variance, which is zero for the first token of a causal prefix

    def __init__(
        self, *, width: int, num_heads: int, causal: bool = False, dropout: float = 0.0, bias: bool = True
    ) -> None:
        super().__init__(width=width, num_heads=num_heads, causal=causal, dropout=dropout, bias=bias)
        self.beta = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.ones_(self.beta)

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None) -> Tensor:
        real = k.new_ones(1, 1, k.shape[2], 1) if valid is None else valid[:, None, :, None].to(k.dtype)
        # Small variances magnify the rounding errors of large keys. So move the origin to the keys: to their mean or,
        # in a causal layer, to the first key, which every prefix contains.
        origin = self._first(k, valid) if self.causal else _mean(k, real, causal=False)
        origin = origin.detach()  # the result does not depend on it
        k = (k - origin) * real
        mean, square = _mean(k, real, causal=self.causal), _mean(k.square(), real, causal=self.causal)
        variance = (square - mean.square()).clamp(min=0)  # (B, H, L or 1, P)
        query = (q - self.beta[:, None, None].to(q.dtype) * (origin + mean)) / (variance + self.variance_floor)
        # A single key has weight one for any query. Its variance is zero, which makes the query huge, and the query's
        # rounding errors would dominate the backward pass. So set the query to zero.
        lone = (real.cumsum(2) if self.causal else real.sum(2, keepdim=True)) <= 1
        return softmax_mix(query.masked_fill(lone, 0.0), k, v, valid, None, causal=self.causal)

    @staticmethod
    def _first(k: Tensor, valid: Tensor | None) -> Tensor:
        """(B, H, 1, P), the first valid key of each sequence."""
        if valid is None:
            return k[:, :, :1]
        first = valid.to(torch.uint8).argmax(1)[:, None, None, None]  # (B, 1, 1, 1)
        return k.gather(2, first.expand(-1, k.shape[1], 1, k.shape[3]))


def _mean(x: Tensor, real: Tensor, *, causal: bool) -> Tensor:
    """Mean over the tokens with ``real`` = 1 (B, H, 1, P), or over those of each prefix (B, H, L, P)."""
    if causal:
        return (x * real).cumsum(2) / real.cumsum(2).clamp(min=1)
    return (x * real).sum(2, keepdim=True) / real.sum(2, keepdim=True).clamp(min=1)
