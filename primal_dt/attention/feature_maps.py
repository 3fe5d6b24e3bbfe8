"""Feature maps of Primal-Attention: queries and keys -> phi_q, phi_k, and with them the kernel <phi_q, phi_k>.

Axes: B batch, L tokens, H heads, P features per head; and an axis of 2, queries first, keys second.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from primal_dt.attention.layer import at_least_float32, autocast_off
from primal_dt.attention.random_features import feature_exponents

__all__ = ["CosineMap", "ExponentialMap", "FeatureMap"]


class FeatureMap(nn.Module, ABC):
    """Queries and keys (B, L, 2, H, P) -> their features, of the same shape."""

    pointwise: bool
    """Whether the features of a token depend on that token alone, so that unwanted tokens may be left out."""

    @abstractmethod
    def forward(self, qk: Tensor, valid: Tensor | None) -> Tensor:
        """Return phi_q and phi_k, (B, L, 2, H, P). ``valid`` is (B, L), True = real."""


class CosineMap(FeatureMap):
    """``phi(z) = z / |z|``: the kernel is the cosine similarity. The map of all experiments of the paper."""

    pointwise = True

    def forward(self, qk: Tensor, valid: Tensor | None) -> Tensor:
        return unit(qk)


def unit(z: Tensor) -> Tensor:
    """``z / |z|`` along the last axis; next to nothing where z is next to nothing."""
    if torch.compiler.is_compiling():
        return (z * _inverse_length(z)).to(z.dtype)  # a compiler fuses the plain formula by itself
    direction, _ = _Unit.apply(z)  # type: ignore[no-untyped-call]
    return direction


def _inverse_length(z: Tensor) -> Tensor:
    """``1 / |z|``, in float32 at least, since squares soon leave the range of float16; 1 where z is next to nothing."""
    length = torch.linalg.vector_norm(z, dim=-1, keepdim=True, dtype=at_least_float32(z.dtype))
    return 1 / torch.where(length > 1e-12, length, 1.0)


class _Unit(torch.autograd.Function):
    """Keeps the unit vector and one number for the backward pass, not z, and makes the gradient in place.

    ``F.normalize`` does neither; see docs/performance.md for why that matters.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(z: Tensor) -> tuple[Tensor, Tensor]:
        inverse = _inverse_length(z)
        return (z * inverse).to(z.dtype), inverse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*output)
        ctx.save_for_forward(*output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, inverse_gradient: Tensor | None) -> Tensor | None:
        direction, inverse = ctx.saved_tensors
        result = None
        if gradient is not None:
            result = gradient.clone(memory_format=torch.contiguous_format)  # in the layout of the rest
            along = torch.einsum("...p,...p->...", direction, result).unsqueeze(-1)
            if torch.is_grad_enabled():  # for second derivatives nothing may be overwritten
                result = (result - direction * along) * inverse
            else:  # fresh memory would cost more than the arithmetic
                result = result.addcmul_(direction, along, value=-1).mul_(inverse)
        if inverse_gradient is not None:  # in second derivatives only
            through_inverse = -inverse_gradient * inverse.square() * direction
            result = through_inverse if result is None else result + through_inverse
        return None if result is None else result.to(direction.dtype)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> tuple[Tensor, Tensor]:
        direction, inverse = ctx.saved_tensors
        along = (direction * tangent).sum(-1, keepdim=True)
        return ((tangent - direction * along) * inverse).to(direction.dtype), -along * inverse.square()


class ExponentialMap(FeatureMap):
    """``phi_q(x_i) = D_i^(-1/2) g(q_i)``, ``phi_k(x_j) = D_j^(-1/2) g(k_j)``, ``D_i = <g(q_i), sum_j g(k_j)>``.

    g are positive random features with ``E <g(q), g(k)> = exp(<q, k> / sqrt(P))`` up to a constant that
    D takes out. With D^(-1/2) on both sides, as in Remark 4.1 of the paper, the kernel is the
    symmetrically normalized ``D^(-1/2) exp(Q K') D^(-1/2)``, not the row-stochastic softmax.

    In a causal layer the sum in D runs over the prefix only.

    Sums are taken of logarithms of features, so only a feature itself can leave the range of floating-point numbers:
    it is held below ``exp(20)``.
    """

    pointwise = False
    exponent_limit = 20.0

    def __init__(self, *, head_width: int, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.scale = head_width**-0.25
        self.directions: Tensor
        self.register_buffer("directions", torch.empty(head_width, head_width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the random features anew."""
        nn.init.normal_(self.directions)

    def forward(self, qk: Tensor, valid: Tensor | None) -> Tensor:
        log_g = self.log_features(qk)  # (B, L, 2, H, P)
        log_k = log_g[:, :, 1]  # (B, L, H, P)
        if valid is not None:  # a number so small that its exponential is zero; infinity would spoil gradients
            log_k = log_k.masked_fill(~valid[:, :, None, None], -1e30)
        log_key_sum = log_k.logcumsumexp(1) if self.causal else log_k.logsumexp(1, keepdim=True)
        phi = self.normalized(log_g, log_key_sum)
        return phi if valid is None else phi.masked_fill(~valid[:, :, None, None, None], 0.0)

    def log_features(self, z: Tensor) -> Tensor:
        """``log g``, in float32 at least."""
        dtype = at_least_float32(z.dtype)
        with autocast_off(z.device):
            return feature_exponents(self.scale * z.to(dtype), self.directions.to(dtype))

    def normalized(self, log_g: Tensor, log_key_sum: Tensor) -> Tensor:
        """The features (B, L, 2, H, P), given the logarithm (B, L or 1, H, P) of the sums of key features in D."""
        log_total = (log_g[:, :, 0] + log_key_sum).logsumexp(-1, keepdim=True)  # (B, L, H, 1), log D
        return (log_g - log_total[:, :, None] / 2).clamp(max=self.exponent_limit).exp()
