"""Downloads, from a server on this machine that serves, stalls, breaks off and refuses."""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from envs.datasets.download import DownloadError, download

CONTENT = bytes(range(256)) * 4000  # about a megabyte


@dataclass
class Server:
    """What it shall do, request by request (the last for ever after), and what it was asked."""

    url: str = ""
    content: bytes = CONTENT
    behavior: list[str] = field(default_factory=lambda: ["serve"])
    ranges: list[str | None] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    etag: str | None = '"one"'
    released: threading.Event = field(default_factory=threading.Event)


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = self.headers.get("Range")
            state.ranges.append(wanted)
            state.paths.append(self.path)
            what = state.behavior[min(len(state.ranges), len(state.behavior)) - 1]
            if what.isdigit():
                self.send_error(int(what))
                return
            if wanted and self.headers.get("If-Range") != state.etag:
                wanted = None  # the file has changed: all of it
            begin = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and what != "whole" else 0
            if begin >= len(state.content):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(state.content)}")
                self.end_headers()
                return
            self.send_response(206 if begin else 200)
            self.send_header("Content-Length", str(len(state.content) - begin))
            if state.etag is not None:
                self.send_header("ETag", state.etag)
            self.end_headers()
            end = begin + 300_000 if what in ("break", "stall") else len(state.content)
            self.wfile.write(state.content[begin:end])
            if what == "stall":
                self.wfile.flush()
                state.released.wait(20)

        def log_message(self, *_: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    state.url = f"http://127.0.0.1:{http.server_port}/file.hdf5"
    yield state
    state.released.set()
    http.shutdown()
    http.server_close()
    thread.join()


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def get(server: Server, path: Path, **options: float) -> None:
    download(server.url, path, verify=lambda file: None, wait_seconds=0.01, stall_seconds=0.5, **options)  # type: ignore[arg-type]


def test_a_file_comes_whole(server: Server, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    get(server, tmp_path / "new" / "file.hdf5")
    assert (tmp_path / "new" / "file.hdf5").read_bytes() == CONTENT
    assert visible(tmp_path / "new") == ["file.hdf5"]
    assert server.ranges == [None]
    shown = capfd.readouterr().err
    assert shown.startswith("file.hdf5: 1.0 MiB in ")


@pytest.mark.parametrize("trouble", ["break", "stall", "503"])
def test_trouble_is_outlived_and_only_what_is_missing_is_asked_for(
    server: Server, tmp_path: Path, trouble: str
) -> None:
    server.behavior = [trouble, trouble, "serve"]
    get(server, tmp_path / "file.hdf5")
    assert (tmp_path / "file.hdf5").read_bytes() == CONTENT
    asked = [None, None, None] if trouble == "503" else [None, "bytes=300000-", "bytes=600000-"]
    assert server.ranges == asked


def test_what_came_is_kept_for_the_next_try(server: Server, tmp_path: Path) -> None:
    server.behavior = ["break", "503"]
    with pytest.raises(DownloadError, match=r"503.*the 300,000 bytes that came are kept"):
        get(server, tmp_path / "file.hdf5", attempts=2)
    assert not (tmp_path / "file.hdf5").exists()
    server.behavior = ["serve"]
    get(server, tmp_path / "file.hdf5")
    assert (tmp_path / "file.hdf5").read_bytes() == CONTENT
    assert server.ranges[-1] == "bytes=300000-"


def test_a_server_that_cannot_resume_starts_over(server: Server, tmp_path: Path) -> None:
    server.behavior = ["break", "whole"]
    get(server, tmp_path / "file.hdf5")
    assert (tmp_path / "file.hdf5").read_bytes() == CONTENT


def test_a_part_of_another_version_of_the_file_is_thrown_away(server: Server, tmp_path: Path) -> None:
    server.behavior = ["break", "503"]
    with pytest.raises(DownloadError):
        get(server, tmp_path / "file.hdf5", attempts=2)
    server.behavior = ["serve"]
    server.content, server.etag = CONTENT[::-1], '"two"'
    get(server, tmp_path / "file.hdf5")
    assert (tmp_path / "file.hdf5").read_bytes() == CONTENT[::-1]


def test_without_a_mark_of_the_version_it_starts_over(server: Server, tmp_path: Path) -> None:
    server.etag = None
    server.behavior = ["break", "serve"]
    get(server, tmp_path / "file.hdf5")
    assert (tmp_path / "file.hdf5").read_bytes() == CONTENT
    assert server.ranges == [None, None]


@pytest.mark.parametrize("extra", [0, 1])
def test_a_part_that_is_whole_is_taken_and_a_longer_one_is_not(server: Server, tmp_path: Path, extra: int) -> None:
    (tmp_path / "file.hdf5.part").write_bytes(CONTENT + b"x" * extra)
    (tmp_path / "file.hdf5.part.mark").write_text('"one"')
    get(server, tmp_path / "file.hdf5")
    assert (tmp_path / "file.hdf5").read_bytes() == CONTENT
    assert len(server.ranges) == 1 + extra


def test_progress_is_no_failure(server: Server, tmp_path: Path) -> None:
    server.behavior = ["break"]  # 300,000 bytes at a time: four requests
    get(server, tmp_path / "file.hdf5", attempts=2)
    assert (tmp_path / "file.hdf5").read_bytes() == CONTENT


def test_two_at_once_make_one_file(server: Server, tmp_path: Path) -> None:
    server.behavior = ["break"]
    threads = [threading.Thread(target=get, args=(server, tmp_path / "file.hdf5")) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "file.hdf5").read_bytes() == CONTENT
    assert len(server.ranges) == 4  # the second found it


def test_a_refusal_is_told_at_once(server: Server, tmp_path: Path) -> None:
    server.behavior = ["404"]
    with pytest.raises(DownloadError, match=r"127\.0\.0\.1.* answers 404 Not Found"):
        get(server, tmp_path / "file.hdf5")
    assert len(server.ranges) == 1


def test_a_name_that_nobody_has_is_told_at_once(tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(DownloadError, match=r"no-such-host\.invalid.* cannot be read"):
        download("http://no-such-host.invalid/x", tmp_path / "x", verify=lambda file: None, wait_seconds=10)
    assert time.monotonic() - start < 8


def test_a_stalled_server_is_given_up(server: Server, tmp_path: Path) -> None:
    server.behavior = ["stall"]
    with pytest.raises(DownloadError, match="the server stopped answering; the 300,000 bytes"):
        get(server, tmp_path / "file.hdf5", attempts=1)


def test_no_server_is_told(tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match=r"127\.0\.0\.1:9/.* cannot be read: .*refused"):
        download("http://127.0.0.1:9/file", tmp_path / "file", verify=lambda file: None, attempts=2, wait_seconds=0)
    assert not (tmp_path / "file").exists()


def test_what_is_not_what_was_expected_is_not_kept(server: Server, tmp_path: Path) -> None:
    def refuse(path: Path) -> None:
        assert path.read_bytes() == CONTENT
        raise ValueError("this is no HDF5")

    with pytest.raises(DownloadError, match="is not what was expected: this is no HDF5"):
        download(server.url, tmp_path / "file.hdf5", verify=refuse)
    assert visible(tmp_path) == []
