"""Muon: momentum with orthogonalized updates.

The update of a weight matrix is the orthogonal factor of its momentum, so that all directions move equally far (Jordan
et al., 2024). It is scaled to the size of AdamW's updates (Liu et al., 2025). This is ``torch.optim.Muon`` with
``adjust_lr_fn="match_rms_adamw"``, with three differences:

* torch always iterates in bfloat16. CPUs without bfloat16 units emulate it, which is many times slower, so this
  implementation uses bfloat16 on GPUs only.
* Matrices of the same shape are processed in one batch.
* In single precision, the iteration on a wide matrix X runs on its small Gram matrix X X'.

Axes: N matrices of one shape, m rows, n columns, m <= n.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["Muon", "orthogonal_factor"]

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic polynomial. Five iterations bring all singular values close to 1."""
NUM_ITERATIONS = 5


def orthogonal_factor(matrices: Tensor) -> Tensor:
    """Approximate ``U V'`` of each ``U S V'`` (N, m, n) by Newton-Schulz iteration.

    The singular values of the result are between about 0.7 and 1.2. The iteration runs in bfloat16 on a GPU, and in
    single precision elsewhere.
    """
    x = matrices.bfloat16() if matrices.device.type == "cuda" else matrices.float()
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    is_wide = x.shape[-1] >= 2 * x.shape[-2] and x.dtype == torch.float32
    return (_iterate_on_gram(x) if is_wide else _iterate(x)).to(matrices.dtype)


def _iterate(x: Tensor) -> Tensor:
    """``X <- a X + (b G + c G^2) X`` with ``G = X X'``, several times."""
    a, b, c = COEFFICIENTS
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.mT  # (N, m, m)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def _iterate_on_gram(x: Tensor) -> Tensor:
    """The same with (N, m, m) matrices only: each X is ``P X_0``, where P and G are polynomials of the first G.

    As such they commute, so that ``Q = a I + b G + c G^2`` takes P to ``Q P`` and G to ``Q G Q``.
    """
    a, b, c = COEFFICIENTS
    gram = x @ x.mT
    product: Tensor | None = None
    for number in range(NUM_ITERATIONS):
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        factor.diagonal(dim1=-2, dim2=-1).add_(a)
        product = factor if product is None else factor @ product
        if number < NUM_ITERATIONS - 1:
            gram = factor @ gram @ factor
    assert product is not None
    return product @ x


class Muon(torch.optim.Optimizer):
    """Muon optimizer, for the weight matrices inside a network. Use AdamW for all other parameters.

    Args:
        params: matrices.
        lr: learning rate, on the same scale as AdamW's.
        weight_decay: coefficient of the decoupled weight decay.
        momentum: weight of past gradients, in Nesterov's form.
    """

    def __init__(
        self, params: Iterable[Tensor], *, lr: float, weight_decay: float = 0.0, momentum: float = 0.95
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        for group in self.param_groups:
            if wrong := [tuple(p.shape) for p in group["params"] if p.ndim != 2]:
                raise ValueError(f"Muon supports only matrices, not parameters of shape {wrong[0]}")

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all matrices that have a gradient."""
        if closure is not None:
            raise ValueError("Muon does not support closures")
        for group in self.param_groups:
            by_shape: dict[tuple[int, int], list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    rows, columns = sorted(parameter.shape)
                    by_shape.setdefault((rows, columns), []).append(parameter)
            for (_, columns), parameters in by_shape.items():
                # Tall matrices are transposed: the iteration is cheapest with fewer rows than columns.
                momenta = torch.stack([_as_wide(self._momentum(p, group["momentum"])) for p in parameters])  # (N, m, n)
                scale = -group["lr"] * 0.2 * columns**0.5
                for parameter, update in zip(parameters, orthogonal_factor(momenta), strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(update if _is_wide(parameter) else update.mT, alpha=scale)

    def _momentum(self, parameter: Tensor, share: float) -> Tensor:
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        state["momentum"].lerp_(gradient, 1 - share)
        return gradient.lerp(state["momentum"], share)


def _is_wide(matrix: Tensor) -> bool:
    return matrix.shape[0] <= matrix.shape[1]


def _as_wide(matrix: Tensor) -> Tensor:
    return matrix if _is_wide(matrix) else matrix.mT
