"""A disk that loses power: what is left of a folder if only flushed content survives."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

__all__ = ["Disk", "watched_disk"]

Inode = tuple[int, int]
Names = Literal["flushed", "all"]
"""Which names of files survive: only those that were flushed, or all, as if the system had just written its journal.

A file system may do either, or anything between. The content of a file survives only if it was flushed.
"""


@dataclass
class Disk:
    """The names and contents below ``root`` that were flushed.

    It follows ``os.fsync`` and the functions that change names. What exists when it is created has been flushed.
    """

    root: Path
    events: list[tuple[str, ...]] = field(default_factory=list)
    """What was done, in order: ``("flush", name)``, ``("replace", name, name)`` and so on."""
    contents: dict[Inode, bytes] = field(default_factory=dict)
    """The content of each file when it was last flushed."""
    names: dict[Inode, dict[str, Inode]] = field(default_factory=dict)
    """The names in each folder when it was last flushed."""
    on_event: Callable[[], None] = lambda: None
    """Called after each event."""
    _handles: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        for path in (self.root, *self.root.rglob("*")):
            self._keep(path)

    def _keep(self, path: Path) -> None:
        """Take over the content of a file, or the names in a folder."""
        self._handles.append(os.open(path, os.O_RDONLY))  # so that no other file gets its number
        if path.is_dir():
            self.names[_inode(path)] = {each.name: self._known(each) for each in path.iterdir()}
        else:
            self.contents[_inode(path)] = path.read_bytes()

    def _known(self, path: Path) -> Inode:
        self._handles.append(os.open(path, os.O_RDONLY))
        return _inode(path)

    def flushed(self, descriptor: int) -> None:
        """Record the flush of a file or a folder. Those outside of the root are left out."""
        inode = _inode_of(os.fstat(descriptor))
        for path in (self.root, *self.root.rglob("*")):
            if _inode(path) == inode:
                self._keep(path)
                self.record("flush", path)
                return

    def record(self, what: str, *paths: Path) -> None:
        """Record an event."""
        self.events.append((what, *(str(path.relative_to(self.root)) for path in paths)))
        self.on_event()

    def fail(self, target: Path, names: Names) -> Path:
        """Write what survives a power failure now to the folder ``target``."""
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        if names == "flushed":
            self._write_flushed(_inode(self.root), target)
        else:
            for path in sorted(self.root.rglob("*")):
                copy = target / path.relative_to(self.root)
                copy.mkdir() if path.is_dir() else copy.write_bytes(self.contents.get(_inode(path), b""))
        return target

    def _write_flushed(self, folder: Inode, target: Path) -> None:
        for name, inode in self.names.get(folder, {}).items():
            if inode in self.contents:
                (target / name).write_bytes(self.contents[inode])
            elif inode in self.names:
                (target / name).mkdir()
                self._write_flushed(inode, target / name)
            else:  # the name was flushed before the content, and it is unknown whether it is a folder
                (target / name).touch()

    def close(self) -> None:
        """Close all files."""
        for handle in self._handles:
            os.close(handle)


def _inode_of(state: os.stat_result) -> Inode:
    return state.st_dev, state.st_ino


def _inode(path: Path) -> Inode:
    return _inode_of(path.lstat())


@contextmanager
def watched_disk(root: Path, *, on_event: Callable[[Disk], None] | None = None) -> Iterator[Disk]:
    """Follow the writes below a folder while the block runs.

    Args:
        root: the folder.
        on_event: called after each event, when a power failure may happen.
    """
    disk = Disk(root)
    if on_event is not None:
        disk.on_event = lambda: on_event(disk)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("replace", "rename", "mkdir", "rmdir", "unlink"):
            patch.setattr(os, name, _following(disk, name))
        fsync = os.fsync

        def follow_fsync(descriptor: int) -> None:
            fsync(descriptor)
            disk.flushed(descriptor)

        patch.setattr(os, "fsync", follow_fsync)
        try:
            yield disk
        finally:
            disk.close()


def _following(disk: Disk, name: str) -> Callable[..., Any]:
    original = getattr(os, name)

    def follow(*paths: Any, **options: Any) -> Any:
        result = original(*paths, **options)
        named = [Path(path) for path in paths if isinstance(path, str | Path)]
        if options.get("dir_fd") is None and all(path.is_relative_to(disk.root) for path in named):
            disk.record(name, *named)
        return result

    return follow
