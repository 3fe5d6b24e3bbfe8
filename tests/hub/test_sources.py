"""``evaluate.py`` and ``load_policy`` with shared policies: folders, the hub, and those of the package."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import evaluate
from primal_dt.hub import sources
from primal_dt.hub.sources import load_policy, pretrained_names
from tests.conftest import run_program
from tests.hub.conftest import Call
from tests.hub.server import Hub
from tests.hub.test_push import REPOSITORY, SOURCE, actions

pytestmark = [
    pytest.mark.xdist_group("hub"),
    pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning"),
]
Evaluate = Callable[..., tuple[str, str]]


@pytest.fixture
def evaluated(own_folders: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Evaluate:
    """Runs ``evaluate.py``, and returns what it writes to stdout and stderr."""
    monkeypatch.setattr("primal_dt.evaluation.report_files.plot_report", lambda report, folder: [])

    def run(*arguments: Any, code: int = 0) -> tuple[str, str]:
        capsys.readouterr()
        result = run_program(evaluate, monkeypatch, *arguments, "--out", "report")
        out, err = capsys.readouterr()
        assert result == code, err
        return out, err

    return run


@pytest.fixture
def pretrained(run: Path, call: Call, own_folders: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package whose one pretrained policy is ``hopper``."""
    monkeypatch.setattr(sources, "PRETRAINED_FOLDER", own_folders / "pretrained")
    call("save", run, "--out", "pretrained/hopper", "--source", "pretrained:hopper")
    return own_folders / "pretrained"


def returns() -> list[float]:
    (group,) = json.loads(Path("report/report.json").read_text())["groups"]
    return [episode["total_reward"] for episode in group["runs"][0]["episodes"]]


def test_a_shared_policy_gets_the_returns_of_its_run(hub: Hub, run: Path, call: Call, evaluated: Evaluate) -> None:
    evaluated(run, "--episodes", 2)
    expected = returns()
    call("push", run, REPOSITORY)
    call("save", run, "--out", "policy")
    before = sorted(Path("policy").rglob("*"))
    for source in (SOURCE, f"{SOURCE}@main", "policy"):
        evaluated(source, "--episodes", 2)
        assert returns() == expected
    assert "no new episodes to run" in evaluated(SOURCE, "--episodes", 2)[1]
    assert sorted(Path("policy").rglob("*")) == before  # episodes are cached elsewhere


def test_a_shared_copy_of_a_run_counts_once(run: Path, call: Call, evaluated: Evaluate) -> None:
    call("save", run, "--out", "policy")
    _, err = evaluated(run, "policy", "--episodes", 1)
    assert "is skipped: it has the same settings and seed as" in err


def test_a_missing_policy_does_not_stop_the_others(hub: Hub, run: Path, evaluated: Evaluate) -> None:
    out, err = evaluated(run, "hub:owner/none", "--episodes", 1, code=1)
    assert "3600*" in out
    assert "error: hub:owner/none: there is no repository owner/none on" in err
    assert "Traceback" not in err


def test_pretrained_policies_are_those_in_the_folder(pretrained: Path, run: Path, evaluated: Evaluate) -> None:
    (pretrained / "notes").mkdir()
    assert pretrained_names() == ["hopper"]
    assert actions(load_policy("pretrained:hopper")) == actions(load_policy(run))
    out, _ = evaluated("--pretrained", "hopper", "--episodes", 1)
    assert "3600*" in out
    assert not (pretrained / "hopper" / "evaluations").exists()
    _, err = evaluated("--pretrained", "ant", code=1)
    assert "there is no pretrained policy 'ant': choose from hopper" in err
    shutil.rmtree(pretrained)
    assert "this copy of the package has none" in evaluated("--pretrained", "ant", code=1)[1]


def test_a_video_of_a_pretrained_policy_is_named_by_it(
    pretrained: Path, evaluated: Evaluate, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Path] = []
    monkeypatch.setattr(evaluate, "check_video", lambda task: None)
    monkeypatch.setattr(evaluate, "record_video", lambda policy, task, path, **options: seen.append(path))
    evaluated("--pretrained", "hopper", "--episodes", 1, "--video")
    (path,) = seen
    assert path.parent == Path("report")
    assert path.name.startswith("pretrained-hopper-")


def test_runs_and_a_behavior_policy_exclude_each_other(
    own_folders: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run_program(evaluate, monkeypatch, "--pretrained", "hopper", "--policy", "random", "--task", "hopper")
    assert "not both" in " ".join(capsys.readouterr().err.split())
