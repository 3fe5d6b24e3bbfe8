"""Terminal output: progress bars (plain lines outside a terminal), optional colors and readable errors."""

import _thread
import errno
import os
import signal
import sys
import threading
import time
from typing import Any, Self

import tyro
from tqdm import tqdm

__all__ = ["SECONDS_BETWEEN_LINES", "Counter", "begin_program", "choose_colors", "explain"]

SECONDS_BETWEEN_LINES = 30.0
MEBIBYTE = 2**20
SHOW_THREAD_ERROR, SHOW_UNRAISABLE = threading.excepthook, sys.unraisablehook
INTERRUPT_SECONDS = 0.01
FOLDERS = "--out for runs and reports, MINARI_DATASETS_PATH for data sets, PRIMAL_DT_CACHE for the cache"
ADVICE = {
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR), f"Set another folder: {FOLDERS}"),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), f"Free some space, or set another folder: {FOLDERS}"),
    errno.EFBIG: "Raise the limit of file sizes (ulimit -f)",
}
"""What a user can do about a path that cannot be used, by the number of the system's error."""


def begin_program() -> None:
    """Set up a program.

    Ctrl-C raises KeyboardInterrupt. ``NO_COLOR`` (https://no-color.org) is respected. A failed write in a thread shows
    no traceback: TensorBoard's thread has the main thread raise the error.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # while scripts import modules, Ctrl-C kills them
    threading.excepthook = _show_thread_error
    sys.unraisablehook = _show_unraisable
    choose_colors()


def choose_colors() -> None:
    """Print no colors in ``--help`` and in messages about flags if ``NO_COLOR`` is set."""
    if os.environ.get("NO_COLOR"):
        tyro._experimental_options["ansi_codes"] = False


def _show_thread_error(error: threading.ExceptHookArgs) -> None:
    if not isinstance(error.exc_value, OSError):
        SHOW_THREAD_ERROR(error)


def _show_unraisable(ignored: "sys.UnraisableHookArgs") -> None:
    """Python ignores Ctrl-C in a callback, such as that of a weak reference. Interrupt the program after it."""
    if ignored.exc_type is KeyboardInterrupt:
        threading.Timer(INTERRUPT_SECONDS, _thread.interrupt_main).start()
    else:
        SHOW_UNRAISABLE(ignored)


def explain(error: Exception) -> str:
    """Return the message of an error, with advice if a path cannot be used or memory ran out."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        advice = f". {ADVICE[error.errno]}" if error.errno in ADVICE else ""
        return f"{error.filename} cannot be used: {error.strerror}{advice}"
    if isinstance(error, MemoryError):
        said = f" ({error})" if str(error) else ""
        return (
            f"there is not enough memory{said}. End other programs, or use less: --accumulate 2 or a smaller --width "
            "to train, a smaller --envs to evaluate"
        )
    return str(error)


class Counter:
    """Progress counter for long work.

    Args:
        name: name of the work.
        total: final count, if it is known.
        unit: unit of the count. Without a bar, ``"B"`` is shown in mebibytes.
        initial: count at the start, excluded from the speed.
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
        """Add ``number`` to the count."""
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
