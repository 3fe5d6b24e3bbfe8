"""Slow, obvious versions of the baseline attention kinds, for comparison with the fast ones.

Written from the papers' formulas, and sharing nothing with the package. Padding is handled by deletion:
each sequence is cut down to its valid tokens, and each head mixes them one token, or one n x n matrix, at a time.

Axes: B batch, L tokens, n valid tokens of one sequence, D width, P = D / H for H heads.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from primal_dt.attention.flowformer import FlowformerAttention
    from primal_dt.attention.layer import DualAttention
    from primal_dt.attention.linear import CosformerAttention, LinearAttention, PerformerAttention
    from primal_dt.attention.linformer import LinformerAttention
    from primal_dt.attention.nystromformer import NystromformerAttention
    from primal_dt.attention.pooled import ScaledHeadAttention
    from primal_dt.attention.reformer import ReformerAttention
    from primal_dt.attention.softmax import BatchNormAttention, SoftmaxAttention


def slow_attention(layer: DualAttention, x: Tensor, valid: Tensor | None = None) -> Tensor:
    """(B, L, D), what ``layer`` computes from ``x`` (B, L, D) without dropout; zero where ``valid`` (B, L) is False."""
    B, L, _ = x.shape
    if valid is None:
        valid = torch.ones(B, L, dtype=torch.bool)
    return torch.stack([_put_back(_one_sequence(layer, x[b][valid[b]]), valid[b]) for b in range(B)])


def _one_sequence(layer: DualAttention, x: Tensor) -> Tensor:
    """(n, D) -> (n, D), all tokens valid."""
    if len(x) == 0:
        return x
    q = layer.query(x)
    k = layer.key(x) if hasattr(layer, "key") else q
    v = layer.value(x)
    slow = SLOW_KINDS[type(layer).__name__]
    P = x.shape[1] // layer.num_heads
    heads = []
    for head in range(layer.num_heads):
        own = slice(head * P, (head + 1) * P)
        heads.append(slow(layer, q[:, own], k[:, own], v[:, own], head))
    hidden: Tensor = layer.output(torch.cat(heads, dim=1))
    return hidden


def _put_back(hidden: Tensor, valid: Tensor) -> Tensor:
    """(n, D) -> (L, D), token by token into the valid slots."""
    tokens = iter(hidden)
    return torch.stack([next(tokens) if real else hidden.new_zeros(hidden.shape[1]) for real in valid.tolist()])


def _seen(layer: DualAttention, i: int, n: int) -> slice:
    """The tokens that token ``i`` of ``n`` may read."""
    return slice(0, i + 1) if layer.causal else slice(0, n)


def _attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Canonical attention of one query (P,) to some keys and values."""
    return torch.softmax(keys @ query / math.sqrt(len(query)), dim=0) @ values


def _row_normalized(layer: DualAttention, kernel: Tensor, v: Tensor, least_total: float = 0.0) -> Tensor:
    """``o_i = sum_j K_ij v_j / max(sum_j K_ij, least_total)`` with all j, or with j <= i, for ``kernel`` (n, n)."""
    rows = []
    for i, row in enumerate(kernel):
        seen = _seen(layer, i, len(v))
        total = row[seen].sum()
        rows.append(row[seen] @ v[seen] / (least_total if total < least_total else total))
    return torch.stack(rows)


def slow_softmax(layer: SoftmaxAttention, q: Tensor, k: Tensor, v: Tensor, head: int) -> Tensor:
    rows = []
    for i in range(len(q)):
        seen = _seen(layer, i, len(q))
        rows.append(_attend(q[i], k[seen], v[seen]))
    return torch.stack(rows)


def slow_batch_norm(layer: BatchNormAttention, q: Tensor, k: Tensor, v: Tensor, head: int) -> Tensor:
    rows = []
    for i in range(len(q)):
        seen = _seen(layer, i, len(q))
        keys = k[seen]
        mu = keys.mean(dim=0)
        sd = (((keys - mu) ** 2).mean(dim=0) + 1e-5).sqrt()
        center = layer.beta[head] * mu
        rows.append(_attend((q[i] - center) / sd, (keys - center) / sd, v[seen]))
    return torch.stack(rows)


def slow_linear(layer: LinearAttention, q: Tensor, k: Tensor, v: Tensor, head: int) -> Tensor:
    return _row_normalized(layer, (F.elu(q) + 1) @ (F.elu(k) + 1).T, v)


def slow_performer(layer: PerformerAttention, q: Tensor, k: Tensor, v: Tensor, head: int) -> Tensor:
    def features(z: Tensor) -> Tensor:
        return torch.exp(z @ layer.directions.T - (z**2).sum(dim=1, keepdim=True) / 2)

    scale = q.shape[1] ** -0.25
    return _row_normalized(layer, features(q * scale) @ features(k * scale).T, v)


def slow_cosformer(layer: CosformerAttention, q: Tensor, k: Tensor, v: Tensor, head: int) -> Tensor:
    place = torch.arange(len(q), dtype=q.dtype)
    nearness = torch.cos(math.pi / 2 * (place[:, None] - place[None, :]) / layer.horizon)
    return _row_normalized(layer, torch.relu(q) @ torch.relu(k).T * nearness, v, layer.least_total)


