"""Dropout with masks that are cheap to draw on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn

__all__ = ["Dropout", "masks_from"]

LEVELS = 1 << 16
"""Number of values of a 16-bit random number."""

_generator: ContextVar[torch.Generator | None] = ContextVar("_generator", default=None)


@contextmanager
def masks_from(generator: torch.Generator) -> Iterator[None]:
    """Context in which this thread draws its CPU masks from ``generator`` instead of torch's default generator.

    If threads shared one generator, the order of their draws would change from run to run, and a run could not be
    reproduced.
    """
    token = _generator.set(generator)
    try:
        yield
    finally:
        _generator.reset(token)


class Dropout(nn.Dropout):
    """``x * m / E[m]``, m zero with probability p. Differs from ``nn.Dropout`` only in how m is drawn on a CPU.

    On a CPU torch's generator yields 64 random bits at a time. ``nn.Dropout`` uses them for one entry; here four
    entries share them. So p is rounded to a multiple of 2^-16. The scale uses the rounded p, so the expectation of the
    output is exactly x. ``inplace`` is not supported.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Apply dropout, in training mode only."""
        dropped = round(self.p * LEVELS)  # out of 2^16 equally likely values
        if not self.training or dropped in (0, LEVELS) or x.device.type != "cpu" or torch.compiler.is_compiling():
            return super().forward(x)
        words = torch.empty((x.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None, generator=_generator.get())
        numbers = words.view(torch.int16)[: x.numel()].view(x.shape)  # -2^15 to 2^15 - 1
        # The comparison writes floats directly: a bool mask in between would take several times as long.
        mask = torch.ge(numbers, dropped - LEVELS // 2, out=x.new_empty(x.shape))
        return x * mask.mul_(LEVELS / (LEVELS - dropped))
