"""Downloads that go on where they stopped."""

import os
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path

from tqdm import tqdm

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
        path: to where. Until then it is ``path`` with ``.part`` at its end, and a later call goes on with that.
        verify: called with the whole file; raises ``ValueError`` if it is not what was expected.
        attempts: how often to try, in a row without a byte of progress.
        stall_seconds: how long a server may say nothing.
        wait_seconds: before another attempt.

    Raises:
        DownloadError: if it cannot be had, or is not what was expected.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    failures = 0
    while True:
        before = part.stat().st_size if part.exists() else 0
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
        now = part.stat().st_size if part.exists() else 0
        failures = 1 if now > before else failures + 1
        unreachable = isinstance(getattr(reason, "reason", None), socket.gaierror)  # no such name, or no network
        if failures >= attempts or unreachable:
            kept = f"; the {now:,} bytes that came are kept, and the next try goes on from there" if now else ""
            raise DownloadError(f"{url} cannot be read: {_said(reason)}{kept}") from reason
        time.sleep(wait_seconds)
    try:
        verify(part)
    except ValueError as error:
        part.unlink()
        raise DownloadError(f"what came from {url} is not what was expected: {error}") from error
    os.replace(part, path)


def _fetch(url: str, part: Path, stall_seconds: float) -> None:
    """Add to the partial file what is missing of it.

    Raises:
        OSError: if the connection fails, stalls or ends early.
    """
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        response = urllib.request.urlopen(request, timeout=stall_seconds)
    except urllib.error.HTTPError as error:
        if error.code == 416 and have:  # there is nothing after what we have: it is whole, or another file
            error.close()
            total = (error.headers.get("Content-Range") or "").rpartition("/")[2]
            if total == str(have):
                return
            part.unlink()
            raise OSError("what was kept of an earlier try is longer than the file") from error
        raise
    with response:
        resumed = response.status == 206
        have = have if resumed else 0
        length = response.headers.get("Content-Length")
        total_bytes = None if length is None else have + int(length)
        with (
            part.open("ab" if resumed else "wb") as file,
            tqdm(
                desc=part.name.removesuffix(".part"),
                total=total_bytes,
                initial=have,
                unit="B",
                unit_scale=True,
                unit_divisor=1024,
            ) as progress,
        ):
            while block := response.read1(BLOCK):
                file.write(block)
                progress.update(len(block))
    size = part.stat().st_size
    if total_bytes is not None and size != total_bytes:
        raise OSError(f"the server broke off after {size:,} of {total_bytes:,} bytes")


def _said(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "the server stopped answering"
    if isinstance(error, urllib.error.URLError) and isinstance(error.reason, Exception):
        return _said(error.reason)
    return str(error) or type(error).__name__
