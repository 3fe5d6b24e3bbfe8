"""Slow, simple versions of the attention kinds, to compare the fast ones with.

They are written from the papers' formulas and share no code with the package. Padding is removed first: each sequence
is cut down to its valid tokens, and each head mixes them one token, or one n x n matrix, at a time.

Axes: B batch, L tokens, n valid tokens of one sequence, D width, P = D / H for H heads, R rank.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from primal_dt import attention


def slow_attention(layer: attention.DualAttention, x: Tensor, valid: Tensor | None = None) -> Tensor:
    """(B, L, D), the output of ``layer`` for ``x`` (B, L, D) without dropout; zero where ``valid`` (B, L) is False."""
    if valid is None:
        valid = torch.ones(x.shape[:2], dtype=torch.bool)
    return torch.stack([_put_back(_one_sequence(layer, row[real]), real) for row, real in zip(x, valid, strict=True)])


def _one_sequence(layer: attention.DualAttention, x: Tensor) -> Tensor:
    """(n, D) -> (n, D), all tokens valid."""
    if len(x) == 0:
        return x
    q = layer.query(x)
    k = layer.key(x) if hasattr(layer, "key") else q
    v = layer.value(x)
    slow = SLOW_KINDS[type(layer).__name__]
    heads = [slow(layer, q[:, part], k[:, part], v[:, part], head) for head, part in enumerate(_parts(layer, x))]
    hidden: Tensor = layer.output(torch.cat(heads, dim=1))
    return hidden


def _parts(layer: attention.AttentionLayer, x: Tensor) -> Iterator[slice]:
    """The features of each head."""
    P = x.shape[-1] // layer.num_heads
    return (slice(head * P, (head + 1) * P) for head in range(layer.num_heads))


def _put_back(hidden: Tensor, valid: Tensor) -> Tensor:
    """(n, D) -> (L, D), token by token into the valid slots."""
    tokens = iter(hidden)
    return torch.stack([next(tokens) if real else hidden.new_zeros(hidden.shape[1]) for real in valid.tolist()])


def _seen(layer: attention.DualAttention, n: int) -> list[slice]:
    """The tokens that each of n tokens may read."""
    return [slice(0, i + 1 if layer.causal else n) for i in range(n)]


def _attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Canonical attention of one query (P,) to some keys and values."""
    return torch.softmax(keys @ query / math.sqrt(len(query)), dim=0) @ values


def _row_normalized(layer: attention.DualAttention, kernel: Tensor, v: Tensor, least_total: float = 0.0) -> Tensor:
    """``o_i = sum_j K_ij v_j / max(sum_j K_ij, least_total)`` with all j, or with j <= i, for ``kernel`` (n, n)."""
    rows = []
    for row, seen in zip(kernel, _seen(layer, len(v)), strict=True):
        total = row[seen].sum()
        rows.append(row[seen] @ v[seen] / (least_total if total < least_total else total))
    return torch.stack(rows)


def slow_softmax(layer: attention.SoftmaxAttention, q: Tensor, k: Tensor, v: Tensor, head: int) -> Tensor:
    return torch.stack([_attend(q[i], k[seen], v[seen]) for i, seen in enumerate(_seen(layer, len(q)))])


def slow_batch_norm(layer: attention.BatchNormAttention, q: Tensor, k: Tensor, v: Tensor, head: int) -> Tensor:
    rows = []
    for i, seen in enumerate(_seen(layer, len(q))):
        mean = k[seen].mean(dim=0)
        deviation = (((k[seen] - mean) ** 2).mean(dim=0) + 1e-5).sqrt()
        center = layer.beta[head] * mean
        rows.append(_attend((q[i] - center) / deviation, (k[seen] - center) / deviation, v[seen]))
    return torch.stack(rows)


def slow_linear(layer: attention.LinearAttention, q: Tensor, k: Tensor, v: Tensor, head: int) -> Tensor:
    return _row_normalized(layer, (F.elu(q) + 1) @ (F.elu(k) + 1).T, v)


def slow_performer(layer: attention.PerformerAttention, q: Tensor, k: Tensor, v: Tensor, head: int) -> Tensor:
    return _row_normalized(layer, _exponential(q, layer.directions) @ _exponential(k, layer.directions).T, v)


def _exponential(z: Tensor, directions: Tensor) -> Tensor:
    """(n, P) -> (n, F), positive random features: the mean of their products is ``exp(<q, k> / sqrt(P))``."""
    z = z / z.shape[1] ** 0.25
    return torch.exp(z @ directions.T - (z**2).sum(dim=1, keepdim=True) / 2)


def slow_cosformer(layer: attention.CosformerAttention, q: Tensor, k: Tensor, v: Tensor, head: int) -> Tensor:
    place = torch.arange(len(q), dtype=q.dtype)
    nearness = torch.cos(math.pi / 2 * (place[:, None] - place[None, :]) / layer.horizon)
    return _row_normalized(layer, torch.relu(q) @ torch.relu(k).T * nearness, v, layer.least_total)


