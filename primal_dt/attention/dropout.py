"""Dropout whose masks cost little on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn

__all__ = ["Dropout", "masks_from"]

LEVELS = 1 << 16
"""Of a random number of 16 bits."""

_generator: ContextVar[torch.Generator | None] = ContextVar("_generator", default=None)


@contextmanager
def masks_from(generator: torch.Generator) -> Iterator[None]:
    """Within it, in this thread, masks on a CPU are drawn from a generator instead of torch's own.

    Threads that shared a generator would get what the others leave them, which is another thing every time.
    """
    token = _generator.set(generator)
    try:
        yield
    finally:
        _generator.reset(token)


class Dropout(nn.Dropout):
    """``x * m / E[m]``, m zero with probability p: as ``nn.Dropout``, but for how m is drawn on a CPU.

    torch's generator yields 64 random bits at a time there, and ``nn.Dropout`` spends them on one entry; here they are
    shared by four. So p is rounded to a multiple of 2^-16, and the scale is that of the rounded p: the expectation of
    the output is x, exactly. (``inplace`` is not meant for it.)
    """

    def forward(self, x: Tensor) -> Tensor:
        """Drop, while training."""
        dropped = round(self.p * LEVELS)  # of 2^16 equally likely numbers
        if not self.training or dropped in (0, LEVELS) or x.device.type != "cpu" or torch.compiler.is_compiling():
            return super().forward(x)
        words = torch.empty((x.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None, generator=_generator.get())
        numbers = words.view(torch.int16)[: x.numel()].view(x.shape)  # from -2^15 on
        # Compared straight into floats: through a mask of booleans it would take several times as long.
        mask = torch.ge(numbers, dropped - LEVELS // 2, out=x.new_empty(x.shape))
        return x * mask.mul_(LEVELS / (LEVELS - dropped))
