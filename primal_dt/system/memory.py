"""How a program's memory is managed, where that can be chosen."""

import ctypes
import sys

__all__ = ["keep_freed_memory"]

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""From glibc's malloc.h."""


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
