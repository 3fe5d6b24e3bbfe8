"""Atomic writes, and checks of files, folders and space."""

import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest

from primal_dt.system.files import (
    atomic_write,
    check_folder,
    check_space,
    check_writable,
    lock_folder,
    move,
    open_regular,
)
from primal_dt.system.terminal import explain
from tests.conftest import file_size_limit
from tests.system.disk import Disk, Names, watched_disk

KINDS: dict[str, Callable[[Path, Path], object]] = {
    "link": lambda path, outside: path.symlink_to(outside),
    "link to nothing": lambda path, outside: path.symlink_to(outside.with_name("nothing")),
    "pipe": lambda path, outside: os.mkfifo(path),
    "folder": lambda path, outside: path.mkdir(),
}
"""What is not a regular file."""


@pytest.fixture(params=KINDS)
def irregular(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A path that is not a regular file. A link leads to the file ``outside``."""
    (tmp_path / "outside").write_text("secret\n")
    folder = tmp_path / "folder"
    folder.mkdir()
    KINDS[request.param](folder / ".lock", tmp_path / "outside")
    return folder / ".lock"


def test_file_appears_complete_with_usual_permissions(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    with atomic_write(path) as file:
        file.write(b"one")
        assert not path.exists()
    assert path.read_bytes() == b"one"
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


def test_content_is_flushed_before_its_name(tmp_path: Path) -> None:
    """In this order: else a name may survive a power failure without its content."""
    with watched_disk(tmp_path) as disk:
        write_atomically(tmp_path / "new" / "file")
    partial = f"new/.file.{os.getpid()}-{threading.get_ident()}.partial"
    assert disk.events == [
        ("mkdir", "new"),
        ("flush", "."),
        ("flush", partial),
        ("replace", partial, "new/file"),
        ("flush", "new"),
    ]


def test_both_folders_of_a_moved_file_are_flushed(tmp_path: Path) -> None:
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    (tmp_path / "old" / "file").touch()
    with watched_disk(tmp_path) as disk:
        move(tmp_path / "old" / "file", tmp_path / "new" / "file")
    replaced = ("replace", "old/file", "new/file")
    assert disk.events == [("flush", "old/file"), replaced, ("flush", "new"), ("flush", "old")]


@pytest.mark.parametrize("names", get_args(Names))
def test_a_power_failure_leaves_the_old_file_or_the_new(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, names: Names
) -> None:
    path, rest, seen = tmp_path / "file", tmp_path_factory.mktemp("rest"), []
    path.write_bytes(b"before")

    def fail(disk: Disk) -> None:
        seen.append((disk.fail(rest / "disk", names) / "file").read_bytes())

    with watched_disk(tmp_path, on_event=fail):
        write_atomically(path)
    assert set(seen) == {b"before", b"one"}
    assert seen == sorted(seen)  # never the old one again
    assert seen[-1] == b"one"


def test_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"before")

    def write_half() -> None:
        with atomic_write(path) as file:
            file.write(b"half of wh")
            raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        write_half()
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


def test_unwritable_folders_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_writable(tmp_path / "new" / "folder")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        check_writable(tmp_path / "file" / "folder")
    monkeypatch.setattr("primal_dt.system.files.os.access", lambda path, mode: path != tmp_path)  # root may write
    with pytest.raises(PermissionError) as caught:
        check_writable(tmp_path / "new" / "folder")
    message = f"{tmp_path} cannot be used: no permission to write there. Set another folder"
    assert explain(caught.value).startswith(message)


def write_atomically(path: Path) -> None:
    with atomic_write(path) as file:
        file.write(b"one")


def lock(path: Path) -> None:
    with lock_folder(path.parent, "in use"):
        pass


@pytest.mark.parametrize(
    "use",
    [
        write_atomically,
        lock,
        lambda path: open_regular(path, "rb"),
        lambda path: open_regular(path, "ab"),
        lambda path: open_regular(path, "a+b"),
    ],
    ids=["atomic write", "lock", "read", "append", "read and append"],
)
def test_what_is_not_a_regular_file_is_refused(irregular: Path, use: Callable[[Path], object]) -> None:
    mode = irregular.lstat().st_mode
    with pytest.raises(OSError, match="not a regular file") as caught:
        use(irregular)
    assert explain(caught.value).startswith(f"{irregular} cannot be used: it is a link, a pipe")
    assert irregular.lstat().st_mode == mode
    assert sorted(path.name for path in irregular.parent.iterdir()) == [".lock"]
    assert (irregular.parents[1] / "outside").read_text() == "secret\n"
    assert not (irregular.parents[1] / "nothing").exists()


def test_files_in_a_linked_folder_are_used(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    path = tmp_path / "runs" / "file"
    write_atomically(path)
    with open_regular(path, "ab") as file:
        file.write(b", two")
    assert path.read_bytes() == b"one, two"


def test_a_prepared_link_is_not_written_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of the partial file can be guessed."""
    (tmp_path / "outside").write_text("secret")
    monkeypatch.setattr("primal_dt.system.files.threading.get_ident", lambda: 7)
    (tmp_path / f".file.{os.getpid()}-7.partial").symlink_to(tmp_path / "outside")
    write_atomically(tmp_path / "file")
    assert (tmp_path / "outside").read_text() == "secret"


def test_a_linked_folder_is_refused_where_it_is_ours(tmp_path: Path) -> None:
    check_folder(tmp_path / "new")
    check_folder(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(OSError, match="it is a link, a pipe or a file"):
        check_folder(tmp_path / "link")


def test_a_failed_write_names_its_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with pytest.raises(OSError) as caught, file_size_limit(2), atomic_write(path) as file:  # noqa: PT011
        file.write(b"three")
    assert explain(caught.value) == f"{path} cannot be used: File too large. Raise the limit of file sizes (ulimit -f)"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="the system cannot reserve space")
def test_missing_space_is_found_in_advance(tmp_path: Path) -> None:
    with file_size_limit(100_000):
        check_space(tmp_path, 60_000)
        check_space(tmp_path, 60_000, start=40_000)
        with pytest.raises(OSError, match="File too large"):
            check_space(tmp_path, 60_000, start=50_000)
    with pytest.raises(OSError, match=r"No space left|File too large"):
        check_space(tmp_path, 2**60)
    assert list(tmp_path.iterdir()) == []
