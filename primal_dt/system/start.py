"""What a program does before it imports torch, which takes seconds and reads settings from the environment."""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

from primal_dt.system.terminal import choose_colors

__all__ = ["PASSIVE", "start"]

PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
"""Threads of OpenMP sleep while they wait, and do not take a core from others. Read when torch is imported."""


def start(parse: Callable[[Sequence[str]], object]) -> None:
    """Begin a program. Call it before torch is imported.

    ``--help`` and wrong flags end the program here. Until the imports are done, Ctrl-C ends it without a traceback.

    Args:
        parse: parses the command line. Settings that it refuses with a ValueError are reported later, by the program.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for name, value in PASSIVE.items():
        os.environ.setdefault(name, value)
    choose_colors()
    with suppress(ValueError):
        parse(sys.argv[1:])
