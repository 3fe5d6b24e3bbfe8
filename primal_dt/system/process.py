"""The process itself: stop requests by Ctrl-C and SIGTERM, and how memory is managed."""

import ctypes
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["StopRequest", "StopRequestedError", "catch_signals", "keep_freed_memory"]

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""From glibc's malloc.h."""


class StopRequestedError(Exception):
    """Raised to abandon work because a stop was requested."""


class StopRequest:
    """Whether a stop was requested, and by which signal."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def check(self) -> None:
        """Called now and then by work that takes long.

        Raises:
            StopRequestedError: if a stop was requested.
        """
        if self.signal is not None:
            raise StopRequestedError


@contextmanager
def catch_signals(on_request: Callable[[], None]) -> Iterator[StopRequest]:
    """Turn Ctrl-C and SIGTERM into a request; a second Ctrl-C acts as usual.

    (A second SIGTERM does not: schedulers and torchrun both send one, and the first is being obeyed.)

    Args:
        on_request: called at once, from the signal's handler.
    """
    request = StopRequest()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def handle(number: int, _: FrameType | None) -> None:
        request.signal = request.signal or number
        signal.signal(signal.SIGINT, before[signal.SIGINT])
        on_request()

    for number in before:
        signal.signal(number, handle)
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def keep_freed_memory() -> bool:
    """Have malloc keep what is freed for the next step, instead of giving it back to the system. Returns if it could.

    A training step frees as much as the next one needs. By itself glibc returns it, and the system then clears every
    page anew before it hands it out again, which on a CPU takes a good part of a step. For programs, not for libraries:
    it holds for the whole process. Does nothing where the C library is not glibc.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, 1 << 30)) and bool(mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1))
