"""Files that are there whole or not at all."""

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

__all__ = ["atomic_write", "check_writable", "remove_partial"]


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, which takes its name when the block ends, also if the power fails then.

    If the block fails, what had that name before still has it.
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
    """See, before long work, that its results can be written to a folder that may not be there yet. Changes nothing.

    Raises:
        PermissionError: if they cannot.
        NotADirectoryError: if what has that name, or a part of it, is no folder.
    """
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "it is not a folder", str(there))
    if not os.access(there, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, "no permission to write there", str(there))


def remove_partial(folder: Path) -> None:
    """Remove what a process that was killed while writing has left in a folder. Nobody else may be writing there."""
    for path in folder.glob(".*.partial"):
        path.unlink(missing_ok=True)


def _flush_folder(folder: Path) -> None:
    """Have the renaming itself survive a power failure, where folders can be flushed."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
