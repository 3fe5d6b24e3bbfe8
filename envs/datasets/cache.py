"""The cache: stores of trajectories, downloads, and notes on which file became which store.

It is a folder ``primal-dt`` in the user's cache folder, or in the one that ``$PRIMAL_DT_CACHE`` names. All of it can be
deleted at any time; but for downloads, it is made again from what is elsewhere.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import platformdirs

from primal_dt.system.files import atomic_write

__all__ = [
    "cache_folder",
    "clear_cache",
    "downloads_folder",
    "file_identity",
    "read_note",
    "stores_folder",
    "usage",
    "write_note",
]

CACHE_VARIABLE = "PRIMAL_DT_CACHE"
KINDS = ("stores", "downloads", "notes")


def cache_folder() -> Path:
    """Where the cache is."""
    chosen = os.environ.get(CACHE_VARIABLE)
    return Path(os.path.expanduser(chosen) if chosen else platformdirs.user_cache_dir(), "primal-dt")


def stores_folder() -> Path:
    """Trajectories as memory-mapped arrays, in folders named by their contents' fingerprints."""
    return cache_folder() / "stores"


def downloads_folder() -> Path:
    """Files as they came from a server."""
    return cache_folder() / "downloads"


def file_identity(path: Path) -> str:
    """What tells a file from others, and from itself after a change, without reading it."""
    state = path.stat()
    return f"{path.resolve()}\n{state.st_size}\n{state.st_mtime_ns}\n"


def read_note(identity: str) -> dict[str, Any] | None:
    """What was written down about something, if anything was."""
    try:
        note = json.loads(_note_path(identity).read_text())
    except (OSError, ValueError):
        return None
    return note if isinstance(note, dict) else None


def write_note(identity: str, note: Mapping[str, Any]) -> None:
    """Write something down."""
    with atomic_write(_note_path(identity)) as file:
        file.write(json.dumps(note).encode())


def _note_path(identity: str) -> Path:
    return cache_folder() / "notes" / f"{hashlib.sha256(identity.encode()).hexdigest()}.json"


def usage() -> dict[str, tuple[int, int]]:
    """Kind of content -> how many files, how many bytes."""
    result = {}
    for kind in KINDS:
        files = [path for path in (cache_folder() / kind).rglob("*") if path.is_file()]
        result[kind] = (len(files), sum(path.stat().st_size for path in files))
    return result


def clear_cache(*, downloads: bool = False) -> None:
    """Delete stores and notes, and nothing else that may be in the folder.

    Args:
        downloads: delete these too. They may have been put there by hand.
    """
    for kind in KINDS if downloads else ("stores", "notes"):
        if (folder := cache_folder() / kind).exists():
            shutil.rmtree(folder)
