"""``evaluate.py``, as a person meets it: it runs what is missing, loses nothing, and says what it is told wrong."""

import json
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import evaluate
import train
from envs import video as video_module
from envs.behavior.policies import BatchedPolicy, read_card
from envs.errors import DataError
from envs.make import make_arena, make_environment
from envs.published import TABLE_4
from envs.tasks import ENVIRONMENTS, task_named
from primal_dt.evaluation import evaluate as evaluate_module
from primal_dt.evaluation.callbacks import ProgressBar
from primal_dt.evaluation.episode_cache import EpisodeCache
from primal_dt.evaluation.evaluate import evaluate_episodes
from primal_dt.evaluation.rollout import Episode, RolloutError, rollout
from primal_dt.training.checkpoint import load_checkpoint
from tests.envs.files import d4rl_arrays, write_d4rl

pytestmark = pytest.mark.xdist_group("evaluate")  # one process trains what they evaluate
SMALL = shlex.split("""
    --width 16 --context 4 --rank 4 --num-layers 2 --batch-size 8 --warmup-steps 5 --steps 20 --log-every-steps 10
    --save-every-steps 20 --eval-every-steps 10 --eval-episodes 1 --spectrum-every-steps 0 --threads 1 --device cpu
""")
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two seeds of primal-plus, and one of softmax."""
    root = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PRIMAL_DT_CACHE", str(root / "cache"))
        patch.setenv("MINARI_DATASETS_PATH", str(root / "minari"))
        arrays = d4rl_arrays((30,) * 20)
        data = str(write_d4rl(root / "hopper.hdf5", arrays, env_id="Hopper-v5"))
        for seed, attention in ((0, "primal-plus"), (1, "primal-plus"), (0, "linear")):
            flags = ["--dataset", data, "--seed", str(seed), "--attention", attention, "--out", str(root / "runs")]
            patch.setattr(sys, "argv", ["train.py", *flags, *SMALL])
            assert train.main() == 0
    return root / "runs"


@pytest.fixture
def runs(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(trained, tmp_path / "runs"))


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: Any) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["evaluate.py", *map(str, arguments)])
        capsys.readouterr()
        code = evaluate.main()
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def episodes_run(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, int]]:
    """What is really run."""
    seen: list[tuple[float, int]] = []

    def counted(policy: Any, task: Any, wanted: Any, **options: Any) -> list[Episode]:
        seen.extend(wanted)
        return evaluate_episodes(policy, task, wanted, **options)

    monkeypatch.setattr(evaluate_module, "evaluate_episodes", counted)
    return seen


def primal(runs: Path) -> list[Path]:
    return sorted(runs.glob("*primal-plus*"))


def test_seeds_are_grouped_and_the_report_is_written(runs: Path, call: Run) -> None:
    code, out, _ = call(*sorted(runs.iterdir()), "--episodes", 2, "--out", "report")
    assert code == 0
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in out.splitlines() if "hopper.hdf5" in line]
    assert [(row[1], row[3], row[8], row[9]) for row in rows] == [
        ("linear", "3600*", "1", "2"),
        ("linear", "1800", "1", "2"),
        ("primal-plus", "3600*", "2", "2"),
        ("primal-plus", "1800", "2", "2"),
    ]
    assert "† fewer than 3 seeds or 10 episodes" in out
    assert all("†" in row[4] for row in rows)
    assert "report: report/report.md" in out
    assert {path.name for path in Path("report").iterdir()} == {
        *("report.md", "report.csv", "report.json"),
        *("scores.png", "targets.png", "profiles.png", "curves.png"),
    }
    content = json.loads(Path("report/report.json").read_text())
    group = next(group for group in content["groups"] if group["policy"] == "primal-plus")
    assert [(run["seed"], run["step"]) for run in group["runs"]] == [(0, 20), (1, 20)]
    assert [step for step, _ in group["runs"][0]["curve"]] == [10, 20]
    assert content["provenance"]["versions"]["torch"] == torch.__version__
    assert content["provenance"]["command"][0] == "evaluate.py"
    mean = np.mean([summary["normalized_mean"] for run in group["runs"] for summary in run["summaries"][:1]])
    assert group["results"][0]["mean"] == pytest.approx(mean)


@pytest.mark.parametrize("mode", ["window", "streaming"])
def test_an_episode_is_that_of_its_seed_and_target_whatever_else_runs(runs: Path, call: Run, mode: str) -> None:
    """Returns bit for bit: 1, 8 or 64 at a time, with and without processes, and when the run was moved."""
    (run, *_) = primal(runs)
    returns = []
    for number, flags in enumerate((["--envs", 1], ["--envs", 8], ["--envs", 64], ["--envs", 20, "--workers", 2])):
        moved = Path(shutil.copytree(run, runs / f"copy {number}"))
        assert call(moved, "--episodes", 35, "--out", f"r{number}", "--mode", mode, *flags)[0] == 0
        *_, group = json.loads(Path(f"r{number}/report.json").read_text())["groups"]
        assert group["mode"] == mode
        returns.append([(e["target"], e["seed"], e["total_reward"]) for e in group["runs"][0]["episodes"]])
    assert returns[1:] == returns[:1] * 3
    assert len(set(returns[0])) == 70
    assert [seed for _, seed, _ in returns[0][:35]] == list(range(2_000_000, 2_000_035))


def test_what_is_known_is_not_run_again(
    runs: Path, call: Run, episodes_run: list[tuple[float, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (run, *_) = primal(runs)
    call(run, "--episodes", 2)
    assert len(episodes_run) == 4
    first = [call(run, "--episodes", 2, "--json")[1] for _ in range(2)]
    assert first[0] == first[1]
    assert len(episodes_run) == 4
    call(run, "--episodes", 3, "--targets", 1800, 500)
    assert episodes_run[4:] == [(3600, 2_000_002), (1800, 2_000_002), *((500, 2_000_000 + i) for i in range(3))]
    call(run, "--episodes", 1, "--seed", 5)
    assert episodes_run[9:] == [(3600, 5), (1800, 5)]
    call(run, "--episodes", 2, "--fresh")
    assert len(episodes_run) == 15
    call(run, "--episodes", 2, "--mode", "streaming")  # window is known
    assert len(episodes_run) == 19
    shutil.copy(*(next((other / "checkpoints").glob("*20.pt")) for other in reversed(primal(runs))))
    call(run, "--episodes", 2)  # other content
    assert len(episodes_run) == 23
    monkeypatch.setattr(evaluate_module, "INFERENCE_VERSION", 99)
    call(run, "--episodes", 2)  # other code
    assert len(episodes_run) == 27


def test_streaming_is_shown_beside_window(runs: Path, call: Run) -> None:
    code, out, _ = call(*primal(runs), "--episodes", 1, "--mode", "streaming")
    assert code == 0
    modes = [line.split("|")[3].strip() for line in out.splitlines() if "3600*" in line]
    assert modes == ["window", "streaming"]
    code, _, err = call(*runs.glob("*linear*"), "--episodes", 1, "--mode", "streaming")
    assert code == 1
    assert "streaming is for stacks of softmax and primal layers" in err


def test_a_run_counts_once_whatever_it_is_called(runs: Path, call: Run) -> None:
    first, second = primal(runs)
    copy = shutil.copytree(first, runs / "again")
    code, out, err = call(first, copy, second, first, "--episodes", 1)
    assert code == 0
    assert err.count("is skipped: it has the settings and the seed of") == 2
    assert [line.split("|")[9].strip() for line in out.splitlines() if "3600*" in line] == ["2"]


def test_a_checkpoint_that_is_not_a_runs_result_is_warned_of(runs: Path, call: Run) -> None:
    (run, *_) = primal(runs)
    (last,) = (run / "checkpoints").glob("*.pt")
    content = torch.load(last, weights_only=True)
    content["step"] = 10
    torch.save(content, last.with_name("step-000000010.pt"))
    _, out, _ = call(last.with_name("step-000000010.pt"), "--episodes", 1)
    assert "seed 0: its training had reached step 10 of 20" in out
    assert "seed 0: step-000000010.pt is not the last checkpoint of its run" in out
    assert "warning" not in call(run, "--episodes", 1)[1]


def test_data_of_another_version_is_warned_of(
    trained: Path, call: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PRIMAL_DT_CACHE", str(tmp_path / "cache"))
    flags = ["--dataset", str(trained.parent / "hopper.hdf5"), "--env-id", "Hopper-v4", "--mix-versions"]
    monkeypatch.setattr(sys, "argv", ["train.py", *flags, *SMALL])
    assert train.main() == 0
    code, out, _ = call(*Path("runs").iterdir(), "--episodes", 1)
    assert code == 0
    assert "trained on data of Hopper-v5, evaluated in Hopper-v4" in out
    assert "†‡" in out


def test_json_is_all_that_is_printed(runs: Path, call: Run) -> None:
    _, out, _ = call(*primal(runs), "--episodes", 1, "--json")
    assert json.loads(out)["groups"][0]["policy"] == "primal-plus"


def test_an_episode_that_fails_loses_none_that_had_ended(
    runs: Path, call: Run, monkeypatch: pytest.MonkeyPatch, episodes_run: list[tuple[float, int]]
) -> None:
    (run, *_) = primal(runs)

    def fails_late(*arguments: Any, on_episode: Callable[[Episode], None], **options: Any) -> list[Episode]:
        ended: list[Episode] = []

        def told(episode: Episode) -> None:
            on_episode(episode)
            ended.append(episode)
            if len(ended) == 2:
                raise RolloutError("the environment of the episode with seed 7 failed at step 3")

        return rollout(*arguments, on_episode=told, **options)

    with monkeypatch.context() as patch:
        patch.setattr("primal_dt.evaluation.evaluate.rollout", fails_late)
        code, _, err = call(run, "--episodes", 2)
    failed = "window: the environment of the episode with seed 7 failed at step 3"
    assert (code, err.splitlines()[-1]) == (1, f"error: {run.name}, {failed}")
    assert call(run, "--episodes", 2)[0] == 0
    assert len(episodes_run) == 4 + 2


def test_what_is_no_run_is_left_out_and_a_run_without_a_checkpoint_does_not_stop_the_others(
    runs: Path, call: Run
) -> None:
    good, empty = primal(runs)
    shutil.rmtree(empty / "checkpoints")
    (runs / "benchmarks").mkdir()
    (runs / "plot.png").touch()
    code, out, err = call(good, empty, runs / "benchmarks", runs / "plot.png", "--episodes", 2)
    assert code == 1
    assert "3600*" in out
    assert f"{runs / 'benchmarks'} is skipped: it is not a run" in err
    assert f"{runs / 'plot.png'} is skipped: it is not a run" in err
    assert f"error: there is no checkpoint that can be read in {empty / 'checkpoints'}" in err
    code, _, err = call(good, runs / "a typo", "--episodes", 2)
    assert (code, "a typo" in err) == (1, True)
    code, _, err = call(runs / "benchmarks", runs / "plot.png")
    assert (code, err.splitlines()[-1]) == (1, "error: none of these is a run")


def test_a_run_that_cannot_be_written_to_is_evaluated_all_the_same(
    runs: Path, call: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = primal(runs)[0]
    before = sorted(run.rglob("*"))
    monkeypatch.setattr("primal_dt.system.files.os.access", lambda path, mode: not path.is_relative_to(run.absolute()))
    code, out, _ = call(run, "--episodes", 2)
    assert (code, "3600*" in out) == (0, True)
    assert caplog.messages == [f"episodes are not kept: {run.absolute()}: no permission to write there"]
    assert sorted(run.rglob("*")) == before


def test_a_run_that_fails_does_not_keep_the_others_from_the_report(
    runs: Path, call: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = primal(runs)
    (last,) = (bad / "checkpoints").glob("*.pt")
    content = torch.load(last, weights_only=True)
    content["weights"]["head.bias"].fill_(float("nan"))
    torch.save(content, last)
    code, out, err = call(bad, good, "--episodes", 2, "--out", "report")
    assert code == 1
    assert "the action at step 0 of the episode with seed 2000000 is not finite" in err
    assert [line.split("|")[9].strip() for line in out.splitlines() if "3600*" in line] == ["1"]
    assert "the action at step 0" in Path("report/report.md").read_text()


@pytest.mark.parametrize("what", ["run", "policy"])
def test_ctrl_c_keeps_what_had_ended(
    what: str, runs: Path, call: Run, monkeypatch: pytest.MonkeyPatch, episodes_run: list[tuple[float, int]]
) -> None:
    arguments = primal(runs)[:1] if what == "run" else ["--policy", "random", "--task", "hopper"]
    ended: list[Episode] = []

    def interrupted(self: ProgressBar, episode: Episode) -> None:
        ended.append(episode)
        if len(ended) == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ProgressBar, "end_episode", interrupted)
        code, out, err = call(*arguments, "--episodes", 4)
    if what == "run":
        assert (code, err.splitlines()[-1]) == (130, "stopped; episodes that had ended are cached")
        assert call(*arguments, "--episodes", 4)[0] == 0
        assert len(episodes_run) == 8 + 5
    else:
        assert code == 1
        assert "warning: random on no data set, seed None: only 3 of 4 episodes: it was stopped" in out


def test_a_line_that_was_cut_off_is_run_again(tmp_path: Path) -> None:
    facts = {"checkpoint": "abc"}
    kept = EpisodeCache(tmp_path, facts)
    kept.end_episode(Episode(1.0, 2, 3.5, 4))
    kept.end_episode(Episode(1.0, 3, 0.1 + 0.2, 4))
    assert EpisodeCache(tmp_path, facts).get(1.0, 3) == Episode(1.0, 3, 0.1 + 0.2, 4)
    (path,) = tmp_path.iterdir()
    assert json.loads(path.read_text().splitlines()[0]) == facts
    path.write_text(path.read_text()[:-10])
    cut = EpisodeCache(tmp_path, facts)
    assert cut.get(1.0, 2) == Episode(1.0, 2, 3.5, 4)
    assert cut.get(1.0, 3) is None
    cut.end_episode(Episode(1.0, 5, 1.0, 4))
    assert EpisodeCache(tmp_path, facts).get(1.0, 5) == Episode(1.0, 5, 1.0, 4)
    assert EpisodeCache(tmp_path, facts, fresh=True).get(1.0, 2) is None
    assert EpisodeCache(tmp_path, {"checkpoint": "def"}).get(1.0, 2) is None


# Versions


def test_another_version_has_to_be_asked_for_and_is_warned_of(runs: Path, call: Run) -> None:
    (run, *_) = primal(runs)
    code, _, err = call(run, "--episodes", 1, "--env-id", "Hopper-v4")
    assert code == 1
    assert "--allow-version-mismatch" in err
    code, out, _ = call(run, "--episodes", 1, "--env-id", "Hopper-v4", "--allow-version-mismatch", "--out", "report")
    assert code == 0
    assert "warning: primal-plus on" in out
    assert "trained on data of Hopper-v5, evaluated in Hopper-v4" in Path("report/report.md").read_text()
    code, _, err = call(run, "--env-id", "Walker2d-v5", "--allow-version-mismatch")
    assert "is trained for Hopper-v5 and cannot act in Walker2d-v5" in err


# Mistakes


def test_a_mistake_ends_in_a_message(runs: Path, call: Run, capsys: pytest.CaptureFixture[str]) -> None:
    (run, *_) = primal(runs)
    for arguments, message in (
        (["nowhere"], "there is no checkpoint nowhere"),
        ([runs], "there is no checkpoint that can be read"),
        ([run, "--env-id", "Hopper-v3", "--allow-version-mismatch"], "the environment Hopper-v3 cannot be made"),
        (["--policy", "random", "--task", "chess"], "there is no task 'chess': it must be one of hopper"),
        (["--policy", "hopper/best"], "there is no policy 'hopper/best'"),
        ([run, "--device", "cuda:77"], "the device 'cuda:77' cannot be used"),
    ):
        code, _, err = call(*arguments)
        assert code == 1, arguments
        assert err.startswith("error: ")
        assert message in err
    for flags, message in (
        ([], "give runs to evaluate"),
        (["--policy", "random"], "--policy random needs --task"),
        ([run, "--policy", "random"], "give runs to evaluate"),
        ([run, "--episodes", 0], "episodes (0) must be at least 1"),
        ([run, "--seed", -1], "seed (-1) must be at least 0"),
        ([run, "--workers", -1], "workers (-1) must be at least 0"),
        ([run, "--task", "hopper"], "--task is for --policy"),
        (["--policy", "random", "--task", "hopper", "--env-id", "Hopper-v4"], "--env-id is for runs"),
        (["--policy", "random", "--task", "hopper", "--targets", 5], "--targets is for runs"),
    ):
        with pytest.raises(SystemExit) as caught:
            call(*flags)
        assert caught.value.code == 2
        assert message in capsys.readouterr().err
    assert not Path("reports").exists()


def test_a_damaged_last_checkpoint_is_not_replaced_silently(runs: Path, call: Run) -> None:
    (run, *_) = primal(runs)
    (last,) = (run / "checkpoints").glob("*.pt")
    shutil.copy(last, last.with_name("step-000000010.pt"))
    last.write_bytes(last.read_bytes()[:1000])
    code, _, err = call(run, "--episodes", 1)
    assert code == 1
    assert "is damaged" in err
    assert str(last.with_name("step-000000010.pt")) in err
    assert call(last.with_name("step-000000010.pt"), "--episodes", 1)[0] == 0


def test_a_loose_checkpoint_will_do(runs: Path, call: Run, tmp_path: Path) -> None:
    (last,) = (primal(runs)[0] / "checkpoints").glob("*.pt")
    (tmp_path / "elsewhere").mkdir()
    alone = Path(shutil.move(last, tmp_path / "elsewhere" / "mine.pt"))
    shutil.rmtree(runs)
    code, out, _ = call(alone, "--episodes", 1)
    assert code == 0
    assert "primal-plus" in out
    assert load_checkpoint(alone).config["run"]["seed"] == 0


# The ends of the scale


def test_the_random_policy_scores_nothing(call: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, episodes in (("hopper", 100), ("walker2d", 100), ("halfcheetah", 10)):
        code, out, _ = call("--policy", "random", "--task", name, "--episodes", episodes, "--json")
        assert code == 0
        assert abs(json.loads(out)["groups"][0]["results"][0]["mean"]) < 2


@pytest.mark.parametrize("name", ["hopper", "walker2d", "halfcheetah"])
def test_our_expert_scores_what_its_card_says(
    name: str, call: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _, out, _ = call("--policy", f"{name}/expert", "--episodes", 20, "--json")
    (group,) = json.loads(out)["groups"]
    card = read_card(name)["policies"]["expert"]["sampled"]
    (summary,) = group["runs"][0]["summaries"]
    assert abs(summary["return_mean"] - card["return_mean"]) < card["return_std"]


def test_a_constant_policy_runs_through_the_same_path(
    call: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody's own function, by module:name. Hopper, pushed one way, falls at once."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("somebodys.py").write_text("import numpy as np\ndef push(observation, random): return np.ones(3)\n")
    code, out, _ = call("--policy", "somebodys:push", "--task", "hopper", "--episodes", 12, "--json")
    assert code == 0
    (group,) = json.loads(out)["groups"]
    lengths = [episode["length"] for episode in group["runs"][0]["episodes"]]
    assert max(lengths) < 100
    assert group["results"][0]["mean"] < 10


def test_behavior_policies_do_not_depend_on_how_many_run_at_once() -> None:
    task = task_named("Hopper-v5")
    wanted = [(0.0, seed) for seed in range(5)]

    class Noise:
        def __call__(self, observation: np.ndarray, random: np.random.Generator, /) -> np.ndarray:
            return random.uniform(-1, 1, 3)

    one, many = (
        evaluate_episodes(BatchedPolicy(Noise(), 3), make_arena(task), wanted, num_environments=count)
        for count in (1, 5)
    )
    assert one == many
    assert len({episode.total_reward for episode in one}) == 5
    other = evaluate_episodes(BatchedPolicy(Noise(), 4), make_arena(task), wanted)
    assert [episode.total_reward for episode in other] != [episode.total_reward for episode in one]


def test_tasks_have_names() -> None:
    assert task_named("halfcheetah").env_id == "HalfCheetah-v5"
    assert task_named("Hopper-v4").env_id == "Hopper-v4"
    with pytest.raises(DataError, match="there is no task for the environment 'Hopper-v9'"):
        task_named("Hopper-v9")


def test_the_published_table_is_the_papers() -> None:
    """Its averages, as printed, to the rounding of nine cells: a digit that was copied wrong would show."""
    assert set(TABLE_4) == {
        (name, tier) for name in ENVIRONMENTS for tier in ("medium", "medium-replay", "medium-expert")
    }
    printed = {"softmax": 72.2, "linear": 64.4, "reformer": 63.9, "performer": 63.8, "flowformer": 73.5}
    printed |= {"cosformer": 67.8, "primal-plus": 77.5}
    for attention, average in printed.items():
        cells = [row[attention][0] for row in TABLE_4.values()]
        assert np.mean(cells) == pytest.approx(average, abs=0.06), attention
    assert TABLE_4["hopper", "medium-replay"]["primal-plus"] == (88.5, 12.5)


# Videos


def test_a_video_is_an_episode(runs: Path, call: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a renderer of gray pictures: that of MuJoCo is not everywhere."""
    imageio_ffmpeg = pytest.importorskip("imageio_ffmpeg")
    make = make_environment

    def gray(task: Any, **options: Any) -> Any:
        environment = make(task)
        monkeypatch.setattr(type(environment), "render", lambda self: np.full((32, 48, 3), 100, np.uint8))
        return environment

    monkeypatch.setattr(video_module, "make_environment", gray)
    code, _, err = call(primal(runs)[0], "--episodes", 1, "--video", "--out", "report")
    assert code == 0, err
    films = sorted(Path("report").glob("*.mp4"))
    assert [re.sub(".*-window", "", film.name) for film in films] == ["-target-1800.mp4", "-target-3600.mp4"]
    assert not list(Path("report").glob(".*"))
    episodes = json.loads(Path("report/report.json").read_text())["groups"][0]["runs"][0]["episodes"]
    for film, episode in zip(reversed(films), episodes, strict=True):
        num_frames, _ = imageio_ffmpeg.count_frames_and_secs(str(film))
        assert num_frames == episode["length"] + 1


