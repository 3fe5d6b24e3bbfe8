"""Atomic writes of files, and checks of folders."""

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout

__all__ = ["atomic_write", "check_writable", "lock_folder", "remove_partial"]


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing that appears under its name only when the block ends. It then survives a power failure.

    If the block raises, an existing file of that name is unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    _flush_folder(path.parent)


def check_writable(folder: Path) -> None:
    """Check, before long work, that a folder can be written to. It need not exist yet; nothing is changed.

    Raises:
        PermissionError: if it cannot.
        NotADirectoryError: if the path or one of its parents is not a folder.
    """
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "it is not a folder", str(existing))
    if not os.access(existing, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, "no permission to write there", str(existing))


@contextmanager
def lock_folder(folder: Path, message: str) -> Iterator[None]:
    """Keep other processes out of a folder. If one is in it, raise ValueError with this message."""
    try:
        with FileLock(folder / ".lock", timeout=0):
            yield
    except Timeout as error:
        raise ValueError(message) from error


def remove_partial(folder: Path) -> None:
    """Remove partial files that a killed process left in a folder. No other process may be writing there."""
    for path in folder.glob(".*.partial"):
        path.unlink(missing_ok=True)


def _flush_folder(folder: Path) -> None:
    """Make a rename survive a power failure, on systems where folders can be flushed."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
