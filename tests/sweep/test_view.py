"""What a person sees of a sweep that runs."""

import io
import json
import re
from pathlib import Path

import pytest

from primal_dt.config import PRESETS
from primal_dt.sweep import view as sweep_view
from primal_dt.sweep.grid import SWEEPS, jobs_of
from primal_dt.sweep.job import Job, JobRecord
from primal_dt.sweep.view import SweepView
from primal_dt.training.scalars import HEADLINE


class Terminal(io.StringIO):
    """Keeps what a terminal would show of what is written."""

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
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    monkeypatch.setattr(sweep_view, "REDRAW_SECONDS", -1.0)
    monkeypatch.setattr(SweepView, "_clock", lambda self: "0:00:00")
    made = jobs_of(
        SWEEPS["demo"], PRESETS["quick"][1], out=tmp_path, threads=1, device="cpu", fingerprint=lambda *_: "same"
    )
    for job in made:
        job.log_path.parent.mkdir(exist_ok=True)
    return made


def trained(job: Job, step: int, score: float) -> None:
    job.folder.mkdir(exist_ok=True)
    (job.folder / "metrics.jsonl").write_text(json.dumps({"step": step, HEADLINE: score}) + "\n")


def test_a_terminal_of_80_columns_shows_how_far_each_job_has_come(jobs: list[Job]) -> None:
    terminal = Terminal()
    view = SweepView(jobs, terminal)
    trained(jobs[4], 1700, 51.25)
    jobs[4].note(state="training", attempts=2)
    jobs[1].note(state="done", attempts=1, score=98.94)
    view.poll()
    screen = terminal.screen()
    assert screen[0] == "0:00:00  4 queued, 1 running, 1 done, 0 failed"
    assert screen[2:5] == [
        "state                step of 5,000  score  job",
        "training, attempt 2          1,700   51.2  …opper-medium-expert-v0__softmax__s1",
        "done                             0   98.9  …r-medium-expert-v0__primal-plus__s1",
    ]
    assert all(line.startswith("queued") for line in screen[5:])
    assert len(screen) == 9


def test_the_table_is_drawn_over_the_last_one_and_stays_at_the_end(jobs: list[Job]) -> None:
    terminal = Terminal()
    view = SweepView(jobs, terminal)
    view.poll()
    for job in jobs:
        job.note(state="done", attempts=1, score=1.0)
    view.close()
    assert terminal.screen()[0].endswith("0 queued, 0 running, 6 done, 0 failed")
    assert len(terminal.screen()) == 9
    view.poll()  # by somebody else: below, not over it
    assert len(terminal.screen()) == 18


def test_more_jobs_than_lines_leave_out_those_that_wait(jobs: list[Job], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINES", "9")
    terminal = Terminal()
    jobs[5].note(state="failed", attempts=1, errors=("out of luck",))
    SweepView(jobs, terminal).poll()
    screen = terminal.screen()
    assert len(screen) == 8
    assert screen[3].startswith("failed")
    assert screen[-1] == "... and 2 more"


def test_why_no_job_runs_is_said_once_and_until_one_does(jobs: list[Job]) -> None:
    terminal, pipe = Terminal(), io.StringIO()
    for out in (terminal, pipe):
        view = SweepView(jobs, out)
        view.wait("waiting: no node has room")
        view.poll()
        view.wait("waiting: no node has room")
    assert terminal.screen()[1] == "waiting: no node has room"
    assert pipe.getvalue().count("waiting: no node has room") == 1
    view = SweepView(jobs, terminal)
    view.wait("")
    view.poll()
    assert terminal.screen()[-8] == ""


def test_a_file_system_that_does_not_answer_is_looked_at_again(
    jobs: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = io.StringIO()
    view = SweepView(jobs, pipe)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", lambda *_: (_ for _ in ()).throw(OSError("stale file handle")))
        view.poll()
    assert pipe.getvalue() == ""
    view.poll()
    assert "6 queued" in pipe.getvalue()


def test_a_pipe_gets_a_line_for_each_change_and_no_control_characters(jobs: list[Job]) -> None:
    pipe = io.StringIO()
    view = SweepView(jobs, pipe)
    view.poll()
    trained(jobs[0], 300, 12.0)
    jobs[0].note(state="training", attempts=1, node="here")
    view.poll()
    view.poll()
    view.end(jobs[0], jobs[0].note(state="failed", errors=("first\nit ended",)))
    view.end(jobs[1], JobRecord(jobs[1].identity, "done", attempts=1, score=7.0))
    lines = pipe.getvalue().splitlines()
    assert not set(pipe.getvalue()) & {"\x1b", "\r"}
    assert [line for line in lines if jobs[0].name in line] == [
        f"0:00:00  training    {jobs[0].name}  on here",
        f"0:00:00  failed      {jobs[0].name}  it ended",
    ]
    view.close()
    assert pipe.getvalue().splitlines()[-1] == "0:00:00  5 queued, 0 running, 0 done, 1 failed"
    assert lines[-1] == f"0:00:00  done        {jobs[1].name}  score 7.0"
    assert lines[0] == "0:00:00  6 queued, 0 running, 0 done, 0 failed"


def test_a_pipe_gets_the_step_and_the_score_of_what_runs_now_and_then(jobs: list[Job]) -> None:
    pipe = io.StringIO()
    trained(jobs[2], 1200, 33.04)
    jobs[2].note(state="training", attempts=1, node="here")
    SweepView(jobs, pipe).poll()
    assert f"\n           {jobs[2].name}  step 1,200, score 33.0\n" in pipe.getvalue()
