"""Positive random features: ``exp(<q, k>) = E[g(q) g(k)]`` with ``g(z) = exp(<w, z> - |z|^2 / 2)``, w ~ N(0, I).

Shared by Performer (FAVOR+, arXiv 2009.14794) and by the exponential map of Primal-Attention.
"""

import torch
from torch import Tensor

__all__ = ["feature_exponents", "gaussian_directions", "orthogonal_directions"]


def feature_exponents(z: Tensor, directions: Tensor, *, limit: float) -> Tensor:
    """(..., P), (F, P) -> (..., F), the exponents ``<w, z> - |z|^2 / 2`` of the features of z.

    They are held to [-limit, limit]. The usual way to stay in range subtracts a maximum over the
    sequence, which in a causal layer would look at the future; a bound per element cannot. The bound is reached where
    |z|^2 / 2 nears the limit, and there a finite number of features estimates nothing any more.
    """
    return (z @ directions.T - z.square().sum(-1, keepdim=True) / 2).clamp(-limit, limit)


def gaussian_directions(num_features: int, dim: int) -> Tensor:
    """(F, P), independent draws from N(0, I)."""
    return torch.randn(num_features, dim)


def orthogonal_directions(num_features: int, dim: int) -> Tensor:
    """(F, P), each row N(0, I) by itself, rows orthogonal within each block of P: less variance, no bias."""
    blocks = []
    for start in range(0, num_features, dim):
        rotation, triangle = torch.linalg.qr(torch.randn(dim, dim))
        rotation = rotation * triangle.diagonal().sign()  # without these signs the rotation is not uniform
        blocks.append(rotation.T[: num_features - start])
    lengths = torch.randn(num_features, dim).norm(dim=-1, keepdim=True)
    return torch.cat(blocks) * lengths
