"""Writes that survive kills and power failures, and checks of files, folders and space."""

import errno
import glob
import hashlib
import os
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import chain, count
from pathlib import Path
from typing import BinaryIO, Literal

from filelock import FileLock, Timeout

__all__ = [
    "atomic_write",
    "check_folder",
    "check_regular",
    "check_space",
    "check_writable",
    "file_digest",
    "lock_folder",
    "make_folder",
    "move",
    "name_errors",
    "open_regular",
    "read_text",
    "remove_partial",
    "remove_tree",
    "unused_name",
]

NOT_REGULAR = "it is a link, a pipe, a device or a folder, not a regular file"
ABANDONED_SECONDS = 3600.0
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing that appears under its name only when the block ends. It then survives a power failure.

    If the block raises, an existing file of that name is unchanged.

    Raises:
        OSError: if a write fails, or if something that is not a regular file has that name.
    """
    make_folder(path.parent)
    check_regular(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.partial")
    partial.unlink(missing_ok=True)
    _remove_old_partial(path)
    try:
        with name_errors(path), partial.open("xb") as file:
            yield file
        move(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _remove_old_partial(path: Path) -> None:
    """Remove what processes that were killed long ago left of a file. Others may be writing it now."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.partial"):
        with suppress(OSError):
            if time.time() - left.lstat().st_mtime > ABANDONED_SECONDS:
                left.unlink()


def make_folder(folder: Path, *, exist_ok: bool = True) -> None:
    """Create a folder and its missing parents, as ``mkdir`` does. They then survive a power failure."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=exist_ok)
    for path in missing:
        _flush(path.parent)


def move(source: Path, target: Path) -> None:
    """Rename a file or a folder. After a power failure, it has its old name or its new one, and all of its content.

    Raises:
        OSError: if something cannot be written, or if ``target`` is a folder that is not empty.
    """
    with name_errors(target):
        for path in (*source.rglob("*"), source):
            if not path.is_symlink():
                _flush(path)
        source.replace(target)
        for folder in dict.fromkeys((target.parent, source.parent)):
            _flush(folder)


def open_regular(path: Path, mode: Literal["rb", "ab", "a+b"]) -> BinaryIO:
    """Open a regular file. Unlike ``path.open``, this follows no link and does not wait for the other end of a pipe.

    Raises:
        OSError: if the path is something else.
    """

    def open_descriptor(name: str, flags: int) -> int:
        check_regular(path)
        flags |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # it may change after the check
        return os.open(name, flags, 0o666)

    return open(path, mode, opener=open_descriptor)


def file_digest(path: Path) -> str:
    """A digest of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def read_text(path: Path) -> str:
    """Read a regular file of UTF-8 text."""
    with open_regular(path, "rb") as file:
        return file.read().decode()


def check_regular(path: Path) -> None:
    """Raise OSError if a path exists and is not a regular file. A link is not one, whatever it leads to."""
    if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
        raise OSError(errno.EINVAL, NOT_REGULAR, str(path))


def check_folder(path: Path) -> None:
    """Raise OSError if a path exists and is not a folder. A link is not one, whatever it leads to."""
    if os.path.lexists(path) and not stat.S_ISDIR(path.lstat().st_mode):
        raise OSError(errno.EINVAL, "it is a link, a pipe or a file, not a folder", str(path))


def check_space(folder: Path, num_bytes: int, *, start: int = 0) -> None:
    """Check that a file in a folder can grow by ``num_bytes`` from the size ``start``. Nothing is changed.

    Raises:
        OSError: if the disk, the quota or the file-size limit does not allow it.
    """
    if not hasattr(os, "posix_fallocate"):
        return
    with tempfile.TemporaryFile(dir=folder) as file:
        try:
            os.posix_fallocate(file.fileno(), start, num_bytes)
        except OSError as error:
            if error.errno in NO_SPACE:  # others: the file system cannot reserve space
                raise


@contextmanager
def name_errors(path: Path) -> Iterator[None]:
    """Add a path to the errors of failed writes, which the system raises without one.

    ``torch.save`` replaces such an error by a RuntimeError that does not give the reason. The original is raised.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        if cause.filename is None and cause.errno is not None:
            cause.filename = str(path)
        raise cause from None


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
    check_regular(folder / ".lock")
    try:
        with FileLock(folder / ".lock", timeout=0):
            yield
    except Timeout as error:
        raise ValueError(message) from error


def remove_tree(path: Path) -> None:
    """Remove a folder with all that is in it, or what else has its name: a link itself, or a pipe, unread."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def unused_name(path: Path) -> Path:
    """The path itself, or with ``-2``, ``-3`` and so on at its end if something has that name."""
    others = (path.with_name(f"{path.name}-{number}") for number in count(2))
    return next(each for each in chain([path], others) if not os.path.lexists(each))


def remove_partial(folder: Path) -> None:
    """Remove partial files that a killed process left in a folder. No other process may be writing there."""
    for path in folder.glob(".*.partial"):
        path.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    """Make the content of a file, or the names in a folder, survive a power failure. Windows cannot flush folders."""
    is_posix = os.name == "posix"
    if not (path.is_file() or (path.is_dir() and is_posix)):
        return
    descriptor = os.open(path, os.O_RDONLY if is_posix else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
