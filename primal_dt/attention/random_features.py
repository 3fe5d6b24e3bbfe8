"""Positive random features: ``exp(<q, k>) = E[g(q) g(k)]`` with ``g(z) = exp(<w, z> - |z|^2 / 2)``, w ~ N(0, I).

Shared by Performer (FAVOR+, arXiv 2009.14794) and by the exponential map of Primal-Attention.

Axes: F features, P the width that they are features of.
"""

import torch
from torch import Tensor

__all__ = ["feature_exponents", "orthogonal_directions_"]


def feature_exponents(z: Tensor, directions: Tensor) -> Tensor:
    """(..., P), (F, P) -> (..., F), the logarithms ``<w, z> - |z|^2 / 2`` of the features of z."""
    return z @ directions.T - z.square().sum(-1, keepdim=True) / 2


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
