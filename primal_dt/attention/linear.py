"""Attention with an explicit feature map: ``o_i = phi(q_i)' sum_j phi(k_j) v_j' / phi(q_i)' sum_j phi(k_j)``.

The sum runs over the valid tokens, in a causal layer over those of the prefix: O(L F V) in both cases.

Axes: B batch, H heads, L tokens, D width, P = D / H, F features, V value width.
"""

import math
from abc import abstractmethod
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from primal_dt.attention.layer import DualAttention
from primal_dt.attention.padding import valid_indices
from primal_dt.attention.random_features import feature_exponents, orthogonal_directions_
from primal_dt.attention.scan import causal_products

__all__ = ["CosformerAttention", "FeatureAttention", "LinearAttention", "PerformerAttention"]


class FeatureAttention(DualAttention):
    """Base class of attention with nonnegative features, which a subclass computes in :meth:`_features`."""

    least_total = 1e-30
    """Lower bound of the denominator. The output fades to zero as the sum falls below it."""

    @abstractmethod
    def _features(self, q: Tensor, k: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
        """(B, H, L, P) each -> phi(q), phi(k), (B, H, L, F) each."""

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None) -> Tensor:
        phi_q, phi_k = self._features(q, k, valid)
        if valid is not None:
            phi_k = phi_k.masked_fill(~valid[:, None, :, None], 0.0)
        weighted = F.pad(v, (0, 1), value=1.0)  # (B, H, L, V + 1): the last column adds up the denominator
        sums = causal_products(phi_q, phi_k, weighted) if self.causal else phi_q @ (phi_k.mT @ weighted)
        return sums[..., :-1] / sums[..., -1:].clamp(min=self.least_total)


class LinearAttention(FeatureAttention):
    """``phi(z) = elu(z) + 1`` (arXiv 2006.16236)."""

    def __init__(
        self, *, width: int, num_heads: int, causal: bool = False, dropout: float = 0.0, bias: bool = True
    ) -> None:
        super().__init__(width=width, num_heads=num_heads, causal=causal, dropout=dropout, bias=bias)

    def _features(self, q: Tensor, k: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
        return _elu_plus_one(q), _elu_plus_one(k)


def _elu_plus_one(z: Tensor) -> Tensor:
    # Not F.elu(z) + 1, which loses all digits where z is far below zero. The scale of phi(q) cancels in the quotient;
    # the lost digits do not.
    return torch.where(z > 0, z + 1, z.clamp(max=0).exp())


class PerformerAttention(FeatureAttention):
    """FAVOR+ (arXiv 2009.14794): positive orthogonal random features whose products estimate ``exp(<q, k> / sqrt(P))``.

    The features are drawn once, when the layer is built; the paper may redraw them during training. To stay in range,
    the usual code subtracts the maximum over the keys from their exponents, which in a causal layer looks at the
    future. Here the exponents are clamped to [-40, 40]. Keys that reach the bound, with |k|^2 near 80 sqrt(P), are too
    large to estimate with a finite number of features.

    Args:
        num_features: F, the number of random features.
    """

    shown_options: ClassVar[tuple[str, ...]] = ("num_features",)
    exponent_limit = 40.0

    def __init__(
        self,
        *,
        width: int,
        num_heads: int,
        causal: bool = False,
        num_features: int = 256,
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        super().__init__(width=width, num_heads=num_heads, causal=causal, dropout=dropout, bias=bias)
        if num_features < 1:
            raise ValueError(f"num_features ({num_features}) must be at least 1")
        self.num_features = num_features
        self.directions: Tensor
        self.register_buffer("directions", torch.empty(num_features, self.head_width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        orthogonal_directions_(self.directions)

    def _features(self, q: Tensor, k: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
        scale = self.head_width**-0.25
        directions = self.directions.to(q.dtype)
        # A common factor of the features of one query cancels in its quotient. So |q|^2 is omitted, and the largest
        # feature is scaled to one.
        q_exponent = scale * q @ directions.T
        q_exponent = q_exponent - q_exponent.detach().amax(-1, keepdim=True)
        k_exponent = feature_exponents(scale * k, directions).clamp(-self.exponent_limit, self.exponent_limit)
        return q_exponent.exp(), k_exponent.exp()


class CosformerAttention(FeatureAttention):
    """``K_ij ~ <relu(q_i), relu(k_j)> cos(pi / 2 * (i - j) / horizon)`` (arXiv 2202.08791).

    With ``cos(a - b) = cos a cos b + sin a sin b``, this is a product of 2 P features. i and j count valid tokens only.

    Args:
        horizon: the maximum number of tokens in a sequence, padding included; the paper uses the sequence length.
    """

    shown_options: ClassVar[tuple[str, ...]] = ("horizon",)
    least_total = 1e-6  # a query, or all keys, may have no positive entry

    def __init__(
        self,
        *,
        width: int,
        num_heads: int,
        causal: bool = False,
        horizon: int = 1024,
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        super().__init__(width=width, num_heads=num_heads, causal=causal, dropout=dropout, bias=bias)
        if horizon < 1:
            raise ValueError(f"horizon ({horizon}) must be at least 1")
        self.horizon = horizon

    def _features(self, q: Tensor, k: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
        if q.shape[2] > self.horizon:
            raise ValueError(
                f"a sequence of {q.shape[2]} tokens is longer than the horizon ({self.horizon}): "
                "build the layer with a larger horizon"
            )
        angle = valid_indices(q[:, 0], valid).to(q.dtype) * (math.pi / 2 / self.horizon)  # (B, L)
        cos, sin = angle.cos()[:, None, :, None], angle.sin()[:, None, :, None]
        q, k = F.relu(q), F.relu(k)
        return torch.cat((q * cos, q * sin), -1), torch.cat((k * cos, k * sin), -1)  # (B, H, L, 2 P)