def slow_flowformer(layer: attention.FlowformerAttention, q: Tensor, k: Tensor, v: Tensor, head: int) -> Tensor:
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
    """The same over prefixes. All sums over tokens are means, including the sum over the values."""
    ends = range(1, len(v) + 1)
    incoming = torch.stack([flow[t - 1, :t].mean() for t in ends])
    outgoing = torch.stack([flow[:t, t - 1].mean() for t in ends])
    conserved_incoming = torch.stack([(flow[t - 1, :t] / outgoing[:t]).mean() for t in ends])
    conserved_outgoing = torch.stack([(flow[:t, t - 1] / incoming[:t]).mean() for t in ends])
    odds = torch.exp(conserved_outgoing.clamp(max=10.0))
    weights = torch.stack([t * odds[t - 1] / odds[:t].sum() for t in ends])
    received = torch.stack([(flow[t - 1, :t, None] * weights[:t, None] * v[:t]).mean(dim=0) for t in ends])
    return torch.sigmoid(conserved_incoming)[:, None] * received / incoming[:, None]


def slow_reformer(layer: attention.ReformerAttention, q: Tensor, k: Tensor, v: Tensor, head: int) -> Tensor:
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
        read = sorted(j for j in near[i] if (j < i if layer.causal else j != i)) or [i]
        rows.append(_attend(q[i], keys[read], v[read]))
    return torch.stack(rows)


def slow_linformer(layer: attention.LinformerAttention, q: Tensor, k: Tensor, v: Tensor, head: int) -> Tensor:
    keys, values = layer.key_rows[: len(q)].T @ k, layer.value_rows[: len(q)].T @ v
    return torch.stack([_attend(query, keys, values) for query in q])


def slow_nystromformer(layer: attention.NystromformerAttention, q: Tensor, k: Tensor, v: Tensor, head: int) -> Tensor:
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


def slow_scaled_head(layer: attention.ScaledHeadAttention, q: Tensor, k: Tensor, v: Tensor, head: int) -> Tensor:
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


def slow_primal(layer: attention.PrimalAttention, x: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """The output (B, L, D) and J (B,) of Primal-Attention: one sequence, one head and one token at a time."""
    outputs, objectives = [], []
    for row, real in zip(x, valid, strict=True):
        sequence = row[real]
        phi_q, phi_k = slow_primal_features(layer, sequence)
        rows = slow_primal_rows(layer, sequence)
        heads, terms = [], []
        for h, lam in enumerate(layer.lam.abs()):
            w_e, w_r = layer.e_weight[h], layer.r_weight[h]
            if rows is not None:
                w_e, w_r = w_e[: len(rows[h])], w_r[: len(rows[h])]
            trace = torch.trace(w_e.T @ w_r)
            if rows is not None:
                w_e, w_r = rows[h].T @ w_e, rows[h].T @ w_r
            scores = [(w_e.T @ a, w_r.T @ b) for a, b in zip(phi_q[h], phi_k[h], strict=True)]
            shown = {"both": slice(None), "e": slice(0, 1), "r": slice(1, 2)}[layer.scores]
            heads.append(torch.stack([layer.merge(torch.cat(pair[shown])) for pair in scores]))
            energies = torch.stack([(lam * (e * e + r * r)).sum() for e, r in scores])
            terms.append(energies.mean() / 2 - trace)
        outputs.append(_put_back(layer.output(torch.cat(heads, dim=1)), real))
        objectives.append(torch.stack(terms).mean())
    return torch.stack(outputs), torch.stack(objectives)


def slow_primal_features(layer: attention.PrimalAttention, x: Tensor) -> tuple[Tensor, Tensor]:
    """phi_q and phi_k (H, n, P or F) of one sequence (n, D). If causal, of the means of queries and keys so far."""
    features, directions = [], getattr(layer.feature_map, "directions", None)
    for part in _parts(layer, x):
        q, k = (z[:, part] for z in layer.query_key(x).chunk(2, dim=-1))
        if layer.causal:
            q, k = (torch.stack([z[: i + 1].mean(dim=0) for i in range(len(z))]) for z in (q, k))
        if directions is None:
            features.append([z / z.norm(dim=1, keepdim=True) for z in (q, k)])
            continue
        g_q, g_k = (_exponential(z, directions) for z in (q, k))
        totals = [sum(g @ other for other in g_k[: i + 1 if layer.causal else None]) for i, g in enumerate(g_q)]
        features.append([g / torch.stack(totals).sqrt()[:, None] for g in (g_q, g_k)])
    phi_q, phi_k = (torch.stack(z) for z in zip(*features, strict=True))
    return phi_q, phi_k


def slow_primal_rows(layer: attention.PrimalAttention, x: Tensor) -> Tensor | None:
    """X' (H, N, P), evenly spaced rows of one sequence (n, D). None if the weights do not depend on the data."""
    if not layer.data_dependent:
        return None
    n = min(layer.e_weight.shape[1], len(x))
    index = [i * (len(x) - 1) // max(n - 1, 1) for i in range(n)]
    return torch.stack([x[index, part] for part in _parts(layer, x)])
