"""What a person sees of long work."""

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from primal_dt.system.terminal import Counter

ROOT = Path(__file__).parents[2]
ESCAPE = b"\x1b["


def test_where_there_is_no_terminal_a_count_is_whole_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = iter(float(second) for second in range(0, 1000, 20))
    monkeypatch.setattr("primal_dt.system.terminal.time.monotonic", lambda: next(seconds))
    with Counter("recording", total=4000, unit="steps") as counter:
        for _ in range(4):
            counter.update(1000)
    assert capsys.readouterr().err.splitlines() == [
        "recording: 2,000 of 4,000 steps, 40 s left",
        "recording: 4,000 of 4,000 steps, 0 s left",
        "recording: 4,000 steps in 100.0 s",
    ]


def test_what_was_there_before_does_not_count_as_speed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = iter((0.0, 40.0))
    monkeypatch.setattr("primal_dt.system.terminal.time.monotonic", lambda: next(seconds))
    Counter("file", total=10 * 2**20, unit="B", initial=6 * 2**20).update(2 * 2**20)
    assert capsys.readouterr().err == "file: 8.0 of 10.0 MiB, 40 s left\n"


def test_what_failed_is_not_reported_as_done(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="broken"), Counter("recording", total=None, unit="steps"):
        raise ValueError("broken")
    assert capsys.readouterr().err == ""


def shown_in_a_terminal(command: list[str], **variables: str) -> bytes:
    """What a program writes to a terminal."""
    leader, follower = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    environment |= {"TERM": "xterm", "PYTHONPATH": str(ROOT), **variables}
    process = subprocess.Popen(command, stdout=follower, stderr=follower, env=environment)
    os.close(follower)
    shown = b""
    try:
        while block := os.read(leader, 65536):
            shown += block
    except OSError:  # how Linux says that the other end is closed
        pass
    os.close(leader)
    process.wait()
    return shown


@pytest.mark.parametrize("program", [["train.py", "quick"], ["evaluate.py"], ["-m", "envs"]])
def test_help_has_colors_in_a_terminal_unless_they_are_not_wanted(program: list[str]) -> None:
    if program[0].endswith(".py"):
        program = [str(ROOT / program[0]), *program[1:]]
    command = [sys.executable, *program, "--help"]
    if program[0] == "-m":
        assert ESCAPE in shown_in_a_terminal(command)
    plain = shown_in_a_terminal(command, NO_COLOR="1")
    assert b"usage" in plain
    assert ESCAPE not in plain


@pytest.mark.parametrize("program", [["train.py"], ["evaluate.py"], ["-m", "envs"]])
def test_ctrl_c_while_a_program_imports_ends_it_without_a_traceback(program: list[str]) -> None:
    command = [sys.executable, "-X", "importtime", *program, "--help"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.rstrip().endswith("numpy._core"):  # what Python has imported by then; most is still to come
                process.send_signal(signal.SIGINT)
                break
        rest = process.stderr.read()
    assert process.returncode == -signal.SIGINT
    assert "Traceback" not in rest
