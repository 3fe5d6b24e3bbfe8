"""An HTTP server on this machine that serves, stalls, disconnects and refuses."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

CONTENT = bytes(range(256)) * 4000  # about a megabyte


@dataclass
class Server:
    """The server's behavior and the requests it received."""

    url: str = ""
    content: bytes = CONTENT
    behavior: list[str] = field(default_factory=lambda: ["serve"])
    """What to do at each request; the last entry applies to all further requests."""
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
            behavior = state.behavior[min(len(state.ranges), len(state.behavior)) - 1]
            if behavior.isdigit():
                self.send_error(int(behavior))
                return
            if self.headers.get("If-Range") != state.etag or behavior == "whole":
                wanted = None  # the file has changed, or the server cannot resume
            begin = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted else 0
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
            end = begin + 300_000 if behavior in ("break", "stall") else len(state.content)
            self.wfile.write(state.content[begin:end])
            if behavior == "stall":
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
