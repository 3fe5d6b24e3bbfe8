"""Process control: stop requests from Ctrl-C and SIGTERM, and memory management."""

import ctypes
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["StopRequest", "StopRequestedError", "catch_signals", "keep_freed_memory", "memory_errors"]

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt, from glibc's malloc.h."""
OUT_OF_MEMORY = (
    "DefaultCPUAllocator",
    "Storage size calculation overflowed",
    "out of memory",
    "std::bad_alloc",
    "can't start new thread",
)
"""Parts of the messages of RuntimeErrors that torch, CUDA and Python raise if memory runs out."""


class StopRequestedError(Exception):
    """Raised to end work early because a stop was requested."""


class StopRequest:
    """Stop request: ``signal`` is the signal that requested the stop, or None."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def check(self) -> None:
        """Check for a stop request. Long work calls this regularly.

        Raises:
            StopRequestedError: if a stop was requested.
        """
        if self.signal is not None:
            raise StopRequestedError


@contextmanager
def catch_signals(on_request: Callable[[], None]) -> Iterator[StopRequest]:
    """Turn Ctrl-C and SIGTERM into a stop request. A second Ctrl-C has its usual effect.

    A second SIGTERM does not: schedulers and torchrun both send one, and the first is already being handled.

    Args:
        on_request: called immediately, from the signal handler.
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


@contextmanager
def memory_errors() -> Iterator[None]:
    """Raise MemoryError if memory runs out, where torch raises a RuntimeError."""
    try:
        yield
    except RuntimeError as error:
        if any(words in str(error) for words in OUT_OF_MEMORY):
            raise MemoryError(str(error).splitlines()[0]) from error
        raise


def keep_freed_memory() -> bool:
    """Make malloc keep freed memory for reuse instead of returning it to the system.

    A training step frees as much memory as the next one needs. By default glibc returns it, and the system clears every
    page before handing it out again, which takes a large part of a step on a CPU. The setting applies to the whole
    process, so call this in programs, not in libraries. It does nothing if the C library is not glibc.

    Returns:
        Whether the setting was applied.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, 1 << 30)) and bool(mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1))
