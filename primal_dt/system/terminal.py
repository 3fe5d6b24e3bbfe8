"""What a person sees of a program: bars in a terminal and plain lines elsewhere, colors if wanted, errors in words."""

import errno
import os
import signal
import sys
import time
from typing import Any, Self

import tyro
from tqdm import tqdm

__all__ = ["SECONDS_BETWEEN_LINES", "Counter", "begin_program", "explain"]

SECONDS_BETWEEN_LINES = 30.0
MEBIBYTE = 2**20
CANNOT_WRITE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR)


def begin_program() -> None:
    """What every program does first: Ctrl-C is an exception, and ``NO_COLOR`` (https://no-color.org) is honored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # scripts let it kill them while they import
    if os.environ.get("NO_COLOR"):
        tyro._experimental_options["ansi_codes"] = False


def explain(error: Exception) -> str:
    """An error in words, with what can be done where a folder cannot be written to."""
    if isinstance(error, OSError) and error.errno in CANNOT_WRITE and error.filename is not None:
        return (
            f"{error.filename} cannot be used: {error.strerror}. Runs and reports go where --out says, data sets "
            "where MINARI_DATASETS_PATH says, and the cache where PRIMAL_DT_CACHE says"
        )
    return str(error)


class Counter:
    """Counts something that takes long, towards a total.

    Args:
        name: what is done.
        total: how many there will be, if that is known.
        unit: of what; ``"B"`` is shown in mebibytes where there is no bar.
        initial: of these, before now.
    """

    def __init__(self, name: str, *, total: int | None, unit: str, initial: int = 0) -> None:
        self._name, self._total, self._unit = name, total, unit
        self._done, self._initial = initial, initial
        self._begin = self._last_line = time.monotonic()
        self._bar: tqdm[Any] | None = None
        if sys.stderr.isatty():
            layout = {"unit": "B", "unit_scale": True, "unit_divisor": 1024} if unit == "B" else {"unit": f" {unit}"}
            self._bar = tqdm(desc=name, total=total, initial=initial, **layout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
        elif kind is None:
            self._print(f"{self._shown(self._done)} {self._label} in {time.monotonic() - self._begin:.1f} s")

    def update(self, number: int) -> None:
        """So many more are done."""
        self._done += number
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(number)
        elif now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            self._print(f"{self._shown(self._done)}{self._ahead(now - self._begin)}")

    def _ahead(self, seconds: float) -> str:
        if self._total is None:
            return f" {self._label}"
        left = max(self._total - self._done, 0) * seconds / max(self._done - self._initial, 1)
        return f" of {self._shown(self._total)} {self._label}, {left:.0f} s left"

    @property
    def _label(self) -> str:
        return "MiB" if self._unit == "B" else self._unit

    def _shown(self, number: int) -> str:
        return f"{number / MEBIBYTE:,.1f}" if self._unit == "B" else f"{number:,}"

    def _print(self, text: str) -> None:
        print(f"{self._name}: {text}", file=sys.stderr, flush=True)
