"""Atomic writes, and checks of folders."""

import os
import stat
from pathlib import Path

import pytest

from primal_dt.system.files import atomic_write, check_writable
from primal_dt.system.terminal import explain


def test_file_appears_complete_with_usual_permissions(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    with atomic_write(path) as file:
        file.write(b"one")
        assert not path.exists()
    assert path.read_bytes() == b"one"
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


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
