"""Flow-Attention (arXiv 2202.06258): attention as a flow that is conserved at sources and sinks.

Axes: B batch, H heads, L tokens, P features per head, V value width.
"""

import torch
from torch import Tensor

from primal_dt.attention.layer import DualAttention
from primal_dt.attention.scan import causal_products

__all__ = ["FlowformerAttention"]


class FlowformerAttention(DualAttention):
    """``o_i = sigmoid(I'_i) phi(q_i)' / I_i sum_j phi(k_j) w_j v_j'`` with ``phi = sigmoid``, ``w = n softmax(O')``.

    Flows, over n valid tokens: incoming ``I_i = <phi(q_i), sum_j phi(k_j)>``, outgoing
    ``O_j = <phi(k_j), sum_i phi(q_i)>``; conserved ``I'_i = <phi(q_i), sum_j phi(k_j) / O_j>``,
    ``O'_j = <phi(k_j), sum_i phi(q_i) / I_i>``. The factor n is from the published code.

    Causal form, as published: every sum over tokens, including the one over values, is a mean over the prefix (so that
    flows stay comparable along the sequence), and the softmax is ``n_j exp(O'_j) / sum_{m <= j} exp(O'_m)``. It cannot
    subtract a maximum that includes future tokens, so O' is clamped to at most 10, as published.

    Departure from the published code: its bidirectional form clamps O' to at most 1. The softmax used here subtracts
    its maximum and does not need this.
    """

    exponent_limit = 10.0

    def __init__(
        self, *, width: int, num_heads: int, causal: bool = False, dropout: float = 0.0, bias: bool = True
    ) -> None:
        super().__init__(width=width, num_heads=num_heads, causal=causal, dropout=dropout, bias=bias)

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None) -> Tensor:
        real = q.new_ones(q.shape[0], 1, q.shape[2], 1) if valid is None else valid[:, None, :, None].to(q.dtype)
        q, k = torch.sigmoid(q) * real, torch.sigmoid(k) * real  # (B, H, L, P); padding carries no flow
        if self.causal:
            return self._mix_prefix(q, k, v, real)
        return self._mix_all(q, k, v, real)

    @staticmethod
    def _mix_all(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
        incoming = _flow(q, k.sum(2, keepdim=True))  # (B, H, L, 1)
        outgoing = _flow(k, q.sum(2, keepdim=True))
        conserved_in = _flow(q, (k / outgoing).sum(2, keepdim=True))
        conserved_out = _flow(k, (q / incoming).sum(2, keepdim=True))
        # The lowest finite number at padding, not -inf: with -inf, a sequence that is all padding would give NaN.
        competition = conserved_out.masked_fill(real == 0, torch.finfo(q.dtype).min).softmax(2) * real.sum(
            2, keepdim=True
        )
        mixed = (q / incoming) @ (k.mT @ (v * competition))
        return torch.sigmoid(conserved_in) * mixed

    def _mix_prefix(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
        count = real.cumsum(2).clamp(min=1)  # (B, 1, L, 1)
        incoming = _flow(q, k.cumsum(2) / count)  # (B, H, L, 1)
        outgoing = _flow(k, q.cumsum(2) / count)
        conserved_in = _flow(q, (k / outgoing).cumsum(2) / count)
        conserved_out = _flow(k, (q / incoming).cumsum(2) / count)
        weight = conserved_out.clamp(max=self.exponent_limit).exp() * real
        competition = weight * count / _positive(weight.cumsum(2))
        mixed = causal_products(q / (incoming * count), k, v * competition)
        return torch.sigmoid(conserved_in) * mixed


def _flow(features: Tensor, total: Tensor) -> Tensor:
    """(B, H, L, 1), the capacity between each token and all others; 1 at padding, whose capacity is zero."""
    return _positive((features * total).sum(-1, keepdim=True))


def _positive(total: Tensor) -> Tensor:
    return torch.where(total > 0, total, 1.0)
