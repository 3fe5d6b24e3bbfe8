"""Nystromformer (arXiv 2102.03902): the Nystrom approximation of softmax attention with landmarks.

Axes: B batch, H heads, L tokens, P per head, V value width, G landmarks.
"""

from typing import ClassVar

import torch
from torch import Tensor

from primal_dt.attention.layer import DualAttention
from primal_dt.attention.padding import valid_counts, valid_indices

__all__ = ["NystromformerAttention"]


class NystromformerAttention(DualAttention):
    """``K ~ softmax(q k_g') pinv(softmax(q_g k_g')) softmax(q_g k')``, scaled by 1 / sqrt(P). Bidirectional only.

    The landmarks q_g, k_g are the means of G equal segments of the valid tokens. In a sequence of at most G tokens,
    each token is a landmark. The pseudo-inverse is computed by the paper's iteration.

    Departures from the published code: the iteration is initialized for each matrix separately (the published code
    scales by a maximum over the batch, which couples the sequences), and the convolution over the values is omitted,
    since it is not part of the approximation.

    Args:
        num_landmarks: G, the number of landmarks.
        pinv_iterations: number of steps of the third-order iteration for the pseudo-inverse.
    """

    shown_options: ClassVar[tuple[str, ...]] = ("num_landmarks", "pinv_iterations")

    def __init__(
        self,
        *,
        width: int,
        num_heads: int,
        num_landmarks: int = 64,
        pinv_iterations: int = 6,
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        # A bias on the keys would add a constant to each row of scores, to which the softmax is invariant.
        super().__init__(width=width, num_heads=num_heads, causal=False, dropout=dropout, bias=bias, keys="unbiased")
        if num_landmarks < 1 or pinv_iterations < 1:
            raise ValueError(
                f"num_landmarks ({num_landmarks}) and pinv_iterations ({pinv_iterations}) must be at least 1"
            )
        self.num_landmarks = num_landmarks
        self.pinv_iterations = pinv_iterations

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None) -> Tensor:
        average, used = self._segments(q, valid)  # (B, 1, G, L), (B, 1, 1, G)
        q = q * q.shape[-1] ** -0.5
        q_mark, k_mark = average @ q, average @ k  # (B, H, G, P)
        from_tokens = _masked_softmax(q @ k_mark.mT, used)  # (B, H, L, G)
        between = _masked_softmax(q_mark @ k_mark.mT, used) * used.mT  # (B, H, G, G)
        to_tokens = _masked_softmax(q_mark @ k.mT, None if valid is None else valid[:, None, None, :])
        return from_tokens @ (_pinv(between, self.pinv_iterations) @ ((to_tokens * used.mT) @ v))

    def _segments(self, q: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
        """The matrix that averages each segment (B, 1, G, L), and which segments have tokens (B, 1, 1, G)."""
        count = valid_counts(q[:, 0], valid)[:, None]  # (B, 1)
        marks = count.clamp(max=self.num_landmarks)
        segment = valid_indices(q[:, 0], valid) * marks // count.clamp(min=1)  # (B, L)
        number = torch.arange(self.num_landmarks, device=q.device)
        member = segment[:, None, :] == number[:, None]  # (B, G, L)
        if valid is not None:
            member = member & valid[:, None, :]
        size = member.sum(-1, keepdim=True)  # (B, G, 1)
        average = member.to(q.dtype) / size.clamp(min=1)
        return average[:, None], (size > 0).mT[:, None]


def _masked_softmax(scores: Tensor, allowed: Tensor | None) -> Tensor:
    """Softmax over the allowed entries of the last axis, zeros elsewhere (all zeros if none is allowed)."""
    if allowed is None:
        return scores.softmax(-1)
    least = torch.finfo(scores.dtype).min
    return scores.masked_fill(~allowed, least).softmax(-1).masked_fill(~allowed, 0.0)


def _pinv(a: Tensor, iterations: int) -> Tensor:
    """Moore-Penrose inverse of (..., G, G), by matrix products only. Zero rows and columns stay zero."""
    identity = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    row, column = a.abs().sum(-1).amax(-1), a.abs().sum(-2).amax(-1)  # norms that bound the largest singular value
    z = a.mT / (row * column).clamp(min=torch.finfo(a.dtype).tiny)[..., None, None]
    for _ in range(iterations):
        az = a @ z
        z = 0.25 * z @ (13 * identity - az @ (15 * identity - az @ (7 * identity - az)))
    return z
