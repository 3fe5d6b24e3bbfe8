"""Progress lines, colors and Ctrl-C."""

import os
import pty
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from primal_dt.system.terminal import Counter

ROOT = Path(__file__).parents[2]
ESCAPE = b"\x1b["


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that advances 20 seconds whenever it is read."""
    seconds = iter(range(0, 1000, 20))
    monkeypatch.setattr("primal_dt.system.terminal.time.monotonic", lambda: float(next(seconds)))


@pytest.mark.usefixtures("clock")
def test_without_terminal_progress_is_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with Counter("recording", total=4000, unit="steps") as counter:
        for _ in range(4):
            counter.update(1000)
    assert capsys.readouterr().err.splitlines() == [
        "recording: 2,000 of 4,000 steps, 40 s left",
        "recording: 4,000 of 4,000 steps, 0 s left",
        "recording: 4,000 steps in 100.0 s",
    ]


@pytest.mark.usefixtures("clock")
def test_initial_count_is_excluded_from_the_speed(capsys: pytest.CaptureFixture[str]) -> None:
    counter = Counter("file", total=10 * 2**20, unit="B", initial=6 * 2**20)
    counter.update(2**20)  # too early for a line
    counter.update(2**20)
    assert capsys.readouterr().err == "file: 8.0 of 10.0 MiB, 40 s left\n"


def test_failed_work_is_not_reported_as_done(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="broken"), Counter("recording", total=None, unit="steps"):
        raise ValueError("broken")
    assert capsys.readouterr().err == ""


def terminal_output(command: list[str], **variables: str) -> bytes:
    """Run a program in a terminal, and return what it shows."""
    leader, follower = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    environment |= {"TERM": "xterm", "PYTHONPATH": str(ROOT), **variables}
    process = subprocess.Popen(command, stdout=follower, stderr=follower, env=environment, cwd=ROOT)
    os.close(follower)
    shown = b""
    with suppress(OSError):  # raised by Linux when the other end is closed
        while block := os.read(leader, 65536):
            shown += block
    os.close(leader)
    process.wait()
    return shown


@pytest.mark.slow
@pytest.mark.parametrize("program", [["train.py", "quick"], ["evaluate.py"], ["-m", "envs"]])
def test_help_has_colors_unless_no_color_is_set(program: list[str]) -> None:
    command = [sys.executable, *program, "--help"]
    if program[0] == "-m":
        assert ESCAPE in terminal_output(command)
    plain = terminal_output(command, NO_COLOR="1")
    assert b"usage" in plain
    assert ESCAPE not in plain


@pytest.mark.parametrize("program", [["train.py", "--dataset", "x"], ["evaluate.py", "x"], ["-m", "envs", "--help"]])
def test_ctrl_c_during_imports_shows_no_traceback(program: list[str]) -> None:
    command = [sys.executable, "-X", "importtime", *program]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.rstrip().endswith("numpy._core"):  # most imports are still to come
                process.send_signal(signal.SIGINT)
                break
        rest = process.stderr.read()
    assert process.returncode == -signal.SIGINT
    assert "Traceback" not in rest


CALLBACK = """
import os, signal, time, weakref
from primal_dt.system.terminal import begin_program

class Thing: pass

begin_program()
thing = Thing()
reference = weakref.ref(thing, lambda _: os.kill(os.getpid(), signal.SIGINT))
try:
    del thing
    time.sleep(10)
except KeyboardInterrupt:
    print("stopped")
"""


def test_ctrl_c_in_a_callback_is_not_ignored() -> None:
    done = subprocess.run([sys.executable, "-c", CALLBACK], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("stopped\n", "")
