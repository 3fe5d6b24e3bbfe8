"""Linformer (arXiv 2006.04768): keys and values projected along the sequence to a fixed number of rows.

Axes: B batch, H heads, L tokens, P per head, V value width, E projected rows.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn

from primal_dt.attention.layer import DualAttention
from primal_dt.attention.padding import valid_indices

__all__ = ["LinformerAttention"]


class LinformerAttention(DualAttention):
    """``o = softmax(q (E k)' / sqrt(P)) (F v)``, with E, F learned, one column per position. Bidirectional only.

    The heads share the projections. Positions count valid tokens only.

    Args:
        max_length: the maximum number of tokens in a sequence, padding included.
        num_rows: the number of rows that keys and values are projected to.
    """

    shown_options: ClassVar[tuple[str, ...]] = ("max_length", "num_rows")

    def __init__(
        self,
        *,
        width: int,
        num_heads: int,
        max_length: int,
        num_rows: int = 256,
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        super().__init__(width=width, num_heads=num_heads, causal=False, dropout=dropout, bias=bias)
        if max_length < 1 or num_rows < 1:
            raise ValueError(f"max_length ({max_length}) and num_rows ({num_rows}) must be at least 1")
        self.max_length = max_length
        self.num_rows = num_rows
        self.key_rows = nn.Parameter(torch.empty(max_length, num_rows))  # E'
        self.value_rows = nn.Parameter(torch.empty(max_length, num_rows))  # F'
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        for rows in (self.key_rows, self.value_rows):
            nn.init.normal_(rows, std=self.num_rows**-0.5)

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None) -> Tensor:
        L = q.shape[2]
        if L > self.max_length:
            raise ValueError(
                f"a sequence of {L} tokens is longer than max_length ({self.max_length}): "
                "build the layer with a larger max_length"
            )
        if valid is None:
            key_rows, value_rows = self.key_rows[:L].to(q.dtype), self.value_rows[:L].to(q.dtype)  # (L, E)
        else:
            index = valid_indices(q[:, 0], valid)  # (B, L)
            key_rows = self.key_rows[index].to(q.dtype)[:, None]  # (B, 1, L, E)
            value_rows = self.value_rows[index].to(q.dtype)[:, None]
            k = k.masked_fill(~valid[:, None, :, None], 0.0)
            v = v.masked_fill(~valid[:, None, :, None], 0.0)
        scores = q @ (key_rows.mT @ k).mT * q.shape[-1] ** -0.5  # (B, H, L, E)
        return scores.softmax(-1) @ (value_rows.mT @ v)
