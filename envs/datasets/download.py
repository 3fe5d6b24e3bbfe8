"""Downloads that go on where they stopped."""

import os
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path

from filelock import FileLock

from primal_dt.system.terminal import Counter

__all__ = ["DownloadError", "download"]

BLOCK = 1 << 16


class DownloadError(RuntimeError):
    """A file that could not be had: from where, and why."""


def download(
    url: str,
    path: Path,
    *,
    verify: Callable[[Path], object],
    attempts: int = 5,
    stall_seconds: float = 30.0,
    wait_seconds: float = 2.0,
) -> None:
    """Fetch a file. It appears under its name when it is whole and verified; what came so far is kept beside it.

    Args:
        url: from where.
        path: to where. Until then it is ``path`` with ``.part`` at its end, and a later call goes on with that, if the
            server says that its file has not changed. Two processes take turns; the second finds the file.
        verify: called with the whole file; raises something if it is not what was expected.
        attempts: how often to try, in a row without a byte of progress.
        stall_seconds: how long a server may say nothing.
        wait_seconds: before another attempt.

    Raises:
        DownloadError: if it cannot be had, or is not what was expected.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = _Part(path)
    with FileLock(path.with_name(f".{path.name}.lock")):
        if path.exists():
            return
        failures = 0
        while True:
            before = part.size
            try:
                _fetch(url, part, stall_seconds)
                break
            except urllib.error.HTTPError as error:
                error.close()
                if error.code < 500:
                    raise DownloadError(f"{url} answers {error.code} {error.reason}") from error
                reason: Exception = error
            except (OSError, HTTPException) as error:
                reason = error
            failures = 1 if part.size > before else failures + 1
            unreachable = isinstance(getattr(reason, "reason", None), socket.gaierror)  # no such name, or no network
            if failures >= attempts or unreachable:
                kept = f"; the {part.size:,} bytes that came are kept for the next try" if part.size else ""
                raise DownloadError(f"{url} cannot be read: {_said(reason)}{kept}") from reason
            time.sleep(wait_seconds)
        try:
            verify(part.path)
        except Exception as error:
            part.discard()
            raise DownloadError(f"what came from {url} is not what was expected: {error}") from error
        os.replace(part.path, path)
        part.discard()


class _Part:
    """What came so far, and by which mark its server knows the version of the file."""

    def __init__(self, path: Path) -> None:
        self.path = path.with_name(path.name + ".part")
        self._mark = path.with_name(path.name + ".part.mark")

    @property
    def size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    @property
    def mark(self) -> str | None:
        return self._mark.read_text() if self._mark.exists() else None

    def begin(self, mark: str | None) -> None:
        self.discard()
        if mark is not None:
            self._mark.write_text(mark)

    def discard(self) -> None:
        self.path.unlink(missing_ok=True)
        self._mark.unlink(missing_ok=True)


def _fetch(url: str, part: _Part, stall_seconds: float) -> None:
    """Add to the partial file what is missing of it.

    Raises:
        OSError: if the connection fails, stalls or ends early.
    """
    headers = {}
    if part.size and part.mark is not None:  # without a mark the server's file may be another by now
        headers = {"Range": f"bytes={part.size}-", "If-Range": part.mark}
    try:
        response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=stall_seconds)
    except urllib.error.HTTPError as error:
        if error.code != 416 or not headers:
            raise
        error.close()  # there is nothing after what we have: it is whole, or longer than it should be
        if (error.headers.get("Content-Range") or "").rpartition("/")[2] == str(part.size):
            return
        part.discard()
        raise OSError("what was kept of an earlier try is longer than the file") from error
    with response:
        if response.status != 206:
            part.begin(response.headers.get("ETag") or response.headers.get("Last-Modified"))
        have, length = part.size, response.headers.get("Content-Length")
        total = None if length is None else have + int(length)
        name = part.path.name.removesuffix(".part")
        with (
            part.path.open("ab") as file,
            Counter(name, total=total, unit="B", initial=have) as progress,
        ):
            while block := response.read1(BLOCK):
                file.write(block)
                progress.update(len(block))
    if total is not None and part.size < total:
        raise OSError(f"the server broke off after {part.size:,} of {total:,} bytes")


def _said(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "the server stopped answering"
    if isinstance(error, urllib.error.URLError) and isinstance(error.reason, Exception):
        return _said(error.reason)
    return str(error) or type(error).__name__
