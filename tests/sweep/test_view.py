"""The display of a running sweep: a redrawn table in a terminal, plain lines in a pipe."""

import io
import json
import re
from pathlib import Path
from unittest.mock import Mock

import pytest

from primal_dt.config import PRESETS
from primal_dt.sweep import view as sweep_view
from primal_dt.sweep.grid import SWEEPS
from primal_dt.sweep.job import Job, jobs_of
from primal_dt.sweep.view import SweepView
from primal_dt.training.scalars import HEADLINE, PLAIN_HEADLINE


class Terminal(io.StringIO):
    """Interprets the control sequences that are written to it."""

    def isatty(self) -> bool:
        return True

    def screen(self) -> list[str]:
        lines: list[str] = []
        row = 0
        for up, erase, text in re.findall(r"\x1b\[(\d+)A|(\x1b\[J)|\x1b\[2K([^\n]*)\n", self.getvalue()):
            if up:
                row -= int(up)
            elif erase:
                del lines[row:]
            else:
                lines[row : row + 1] = [text]
                row += 1
        return lines


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """Six queued jobs. The terminal has 24 lines of 80 columns, and every poll redraws."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    monkeypatch.setattr(sweep_view, "REDRAW_SECONDS", -1.0)
    monkeypatch.setattr(SweepView, "_clock", lambda self: "0:00:00")
    (tmp_path / "jobs").mkdir()
    base = PRESETS["quick"][1]
    return jobs_of(SWEEPS["demo"], base, out=tmp_path, threads=1, device="cpu", fingerprint=lambda *_: "same")


def train(job: Job, step: int, score: float, attempts: int = 1) -> None:
    """Write the files of a job that is in training."""
    job.folder.mkdir()
    (job.folder / "metrics.jsonl").write_text(json.dumps({"step": step, HEADLINE: score}) + "\n")
    job.note(state="training", attempts=attempts, node="here")


def test_the_table_fits_80_columns(jobs: list[Job]) -> None:
    terminal = Terminal()
    train(jobs[4], 1700, 51.25, attempts=2)
    jobs[1].note(state="done", attempts=1, score=98.94)
    SweepView(jobs, terminal).poll()
    screen = terminal.screen()
    assert screen[0] == "0:00:00  4 queued, 1 running, 1 done, 0 failed"
    assert screen[2:5] == [
        "state                step of 5,000  score  job",
        "training, attempt 2          1,700   51.2  …opper-medium-expert-v0__softmax__s1",
        "done                             0   98.9  …r-medium-expert-v0__primal-plus__s1",
    ]
    assert all(line.startswith("queued") for line in screen[5:])
    assert len(screen) == 9


def test_the_table_is_redrawn_in_place_until_the_end(jobs: list[Job]) -> None:
    terminal = Terminal()
    view = SweepView(jobs, terminal)
    view.poll()
    for job in jobs:
        job.note(state="done", attempts=1, score=1.0)
    view.close()
    assert terminal.screen()[0].endswith("0 queued, 0 running, 6 done, 0 failed")
    assert len(terminal.screen()) == 9
    view.poll()  # after the end, output goes below the table
    assert len(terminal.screen()) == 18


def test_a_long_table_leaves_out_queued_jobs(jobs: list[Job], monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setenv("LINES", "9")
    jobs[5].note(state="failed", attempts=1, errors=("out of luck",))
    SweepView(jobs, terminal).poll()
    screen = terminal.screen()
    assert len(screen) == 8
    assert screen[3].startswith("failed")
    assert screen[-1] == "... and 2 more"


def test_the_reason_for_waiting_is_shown(jobs: list[Job]) -> None:
    """A terminal shows it until a job runs; a pipe shows it once."""
    terminal, pipe = Terminal(), io.StringIO()
    views = [SweepView(jobs, pipe), SweepView(jobs, terminal)]
    for view in views:
        view.wait("waiting: no node has room")
        view.poll()
        view.wait("waiting: no node has room")
    assert terminal.screen()[1] == "waiting: no node has room"
    assert pipe.getvalue().count("waiting: no node has room") == 1
    views[1].wait("")
    views[1].poll()
    assert terminal.screen()[1] == ""


def test_the_view_survives_file_system_errors(jobs: list[Job], monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = io.StringIO()
    view = SweepView(jobs, pipe)
    with monkeypatch.context() as patch:
        patch.setattr("primal_dt.sweep.job.open_regular", Mock(side_effect=OSError("stale file handle")))
        view.poll()
    assert pipe.getvalue() == ""
    view.poll()
    assert "6 queued" in pipe.getvalue()


@pytest.mark.parametrize("content", [b"\xff\n", b"5\n", b"{}\n", b"[" * 100_000, None])
def test_a_job_with_damaged_metrics_hides_no_other(jobs: list[Job], content: bytes | None) -> None:
    """The file has other content, or is a folder."""
    train(jobs[0], 300, 12.0)
    train(jobs[1], 600, 13.0)
    path = jobs[0].folder / "metrics.jsonl"
    path.unlink()
    path.mkdir() if content is None else path.write_bytes(content)
    terminal, pipe = Terminal(), io.StringIO()
    for stream in (terminal, pipe):
        SweepView(jobs, stream).poll()
    assert [line.split()[:2] for line in terminal.screen()[3:5]] == [["training", "0"], ["training", "600"]]
    assert f"{jobs[1].name}  step 600, score 13.0\n" in pipe.getvalue()


@pytest.mark.parametrize("change", [(b"{", b"\xff"), (b"training", b"traininh"), (b"{", b"[" * 100_000)])
def test_a_job_with_a_damaged_record_hides_no_other(jobs: list[Job], change: tuple[bytes, bytes]) -> None:
    """It counts as queued."""
    terminal = Terminal()
    train(jobs[0], 300, 12.0)
    train(jobs[1], 600, 13.0)
    path = jobs[0].log_path.with_suffix(".json")
    path.write_bytes(path.read_bytes().replace(*change))
    SweepView(jobs, terminal).poll()
    assert terminal.screen()[0] == "0:00:00  5 queued, 1 running, 0 done, 0 failed"


def test_a_pipe_gets_a_line_for_each_change(jobs: list[Job]) -> None:
    pipe = io.StringIO()
    view = SweepView(jobs, pipe)
    view.poll()
    train(jobs[0], 300, 12.0)
    view.poll()
    view.poll()
    view.end(jobs[0], jobs[0].note(state="failed", errors=("first\nit ended",)))
    view.end(jobs[1], jobs[1].note(state="done", attempts=1, score=7.0))
    view.close()
    first, *changes, last = pipe.getvalue().splitlines()
    assert not set(pipe.getvalue()) & {"\x1b", "\r"}
    assert first == "0:00:00  6 queued, 0 running, 0 done, 0 failed"
    assert changes == [
        f"0:00:00  training    {jobs[0].name}  on here",
        f"0:00:00  failed      {jobs[0].name}  it ended",
        f"0:00:00  done        {jobs[1].name}  score 7.0",
    ]
    assert last == "0:00:00  4 queued, 0 running, 1 done, 1 failed"


def test_plain_returns_are_not_called_scores(jobs: list[Job]) -> None:
    """They belong to tasks without reference returns, and are shown during the training and after it."""
    terminal, pipe = Terminal(), io.StringIO()
    train(jobs[0], 300, 0.0)
    (jobs[0].folder / "metrics.jsonl").write_text(json.dumps({"step": 300, PLAIN_HEADLINE: 0.625}) + "\n")
    done = jobs[1].note(state="done", attempts=1, score=0.25, is_plain=True)
    SweepView(jobs, terminal).poll()
    shown = "\n".join(terminal.screen())
    assert "  300  return 0.62  " in shown
    assert "  return 0.25  " in shown
    view = SweepView(jobs, pipe)
    view.end(jobs[1], done)
    view.poll()
    assert f"done        {jobs[1].name}  return 0.25\n" in pipe.getvalue()
    assert f"{jobs[0].name}  step 300, return 0.62\n" in pipe.getvalue()


def test_a_pipe_gets_steps_and_scores(jobs: list[Job]) -> None:
    pipe = io.StringIO()
    train(jobs[2], 1200, 33.04)
    SweepView(jobs, pipe).poll()
    assert f"\n           {jobs[2].name}  step 1,200, score 33.0\n" in pipe.getvalue()
