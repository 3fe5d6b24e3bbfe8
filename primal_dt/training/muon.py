"""Muon: momentum whose matrices are made orthogonal.

The update of a weight matrix is the orthogonal factor of its momentum, so that all directions move alike (Jordan et
al., 2024); its size is scaled to that of AdamW's (Liu et al., 2025). It is ``torch.optim.Muon`` with
``adjust_lr_fn="match_rms_adamw"``, but for two things: torch's iterates in bfloat16, which a CPU without units for it
emulates, many times slower; and here matrices of one shape are worked on together.

Axes: N matrices of one shape, m rows, n columns, m <= n.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["Muon", "orthogonal_factor"]

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic: its iteration takes all singular values to about 1 in five steps."""
NUM_ITERATIONS = 5


def orthogonal_factor(matrices: Tensor) -> Tensor:
    """``U V'`` of each ``U S V'`` (N, m, n), about: singular values end up between 0.7 and 1.2 (Newton-Schulz).

    In bfloat16 on a GPU, which has units for it; in single precision elsewhere.
    """
    a, b, c = COEFFICIENTS
    x = matrices.bfloat16() if matrices.device.type == "cuda" else matrices.float()
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.mT  # (N, m, m)
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """For the weight matrices inside a network; what else is learned is AdamW's.

    Args:
        params: matrices.
        lr: learning rate; as large as AdamW's would be.
        weight_decay: decoupled.
        momentum: share of the past, with Nesterov's look ahead.
    """

    def __init__(
        self, params: Iterable[Tensor], *, lr: float, weight_decay: float = 0.0, momentum: float = 0.95
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        for group in self.param_groups:
            if wrong := [tuple(p.shape) for p in group["params"] if p.ndim != 2]:
                raise ValueError(f"Muon is for matrices, not for parameters of shape {wrong[0]}")

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all matrices that have a gradient."""
        if closure is not None:
            raise ValueError("Muon takes no closure")
        for group in self.param_groups:
            by_shape: dict[tuple[int, int], list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    rows, columns = sorted(parameter.shape)
                    by_shape.setdefault((rows, columns), []).append(parameter)
            for (_, columns), parameters in by_shape.items():
                # Tall matrices lie down: the iteration costs least when rows are fewer than columns.
                momenta = torch.stack([_lying(self._momentum(p, group["momentum"])) for p in parameters])  # (N, m, n)
                scale = -group["lr"] * 0.2 * columns**0.5
                for parameter, update in zip(parameters, orthogonal_factor(momenta), strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(update if _lies(parameter) else update.mT, alpha=scale)

    def _momentum(self, parameter: Tensor, share: float) -> Tensor:
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        state["momentum"].lerp_(gradient, 1 - share)
        return gradient.lerp(state["momentum"], share)


def _lies(matrix: Tensor) -> bool:
    return matrix.shape[0] <= matrix.shape[1]


def _lying(matrix: Tensor) -> Tensor:
    return matrix if _lies(matrix) else matrix.mT
