"""Base classes of all attention layers: the call, the return type and the mask.

Axes: B batch, L tokens, M chosen tokens, H heads, D width, P = D / H.
"""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from primal_dt.attention.dropout import Dropout

__all__ = ["AttentionLayer", "AttentionOutput", "DualAttention", "Positions"]

Positions = slice | Tensor | None
"""Tokens to compute outputs for: a slice, a 1-D integer tensor of indices, or None for all tokens."""


class AttentionOutput(NamedTuple):
    """Output of every attention layer."""

    hidden: Tensor
    """(B, M, D), the output at the chosen positions; zero at padding."""
    objective: Tensor | None
    """(B,), the KSVD objective J of each sequence. None if it was not requested or if the kind has none."""


class AttentionLayer(nn.Module, ABC):
    """Self-attention: (B, L, D) -> (B, L, D). All layers share one mask polarity: ``valid`` (B, L), True = real.

    Padded slots are set to zero on entry and on exit. Their content, NaN included, never affects a valid output, the
    objective or a gradient. (Exception: ``SoftmaxAttention(right_padded=True)``, which promises finite padding.)
    """

    shown_options: ClassVar[tuple[str, ...]] = ()
    """Attributes that ``repr`` shows in addition to those common to all kinds."""

    def __init__(self, *, width: int, num_heads: int, causal: bool, dropout: float, bias: bool) -> None:
        super().__init__()
        if width < 1 or num_heads < 1 or width % num_heads:
            raise ValueError(f"width ({width}) must be divisible by num_heads ({num_heads}), both at least 1")
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout ({dropout}) must be at least 0 and below 1")
        self.width = width
        self.num_heads = num_heads
        self.head_width = width // num_heads
        self.causal = causal
        self.output = nn.Linear(width, width, bias=bias)
        self.dropout = Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        valid: Tensor | None = None,
        *,
        positions: Positions = None,
        with_objective: bool = False,
    ) -> AttentionOutput:
        """Compute attention.

        Args:
            x: (B, L, D), the input tokens.
            valid: (B, L) bool, True for real tokens; None if all tokens are real.
            positions: the M tokens to compute outputs for. The result equals computing all outputs and selecting.
            with_objective: also return J, for kinds that have one.

        Returns:
            The output (B, M, D), and J (B,) or None.
        """
        x = self._clear_padding(x, valid, positions)
        heads, objective = self._attend(x, valid, positions, with_objective)
        return AttentionOutput(self._emit(heads, None if valid is None else select(valid, positions)), objective)

    @abstractmethod
    def _attend(
        self, x: Tensor, valid: Tensor | None, positions: Positions, with_objective: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the heads (B, M, H, P) at the chosen positions, and J (B,) or None.

        x (B, L, D) has zeros in its padded slots.
        """

    @abstractmethod
    def kernel_matrix(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """(B, H, L, L), the matrix K of the dual form ``o_i = sum_j K_ij v_j``, for analysis.

        Rows and columns of padding are zero. In a causal layer K is lower triangular, except in Primal-Attention, whose
        K compares prefixes. Needs O(L^2) memory, even if the layer itself does not.
        """

    def reset_parameters(self) -> None:
        """Reinitialize all weights and random features."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.reset_parameters()

    def extra_repr(self) -> str:
        shown = ("width", "num_heads", "causal", *self.shown_options)
        return ", ".join(f"{name}={getattr(self, name)}" for name in shown)

    def _clear_padding(self, x: Tensor, valid: Tensor | None, positions: Positions = None) -> Tensor:
        """Check the arguments of a call; return ``x`` with zeros in its padded slots."""
        check_tensor("x", x)
        if x.dim() != 3 or x.shape[-1] != self.width or x.shape[1] == 0:
            raise ValueError(f"x must have shape (batch, tokens >= 1, width {self.width}), not {tuple(x.shape)}")
        check_positions(positions)
        if valid is None:
            return x
        check_mask(valid, tuple(x.shape[:2]))
        return x.masked_fill(~valid[..., None], 0.0)

    def _emit(self, heads: Tensor, valid: Tensor | None) -> Tensor:
        """(..., H, P), (...) -> (..., D): join the heads, project, apply dropout, clear padding."""
        hidden: Tensor = self.dropout(self.output(heads.flatten(-2)))
        return hidden if valid is None else hidden.masked_fill(~valid[..., None], 0.0)


class DualAttention(AttentionLayer):
    """Attention in its dual form: ``o_i = sum_j K(q_i, k_j) v_j`` for some kernel K, then a projection.

    A subclass implements :meth:`_mix`, which must be linear in the values. ``keys`` selects a key projection
    (``biased`` if ``bias`` is set, or always ``unbiased``), or none (``shared``: the queries serve as keys).
    """

    mixes_in_half_precision = False
    """Whether :meth:`_mix` runs in autocast's dtype. Otherwise it runs in at least float32, as long sums need."""

    def __init__(
        self,
        *,
        width: int,
        num_heads: int,
        causal: bool,
        dropout: float,
        bias: bool,
        keys: Literal["biased", "unbiased", "shared"] = "biased",
    ) -> None:
        super().__init__(width=width, num_heads=num_heads, causal=causal, dropout=dropout, bias=bias)
        self.query = nn.Linear(width, width, bias=bias)
        if keys != "shared":
            self.key = nn.Linear(width, width, bias=bias and keys == "biased")
        self.value = nn.Linear(width, width, bias=bias)

    @abstractmethod
    def _mix(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None) -> Tensor:
        """q, k (B, H, L, P), v (B, H, L, V) -> (B, H, L, V).

        V is arbitrary: :meth:`kernel_matrix` passes an identity matrix as the values.
        """

    def _attend(
        self, x: Tensor, valid: Tensor | None, positions: Positions, with_objective: bool
    ) -> tuple[Tensor, Tensor | None]:
        q, k = self._queries_and_keys(x)  # (B, H, L, P)
        mixed = self._mix_precisely(q, k, self._split(self.value(x)), valid)  # (B, H, L, P)
        return select(mixed.transpose(1, 2), positions), None

    def kernel_matrix(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        x = self._clear_padding(x, valid)
        B, L, _ = x.shape
        q, k = self._queries_and_keys(x)  # (B, H, L, P)
        # _mix is linear in the values, so applying it to the identity matrix gives K.
        units = torch.eye(L, dtype=q.dtype, device=q.device).expand(B, self.num_heads, L, L)
        matrix = self._mix_precisely(q, k, units, valid)
        return matrix if valid is None else matrix.masked_fill(~valid[:, None, :, None], 0.0)

    def _mix_precisely(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None) -> Tensor:
        if self.mixes_in_half_precision:
            return self._mix(q, k, v, valid)
        dtype = at_least_float32(q.dtype)
        with autocast_off(q.device):
            return self._mix(q.to(dtype), k.to(dtype), v.to(dtype), valid).to(v.dtype)

    def _queries_and_keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self._split(self.query(x)), self._split(self.key(x))

    def _split(self, x: Tensor) -> Tensor:
        """(B, L, D) -> (B, H, L, P)."""
        return x.unflatten(-1, (self.num_heads, self.head_width)).transpose(1, 2)


def check_tensor(name: str, x: object) -> None:
    """Raise a TypeError unless ``x`` is a floating-point tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, not {type(x).__name__}")
    if not x.is_floating_point():
        raise TypeError(f"{name} must hold floating-point numbers, not {x.dtype}: embed or cast it first")


def check_mask(valid: object, shape: tuple[int, ...]) -> None:
    """Raise an error unless ``valid`` is a bool tensor of this shape."""
    if not isinstance(valid, Tensor):
        raise TypeError(f"valid must be a torch.Tensor, not {type(valid).__name__}")
    if valid.dtype != torch.bool or valid.shape != shape:
        raise ValueError(
            f"valid must be a bool tensor of shape {shape}, True for real tokens, "
            f"not {valid.dtype} of shape {tuple(valid.shape)}"
        )


def check_positions(positions: object) -> None:
    """Raise an error unless ``positions`` can select tokens.

    torch checks whether indices are in range; a check here would wait for the GPU.
    """
    rule = "positions must be None, a slice with a positive step, or a 1-D int64 or int32 tensor"
    if isinstance(positions, Tensor):
        if positions.dim() != 1 or positions.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"{rule}, not {positions.dtype} of shape {tuple(positions.shape)}")
    elif isinstance(positions, slice):
        if positions.step is not None and positions.step < 1:
            raise ValueError(f"{rule}, not a slice with step {positions.step}")
    elif positions is not None:
        raise TypeError(f"{rule}, not {type(positions).__name__}")


def select(x: Tensor, positions: Positions) -> Tensor:
    """Select tokens: (B, L, ...) -> (B, M, ...)."""
    return x if positions is None else x[:, positions]


def autocast_off(device: torch.device) -> AbstractContextManager[object]:
    """Context manager that disables autocast, on devices that have it."""
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """The dtype for sums over a sequence: float32, or float64 if ``dtype`` is float64."""
    return torch.promote_types(dtype, torch.float32)
