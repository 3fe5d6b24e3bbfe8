"""``evaluate.py`` from the command line: it runs the missing episodes, loses none, and explains mistakes."""

import json
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from gymnasium.envs.mujoco.mujoco_rendering import MujocoRenderer

import evaluate
import train
from envs import graphics
from envs import video as video_module
from envs.behavior.policies import BatchedPolicy, read_card
from envs.errors import DataError
from envs.make import make_arena, make_environment
from envs.published import TABLE_4
from envs.tasks import ENVIRONMENTS, task_named
from primal_dt.evaluation import evaluate as evaluate_module
from primal_dt.evaluation import report_files
from primal_dt.evaluation.callbacks import ProgressBar
from primal_dt.evaluation.episode_cache import EpisodeCache
from primal_dt.evaluation.evaluate import evaluate_episodes
from primal_dt.evaluation.plots import plot_report
from primal_dt.evaluation.rollout import Episode, RolloutError
from primal_dt.training.checkpoint import load_checkpoint
from tests.conftest import ON_ONE_CORE, SMALL, file_size_limit, run_program, small_data

pytestmark = pytest.mark.xdist_group("evaluate")  # one process trains the runs for all tests
Call = Callable[..., tuple[str, str]]
Pairs = list[tuple[float, int]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two seeds of primal-plus and one of linear."""
    root = tmp_path_factory.mktemp("trained")
    flags = ["--dataset", small_data(root / "hopper.hdf5"), "--out", root / "runs", *SMALL, *ON_ONE_CORE]
    with pytest.MonkeyPatch.context() as monkeypatch:
        for seed, attention in ((0, "primal-plus"), (1, "primal-plus"), (0, "linear")):
            assert run_program(train, monkeypatch, *flags, "--seed", seed, "--attention", attention) == 0
    return root / "runs"


@pytest.fixture
def runs(trained: Path, own_folders: Path) -> Path:
    """A copy of the trained runs."""
    return Path(shutil.copytree(trained, own_folders / "runs"))


@pytest.fixture
def run(runs: Path) -> Path:
    return primal(runs)[0]


def primal(runs: Path) -> list[Path]:
    return sorted(runs.glob("*primal-plus*"))


def last_checkpoint(run: Path) -> Path:
    (path,) = (run / "checkpoints").glob("*.pt")
    return path


@pytest.fixture
def call(own_folders: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs ``evaluate.py``, checks its exit code, and returns what it writes to stdout and stderr."""
    monkeypatch.setattr(report_files, "plot_report", lambda report, folder: [])  # plots take most of the time

    def run(*arguments: Any, code: int = 0) -> tuple[str, str]:
        capsys.readouterr()
        try:
            result: Any = run_program(evaluate, monkeypatch, *arguments)
        except SystemExit as error:
            result = error.code
        out, err = capsys.readouterr()
        assert result == code, err
        return out, err

    return run


@pytest.fixture
def episodes_run(monkeypatch: pytest.MonkeyPatch) -> Pairs:
    """The target and seed of each episode that is run and not taken from the cache."""
    seen: Pairs = []

    def recorded(policy: Any, arena: Any, pairs: Any, **options: Any) -> list[Episode]:
        seen.extend(pairs)
        return evaluate_episodes(policy, arena, pairs, **options)

    monkeypatch.setattr(evaluate_module, "evaluate_episodes", recorded)
    return seen


def failing_at_episode(number: int, error: BaseException) -> Any:
    """A context in which an error is raised when this number of episodes has ended."""
    return patch.object(ProgressBar, "end_episode", side_effect=[None] * (number - 1) + [error])


def rows(out: str, words: str) -> list[list[str]]:
    """The cells of the table's rows that contain the words."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in out.splitlines() if words in line]


def groups(report: str) -> Any:
    return json.loads(Path(report, "report.json").read_text())["groups"]


def test_seeds_are_grouped(runs: Path, call: Call) -> None:
    out, _ = call(*sorted(runs.iterdir()), "--episodes", 2)
    table = rows(out, "hopper.hdf5")
    assert [(row[1], row[2], row[7], row[8]) for row in table] == [
        ("linear", "3600*", "1", "2"),
        ("linear", "1800", "1", "2"),
        ("primal-plus", "3600*", "2", "2"),
        ("primal-plus", "1800", "2", "2"),
    ]
    assert "† fewer than 3 seeds or 10 episodes" in out
    assert all("†" in row[3] for row in table)


def test_targets_are_spread_over_the_returns_of_the_data(run: Path, call: Call) -> None:
    """Eight targets, from the data's lowest return to above its highest, and the headline target."""
    call(run, "--episodes", 1, "--targets", "auto", "--out", "report")
    (group,) = groups("report")
    data = load_checkpoint(run).task.data_returns
    assert len(data) == 101
    first, *targets = [result["target"] for result in group["results"]]
    assert first == 3600
    assert targets == sorted(targets)
    assert len(targets) == 8
    assert targets[0] == pytest.approx(data[0], rel=1e-3)
    assert targets[-2] < data[-1] < targets[-1]
    assert -1 <= group["target_correlation"] <= 1


def test_the_report_folder_is_written(runs: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_files, "plot_report", plot_report)
    out, _ = call(*primal(runs), "--episodes", 2, "--out", "report")
    assert "report: report/report.md" in out
    assert {path.name for path in Path("report").iterdir()} == {
        *("report.md", "report.csv", "report.json"),
        *("scores.png", "targets.png", "profiles.png", "curves.png"),
    }
    (group,) = groups("report")
    assert [(run["seed"], run["step"]) for run in group["runs"]] == [(0, 20), (1, 20)]
    assert [step for step, _ in group["runs"][0]["curve"]] == [10, 20]
    mean = np.mean([run["summaries"][0]["normalized_mean"] for run in group["runs"]])
    assert group["results"][0]["mean"] == pytest.approx(mean)
    provenance = json.loads(Path("report/report.json").read_text())["provenance"]
    assert provenance["versions"]["torch"] == torch.__version__
    assert provenance["command"][0] == "evaluate.py"


@pytest.mark.slow
def test_episodes_do_not_depend_on_what_else_runs(runs: Path, run: Path, call: Call) -> None:
    """Returns are bit-identical with 1, 8 or 64 environments at once, with worker processes, and in a copied run."""

    def returns(episodes: int, *flags: Any) -> dict[tuple[str, float, int], float]:
        name = f"copy {flags}"
        copy = shutil.copytree(run, runs / name)
        call(copy, "--episodes", episodes, "--mode", "streaming", "--out", name, *flags)
        every = [(group["mode"], episode) for group in groups(name) for episode in group["runs"][0]["episodes"]]
        return {(mode, episode["target"], episode["seed"]): episode["total_reward"] for mode, episode in every}

    expected = returns(35, "--envs", 64, "--workers", 0)
    assert list(expected) == list(product(("window", "streaming"), (3600, 1800), range(2_000_000, 2_000_035)))
    assert returns(35, "--envs", 8) == expected
    assert returns(35, "--envs", 20, "--workers", 2) == expected
    alone = returns(10, "--envs", 1)
    assert len(alone) == 40
    assert alone.items() <= expected.items()


def test_known_episodes_are_not_run_again(
    runs: Path, run: Path, call: Call, episodes_run: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def new(*flags: Any) -> Pairs:
        """The episodes that a call runs."""
        before = len(episodes_run)
        call(run, *flags)
        return episodes_run[before:]

    assert len(new("--episodes", 2)) == 4
    first, second = (call(run, "--episodes", 2, "--json")[0] for _ in range(2))
    assert first == second
    assert len(episodes_run) == 4
    more = new("--episodes", 3, "--targets", 1800, 500)
    assert more == [(3600, 2_000_002), (1800, 2_000_002), *((500, 2_000_000 + i) for i in range(3))]
    assert new("--episodes", 1, "--seed", 5) == [(3600, 5), (1800, 5)]
    assert len(new("--episodes", 2, "--fresh")) == 4
    assert len(new("--episodes", 2, "--mode", "streaming")) == 4  # those of mode window are known
    shutil.copy(last_checkpoint(primal(runs)[1]), last_checkpoint(run))
    assert len(new("--episodes", 2)) == 4  # another checkpoint
    monkeypatch.setattr(evaluate_module, "INFERENCE_VERSION", 99)
    assert len(new("--episodes", 2)) == 4  # another version of the code


def test_the_number_of_new_episodes_is_shown(run: Path, call: Call) -> None:
    assert "4 of 4 episodes in" in call(run, "--episodes", 2)[1]
    assert "no new episodes to run" in call(run, "--episodes", 2)[1]


def test_streaming_is_reported_beside_window(runs: Path, call: Call) -> None:
    out, _ = call(*primal(runs), "--episodes", 1, "--mode", "streaming")
    assert [row[2] for row in rows(out, "3600*")] == ["window", "streaming"]
    _, err = call(*runs.glob("*linear*"), "--episodes", 1, "--mode", "streaming", code=1)
    assert "mode streaming supports only softmax and primal layers" in err


def test_copies_of_a_run_count_once(runs: Path, call: Call) -> None:
    first, second = primal(runs)
    copy = shutil.copytree(first, runs / "again")
    out, err = call(first, copy, second, first, "--episodes", 1)
    assert err.count("is skipped: it has the same settings and seed as") == 2
    assert [row[7] for row in rows(out, "3600*")] == ["2"]


def test_an_unfinished_checkpoint_gives_a_warning(run: Path, call: Call) -> None:
    last = last_checkpoint(run)
    earlier = last.with_name("step-000000010.pt")
    content = torch.load(last, weights_only=True)
    content["step"] = content["training"]["trainer"]["step"] = 10
    torch.save(content, earlier)
    out, _ = call(earlier, "--episodes", 1)
    assert "seed 0: training is unfinished (step 10 of 20)" in out
    assert "seed 0: step-000000010.pt is not the last checkpoint of its run" in out
    assert "warning" not in call(run, "--episodes", 1)[0]


def test_data_of_another_version_gives_a_warning(trained: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--dataset", trained.parent / "hopper.hdf5", "--env-id", "Hopper-v4", "--mix-versions"]
    assert run_program(train, monkeypatch, *flags, *SMALL, *ON_ONE_CORE) == 0
    out, _ = call(*Path("runs").iterdir(), "--episodes", 1)
    assert "trained on data from Hopper-v5, evaluated in Hopper-v4" in out
    assert "†‡" in out


def test_another_version_needs_a_flag_and_gives_a_warning(run: Path, call: Call) -> None:
    _, err = call(run, "--episodes", 1, "--env-id", "Hopper-v4", code=1)
    assert "--allow-version-mismatch" in err
    out, _ = call(run, "--episodes", 1, "--env-id", "Hopper-v4", "--allow-version-mismatch", "--out", "report")
    assert "warning: primal-plus on" in out
    page = Path("report/report.md").read_text()
    assert "trained on data from Hopper-v5, evaluated in Hopper-v4" in page
    assert "seed 0: trained for Hopper-v5, evaluated in Hopper-v4" in page
    _, err = call(run, "--env-id", "Walker2d-v5", "--allow-version-mismatch", code=1)
    assert "is trained for Hopper-v5 and cannot act in Walker2d-v5" in err


def test_json_is_the_only_output(runs: Path, call: Call) -> None:
    out, _ = call(*primal(runs), "--episodes", 1, "--json")
    assert json.loads(out)["groups"][0]["policy"] == "primal-plus"


def test_two_policies_are_compared(runs: Path, call: Call) -> None:
    out, _ = call(*runs.glob("*"), "--episodes", 1, "--compare", "primal-plus", "linear", "--out", "compared")
    assert "primal-plus scores " in out
    assert "relative to linear, as a mean over 1 task" in out
    assert json.loads(Path("compared/report.json").read_text())["comparison"]["second"] == "linear"
    _, err = call(*runs.glob("*"), "--episodes", 1, "--compare", "primal-plus", "softmax", "--out", "other", code=1)
    assert "error: 'softmax' is not a policy with scores in this report" in err
    assert Path("other/report.md").exists()


def test_a_failure_keeps_finished_episodes(run: Path, call: Call, episodes_run: Pairs) -> None:
    message = "the environment of the episode with seed 7 failed at step 3"
    with failing_at_episode(2, RolloutError(message)):
        _, err = call(run, "--episodes", 2, code=1)
    assert err.splitlines()[-1] == f"error: {run.name}, window: {message}"
    call(run, "--episodes", 2)
    assert len(episodes_run) == 4 + 2


def test_ctrl_c_keeps_finished_episodes_of_a_run(run: Path, call: Call, episodes_run: Pairs) -> None:
    with failing_at_episode(3, KeyboardInterrupt()):
        _, err = call(run, "--episodes", 4, code=130)
    assert err.splitlines()[-1] == "stopped; finished episodes of runs are cached"
    call(run, "--episodes", 4)
    assert len(episodes_run) == 8 + 5


def test_ctrl_c_reports_finished_episodes_of_a_policy(call: Call) -> None:
    with failing_at_episode(3, KeyboardInterrupt()):
        out, _ = call("--policy", "random", "--task", "hopper", "--episodes", 4, code=1)
    reason = "only 3 of 4 episodes finished: the evaluation was stopped"
    assert f"warning: random on no data set, seed None: {reason}" in out


def test_paths_that_are_not_runs_are_skipped(runs: Path, call: Call) -> None:
    good, empty = primal(runs)
    shutil.rmtree(empty / "checkpoints")
    folder, file = runs / "benchmarks", runs / "plot.png"
    folder.mkdir()
    file.touch()
    out, err = call(good, empty, folder, file, "--episodes", 2, code=1)
    assert "3600*" in out
    assert all(f"{path} is skipped: it is not a run" in err for path in (folder, file))
    assert f"error: there is no readable checkpoint in {empty / 'checkpoints'}" in err
    assert "a typo" in call(good, runs / "a typo", "--episodes", 2, code=1)[1]
    assert call(folder, file, code=1)[1].splitlines()[-1] == "error: none of the given paths is a run"


def test_a_read_only_run_is_evaluated(
    run: Path, call: Call, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = sorted(run.rglob("*"))
    monkeypatch.setattr("primal_dt.system.files.os.access", lambda path, mode: not path.is_relative_to(run.absolute()))
    assert "3600*" in call(run, "--episodes", 2)[0]
    assert caplog.messages == [f"episodes are not cached: {run.absolute()}: no permission to write there"]
    assert sorted(run.rglob("*")) == before


def test_a_failing_run_does_not_stop_the_others(runs: Path, call: Call) -> None:
    bad, good = primal(runs)
    content = torch.load(last_checkpoint(bad), weights_only=True)
    content["weights"]["head.weight"].fill_(1e38)  # finite, but the actions are not
    torch.save(content, last_checkpoint(bad))
    out, err = call(bad, good, "--episodes", 2, "--out", "report", code=1)
    assert "the model cannot be used, its weights are damaged or too large" in err
    assert [row[7] for row in rows(out, "3600*")] == ["1"]
    assert "the model cannot be used" in Path("report/report.md").read_text()


def remove_weight(run: Path) -> None:
    content = torch.load(last_checkpoint(run), weights_only=True)
    del content["weights"]["head.bias"]
    torch.save(content, last_checkpoint(run))


def remove_seed(run: Path) -> None:
    content = torch.load(last_checkpoint(run), weights_only=True)
    del content["config"]["run"]["seed"]
    torch.save(content, last_checkpoint(run))


def make_cache_unreadable(run: Path) -> None:
    """A folder in place of the file: a superuser could read a file without permissions."""
    (path,) = (run / "evaluations").iterdir()
    path.unlink()
    path.mkdir()


def make_metrics_unreadable(run: Path) -> None:
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove_weight, "head.bias"),
        (remove_seed, "seed"),
        (make_cache_unreadable, "it is a link, a pipe, a device or a folder"),
        (make_metrics_unreadable, "it is a link, a pipe, a device or a folder"),
    ],
)
def test_a_damaged_run_is_one_row_of_what_failed(
    runs: Path, call: Call, damage: Callable[[Path], None], message: str
) -> None:
    bad, good = primal(runs)
    call(bad, "--episodes", 1)
    damage(bad)
    out, err = call(bad, good, "--episodes", 1, "--out", "report", code=1)
    (failure,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert bad.name in failure
    assert message in failure
    assert [row[7] for row in rows(out, "3600*")] == ["1"]
    assert [run["seed"] for run in groups("report")[0]["runs"]] == [1]
    assert failure.removeprefix("error: ") in json.loads(Path("report/report.json").read_text())["warnings"]


def test_a_run_that_cannot_stream_does_not_stop_the_others(runs: Path, call: Call) -> None:
    out, err = call(*sorted(runs.iterdir()), "--episodes", 1, "--mode", "streaming", code=1)
    assert [(row[1], row[2], row[8]) for row in rows(out, "3600*")] == [
        ("primal-plus", "window", "2"),
        ("primal-plus", "streaming", "2"),
    ]
    (failure,) = [line for line in err.splitlines() if line.startswith("error: ")]
    (linear,) = runs.glob("*linear*")
    assert str(linear) in failure
    assert "mode streaming supports only softmax and primal layers, not linear" in failure


def test_every_run_that_fails_is_named(runs: Path, call: Call) -> None:
    """Also if no run is left to report."""
    bad = primal(runs)
    for run in bad:
        last_checkpoint(run).write_bytes(b"half")
    _, err = call(*bad, "--episodes", 1, code=1)
    assert [line.startswith("error: ") for line in err.splitlines()] == [True, True]
    assert all(run.name in line for run, line in zip(bad, err.splitlines(), strict=True))
    assert not Path("reports").exists()


def test_damaged_metrics_are_a_warning(run: Path, call: Call) -> None:
    """The results do not depend on the metrics: the run is reported, and its curve lacks a point."""
    path = run / "metrics.jsonl"
    first, last = path.read_bytes().splitlines()
    path.write_bytes(b"\xff" + first + b"\n" + last + b"\n")
    out, _ = call(run, "--episodes", 1, "--out", "report")
    assert f"seed 0: damaged lines in {path}: 1, the first is line 1; its training curve lacks them" in out
    assert [step for step, _ in groups("report")[0]["runs"][0]["curve"]] == [20]
    assert path.read_bytes().startswith(b"\xff")  # only training changes it


@pytest.mark.parametrize("bad", [b"\xff", b"5", b"[" * 100_000, b'{"target": 3600.0, "seed": 2000000}'])
def test_damaged_cached_episodes_are_run_again(run: Path, call: Call, episodes_run: Pairs, bad: bytes) -> None:
    expected = json.loads(call(run, "--episodes", 2, "--json")[0])["groups"]
    (path,) = (run / "evaluations").iterdir()
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([lines[0], bad, *lines[2:], b""]))
    assert json.loads(call(run, "--episodes", 2, "--json")[0])["groups"] == expected
    assert len(episodes_run) == 4 + 1


@pytest.mark.parametrize(
    "change",
    [
        *({"total_reward": value} for value in ("x", True, float("nan"), float("inf"), 10**400)),
        *({"length": None}, {"seed": True}, {"target": "x"}, {"predicted": []}, {"success": "x"}),
    ],
)
def test_cached_lines_that_are_no_episodes_are_ignored(tmp_path: Path, change: dict[str, Any]) -> None:
    EpisodeCache(tmp_path, {}).end_episode(Episode(1.0, 1, 3.5, 4, 2.0, True))
    (path,) = tmp_path.iterdir()
    first, line = path.read_text().splitlines()
    assert EpisodeCache(tmp_path, {}).get(1.0, 1) == Episode(1.0, 1, 3.5, 4, 2.0, True)
    path.write_text(f"{first}\n{json.dumps(json.loads(line) | change)}\n")
    assert not EpisodeCache(tmp_path, {})._known


def test_the_cache_survives_an_incomplete_line(tmp_path: Path) -> None:
    def cache(**options: Any) -> EpisodeCache:
        return EpisodeCache(tmp_path, {"checkpoint": "abc"}, **options)

    episodes = [Episode(1.0, 2, 3.5, 4), Episode(1.0, 3, 0.1 + 0.2, 4), Episode(1.0, 5, 1.0, 4)]
    for episode in episodes[:2]:
        cache().end_episode(episode)
    assert cache().get(1.0, 3) == episodes[1]
    (path,) = tmp_path.iterdir()
    assert json.loads(path.read_text().splitlines()[0]) == {"checkpoint": "abc"}
    path.write_text(path.read_text()[:-10])
    assert [cache().get(1.0, seed) for seed in (2, 3)] == [episodes[0], None]
    cache().end_episode(episodes[2])
    assert cache().get(1.0, 5) == episodes[2]
    assert cache(fresh=True).get(1.0, 2) is None
    assert EpisodeCache(tmp_path, {"checkpoint": "def"}).get(1.0, 2) is None


@pytest.mark.parametrize("kind", ["link", "pipe", "linked folder"])
def test_nothing_is_written_through_a_link(run: Path, call: Call, kind: str) -> None:
    call(run, "--episodes", 1)
    (cache,) = (run / "evaluations").iterdir()
    outside = cache.rename("outside").absolute()
    before = outside.read_bytes()
    refused, message = cache, "it is a link, a pipe, a device or a folder, not a regular file"
    if kind == "pipe":
        os.mkfifo(cache)
    elif kind == "link":
        cache.symlink_to(outside)
    else:
        refused, message = cache.parent, "it is a link, a pipe or a file, not a folder"
        cache.parent.rmdir()
        cache.parent.symlink_to(outside.parent)
    _, err = call(run, "--episodes", 2, code=1)
    assert f"{refused} cannot be used: {message}" in err
    assert outside.read_bytes() == before


def test_a_piped_metrics_file_is_refused(run: Path, call: Call) -> None:
    (run / "metrics.jsonl").unlink()
    os.mkfifo(run / "metrics.jsonl")
    assert f"{run / 'metrics.jsonl'} cannot be used: it is a link, a pipe" in call(run, "--episodes", 1, code=1)[1]


def test_runs_in_a_linked_folder_are_evaluated(run: Path, call: Call, episodes_run: Pairs) -> None:
    Path("elsewhere").symlink_to(run.parent)
    call(Path("elsewhere") / run.name, "--episodes", 1)
    call(run, "--episodes", 1)
    assert len(episodes_run) == 2


def test_a_full_disk_ends_in_a_message(run: Path, call: Call, episodes_run: Pairs) -> None:
    call(run, "--episodes", 1)
    (cache,) = (run / "evaluations").iterdir()
    with file_size_limit(cache.stat().st_size + 150):
        _, err = call(run, "--episodes", 3, code=1)
    error, advice = err.splitlines()[-2:]
    assert error == f"error: {cache} cannot be used: File too large. Raise the limit of file sizes (ulimit -f)"
    assert advice == "finished episodes of runs are cached; to resume, give the same command"
    call(run, "--episodes", 3)
    assert len(episodes_run) == 2 + 4 + 3  # one of the four was cached before the limit


@pytest.mark.parametrize("shortage", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_missing_memory_ends_in_a_message(run: Path, call: Call, shortage: Exception) -> None:
    with failing_at_episode(1, shortage):
        error, advice = call(run, "--episodes", 2, code=1)[1].splitlines()[-2:]
    assert error.startswith("error: there is not enough memory")
    assert advice == "finished episodes of runs are cached; to resume, give the same command"


@pytest.mark.parametrize(
    ("code", "arguments", "message"),
    [
        (1, "nowhere", "the checkpoint nowhere does not exist"),
        (1, "runs", "runs is not a run or a shared policy"),
        (1, "RUN --env-id Hopper-v3 --allow-version-mismatch", "the environment Hopper-v3 cannot be created"),
        (1, "--policy random --task chess", "there is no task 'chess': it must be one of hopper"),
        (1, "--policy hopper/best", "there is no policy 'hopper/best'"),
        (1, "RUN --device cuda:77", "the device 'cuda:77' cannot be used"),
        (2, "", "give runs to evaluate"),
        (2, "--policy random", "--policy random needs --task"),
        (2, "RUN --policy random", "give runs to evaluate"),
        (2, "RUN --episodes 0", "episodes (0) must be at least 1"),
        (2, "RUN --seed -1", "seed (-1) must be at least 0"),
        (2, "RUN --workers -1", "workers (-1) must be at least 0"),
        (2, "RUN --targets nan", "targets (nan) must be from -1e+15 to 1e+15"),
        (2, "RUN --targets 1 1e308", "targets (1e+308) must be from -1e+15 to 1e+15"),
        (2, f"RUN --seed {2**63}", f"seed ({2**63}) must be at least 0"),
        (2, "RUN --envs 10000000", "envs (10000000) must be at least 1 and at most"),
        (2, "RUN --workers 10000000", "workers (10000000) must be at least 0"),
        (1, "RUN --device meta", "the device 'meta' cannot be used"),
        (2, "RUN --task hopper", "--task is for --policy"),
        (2, "--policy random --task hopper --env-id Hopper-v4", "--env-id is for runs"),
        (2, "--policy random --task hopper --targets 5", "--targets is for runs"),
    ],
)
def test_mistakes_end_in_a_message(run: Path, call: Call, code: int, arguments: str, message: str) -> None:
    _, err = call(*shlex.split(arguments.replace("RUN", str(run))), code=code)
    assert err.startswith("error: ") == (code == 1)  # tyro explains those with code 2
    assert message in err
    assert not Path("reports").exists()


def test_a_damaged_last_checkpoint_is_an_error(run: Path, call: Call) -> None:
    last = last_checkpoint(run)
    earlier = shutil.copy(last, last.with_name("step-000000010.pt"))
    last.write_bytes(last.read_bytes()[:1000])
    _, err = call(run, "--episodes", 1, code=1)
    assert "is damaged" in err
    assert str(earlier) in err
    call(earlier, "--episodes", 1)


def test_a_checkpoint_without_its_run_is_evaluated(run: Path, call: Call) -> None:
    alone = Path(shutil.move(last_checkpoint(run), "mine.pt"))
    shutil.rmtree("runs")
    assert "primal-plus" in call(alone, "--episodes", 1)[0]
    assert load_checkpoint(alone).config["run"]["seed"] == 0


@pytest.mark.parametrize(("name", "episodes"), [("hopper", 100), ("walker2d", 100), ("halfcheetah", 10)])
def test_the_random_policy_scores_about_0(name: str, episodes: int, call: Call) -> None:
    out, _ = call("--policy", "random", "--task", name, "--episodes", episodes, "--json")
    assert abs(json.loads(out)["groups"][0]["results"][0]["mean"]) < 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hopper", "walker2d", "halfcheetah"])
def test_our_expert_scores_what_its_card_says(name: str, call: Call) -> None:
    out, _ = call("--policy", f"{name}/expert", "--episodes", 20, "--json")
    card = read_card(name)["policies"]["expert"]["sampled"]
    (summary,) = json.loads(out)["groups"][0]["runs"][0]["summaries"]
    assert abs(summary["return_mean"] - card["return_mean"]) < card["return_std"]


def test_a_users_function_is_evaluated(call: Call, own_folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hopper soon falls if it is pushed in one direction."""
    monkeypatch.syspath_prepend(own_folders)
    Path("somebodys.py").write_text("import numpy as np\ndef push(observation, random): return np.ones(3)\n")
    out, _ = call("--policy", "somebodys:push", "--task", "hopper", "--episodes", 12, "--json")
    (group,) = json.loads(out)["groups"]
    assert max(episode["length"] for episode in group["runs"][0]["episodes"]) < 100
    assert group["results"][0]["mean"] < 10


def test_behavior_episodes_do_not_depend_on_their_number() -> None:
    def noise(observation: np.ndarray, random: np.random.Generator, /) -> np.ndarray:
        return random.uniform(-1, 1, 3)

    def returns(seed: int, num_environments: int) -> list[float]:
        policy, arena = BatchedPolicy(noise, seed), make_arena(task_named("Hopper-v5"))
        episodes = evaluate_episodes(policy, arena, [(0.0, i) for i in range(5)], num_environments=num_environments)
        return [episode.total_reward for episode in episodes]

    assert returns(3, 1) == returns(3, 5)
    assert len(set(returns(3, 1))) == 5
    assert returns(4, 5) != returns(3, 5)


def test_tasks_have_names() -> None:
    assert task_named("halfcheetah").env_id == "HalfCheetah-v5"
    assert task_named("Hopper-v4").env_id == "Hopper-v4"
    with pytest.raises(DataError, match="the environment Hopper-v9 is not registered"):
        task_named("Hopper-v9")


def test_the_published_table_is_the_papers() -> None:
    """The averages equal the printed ones, up to the rounding of nine cells. So a miscopied digit would show."""
    tiers = ("medium", "medium-replay", "medium-expert")
    assert set(TABLE_4) == {(name, tier) for name in ENVIRONMENTS for tier in tiers}
    printed = {"softmax": 72.2, "linear": 64.4, "reformer": 63.9, "performer": 63.8, "flowformer": 73.5}
    printed |= {"cosformer": 67.8, "primal-plus": 77.5}
    for attention, average in printed.items():
        cells = [row[attention][0] for row in TABLE_4.values()]
        assert np.mean(cells) == pytest.approx(average, abs=0.06), attention
    assert TABLE_4["hopper", "medium-replay"]["primal-plus"] == (88.5, 12.5)


def test_a_video_shows_an_episode_in_real_time(run: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """The renderer draws gray pictures, since MuJoCo's does not work on every machine."""
    imageio_ffmpeg = pytest.importorskip("imageio_ffmpeg")

    def gray(task: Any, **options: Any) -> Any:
        environment = make_environment(task)
        monkeypatch.setattr(type(environment), "render", lambda self: np.full((32, 48, 3), 100, np.uint8))
        return environment

    monkeypatch.setattr(video_module, "make_environment", gray)
    call(run, "--episodes", 1, "--video", "--out", "report")
    (video,) = Path("report").glob("*.mp4")
    assert video.name.endswith("-window-target-3600.mp4")  # the headline target
    assert not list(Path("report").glob(".*"))
    length = groups("report")[0]["runs"][0]["episodes"][0]["length"]
    frames, seconds = imageio_ffmpeg.count_frames_and_secs(str(video))
    assert frames == 1 + -(-length // 4)  # of 125 steps per second
    assert seconds == pytest.approx(length / 125, abs=0.1)


@pytest.mark.parametrize(
    ("value", "libraries", "message"),
    [
        ("egl", ("EGL",), "cannot be rendered here: no such context. MUJOCO_GL is egl: try egl, osmesa or glfw"),
        ("osmesa", ("EGL",), "its library OSMesa is not installed: install libosmesa6 (Debian)"),
        (None, (), "there is neither a screen nor a software renderer: install libegl1 or libosmesa6 (Debian)"),
    ],
)
def test_a_missing_renderer_is_explained_at_once(
    value: str | None,
    libraries: tuple[str, ...],
    message: str,
    run: Path,
    call: Call,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the advice to install what is installed."""
    pytest.importorskip("imageio_ffmpeg")
    monkeypatch.setattr(sys, "platform", "linux")
    for name in (*graphics.SCREENS, graphics.VARIABLE):
        monkeypatch.delenv(name, raising=False)
    if value:
        monkeypatch.setenv(graphics.VARIABLE, value)
    monkeypatch.setattr(graphics, "find_library", lambda name: f"lib{name}.so" if name in libraries else None)
    monkeypatch.setattr(MujocoRenderer, "render", Mock(side_effect=RuntimeError("no such context")))
    _, err = call(run, "--episodes", 1, "--video", code=1)
    assert message in err
    assert "pip install" not in err
    assert not (run / "evaluations").exists()  # no episode was run before


def test_a_missing_encoder_is_explained_at_once(run: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    _, err = call(run, "--episodes", 1, "--video", code=1)
    assert "there is no video encoder" in err
    assert "Install the extra video: pip install -c constraints.txt -e '.[video]'" in err
    assert "MUJOCO_GL" not in err


def test_a_bar_shows_the_time_left_in_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("primal_dt.evaluation.callbacks.sys.stderr.isatty", lambda: True, raising=False)
    with ProgressBar("a run") as bar:
        bar.begin(2, 10)
        time.sleep(0.15)  # longer than the interval at which tqdm draws
        bar.step(2)
        bar.end_episode(Episode(3600.0, 0, 5.0, 2))
        time.sleep(0.15)
        bar.step(1)
    shown = capsys.readouterr().err
    assert re.search(r"a run: +10%.*at most \S+ left, 2 running, 0 ended, [\d,]+ steps/s", shown)
    assert re.search(r"a run: +60%.*1 running, 1 ended", shown)  # of 20: 2 steps, the last one, 8 unused ones, 1 step
    assert "1 of 2 episodes in" in shown
