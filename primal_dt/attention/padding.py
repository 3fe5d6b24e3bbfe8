"""Positions of the valid tokens in a padded batch. ``valid`` is (B, L), True = real; padding may be anywhere.

Axes: B batch, L tokens, M queries, N rows.
"""

import torch
from torch import Tensor

from primal_dt.attention.layer import Positions, select

__all__ = ["attention_mask", "spread_rows", "valid_counts", "valid_indices", "valid_order"]


def valid_counts(x: Tensor, valid: Tensor | None) -> Tensor:
    """(B,), the number of valid tokens in each sequence of x (B, L, ...)."""
    if valid is None:
        return torch.full((x.shape[0],), x.shape[1], device=x.device)
    return valid.sum(1)


def valid_indices(x: Tensor, valid: Tensor | None) -> Tensor:
    """(B, L), the index of each valid token of x (B, L, ...) among the valid tokens, from 0.

    These indices do not change when a sequence is padded. Padding gets an arbitrary index in range.
    """
    if valid is None:
        return torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
    return (valid.cumsum(1) - 1).clamp(min=0)


def valid_order(valid: Tensor) -> Tensor:
    """(B, L), the permutation that puts the valid tokens first and keeps their order."""
    return (~valid).to(torch.uint8).argsort(dim=1, stable=True)


def spread_rows(x: Tensor, valid: Tensor | None, num_rows: int) -> tuple[Tensor, Tensor]:
    """Choose evenly spaced valid tokens of each sequence, from its first to its last.

    Returns:
        Positions (B, N) with ``N = min(num_rows, L)``, and a bool mask (B, N) of those that are used: a sequence with
        n < N valid tokens uses the first n.
    """
    count = valid_counts(x, valid)[:, None]  # (B, 1)
    row = torch.arange(min(num_rows, x.shape[1]), device=x.device)  # (N,)
    wanted = count.clamp(max=row.numel())  # (B, 1)
    nth = row * (count - 1) // (wanted - 1).clamp(min=1)  # (B, N), the index among the valid tokens
    used = row < wanted  # (B, N)
    if valid is None:
        return nth, used
    position = torch.searchsorted(valid.cumsum(1), nth + 1)  # where the running count first reaches nth + 1
    return position.clamp(max=x.shape[1] - 1), used


def attention_mask(x: Tensor, valid: Tensor | None, positions: Positions, *, causal: bool) -> Tensor | None:
    """(B or 1, 1, M or 1, L) bool, True where a query may attend; None if everywhere.

    Every query may attend to some token, since a softmax over nothing is NaN. In a causal layer, padding may attend to
    itself. In a bidirectional layer, a sequence that is all padding may attend everywhere. The outputs of such queries
    are cleared, since they are padding.
    """
    if not causal:
        if valid is None:
            return None
        return (valid | ~valid.any(1, keepdim=True))[:, None, None, :]
    token = torch.arange(x.shape[1], device=x.device)  # (L,)
    query = select(token[None], positions)[0][:, None]  # (M, 1)
    past = token <= query  # (M, L)
    if valid is None:
        return past[None, None]
    return ((past & valid[:, None, :]) | (token == query))[:, None]
