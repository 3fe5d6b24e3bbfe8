"""The KSVD objective J (paper, eq. 6 and 11). J = 0 is necessary for a singular value decomposition.

Axes: B batch, L tokens, H heads, R rank. An axis of size 2 holds e first, r second.
"""

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from primal_dt.attention.layer import at_least_float32

__all__ = ["PenaltyReduction", "ksvd_objective", "ksvd_penalty", "reduce_layers"]

PenaltyReduction = Literal["mean", "sum"]


def ksvd_objective(scores: Tensor, lam: Tensor, trace: Tensor, valid: Tensor | None) -> Tensor:
    """``J = 1/2 mean_i |Lambda^(1/2) e_i|^2 + 1/2 mean_j |Lambda^(1/2) r_j|^2 - Tr(W_e' W_r)``, mean over heads.

    The means run over the valid tokens; a sequence without valid tokens has J = 0. The paper writes sums over tokens,
    but its experiments use means. The two agree if Lambda is scaled by the number of tokens.

    Args:
        scores: (2, H, B, L, R), e and r.
        lam: (H, R), the diagonal of Lambda.
        trace: (H, B or 1), ``Tr(W_e' W_r)`` of the raw weights.
        valid: (B, L), True = real; None if all tokens are real.

    Returns:
        (B,), J of each sequence, in at least float32.
    """
    dtype = at_least_float32(scores.dtype)
    if valid is not None:
        scores = scores.masked_fill(~valid[:, :, None], 0.0)
    energy = sum_of_squares(scores.to(dtype))  # (H, B, R)
    count = scores.shape[3] if valid is None else valid.sum(1).clamp(min=1)[:, None]  # (B, 1)
    per_head = 0.5 * (lam.to(dtype)[:, None] * energy / count).sum(-1) - trace.to(dtype)  # (H, B)
    objective = per_head.mean(0)  # (B,)
    return objective if valid is None else objective.masked_fill(~valid.any(1), 0.0)


def ksvd_penalty(objectives: Iterable[Tensor], reduction: PenaltyReduction = "mean", *, like: Tensor) -> Tensor:
    """``mean_l mean_b(J_lb^2)``: the penalty of some layers, to be multiplied by eta.

    The mean over layers is that of the published code, and of the values of eta published for PrimalFormer. The paper's
    equation 10 has the sum. For a single layer, as in Primal.+, the two are equal.

    Args:
        objectives: J (B,) of each layer that has one.
        reduction: ``mean`` or ``sum`` over the layers.
        like: a tensor whose device and dtype the zero has that is returned if there are no objectives.
    """
    penalties = [objective.square().mean() for objective in objectives]
    if not penalties:
        return like.new_zeros(())
    return reduce_layers(torch.stack(penalties), reduction)


def reduce_layers(penalties: Tensor, reduction: PenaltyReduction) -> Tensor:
    """(number of layers,) -> the penalty of the model."""
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be 'mean' or 'sum', not {reduction!r}")
    return penalties.mean() if reduction == "mean" else penalties.sum()


def sum_of_squares(scores: Tensor) -> Tensor:
    """(2, H, B, L, R) -> (H, B, R), summed over e and r and all tokens."""
    if torch.compiler.is_compiling():
        return scores.square().sum((0, 3))  # the compiler fuses the plain formula itself
    return _SumOfSquares.apply(scores)  # type: ignore[no-untyped-call]


class _SumOfSquares(torch.autograd.Function):
    """Sum of squares whose gradient takes one pass.

    The gradient of ``square`` and ``sum`` creates three arrays of the size of the scores.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(scores: Tensor) -> Tensor:
        return scores.square().sum((0, 3))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (scores,) = ctx.saved_tensors
        return scores * (2 * gradient)[:, :, None]

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        (scores,) = ctx.saved_tensors
        return 2 * (scores * tangent).sum((0, 3))
