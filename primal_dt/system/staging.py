"""Folders to write to until their content is complete."""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock

from primal_dt.system.files import make_folder, remove_tree

__all__ = ["staging_folder"]

PREFIX = ".partial-"


@contextmanager
def staging_folder(parent: Path) -> Iterator[Path]:
    """Create a folder that only this process uses, and remove it when the block ends, unless it was renamed.

    Folders that killed processes left in ``parent`` are removed first: those whose lock is free.
    """
    make_folder(parent)
    for path in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):  # it is in use, or another user's
            _remove(path.with_suffix(""))
    folder = parent / f"{PREFIX}{uuid.uuid4().hex}"
    owned = FileLock(_lock(folder))
    owned.acquire()  # before the folder exists, so that it is never without its owner
    try:
        folder.mkdir()  # unlike the tempfile module's, with the permissions that the user's umask leaves
        yield folder
    finally:
        owned.release()
        with suppress(OSError):
            _remove(folder)


def _remove(folder: Path) -> None:
    """Remove a folder and its lock.

    Raises:
        OSError: if a process is using it.
    """
    with FileLock(_lock(folder), timeout=0), suppress(OSError):
        remove_tree(folder)
    _lock(folder).unlink(missing_ok=True)


def _lock(folder: Path) -> Path:
    return folder.with_suffix(".lock")
