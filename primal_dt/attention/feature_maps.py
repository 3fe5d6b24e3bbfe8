"""Feature maps of Primal-Attention: queries and keys -> phi_q, phi_k, and with them the kernel <phi_q, phi_k>.

Axes: B batch, L tokens, H heads, P features per head.
"""

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from primal_dt.attention.layer import at_least_float32, autocast_off
from primal_dt.attention.random_features import feature_exponents, gaussian_directions

__all__ = ["CosineMap", "ExponentialMap", "FeatureMap"]


class FeatureMap(nn.Module, ABC):
    """Queries and keys (B, L, H, P) -> features of the same shape."""

    pointwise: bool
    """Whether the features of a token depend on that token alone, so that unwanted tokens may be left out."""

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return phi_q, phi_k, each (B, L, H, P). ``valid`` is (B, L), True = real."""


class CosineMap(FeatureMap):
    """``phi(z) = z / |z|``: the kernel is the cosine similarity. The map of all experiments of the paper."""

    pointwise = True

    def forward(self, q: Tensor, k: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
        return F.normalize(q, dim=-1), F.normalize(k, dim=-1)


class ExponentialMap(FeatureMap):
    """``phi_q(x_i) = D_i^(-1/2) g(q_i)``, ``phi_k(x_j) = D_j^(-1/2) g(k_j)``, ``D_i = <g(q_i), sum_j g(k_j)>``.

    g are positive random features with ``E <g(q), g(k)> = exp(<q, k> / sqrt(P))`` up to a constant that
    D takes out. With D^(-1/2) on both sides, as in Remark 4.1 of the paper, the kernel is the
    symmetrically normalised ``D^(-1/2) exp(Q K') D^(-1/2)``, not the row-stochastic softmax.

    In a causal layer the sum in D runs over the prefix only.
    """

    pointwise = False
    # exp(2 * 20) is the largest ratio that D can reach; its square, in the objective, still fits float32.
    exponent_limit = 20.0

    def __init__(self, *, head_width: int, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.scale = head_width**-0.25
        self.directions: Tensor
        self.register_buffer("directions", gaussian_directions(head_width, head_width))

    def forward(self, q: Tensor, k: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
        g_q, g_k = self.unnormalized(q), self.unnormalized(k)  # (B, L, H, P)
        if valid is not None:
            g_k = g_k.masked_fill(~valid[:, :, None, None], 0.0)
        key_sum = g_k.cumsum(1) if self.causal else g_k.sum(1, keepdim=True)
        return self.normalize(g_q, g_k, key_sum)

    def unnormalized(self, z: Tensor) -> Tensor:
        """The features g, in float32 at least."""
        dtype = at_least_float32(z.dtype)
        with autocast_off(z.device):
            directions = self.directions.to(dtype)
            return feature_exponents(self.scale * z.to(dtype), directions, limit=self.exponent_limit).exp()

    def normalize(self, g_q: Tensor, g_k: Tensor, key_sum: Tensor) -> tuple[Tensor, Tensor]:
        """Divide by the root of D. A token that no valid key precedes has D = 0 and is padding itself."""
        total = (g_q * key_sum).sum(-1, keepdim=True)  # (B, L, H, 1), D
        root = torch.where(total > 0, total, 1.0).rsqrt()
        return g_q * root, g_k * root
