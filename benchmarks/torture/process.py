"""Programs in forked processes, which need not import torch again, and ways to sabotage them."""

import builtins
import io
import os
import resource
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["Outcome", "Process", "Sabotage", "limit_file_size", "limit_memory", "on_calls"]

Sabotage = Callable[[], None]
"""Called in a new process before its program."""
POLL_SECONDS = 0.002
PATIENCE = 120.0
"""Seconds after which a program that should end counts as hanging. Machines may be busy."""
CALLS = ("fsync", "replace", "rename", "mkdir", "unlink", "open")
"""Functions of the module ``os`` that change or open files. The built-in ``open`` is another."""


@dataclass(frozen=True)
class Outcome:
    """How a program ended."""

    command: str
    code: int
    """The exit code, or the negative number of the signal that ended it."""
    out: str
    err: str

    @property
    def has_traceback(self) -> bool:
        """Whether it printed a traceback."""
        return "Traceback (most recent call last)" in self.err + self.out

    @property
    def is_clear(self) -> bool:
        """Whether it succeeded, or failed with a message and without a traceback."""
        is_explained = (self.code > 0 and "error:" in self.err) or (self.code == 2 and bool(self.err))  # 2: of tyro
        return (self.code == 0 or is_explained) and not self.has_traceback

    def __str__(self) -> str:
        return f"{self.command}\nexit code {self.code}\n{self.out[-1000:]}{self.err[-4000:]}"


class Process:
    """A program that runs in a process of its own.

    Args:
        main: the program's main function.
        command: its command line, with its name first.
        folder: the working folder.
        sabotage: called in the new process before the program.
    """

    def __init__(
        self,
        main: Callable[[], int | None],
        command: Sequence[str],
        folder: Path,
        sabotage: Sabotage | None = None,
    ) -> None:
        self._command = shlex.join(command)
        sys.stdout.flush()
        sys.stderr.flush()
        pipes = [os.pipe(), os.pipe()]  # not files, whose size may be limited
        self._printed = [read for read, _ in pipes]
        self._code: int | None = None
        with _without_signals():
            self._pid = os.fork()
            if self._pid == 0:
                for descriptor, (_, write) in enumerate(pipes, 1):
                    os.dup2(write, descriptor)
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                os.setpgrp()  # so that processes which it starts can be killed with it
        if self._pid == 0:
            _run(main, command, folder, sabotage)
        for _, write in pipes:
            os.close(write)

    def has_ended(self, seconds: float = 0.0) -> bool:
        """Wait at most that long for its end."""
        end = time.monotonic() + seconds
        while self._code is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() >= end:
                return False
            else:
                time.sleep(POLL_SECONDS)
        return True

    def send(self, number: int) -> None:
        """Send a signal, if it has not ended."""
        if not self.has_ended():
            os.kill(self._pid, number)

    def outcome(self) -> Outcome:
        """Wait for its end. A program that hangs is killed, and its outcome says so."""
        is_hanging = not self.has_ended(PATIENCE)
        if is_hanging:
            self.send(signal.SIGKILL)
            self.has_ended(PATIENCE)
        with suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        texts = [_read(descriptor) for descriptor in self._printed]
        assert self._code is not None
        return Outcome(self._command, self._code, texts[0], texts[1] + "it hung and was killed" * is_hanging)


def _read(descriptor: int) -> str:
    """Read all that is left in a pipe, and close it. Processes of the program may still hold its other end."""
    os.set_blocking(descriptor, False)
    content = b""
    with suppress(BlockingIOError):
        while block := os.read(descriptor, 2**20):
            content += block
    os.close(descriptor)
    return content.decode(errors="replace")


@contextmanager
def _without_signals() -> Iterator[None]:
    """Defer signals, in this process and in one that it forks."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run(main: Callable[[], int | None], command: Sequence[str], folder: Path, sabotage: Sabotage | None) -> NoReturn:
    """Run a program in this process, which ends with it."""
    code: Any = 1
    try:
        os.chdir(folder)
        sys.argv = list(command)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", encoding="utf-8", errors="replace") for number in (1, 2))
        if sabotage is not None:
            sabotage()
        code = main()
    except SystemExit as stop:
        code = stop.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))


def on_calls(folder: Path, action: Callable[[int, object], None]) -> Sabotage:
    """Call a function before each call that opens a file below a folder, flushes, renames or deletes.

    Args:
        folder: the folder.
        action: called with the number of the call, from 1, and its first argument. If it raises, the call fails.
    """

    def sabotage() -> None:
        numbers = count(1)

        def watched(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                if arguments and _is_below(arguments[0], folder):
                    action(next(numbers), arguments[0])
                return original(*arguments, **options)

            return call

        for name in CALLS:
            setattr(os, name, watched(getattr(os, name)))
        builtins.open = io.open = watched(open)

    return sabotage


def _is_below(path: Any, folder: Path) -> bool:
    """Whether a path or a descriptor may be in a folder."""
    return isinstance(path, int) or Path(os.fsdecode(path)).absolute().is_relative_to(folder)


def limit_file_size(num_bytes: int) -> Sabotage:
    """Limit the size of files that the process writes."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


def limit_memory(num_bytes: int) -> Sabotage:
    """Limit the memory that the process may take in addition to what it has."""

    def sabotage() -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + num_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))

    return sabotage
