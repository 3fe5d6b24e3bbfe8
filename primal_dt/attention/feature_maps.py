"""Feature maps of Primal-Attention: queries and keys -> phi_q, phi_k, which define the kernel <phi_q, phi_k>.

Axes: B batch, L tokens, H heads, P features per head. An axis of size 2 holds queries first, keys second.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from primal_dt.attention.layer import at_least_float32, autocast_off
from primal_dt.attention.random_features import feature_exponents

__all__ = ["CosineMap", "ExponentialMap", "FeatureMap"]


class FeatureMap(nn.Module, ABC):
    """Base class of maps from queries and keys (B, L, 2, H, P) to features of the same shape."""

    pointwise: bool
    """Whether the features of a token depend on that token alone, so that other tokens can be skipped."""

    @abstractmethod
    def forward(self, qk: Tensor, valid: Tensor | None) -> Tensor:
        """Return phi_q and phi_k, (B, L, 2, H, P). ``valid`` is (B, L), True = real."""


class CosineMap(FeatureMap):
    """``phi(z) = z / |z|``: the kernel is the cosine similarity. The paper uses this map in all its experiments."""

    pointwise = True

    def forward(self, qk: Tensor, valid: Tensor | None) -> Tensor:
        return unit(qk)


def unit(z: Tensor) -> Tensor:
    """``z / |z|`` along the last axis; z itself where ``|z| <= 1e-12``."""
    if torch.compiler.is_compiling():
        return (z * _inverse_length(z)).to(z.dtype)  # the compiler fuses the plain formula itself
    direction, _ = _Unit.apply(z)  # type: ignore[no-untyped-call]
    return direction


def _inverse_length(z: Tensor) -> Tensor:
    """``1 / |z|``, in at least float32, since squares easily leave the range of float16; 1 where ``|z| <= 1e-12``."""
    length = torch.linalg.vector_norm(z, dim=-1, keepdim=True, dtype=at_least_float32(z.dtype))
    return 1 / torch.where(length > 1e-12, length, 1.0)


class _Unit(torch.autograd.Function):
    """``z / |z|``, saving the unit vector and one number for the backward pass instead of z.

    The gradient is computed in place. ``F.normalize`` does neither; docs/performance.md explains why this matters.
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
            result = gradient.clone(memory_format=torch.contiguous_format)  # the layout of the other operands
            along = torch.einsum("...p,...p->...", direction, result).unsqueeze(-1)
            if torch.is_grad_enabled():  # second derivatives need every intermediate result
                result = (result - direction * along) * inverse
            else:  # allocating memory would cost more than the arithmetic
                result = result.addcmul_(direction, along, value=-1).mul_(inverse)
        if inverse_gradient is not None:  # only for second derivatives
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

    g are positive random features with ``E <g(q), g(k)> = exp(<q, k> / sqrt(P))`` up to a constant, which D cancels.
    With D^(-1/2) on both sides, as in Remark 4.1 of the paper, the kernel is the symmetrically normalized
    ``D^(-1/2) exp(Q K') D^(-1/2)``, not the row-stochastic softmax.

    In a causal layer the sum in D runs over the prefix only.

    Sums are computed from the logarithms of the features, so only a feature itself can overflow. Features are clamped
    to at most ``exp(20)``.
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
        """Draw new random features."""
        nn.init.normal_(self.directions)

    def forward(self, qk: Tensor, valid: Tensor | None) -> Tensor:
        log_g = self.log_features(qk)  # (B, L, 2, H, P)
        log_k = log_g[:, :, 1]  # (B, L, H, P)
        if valid is not None:  # so low that its exponential is zero; -inf would spoil gradients
            log_k = log_k.masked_fill(~valid[:, :, None, None], -1e30)
        log_key_sum = log_k.logcumsumexp(1) if self.causal else log_k.logsumexp(1, keepdim=True)
        phi = self.normalized(log_g, log_key_sum)
        return phi if valid is None else phi.masked_fill(~valid[:, :, None, None, None], 0.0)

    def log_features(self, z: Tensor) -> Tensor:
        """``log g``, in at least float32."""
        dtype = at_least_float32(z.dtype)
        with autocast_off(z.device):
            return feature_exponents(self.scale * z.to(dtype), self.directions.to(dtype))

    def normalized(self, log_g: Tensor, log_key_sum: Tensor) -> Tensor:
        """The features (B, L, 2, H, P), given the logarithm (B, L or 1, H, P) of the sums of key features in D."""
        log_total = (log_g[:, :, 0] + log_key_sum).logsumexp(-1, keepdim=True)  # (B, L, H, 1), log D
        return (log_g - log_total[:, :, None] / 2).clamp(max=self.exponent_limit).exp()