def test_without_a_renderer_it_is_told(runs: Path, call: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("imageio_ffmpeg")

    def blind(task: Any, **options: Any) -> Any:
        raise RuntimeError("an OpenGL platform library has not been loaded")

    monkeypatch.setattr(video_module, "make_environment", blind)
    code, _, err = call(primal(runs)[0], "--episodes", 1, "--video")
    assert code == 1
    assert "cannot be rendered here: an OpenGL platform library has not been loaded" in err
    assert "MUJOCO_GL=osmesa" in err
    assert not list(runs.glob("*/evaluations"))  # told before anything was run


def test_a_bar_shows_the_time_left_in_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("primal_dt.evaluation.callbacks.sys.stderr.isatty", lambda: True, raising=False)
    with ProgressBar("a run") as bar:
        bar.begin(2, 10)
        time.sleep(0.15)  # bars are not drawn more often
        bar.step(2)
        bar.end_episode(Episode(3600.0, 0, 5.0, 2))
        time.sleep(0.15)
        bar.step(1)
    shown = capsys.readouterr().err
    assert re.search(r"a run: +10%.*at most \S+ left, 2 running, 0 ended, [\d,]+ steps/s", shown)
    assert re.search(r"a run: +60%.*1 running, 1 ended", shown)  # 2 + 8 that it was spared + its last + 1, of 20
    assert "1 of 2 episodes in" in shown


def test_what_is_known_is_said_to_be(runs: Path, call: Run) -> None:
    (run, *_) = primal(runs)
    assert "4 of 4 episodes in" in call(run, "--episodes", 2)[2]
    assert "no new episodes to run" in call(run, "--episodes", 2)[2]
