"""The torture test: it finds nothing to complain about, and it would."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.torture.flags import PROGRAMS, random_command
from benchmarks.torture.invariants import State, check_files, state_of
from benchmarks.torture.process import Outcome, Process, limit_file_size, on_calls
from benchmarks.torture.world import NAME, InvariantError

ROOT = Path(__file__).parents[2]
POINTS = b'{"step": 2}\n{"step": 4}\n{"step": 6}\n'
BEFORE: State = {
    "home/secret": b"secret",
    f"minari/{NAME}/data/metadata.json": b"{}",
    "runs/a/config.json": b"{}",
    "runs/a/metrics.jsonl": POINTS,
    "runs/a/checkpoints/step-000000004.pt": b"four",
    "runs/a/checkpoints/step-000000006.pt": b"six",
    "runs/a/evaluations/x.jsonl": b"one\n",
}


@pytest.mark.slow
def test_half_a_minute_of_torture(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.torture", "--minutes", "0.5", "--seed", "7", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("| all"))
    assert int(line.split("|")[2].replace(",", "")) >= 6, "hardly any attack in half a minute"


@pytest.mark.parametrize(
    "changes",
    [
        {"home/secret": b"changed"},
        {"home/secret": None},
        {"elsewhere": b"new"},
        {f"minari/{NAME}/data/metadata.json": b"other"},
        {"runs/a/config.json": b"other"},
        {"runs/a/metrics.jsonl": POINTS[12:]},
        {"runs/a/metrics.jsonl": None},
        {"runs/a/checkpoints/step-000000006.pt": None},
        {"runs/a/checkpoints/step-000000004.pt": None},
        {"runs/a/evaluations/x.jsonl": b""},
        {"runs/a/evaluations/x.jsonl": None},
        {"runs/a/evaluations/x.jsonl": "link to home/secret"},
    ],
    ids=str,
)
def test_losses_and_foreign_writes_are_noticed(changes: dict[str, bytes | str | None]) -> None:
    changed = {name: content for name, content in (BEFORE | changes).items() if content is not None}
    with pytest.raises(InvariantError):
        check_files(BEFORE, changed, program="resume")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"runs/b/config.json": b"{}", "reports/report.md": b"", "cache/note": b""},
        {"runs/a/metrics.jsonl": POINTS + b'{"step": 8}\n', "runs/a/evaluations/x.jsonl": b"one\ntwo\n"},
        {"runs/a/metrics.jsonl": POINTS[:24], "runs/a/checkpoints/step-000000006.pt": None},
        {"runs/a/checkpoints/step-000000006.pt": None, "runs/a/checkpoints/step-000000006.pt.damaged": b"six"},
        {"runs/a/checkpoints/step-000000004.pt": None, "runs/a/checkpoints/step-000000008.pt": b"eight"},
        {"runs/a/metrics.jsonl": POINTS[12:], "runs/a/metrics.jsonl.damaged": POINTS},
    ],
    ids=str,
)
def test_usual_changes_are_allowed(changes: dict[str, bytes | None]) -> None:
    before = dict(BEFORE)
    if changes.get("runs/a/metrics.jsonl") == POINTS[:24]:  # the point after the last checkpoint is computed again
        del before["runs/a/checkpoints/step-000000006.pt"]
    changed = {name: content for name, content in (BEFORE | changes).items() if content is not None}
    check_files(before, changed, program="resume")


def test_a_state_has_links_and_pipes(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("folder")
    os.mkfifo(tmp_path / "pipe")
    state = state_of(tmp_path)
    assert state.pop("pipe") not in ("", b"")
    assert state == {"folder/file": b"content", "link": "link to folder"}


@pytest.mark.parametrize(
    ("code", "err", "is_clear"),
    [
        (0, "", True),
        (1, "error: no", True),
        (2, "Parsing error", True),
        (2, "", False),
        (1, "", False),
        (-11, "error: no", False),
        (0, "Traceback (most recent call last):", False),
        (1, "error: no\nTraceback (most recent call last):", False),
    ],
)
def test_an_outcome_is_a_success_or_a_message(code: int, err: str, is_clear: bool) -> None:
    assert Outcome("train.py", code, "", err).is_clear == is_clear


def write_two_files() -> int:
    for name in ("one", "two"):
        Path(name).write_bytes(b"x" * 1000)
    print("done")
    return 0


def test_programs_are_sabotaged(tmp_path: Path) -> None:
    assert Process(write_two_files, ["x"], tmp_path).outcome().out == "done\n"
    for path in tmp_path.iterdir():
        path.unlink()

    def fail(number: int, path: object) -> None:
        if number == 2:
            raise OSError(28, "full", str(path))

    outcome = Process(write_two_files, ["x"], tmp_path, on_calls(tmp_path, fail)).outcome()
    assert (outcome.code, outcome.has_traceback, outcome.is_clear) == (1, True, False)
    assert state_of(tmp_path) == {"one": b"x" * 1000}
    outcome = Process(write_two_files, ["x"], tmp_path, limit_file_size(10)).outcome()
    assert "File too large" in outcome.err


def test_random_flags_reach_every_flag() -> None:
    """And the same seed gives the same command."""
    assert random_command(random.Random("a")) == random_command(random.Random("a"))
    chance, seen = random.Random(0), set()
    for _ in range(20_000):
        seen |= set(random_command(chance))
    for _, flags in PROGRAMS:
        assert {f"--{name.replace('_', '-')}" for name in flags} <= seen
