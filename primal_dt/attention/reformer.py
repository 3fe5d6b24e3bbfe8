"""Reformer (arXiv 2001.04451): attention among tokens that a locality-sensitive hash groups.

Axes: B batch, H heads, L tokens, P per head, V value width, T hash rounds, G chunks, C tokens per chunk.
"""

from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from primal_dt.attention.layer import DualAttention

__all__ = ["ReformerAttention"]


class ReformerAttention(DualAttention):
    """``K_ij = softmax_j(<q_i, k_j> / sqrt(P))`` over the j near i in some round, with ``k_j = q_j / |q_j|``.

    In each round the tokens are sorted by the bucket of their query x (``argmax [x R; -x R]``, R a random rotation),
    then by position, and cut into chunks. "Near" means in the same chunk or in the one before, regardless of the
    bucket, as in the paper's batched form. Rounds are combined exactly: a pair that is near in n rounds counts once. A
    token attends to itself only if it can attend to no other token.

    Departures from the published code:

    * The rotations are drawn once, when the layer is built.
    * The first chunk has no chunk before it. (In the published code, the last chunk comes before the first; here the
      last chunk would be padding.)
    * The number of buckets is an argument and does not depend on the sequence length, so padding cannot change it.

    In the causal layer a token attends only to its past. But which past tokens are near depends on the sorting, and so
    on all tokens: the future can leak through which tokens share a chunk. The paper's model has the same leak.

    Args:
        num_buckets: the number of hash buckets; must be even.
        num_rounds: T, the number of hash rounds.
        chunk_size: C, the number of tokens in a chunk.
    """

    shown_options: ClassVar[tuple[str, ...]] = ("num_buckets", "num_rounds", "chunk_size")
    own_penalty = 1e5
    """Negative of the score of a token with itself."""

    def __init__(
        self,
        *,
        width: int,
        num_heads: int,
        causal: bool = False,
        num_buckets: int = 32,
        num_rounds: int = 2,
        chunk_size: int = 64,
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        super().__init__(width=width, num_heads=num_heads, causal=causal, dropout=dropout, bias=bias, keys="shared")
        if num_buckets < 2 or num_buckets % 2:
            raise ValueError(f"num_buckets ({num_buckets}) must be even and at least 2")
        if num_rounds < 1 or chunk_size < 1:
            raise ValueError(f"num_rounds ({num_rounds}) and chunk_size ({chunk_size}) must be at least 1")
        self.num_buckets = num_buckets
        self.num_rounds = num_rounds
        self.chunk_size = chunk_size
        self.rotations: Tensor
        self.register_buffer("rotations", torch.empty(num_heads, num_rounds, self.head_width, num_buckets // 2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.normal_(self.rotations)

    def sort_tokens(self, q: Tensor, valid: Tensor | None) -> Tensor:
        """(B, H, T, L), the tokens sorted for each round: by bucket, then by position, padding last."""
        turned = torch.einsum("bhlp,htpn->bhtln", q.detach(), self.rotations.to(q.dtype))
        bucket = torch.cat((turned, -turned), -1).argmax(-1)  # (B, H, T, L)
        if valid is not None:
            bucket = bucket.masked_fill(~valid[:, None, None, :], self.num_buckets)
        return bucket.argsort(dim=-1, stable=True)

    def _queries_and_keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q = self._split(self.query(x))
        return q, F.normalize(q, dim=-1)

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None) -> Tensor:
        return attend_in_chunks(
            q,
            k,
            v,
            self.sort_tokens(q, valid),
            valid,
            chunk_size=self.chunk_size,
            causal=self.causal,
            own_penalty=self.own_penalty,
        )


def attend_in_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    order: Tensor,
    valid: Tensor | None,
    *,
    chunk_size: int,
    causal: bool,
    own_penalty: float,
) -> Tensor:
    """Attention within chunks, for T orders of the tokens, combined. Linear in L for a fixed chunk size.

    Args:
        q: (B, H, L, P).
        k: (B, H, L, P).
        v: (B, H, L, V).
        order: (B, H, T, L), the token at each place of each round; padding is in the last places.
        valid: (B, L), True = real; None if all tokens are real.
        chunk_size: C.
        causal: whether a token attends only to itself and earlier tokens.
        own_penalty: negative of the score of a token with itself.

    Returns:
        (B, H, L, V).
    """
    B, H, T, L = order.shape
    C = min(chunk_size, L)
    G = -(-L // C)
    place = order.argsort(-1)  # (B, H, T, L), the place of each token
    chunk_of = (place // C).to(torch.int32)  # (B, H, T, L)

    # The last chunk is filled up with copies of token 0, which are masked out.
    padded = F.pad(order, (0, G * C - L))  # (B, H, T, G C)
    real = torch.arange(G * C, device=q.device) < L  # (G C,)
    if valid is not None:
        real = real & valid[:, None, None].expand(B, H, T, L).gather(-1, padded)

    def sort(t: Tensor) -> Tensor:
        """(B, H, L, .) -> (B, H, T, G, C, .)."""
        index = padded[..., None].expand(*padded.shape, t.shape[-1])
        return t[:, :, None].expand(B, H, T, L, t.shape[-1]).gather(3, index).unflatten(3, (G, C))

    token = padded.unflatten(-1, (G, C))  # (B, H, T, G, C)
    real = real.expand(padded.shape).unflatten(-1, (G, C))
    key_token = _with_chunk_before(token[..., None])[..., 0]  # (B, H, T, G, 2 C)
    allowed = _with_chunk_before(real[..., None])[..., 0][..., None, :]  # (B, H, T, G, 1, 2 C)
    if causal:
        allowed = allowed & (key_token[..., None, :] <= token[..., None])
    own = torch.arange(2 * C, device=q.device) == torch.arange(C, device=q.device)[:, None] + C  # (C, 2 C)

    scores = sort(q) @ _with_chunk_before(sort(k)).mT * q.shape[-1] ** -0.5  # (B, H, T, G, C, 2 C)
    scores = scores - _meetings(chunk_of, sort).to(q.dtype).log()
    scores = scores.masked_fill(~allowed, torch.finfo(q.dtype).min)
    scores = scores.masked_fill(own, -own_penalty)  # the fallback if no other key is allowed, also for padding
    total = scores.logsumexp(-1, keepdim=True)  # (B, H, T, G, C, 1)
    mixed = (scores - total).exp() @ _with_chunk_before(sort(v))  # (B, H, T, G, C, V)

    def unsort(t: Tensor) -> Tensor:
        """(B, H, T, G, C, .) -> (B, H, T, L, .)."""
        return t.flatten(3, 4).gather(3, place[..., None].expand(B, H, T, L, t.shape[-1]))

    share = unsort(total).softmax(2)  # (B, H, T, L, 1), the weight of each round
    return (share * unsort(mixed)).sum(2)


def _with_chunk_before(t: Tensor) -> Tensor:
    """Prepend the previous chunk, or zeros for the first chunk: (B, H, T, G, C, .) -> (B, H, T, G, 2 C, .)."""
    before = F.pad(t[:, :, :, :-1], (0, 0, 0, 0, 1, 0))
    return torch.cat((before, t), -2)


def _meetings(chunk_of: Tensor, sort: Callable[[Tensor], Tensor]) -> Tensor:
    """(B, H, T, G, C, 2 C), the number of rounds in which a key is near the query; at least 1."""
    chunks = sort(chunk_of.mT)  # (B, H, T, G, C, T), the chunk of each sorted token in every round
    key_chunks = _with_chunk_before(chunks)  # (B, H, T, G, 2 C, T)
    meetings = torch.zeros((), dtype=torch.uint8, device=chunk_of.device)
    for query_chunk, key_chunk in zip(chunks.unbind(-1), key_chunks.unbind(-1), strict=True):
        distance = query_chunk[..., None] - key_chunk[..., None, :]  # (B, H, T, G, C, 2 C)
        meetings = meetings + ((distance == 0) | (distance == 1))
    return meetings.clamp(min=1)
