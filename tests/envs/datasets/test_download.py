"""Downloads from a server on this machine."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from envs.datasets.download import DownloadError, download
from tests.envs.datasets.conftest import CONTENT, Server

FILE = Path("file.hdf5")


def get(server: Server, path: Path = FILE, **options: Any) -> bytes:
    """Download the server's file, and return its content."""
    defaults: dict[str, Any] = {"verify": lambda path: None, "wait_seconds": 0.01, "stall_seconds": 0.5}
    download(server.url, path, **defaults | options)
    return path.read_bytes()


def test_a_download_is_complete(server: Server, capfd: pytest.CaptureFixture[str]) -> None:
    folder = Path("new")
    assert get(server, folder / "file.hdf5") == CONTENT
    assert [path.name for path in folder.iterdir() if not path.name.startswith(".")] == ["file.hdf5"]
    assert server.ranges == [None]
    assert capfd.readouterr().err.startswith("file.hdf5: 1.0 MiB in ")


@pytest.mark.slow
@pytest.mark.parametrize("trouble", ["break", "stall", "503"])
def test_an_interrupted_download_resumes(server: Server, trouble: str) -> None:
    server.behavior = [trouble, trouble, "serve"]
    assert get(server) == CONTENT
    assert server.ranges == ([None] * 3 if trouble == "503" else [None, "bytes=300000-", "bytes=600000-"])


def test_the_next_download_resumes(server: Server) -> None:
    server.behavior = ["break", "503"]
    with pytest.raises(DownloadError, match=r"503.*the 300,000 bytes received are saved"):
        get(server, attempts=2)
    assert not FILE.exists()
    server.behavior = ["serve"]
    assert get(server) == CONTENT
    assert server.ranges[-1] == "bytes=300000-"


def test_a_server_that_cannot_resume_starts_over(server: Server) -> None:
    server.behavior = ["break", "whole"]
    assert get(server) == CONTENT


def test_a_part_of_a_changed_file_is_discarded(server: Server) -> None:
    server.behavior = ["break", "503"]
    with pytest.raises(DownloadError):
        get(server, attempts=2)
    server.behavior, server.content, server.etag = ["serve"], CONTENT[::-1], '"two"'
    assert get(server) == CONTENT[::-1]


def test_without_an_etag_it_starts_over(server: Server) -> None:
    server.behavior, server.etag = ["break", "serve"], None
    assert get(server) == CONTENT
    assert server.ranges == [None, None]


@pytest.mark.parametrize("extra", [0, 1])
def test_only_a_complete_part_is_accepted(server: Server, extra: int) -> None:
    Path("file.hdf5.part").write_bytes(CONTENT + b"x" * extra)
    Path("file.hdf5.part.mark").write_text('"one"')
    assert get(server) == CONTENT
    assert len(server.ranges) == 1 + extra


def test_progress_resets_the_attempts(server: Server) -> None:
    server.behavior = ["break"]  # 300,000 bytes at a time: four requests
    assert get(server, attempts=2) == CONTENT


def test_concurrent_downloads_share_one_file(server: Server) -> None:
    server.behavior = ["break"]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(get, [server] * 2)) == [CONTENT] * 2
    assert len(server.ranges) == 4  # the requests of one download


def test_a_refused_request_is_not_repeated(server: Server) -> None:
    server.behavior = ["404"]
    with pytest.raises(DownloadError, match=r"127\.0\.0\.1.* returned 404 Not Found"):
        get(server)
    assert len(server.ranges) == 1


def test_an_unknown_host_fails_at_once() -> None:
    start = time.monotonic()
    with pytest.raises(DownloadError, match=r"no-such-host\.invalid.* cannot be downloaded"):
        get(Server("http://no-such-host.invalid/x"), wait_seconds=10)
    assert time.monotonic() - start < 8


def test_a_stalled_server_times_out(server: Server) -> None:
    server.behavior = ["stall"]
    with pytest.raises(DownloadError, match="the server stopped responding; the 300,000 bytes"):
        get(server, attempts=1)


def test_an_unreachable_server_is_reported() -> None:
    with pytest.raises(DownloadError, match=r"127\.0\.0\.1:9/.* cannot be downloaded: .*refused"):
        get(Server("http://127.0.0.1:9/file"), attempts=2)
    assert not FILE.exists()


def test_a_file_that_fails_verification_is_deleted(server: Server) -> None:
    def refuse(path: Path) -> None:
        assert path.read_bytes() == CONTENT
        raise ValueError("this is not HDF5")

    with pytest.raises(DownloadError, match="is not as expected: this is not HDF5"):
        get(server, verify=refuse)
    assert [path.name for path in Path().iterdir() if not path.name.startswith(".")] == []
