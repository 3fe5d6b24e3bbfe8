"""Positive random features: ``exp(<q, k>) = E[g(q) g(k)]`` with ``g(z) = exp(<w, z> - |z|^2 / 2)``, w ~ N(0, I).

Shared by Performer (FAVOR+, arXiv 2009.14794) and by the exponential map of Primal-Attention.

Axes: F features, P input width.
"""

import torch
from torch import Tensor

__all__ = ["feature_exponents", "orthogonal_directions_"]


def feature_exponents(z: Tensor, directions: Tensor) -> Tensor:
    """(..., P), (F, P) -> (..., F), the logarithms ``<w, z> - |z|^2 / 2`` of the features of z."""
    return z @ directions.T - z.square().sum(-1, keepdim=True) / 2


@torch.no_grad()
def orthogonal_directions_(directions: Tensor) -> Tensor:
    """Fill (F, P) with rows that are each N(0, I), and orthogonal within each block of P rows.

    Orthogonal rows reduce the variance of the features' products and add no bias.
    """
    F, P = directions.shape
    for start in range(0, F, P):
        rotation, triangle = torch.linalg.qr(torch.randn(P, P, dtype=directions.dtype, device=directions.device))
        rotation = rotation * triangle.diagonal().sign()  # makes the rotation uniformly distributed
        directions[start : start + P] = rotation.T[: F - start]
    lengths = torch.randn_like(directions).norm(dim=-1, keepdim=True)
    return directions.mul_(lengths)