def slow_flowformer(layer: FlowformerAttention, q: Tensor, k: Tensor, v: Tensor, head: int) -> Tensor:
    flow = torch.sigmoid(q) @ torch.sigmoid(k).T
    return _flow_prefix(flow, v) if layer.causal else _flow_all(flow, v)


def _flow_all(flow: Tensor, v: Tensor) -> Tensor:
    """``flow`` (n, n): to token i, the sink, from token j, the source."""
    incoming, outgoing = flow.sum(dim=1), flow.sum(dim=0)
    conserved_incoming = (flow / outgoing[None, :]).sum(dim=1)
    conserved_outgoing = (flow / incoming[:, None]).sum(dim=0)
    weights = len(v) * torch.softmax(conserved_outgoing, dim=0)
    return torch.sigmoid(conserved_incoming)[:, None] * (flow @ (weights[:, None] * v)) / incoming[:, None]


def _flow_prefix(flow: Tensor, v: Tensor) -> Tensor:
    """The same over prefixes, with means in the place of the sums over tokens, that over the values included."""
    ends = range(1, len(v) + 1)
    incoming = torch.stack([flow[t - 1, :t].mean() for t in ends])
    outgoing = torch.stack([flow[:t, t - 1].mean() for t in ends])
    conserved_incoming = torch.stack([(flow[t - 1, :t] / outgoing[:t]).mean() for t in ends])
    conserved_outgoing = torch.stack([(flow[:t, t - 1] / incoming[:t]).mean() for t in ends])
    odds = torch.exp(conserved_outgoing.clamp(max=10.0))
    weights = torch.stack([t * odds[t - 1] / odds[:t].sum() for t in ends])
    received = torch.stack([(flow[t - 1, :t, None] * weights[:t, None] * v[:t]).mean(dim=0) for t in ends])
    return torch.sigmoid(conserved_incoming)[:, None] * received / incoming[:, None]


def slow_reformer(layer: ReformerAttention, q: Tensor, k: Tensor, v: Tensor, head: int) -> Tensor:
    n, chunk = len(q), layer.chunk_size
    near: list[set[int]] = [set() for _ in range(n)]
    for rotation in layer.rotations[head]:
        buckets = torch.cat([q @ rotation, -q @ rotation], dim=1).argmax(dim=1).tolist()
        order = [token for _, token in sorted(zip(buckets, range(n), strict=True))]
        for place, token in enumerate(order):
            start = place // chunk * chunk
            near[token].update(order[max(start - chunk, 0) : start + chunk])
    keys = q / q.norm(dim=1, keepdim=True)
    rows = []
    for i in range(n):
        others = sorted(j for j in near[i] if (j < i if layer.causal else j != i))
        read = others or [i]
        rows.append(_attend(q[i], keys[read], v[read]))
    return torch.stack(rows)


def slow_linformer(layer: LinformerAttention, q: Tensor, k: Tensor, v: Tensor, head: int) -> Tensor:
    keys, values = layer.key_rows[: len(q)].T @ k, layer.value_rows[: len(q)].T @ v
    return torch.stack([_attend(query, keys, values) for query in q])


def slow_nystromformer(layer: NystromformerAttention, q: Tensor, k: Tensor, v: Tensor, head: int) -> Tensor:
    n, landmarks = len(q), min(layer.num_landmarks, len(q))
    segments = [[t for t in range(n) if t * landmarks // n == g] for g in range(landmarks)]
    q_g, k_g = (torch.stack([z[segment].mean(dim=0) for segment in segments]) for z in (q, k))
    scale = math.sqrt(q.shape[1])
    left, middle, right = (torch.softmax(a @ b.T / scale, dim=1) for a, b in ((q, k_g), (q_g, k_g), (q_g, k)))

    one = torch.eye(landmarks, dtype=q.dtype)
    inverse = middle.T / (middle.abs().sum(dim=0).max() * middle.abs().sum(dim=1).max())
    for _ in range(layer.pinv_iterations):
        product = middle @ inverse
        inverse = inverse @ (13 * one - product @ (15 * one - product @ (7 * one - product))) / 4
    return left @ inverse @ right @ v


def slow_scaled_head(layer: ScaledHeadAttention, q: Tensor, k: Tensor, v: Tensor, head: int) -> Tensor:
    n, stride = len(q), layer.strides[head]
    runs = [list(range(start, min(start + stride, n))) for start in range(0, n, stride)]
    rows = []
    for i in range(n):
        read = [run for run in runs if run[-1] < i] + [[i]] if layer.causal else runs
        keys, values = (torch.stack([z[run].mean(dim=0) for run in read]) for z in (k, v))
        rows.append(_attend(q[i], keys, values))
    return torch.stack(rows)


SLOW_KINDS: dict[str, Callable[..., Tensor]] = {
    "SoftmaxAttention": slow_softmax,
    "BatchNormAttention": slow_batch_norm,
    "LinearAttention": slow_linear,
    "PerformerAttention": slow_performer,
    "CosformerAttention": slow_cosformer,
    "FlowformerAttention": slow_flowformer,
    "ReformerAttention": slow_reformer,
    "LinformerAttention": slow_linformer,
    "NystromformerAttention": slow_nystromformer,
    "ScaledHeadAttention": slow_scaled_head,
}
