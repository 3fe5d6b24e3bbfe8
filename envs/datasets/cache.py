"""The cache: stores of trajectories, downloads, notes that map each source file to its store, and episodes.

The cache is the folder ``primal-dt`` in the user's cache folder, or in ``$PRIMAL_DT_CACHE`` if that is set. It can be
deleted at any time. Stores and notes are rebuilt from the source files; downloads must be downloaded again, and
episodes of shared policies run again.
"""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import platformdirs

from primal_dt.system.files import atomic_write, open_regular, remove_tree
from primal_dt.system.records import dump_record, parse_record

__all__ = [
    "cache_folder",
    "clear_cache",
    "downloads_folder",
    "evaluations_folder",
    "file_identity",
    "read_note",
    "stores_folder",
    "usage",
    "write_note",
]

CACHE_VARIABLE = "PRIMAL_DT_CACHE"
KINDS = ("stores", "downloads", "notes", "evaluations")


def cache_folder() -> Path:
    """The cache's folder."""
    chosen = os.environ.get(CACHE_VARIABLE)
    return Path(os.path.expanduser(chosen) if chosen else platformdirs.user_cache_dir(), "primal-dt")


def stores_folder() -> Path:
    """The folder of stores: trajectories as memory-mapped arrays. Each store's folder is named by its fingerprint."""
    return cache_folder() / "stores"


def downloads_folder() -> Path:
    """The folder of downloaded files, unchanged."""
    return cache_folder() / "downloads"


def evaluations_folder() -> Path:
    """The folder of finished episodes of shared policies. Those of runs are in the run folders."""
    return cache_folder() / "evaluations"


def file_identity(path: Path) -> str:
    """The file's path, size and modification time. They identify a version of the file without reading it."""
    state = path.stat()
    return f"{path.resolve()}\n{state.st_size}\n{state.st_mtime_ns}\n"


def read_note(identity: str) -> dict[str, Any] | None:
    """Read the note for an identity; None if there is none or it is unreadable."""
    try:
        with open_regular(_note_path(identity), "rb") as file:
            return parse_record(file.read())
    except OSError:
        return None


def write_note(identity: str, note: Mapping[str, Any]) -> None:
    """Write the note for an identity."""
    with atomic_write(_note_path(identity)) as file:
        file.write(dump_record(note))


def _note_path(identity: str) -> Path:
    return cache_folder() / "notes" / f"{hashlib.sha256(identity.encode()).hexdigest()}.json"


def usage() -> dict[str, tuple[int, int]]:
    """The number of files and of bytes for each kind of content."""
    result = {}
    for kind in KINDS:
        files = [path for path in (cache_folder() / kind).rglob("*") if path.is_file()]
        result[kind] = (len(files), sum(path.stat().st_size for path in files))
    return result


def clear_cache(*, downloads: bool = False) -> None:
    """Delete stores, notes and episodes. Other content of the cache's folder is not touched.

    Args:
        downloads: whether to delete downloads too, including files that were placed there by hand.
    """
    for kind in KINDS if downloads else ("stores", "notes", "evaluations"):
        remove_tree(cache_folder() / kind)
