"""Resumable downloads."""

import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path

from filelock import FileLock

from primal_dt.system.files import make_folder, move, open_regular
from primal_dt.system.terminal import Counter

__all__ = ["DownloadError", "download"]

BLOCK = 1 << 16


class DownloadError(RuntimeError):
    """A failed download. The message names the URL and the reason."""


def download(
    url: str,
    path: Path,
    *,
    verify: Callable[[Path], object],
    attempts: int = 5,
    stall_seconds: float = 30.0,
    wait_seconds: float = 2.0,
) -> None:
    """Download a file. It appears at ``path`` only when it is complete and verified.

    Incomplete data is saved beside it with the suffix ``.part``. A later call resumes from there if the server confirms
    that its file has not changed. If two processes download the same file, the second waits and finds it complete.

    Args:
        url: the URL to download.
        path: the path to save the file to.
        verify: called with the path of the complete file; raises an exception if the content is not as expected.
        attempts: the maximum number of consecutive attempts without progress.
        stall_seconds: the timeout if the server sends nothing.
        wait_seconds: the pause between attempts.

    Raises:
        DownloadError: if the file cannot be downloaded, or if ``verify`` rejects it.
    """
    make_folder(path.parent)
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
                    raise DownloadError(f"{url} returned {error.code} {error.reason}") from error
                reason: Exception = error
            except (OSError, HTTPException) as error:
                reason = error
            failures = 1 if part.size > before else failures + 1
            unreachable = isinstance(getattr(reason, "reason", None), socket.gaierror)  # unknown host, or no network
            if failures >= attempts or unreachable:
                saved = f"; the {part.size:,} bytes received are saved for the next attempt" if part.size else ""
                raise DownloadError(f"{url} cannot be downloaded: {_describe(reason)}{saved}") from reason
            time.sleep(wait_seconds)
        try:
            verify(part.path)
        except Exception as error:
            part.discard()
            raise DownloadError(f"the file from {url} is not as expected: {error}") from error
        move(part.path, path)
        part.discard()


class _Part:
    """An incomplete download, and the mark (ETag or Last-Modified) of the server's version of the file."""

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
    """Download the missing rest of a partial file.

    Raises:
        OSError: if the connection fails, stalls or ends early.
    """
    headers = {}
    if part.size and part.mark is not None:  # without a mark, the server's file may have changed
        headers = {"Range": f"bytes={part.size}-", "If-Range": part.mark}
    try:
        response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=stall_seconds)
    except urllib.error.HTTPError as error:
        if error.code != 416 or not headers:
            raise
        error.close()  # nothing follows our bytes: the partial file is complete or too long
        if (error.headers.get("Content-Range") or "").rpartition("/")[2] == str(part.size):
            return
        part.discard()
        raise OSError("the partial file of an earlier attempt is longer than the server's file") from error
    with response:
        if response.status != 206:
            part.begin(response.headers.get("ETag") or response.headers.get("Last-Modified"))
        have, length = part.size, response.headers.get("Content-Length")
        total = None if length is None else have + int(length)
        name = part.path.name.removesuffix(".part")
        with (
            open_regular(part.path, "ab") as file,
            Counter(name, total=total, unit="B", initial=have) as progress,
        ):
            while block := response.read1(BLOCK):
                file.write(block)
                progress.update(len(block))
    if total is not None and part.size < total:
        raise OSError(f"the connection ended after {part.size:,} of {total:,} bytes")


def _describe(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "the server stopped responding"
    if isinstance(error, urllib.error.URLError) and isinstance(error.reason, Exception):
        return _describe(error.reason)
    return str(error) or type(error).__name__
