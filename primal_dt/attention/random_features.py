"""Positive random features: ``exp(<q, k>) = E[g(q) g(k)]`` with ``g(z) = exp(<w, z> - |z|^2 / 2)``, w ~ N(0, I).

Shared by Performer (FAVOR+, arXiv 2009.14794) and by the exponential map of Primal-Attention.
"""

import torch
from torch import Tensor

__all__ = ["feature_exponents", "orthogonal_directions_"]


def feature_exponents(z: Tensor, directions: Tensor, *, limit: float) -> Tensor:
    """(..., P), (F, P) -> (..., F), the exponents ``<w, z> - |z|^2 / 2`` of the features of z.

    They are held to [-limit, limit]. The usual way to stay in range subtracts a maximum over the
    sequence, which in a causal layer would look at the future; a bound per element cannot. The bound is reached where
    |z|^2 / 2 nears the limit, and there a finite number of features estimates nothing any more.
    """
    return (z @ directions.T - z.square().sum(-1, keepdim=True) / 2).clamp(-limit, limit)


@torch.no_grad()
def orthogonal_directions_(directions: Tensor) -> Tensor:
    """Fill (F, P) with rows that are N(0, I) each, and orthogonal within each block of P: less variance, no bias."""
    F, P = directions.shape
    for start in range(0, F, P):
        rotation, triangle = torch.linalg.qr(torch.randn(P, P, dtype=directions.dtype, device=directions.device))
        rotation = rotation * triangle.diagonal().sign()  # without these signs the rotation is not uniform
        directions[start : start + P] = rotation.T[: F - start]
    lengths = torch.randn_like(directions).norm(dim=-1, keepdim=True)
    return directions.mul_(lengths)
