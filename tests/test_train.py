"""``train.py``: what a run writes, how it resumes, and its messages."""

import ast
import inspect
import io
import json
import multiprocessing
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import numpy as np
import pytest
import torch

import evaluate
import train
from envs.datasets import cache
from envs.datasets.load import load_dataset
from primal_dt.config import PRESETS, Attention, Config, EvaluationConfig, ModelConfig, OptimizerConfig, RunConfig
from primal_dt.evaluation.evaluate import evaluate_episodes
from primal_dt.model.transformer import ATTENTION_STACKS
from primal_dt.system.provenance import commit
from primal_dt.training import checkpoint as checkpoint_module
from primal_dt.training.arguments import parse_config
from primal_dt.training.checkpoint import CheckpointError, load_checkpoint
from primal_dt.training.distributed import Processes
from primal_dt.training.guidance import ValueRange
from primal_dt.training.metrics_log import read_metrics
from primal_dt.training.run_folder import lock_run, read_record
from primal_dt.training.trainer import Trainer
from tests.conftest import ON_ONE_CORE, SMALL, data_variables, file_size_limit, run_program, small_data
from tests.envs.files import d4rl_arrays, write_d4rl
from tests.system.disk import Disk, Names, watched_disk
from tests.training import test_metrics_log

RUN = [*SMALL, *ON_ONE_CORE, *shlex.split("--dropout 0.1 --steps 60 --log-every-steps 5 --save-every-steps 10")]
RUN += shlex.split("--eval-every-steps 20 --spectrum-every-steps 30")
SHORT = ["--steps", "5", "--eval-every-steps", "0"]
FLAGS = shlex.split("""
    --dataset --attention --rank --eta --steps --batch-size --context --width --lr --seed --device --out --resume
""")


@dataclass(frozen=True)
class Whole:
    """An undisturbed run, and what it printed."""

    folder: Path
    out: str
    err: str


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    root = tmp_path_factory.mktemp("whole")
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        for name, value in data_variables(root).items():
            patch.setenv(name, value)
        data = small_data(root / "small data.hdf5")
        assert run_program(train, patch, "--dataset", data, *RUN, "--out", root / "runs") == 0
    return Whole(only_run(root / "runs"), out.getvalue(), err.getvalue())


@dataclass(frozen=True)
class Script:
    """``train.py`` in an empty folder with a small data set."""

    data: str
    patch: pytest.MonkeyPatch
    capture: pytest.CaptureFixture[str]

    def run(self, *arguments: str) -> int:
        return run_program(train, self.patch, *arguments)

    def start(self, *arguments: str) -> int:
        """Start a run like the undisturbed one, with more arguments."""
        return self.run("--dataset", self.data, *RUN, *arguments)

    def resume(self, folder: Path | None = None) -> int:
        return self.run("--resume", str(folder or only_run()))

    def err(self) -> str:
        return self.capture.readouterr().err


@pytest.fixture
def script(own_folders: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Script:
    # Only the undisturbed run draws plots, which take longer than its training.
    monkeypatch.setattr("primal_dt.evaluation.report_files.plot_report", lambda report, folder: [])
    return Script(small_data(own_folders / "small data.hdf5"), monkeypatch, capsys)


@pytest.fixture
def finished(whole: Whole, own_folders: Path) -> Path:
    """A copy of the undisturbed run."""
    return Path(shutil.copytree(whole.folder, own_folders / "copy"))


def only_run(folder: Path | str = "runs") -> Path:
    (found,) = Path(folder).iterdir()
    return found


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def record(folder: Path) -> list[dict[str, float]]:
    """The logged metrics without times."""
    times = ("time", "train/steps_per_second")
    return [{name: value for name, value in line.items() if name not in times} for line in read_metrics(folder)]


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    found = test_metrics_log.curves(folder)
    return {tag: points for tag, points in found.items() if "per_second" not in tag}


def assert_same(one: Path, two: Path) -> None:
    """Weights, optimizers, metrics and curves are equal, bit for bit."""
    first, second = load_checkpoint(one), load_checkpoint(two)
    assert first.step == second.step
    torch.testing.assert_close(first.weights, second.weights, rtol=0, atol=0)
    torch.testing.assert_close(first.training["trainer"], second.training["trainer"], rtol=0, atol=0)
    assert record(one) == record(two)
    assert curves(one) == curves(two)


def after_update(patch: pytest.MonkeyPatch, step: int, action: Callable[[Trainer], object]) -> None:
    """Call ``action`` after the update that reaches ``step``."""
    update = Trainer.update

    def patched(self: Trainer, batch: Any) -> None:
        update(self, batch)
        if self.step == step:
            action(self)

    patch.setattr(Trainer, "update", patched)


def interrupt_evaluations(patch: pytest.MonkeyPatch, number: int, *, first: int = 1) -> None:
    """Send a signal to this process at the start of every evaluation, from the first or a later one on."""
    evaluations = count(1)

    def interrupted(*arguments: Any, **options: Any) -> Any:
        if next(evaluations) >= first:
            os.kill(os.getpid(), number)
        return evaluate_episodes(*arguments, **options)

    patch.setattr(train, "evaluate_episodes", interrupted)


# What a run writes


def test_run_is_named_after_data_stack_and_seed(whole: Whole) -> None:
    assert whole.folder.name.startswith("small-data__primal-plus__s0__")


def test_run_prints_its_files_and_scores(whole: Whole) -> None:
    for word in (str(whole.folder), "tensorboard --logdir", "normalized return", "3600", "1800", "step-000000060.pt"):
        assert word in whole.out
    assert "step 60 of 60  loss" in whole.err


def test_run_writes_a_report(whole: Whole) -> None:
    report = json.loads((whole.folder / "report" / "report.json").read_text())
    (result, _) = report["groups"][0]["results"]
    assert result["mean"] == pytest.approx(record(whole.folder)[-1]["eval/normalized_return"])
    assert str(whole.folder / "report" / "report.md") in whole.out


def test_a_task_without_references_has_returns(script: Script) -> None:
    """In the progress, the metrics, the table and the report of a run, and in an evaluation of its checkpoint."""
    scored = train.run_task
    script.patch.setattr(train, "run_task", lambda *given: replace(scored(*given), reference=None))
    script.patch.setattr("primal_dt.training.progress.SECONDS_BETWEEN_LINES", 0.0)
    assert script.start("--steps", "30", "--eval-every-steps", "10", "--eval-episodes", "1") == 0
    lines = record(only_run())
    curve = [[line["step"], line["eval/return"]] for line in lines if "eval/return" in line]
    assert [step for step, _ in curve] == [10, 20, 30]
    assert not any("normalized" in name for line in lines for name in line)
    printed = script.capture.readouterr()
    assert "return: Hopper-v5, plain returns" in printed.out
    assert "normalized" not in printed.out
    assert re.search(r"step 25 of 30  loss \d\.\d+  return -?\d", printed.err)
    assert run_program(evaluate, script.patch, only_run(), "--episodes", 1, "--out", "again") == 0
    for folder in (only_run() / "report", Path("again")):
        (group,) = json.loads((folder / "report.json").read_text())["groups"]
        assert (group["unit"], group["runs"][0]["curve"]) == ("return", curve)


def test_metrics_are_logged_when_due(whole: Whole) -> None:
    lines = record(whole.folder)
    assert [line["step"] for line in lines] == list(range(5, 61, 5))
    assert [line["step"] for line in lines if "eval/normalized_return" in line] == [20, 40, 60]
    assert [line["step"] for line in lines if "spectrum/effective_rank/layer_1" in line] == [30, 60]
    names = {"train/loss", "train/action_mse", "train/penalty", "train/J/layer_1", "train/gradient_norm"}
    assert names <= set(lines[0])
    assert lines[-1]["eval/normalized_return"] == lines[-1]["eval/normalized_return/target_3600"]


def test_tensorboard_shows_the_metrics(whole: Whole) -> None:
    shown = {name: dict(points) for name, points in curves(whole.folder).items()}
    for line in record(whole.folder):
        for name, value in line.items():
            if name != "step":
                assert shown[name][int(line["step"])] == pytest.approx(value, rel=1e-6)


def test_run_stores_its_config_and_provenance(whole: Whole) -> None:
    config, checkpoint = json.loads((whole.folder / "config.json").read_text()), load_checkpoint(whole.folder)
    assert config["task"]["fingerprint"] == checkpoint.task.fingerprint
    assert config["config"] == checkpoint.config
    assert config["versions"]["torch"] == torch.__version__
    assert config["commit"] == commit()
    assert config["command"][0] == "train.py"


def test_last_two_checkpoints_are_kept(whole: Whole) -> None:
    assert checkpoints(whole.folder) == ["step-000000050.pt", "step-000000060.pt"]


def test_policy_needs_only_the_run(script: Script) -> None:
    script.start(*SHORT)
    Path(script.data).unlink()
    policy = load_checkpoint(only_run()).policy()
    policy.reset([3600.0])
    action = policy.act(np.zeros((1, 11)))
    assert action.shape == (1, 3)
    assert np.abs(action).max() <= 1


@pytest.mark.slow
def test_same_seed_gives_the_same_run(script: Script, whole: Whole) -> None:
    script.start("--out", "same")
    script.start("--out", "other", "--seed", "1")
    assert_same(only_run("same"), whole.folder)
    assert record(only_run("other")) != record(whole.folder)


@pytest.mark.parametrize("attention", ["softmax", "primalformer", "linear", "cosformer"])
def test_other_stacks_learn(script: Script, attention: str) -> None:
    assert script.start("--attention", attention, "--eval-every-steps", "0") == 0
    assert load_checkpoint(only_run()).shape.attention == attention
    losses = [line["train/action_mse"] for line in record(only_run())]
    assert losses[-1] < losses[0]


SLOW = """
import sys, time, train
update = train.Trainer.update
train.Trainer.update = lambda *arguments: (update(*arguments), time.sleep(0.2))
sys.exit(train.main())
"""
"""``train.py`` with enough time for a signal to arrive before the last step."""


@pytest.mark.slow
def test_interrupted_torchrun_matches_one_process(script: Script) -> None:
    flags = ["--dropout", "0", "--steps", "30", "--out"]
    script.start(*flags, "alone")
    Path("slow.py").write_text(SLOW)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"PYTHONPATH": str(Path(train.__file__).parent)}
    arguments = ["--dataset", script.data, *RUN, *flags, "shared"]
    process = subprocess.Popen([*launch, "slow.py", *arguments], env=environment)
    while not any(read_metrics(folder) for folder in Path("shared").glob("*")):
        assert process.poll() is None
        time.sleep(0.05)
    process.terminate()
    process.wait(60)
    folder = only_run("shared")  # only rank 0 creates a run folder
    assert 0 < load_checkpoint(folder).step < 30
    resume = [*launch, train.__file__, "--resume", str(folder)]
    done = subprocess.run(resume, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    alone, shared = record(only_run("alone")), record(folder)
    assert [line["step"] for line in alone] == [line["step"] for line in shared]
    for one, two in zip(alone, shared, strict=True):
        for name in ("train/loss", "train/action_mse", "train/penalty", "train/gradient_norm"):
            assert two[name] == pytest.approx(one[name], abs=1e-5, rel=0), (one["step"], name)
    assert load_checkpoint(folder).step == 30


# Stopping and resuming


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize(
    "step", [24, 25, 20, 60], ids=["between points", "at a point", "in an evaluation", "in the last"]
)
def test_resume_is_bit_identical(script: Script, whole: Whole, step: int, number: int, code: int) -> None:
    with script.patch.context() as patch:
        if step in (20, 60):
            interrupt_evaluations(patch, number, first=step // 20)
        else:
            after_update(patch, step, lambda trainer: os.kill(os.getpid(), number))
        assert script.start() == code
    assert load_checkpoint(only_run()).step == step
    out = script.capture.readouterr().out
    assert f"stopped after step {step}; to resume: python train.py --resume {only_run()}" in out
    with mock.patch.object(Trainer, "update", autospec=True, side_effect=Trainer.update) as update:
        assert script.resume() == 0
    assert update.call_count == 60 - step  # restarting from step 0 would give the same result
    assert_same(only_run(), whole.folder)


@pytest.mark.slow
def test_run_stopped_thrice_in_one_evaluation_resumes(script: Script) -> None:
    flags = ["--log-every-steps", "1", "--steps", "25"]
    script.start(*flags, "--out", "undisturbed")
    with script.patch.context() as patch:
        interrupt_evaluations(patch, signal.SIGTERM)
        assert script.start(*flags) == 143
        assert script.resume() == 143
        assert script.resume() == 143
    assert load_checkpoint(only_run()).step == 20
    assert script.resume() == 0
    assert_same(only_run(), only_run("undisturbed"))


def test_run_resumes_from_another_folder(script: Script) -> None:
    script.start("--dataset", Path(script.data).name, *SHORT)
    folder = only_run().resolve()
    Path("elsewhere").mkdir()
    script.patch.chdir("elsewhere")
    assert script.resume(folder) == 0


def test_resume_takes_all_but_the_device_from_the_run(whole: Whole) -> None:
    resume = ["--resume", str(whole.folder)]
    assert train.parse(resume)[0].run.device == "cpu"
    assert train.parse([*resume, "--device", "cuda"])[0].run.device == "cuda"
    with pytest.raises(ValueError, match="only --device, --trust-env and --logger can be given"):
        train.parse([*resume, "--steps", str(PRESETS["quick"][1].optimizer.steps)])


def test_two_processes_cannot_train_one_run(script: Script, finished: Path) -> None:
    with lock_run(finished):
        assert script.resume(finished) == 1
    assert "is being trained by another process" in script.err()


def test_resuming_a_finished_run_changes_nothing(script: Script, finished: Path, whole: Whole) -> None:
    assert script.resume(finished) == 0
    assert_same(finished, whole.folder)


def test_finished_run_gets_its_missing_report(script: Script, finished: Path, whole: Whole) -> None:
    """A kill after the last checkpoint left no report, or a part of it. The evaluation is run again."""
    (finished / "report" / "report.json").unlink()
    assert script.resume(finished) == 0
    own, expected = (json.loads((run / "report" / "report.json").read_text()) for run in (finished, whole.folder))
    assert own["groups"][0]["results"] == expected["groups"][0]["results"]
    assert_same(finished, whole.folder)
    script.patch.setattr(train, "evaluate_episodes", mock.Mock(side_effect=AssertionError))
    assert script.resume(finished) == 0  # a complete report is not made again


def test_run_killed_before_its_config_starts_again(script: Script) -> None:
    def kill(*_: Any) -> None:
        raise KeyboardInterrupt

    with script.patch.context() as patch:
        patch.setattr(train, "write_record", kill)
        assert script.start(*SHORT, "--name", "again") == 130
    assert script.start(*SHORT, "--name", "again") == 0
    assert script.start(*SHORT, "--name", "again") == 1
    assert "already exists: give another --name, or resume it" in script.err()


@pytest.mark.parametrize(
    ("part", "name", "value", "message"),
    [
        ("run", "seed", 7, "run.seed is 7, not 0"),
        ("optimizer", "lr", 0.5, "optimizer.lr is 0.5, not 0.003"),
        ("optimizer", "batch_size", 4, "optimizer.batch_size is 4, not 8"),
        ("optimizer", "schedule", "constant", "optimizer.schedule is 'constant', not 'cosine'"),
        ("optimizer", "schedule", "bogus", "config.optimizer.schedule must be one of constant, cosine, not 'bogus'"),
        ("evaluation", "targets", [5.0], "evaluation.targets is (5.0,), not None"),
        ("run", "seed", None, "config.run lacks seed"),
    ],
)
def test_resume_with_other_settings_is_refused(
    script: Script, finished: Path, part: str, name: str, value: Any, message: str
) -> None:
    """The checkpoint's configuration is the truth."""
    content = json.loads((finished / "config.json").read_text())
    content["config"][part][name] = value
    if value is None:
        del content["config"][part][name]
    (finished / "config.json").write_text(json.dumps(content))
    assert script.resume(finished) == 1
    err = script.err()
    assert err.startswith(f"error: {finished / 'config.json'} ")
    assert message in err


def test_a_changed_config_is_refused_before_the_first_checkpoint(script: Script, finished: Path) -> None:
    """There is nothing to compare it with, but it has a checksum."""
    shutil.rmtree(finished / "checkpoints")
    path = finished / "config.json"
    path.write_text(path.read_text().replace('"seed": 0', '"seed": 1'))
    assert script.resume(finished) == 1
    assert "config.json was changed after the run started" in script.err()


@pytest.mark.parametrize("name", ["report.json", "report.md", "report.csv"])
def test_a_damaged_report_is_written_again(script: Script, finished: Path, whole: Whole, name: str) -> None:
    (finished / "report" / name).write_bytes(b"")
    assert script.resume(finished) == 0
    assert (finished / "report" / name).read_text()


def test_files_of_users_are_not_checkpoints(script: Script, finished: Path, whole: Whole) -> None:
    folder = finished / "checkpoints"
    (folder / "step-000000060.pt").rename(folder / "step-best.pt")
    shutil.copy(folder / "step-000000050.pt", folder / "step-keep.pt")
    shutil.copy(folder / "step-000000050.pt", folder / "step-999999999.pt")
    assert script.resume(finished) == 0
    assert "step-999999999.pt is damaged: it is that of step 50" in script.err()
    names = ["step-000000050.pt", "step-000000060.pt", "step-999999999.pt.damaged", "step-best.pt", "step-keep.pt"]
    assert checkpoints(finished) == names
    assert_same(finished, whole.folder)


def test_resume_lists_all_that_differs(script: Script, finished: Path) -> None:
    content = json.loads((finished / "config.json").read_text())
    content["threads"] = 2
    content["config"]["model"]["eta"] = 1.0
    content["task"]["fingerprint"] = "0" * 64
    (finished / "config.json").write_text(json.dumps(content))
    assert script.resume(finished) == 1
    err = script.err()
    for words in ("model.eta is 1.0, not 0.05", "threads is 2, not 1", "task.fingerprint is '0000"):
        assert words in err


def test_checkpoint_without_a_weight_falls_back(script: Script, finished: Path, whole: Whole) -> None:
    last = finished / "checkpoints" / "step-000000060.pt"
    content = torch.load(last, weights_only=True)
    del content["weights"]["head.weight"]
    torch.save(content, last)
    assert script.resume(finished) == 0
    assert "weights lacks head.weight; resuming from step-000000050.pt" in script.err()
    assert_same(finished, whole.folder)


def test_damaged_checkpoint_falls_back_to_the_previous(script: Script, finished: Path, whole: Whole) -> None:
    last = finished / "checkpoints" / "step-000000060.pt"
    last.write_bytes(last.read_bytes()[:1000])
    assert script.resume(finished) == 0
    err = script.err()
    assert "step-000000060.pt is damaged" in err
    assert "resuming from step-000000050.pt" in err
    assert_same(finished, whole.folder)
    assert checkpoints(finished) == ["step-000000050.pt", "step-000000060.pt", "step-000000060.pt.damaged"]


def test_run_without_checkpoints_restarts(script: Script, finished: Path, whole: Whole) -> None:
    for path in (finished / "checkpoints").iterdir():
        path.unlink()
    with pytest.raises(CheckpointError):
        load_checkpoint(finished)
    assert script.resume(finished) == 0
    assert_same(finished, whole.folder)


@pytest.mark.slow
def test_killed_runs_lose_nothing(script: Script) -> None:
    """After each of 12 kills at random moments, all files are readable. The result is that of an undisturbed run."""
    flags = ["--steps", "200", "--log-every-steps", "2", "--save-every-steps"]
    script.start(*flags, "200", "--out", "undisturbed")
    arguments = ["--dataset", script.data, *RUN, *flags, "2", "--out", "killed"]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["train", "torch._dynamo", "pytest"])  # slow imports

    def launch() -> Any:
        code = f"import sys, train; sys.argv = {['train.py', *arguments]}; sys.exit(train.main())"
        process = context.Process(target=exec, args=(code, {}))
        process.start()
        return process

    chance, newest = random.Random(0), 0
    for _ in range(12):
        process = launch()
        points = chance.randint(0, 3)  # kill it while it starts, or at any moment after some more points
        target = num_points() + points
        while process.is_alive() and num_points() < target:
            time.sleep(0.005)
        time.sleep(chance.uniform(0.0, 0.025 if points else 0.5))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        for folder in Path("killed").glob("*"):
            if (folder / "config.json").exists():
                arguments = ["--resume", str(folder)]
                step = newest_step(folder)
                assert step >= newest  # no checkpoint was lost, and training did not restart
                newest = step
            else:  # killed before it could be resumed
                shutil.rmtree(folder)
    process = launch()
    process.join()
    assert process.exitcode == 0
    assert newest > 0
    assert_same(only_run("killed"), only_run("undisturbed"))
    assert not list(Path("killed").glob("**/*.partial"))


@pytest.mark.parametrize("names", get_args(Names))
def test_a_power_failure_loses_no_checkpoint(script: Script, whole: Whole, names: Names) -> None:
    """It may happen at every flush and rename. Points before the newest checkpoint survive too."""
    Path("disk").mkdir()
    steps: list[int] = []
    images: list[Path] = []

    def fail(disk: Disk) -> None:
        rest = disk.fail(Path(f"rest-{len(steps)}").absolute(), names)
        folder = rest / "run"
        newest = load_checkpoint(folder).step if list(folder.glob("checkpoints/step-*.pt")) else 0
        steps.append(newest)
        if newest:
            assert [line["step"] for line in read_metrics(folder)][: newest // 5] == list(range(5, newest + 1, 5))
        if read_record_if_any(folder):
            images.append(folder)

    with watched_disk(Path("disk").absolute(), on_event=fail) as disk:
        assert script.start("--out", "disk", "--name", "run") == 0
        fail(disk)
    assert steps == sorted(steps)
    assert set(steps) == {0, 10, 20, 30, 40, 50, 60}
    saved = [step for step, event in zip(steps, disk.events, strict=False) if event == ("flush", "run/checkpoints")]
    assert saved[-6:] == [10, 20, 30, 40, 50, 60]
    folder = random.Random(0).choice(images)
    assert script.resume(folder) == 0
    assert_same(folder, whole.folder)


def read_record_if_any(folder: Path) -> bool:
    """Whether a run has a record. It must be readable then."""
    return (folder / "config.json").exists() and bool(read_record(folder))


def num_points() -> int:
    return sum(len(path.read_bytes().splitlines()) for path in Path("killed").glob("*/metrics.jsonl"))


def newest_step(folder: Path) -> int:
    """Check that all checkpoints are readable and that all points before them are logged. Returns the last step."""
    newest = max((load_checkpoint(path).step for path in (folder / "checkpoints").glob("step-*.pt")), default=0)
    assert [line["step"] for line in record(folder)][: newest // 2] == list(range(2, newest + 1, 2))
    return newest


# Errors


@pytest.mark.parametrize(
    ("step", "stop", "found_at"), [(22, False, 23), (24, True, 24), (30, False, 30)], ids=["loss", "stop", "save"]
)
def test_nonfinite_values_stop_the_run(script: Script, step: int, stop: bool, found_at: int) -> None:
    """They are found in the next loss, or in the weights when these would be saved: after a stop request or on time."""

    def poison(trainer: Trainer) -> None:
        torch.nn.init.constant_(trainer.model.head.weight, float("nan" if step == 22 else "inf"))
        if stop:
            os.kill(os.getpid(), signal.SIGTERM)

    after_update(script.patch, step, poison)
    assert script.start() == 3
    err = script.err()
    assert f"not finite at step {found_at}" in err
    assert "the last good checkpoint" in err
    assert "step-000000020.pt" in err
    for path in (only_run() / "checkpoints").iterdir():
        assert all(torch.isfinite(weight).all() for weight in load_checkpoint(path).weights.values())
    assert load_checkpoint(only_run()).step == 20
    assert [line["step"] for line in record(only_run())] == list(range(5, found_at, 5))


def test_full_disk_leaves_the_last_checkpoint(script: Script, whole: Whole) -> None:
    """A real limit makes the write fail inside ``torch.save``."""
    save = checkpoint_module.save_checkpoint

    def full(path: Path, checkpoint: Any) -> None:
        with file_size_limit(10_000) if checkpoint.step == 30 else nullcontext():
            save(path, checkpoint)

    with script.patch.context() as patch:
        patch.setattr(checkpoint_module, "save_checkpoint", full)
        assert script.start() == 1
    assert_tells_how_to_resume(script.err(), "step-000000030.pt cannot be used: File too large")
    assert load_checkpoint(only_run()).step == 20
    assert script.resume() == 0
    assert_same(only_run(), whole.folder)


@pytest.mark.parametrize(("name", "byte"), [("actions", b"\0"), ("actions", b"\xff"), ("returns_to_go", b"\xff")])
def test_damaged_cache_stops_the_run(script: Script, name: str, byte: bytes) -> None:
    path = stored(script, name)
    path.write_bytes(byte * path.stat().st_size)
    assert script.start() == 1
    err = script.err()
    assert "is damaged" in err
    assert "python -m envs cache --clear" in err
    assert not list(Path("runs").glob("*/checkpoints/*"))
    assert not Path("runs").exists() or record(only_run()) == []


def test_run_on_a_damaged_cache_resumes_without_it(script: Script, whole: Whole) -> None:
    path = stored(script, "actions")
    path.write_bytes(bytes(path.stat().st_size))
    assert script.start() == 1
    cache.clear_cache()
    assert script.resume() == 0
    assert_same(only_run(), whole.folder)


def test_cache_that_shrinks_in_use_stops_the_run(script: Script) -> None:
    path = stored(script, "actions")
    after_update(script.patch, 23, lambda _: os.truncate(path, path.stat().st_size - 4))
    assert script.start() == 1
    assert_tells_how_to_resume(script.err(), "actions.f32 was changed while it was in use")
    assert load_checkpoint(only_run()).step == 20


def stored(script: Script, name: str) -> Path:
    """A file of the cached data."""
    load_dataset(script.data)
    (path,) = cache.stores_folder().glob(f"*/{name}.f32")
    return path


def assert_tells_how_to_resume(err: str, reason: str) -> None:
    """The last three lines give the reason, the last checkpoint, of step 20, and the command. There is no traceback."""
    error, last, again = err.splitlines()[-3:]
    assert error.startswith("error: ")
    assert reason in error
    assert last == f"last checkpoint: {only_run() / 'checkpoints' / 'step-000000020.pt'}"
    assert again == f"to resume: python train.py --resume {only_run()}"
    assert "Traceback" not in err


@pytest.mark.parametrize("shortage", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_missing_memory_ends_in_a_message(script: Script, shortage: Exception) -> None:
    def run_out(trainer: Trainer) -> None:
        raise shortage

    after_update(script.patch, 24, run_out)
    assert script.start() == 1
    assert_tells_how_to_resume(script.err(), "there is not enough memory")


def test_too_large_a_model_ends_in_a_message(script: Script) -> None:
    script.patch.setattr(train, "DecisionTransformer", lambda shape: torch.empty(2**61))
    assert script.start() == 1
    assert script.err().startswith("error: there is not enough memory")


@pytest.mark.parametrize("more", [0, 3000], ids=["metrics", "events"])
def test_full_disk_while_logging_ends_in_a_message(script: Script, more: int) -> None:
    """Also if it is TensorBoard's thread that cannot write its file, which is larger than that of the metrics."""

    def fill(trainer: Trainer) -> None:
        limits.enter_context(file_size_limit((only_run() / "metrics.jsonl").stat().st_size + more))

    with ExitStack() as limits:
        after_update(script.patch, 24, fill)
        assert script.start("--save-every-steps", "20", "--eval-every-steps", "0") == 1
    err = script.err()
    assert_tells_how_to_resume(err, "cannot be used: File too large")
    assert f"error: {only_run()}" in err


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.json", "events.out.tfevents.7"])
def test_resume_writes_nothing_through_a_link(script: Script, finished: Path, name: str) -> None:
    outside = Path(shutil.copy(finished / "metrics.jsonl", "outside"))
    before = outside.read_bytes()
    (finished / name).unlink(missing_ok=True)
    (finished / name).symlink_to(outside.absolute())
    assert script.resume(finished) == 1
    assert f"{finished / name} cannot be used: it is a link" in script.err()
    assert outside.read_bytes() == before


def test_a_run_in_a_linked_folder_resumes(script: Script, finished: Path, whole: Whole) -> None:
    (finished / "checkpoints" / "step-000000060.pt").unlink()
    Path("link").symlink_to(finished)
    assert script.resume(Path("link")) == 0
    assert_same(finished, whole.folder)


def test_resume_with_changed_data_is_refused(script: Script) -> None:
    script.start(*SHORT)
    write_d4rl(Path(script.data), d4rl_arrays((30,) * 20, seed=1), env_id="Hopper-v5")
    assert script.resume() == 1
    assert "has changed since the run" in script.err()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dataset", "nonsense"], "there is no data set 'nonsense'"),
        (["--dataset", "DATA", "--env-id", "Hopper-v4"], "--mix-versions"),
        (["--dataset", "OLD"], "the environment Hopper-v3 cannot be created"),
        (["--resume", "nowhere"], "nowhere is not a run"),
        (["--resume", "DATA"], "is a file: give a run folder"),
        (["--resume", "nowhere", "--steps", "7"], "only --device, --trust-env and --logger can be given"),
        (["--dataset", "DATA", "--device", "cuda:77"], "the device 'cuda:77' cannot be used"),
        (["--dataset", "DATA", "--device", "meta"], "the device 'meta' cannot be used"),
        (["--dataset", "DATA", "--out", "DATA"], "cannot be used: it is not a folder"),
    ],
)
def test_user_errors_end_in_a_message(script: Script, arguments: list[str], message: str) -> None:
    old = str(write_d4rl(Path("old.hdf5"), d4rl_arrays((30,) * 20), env_id="Hopper-v3"))
    assert script.run(*({"DATA": script.data, "OLD": old}.get(word, word) for word in arguments)) == 1
    err = script.err()
    assert err.startswith("error: ")
    assert message in err
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--stepps", "3"], ["--stepps"]),
        (["fast"], ["quick", "paper"]),
        (["--steps", "many"], ["many"]),
        (["--attention", "best"], ["primal-plus", "softmax", "attention_sh"]),
        (["--num-heads", "3"], ["width (128) must be divisible by num_heads (3)"]),
        (["--dropout", "1"], ["dropout (1.0) must be at least 0 and below 1"]),
        (["--attention-dropout", "1"], ["attention_dropout (1.0) must be at least 0 and below 1"]),
        (["--data-dependent"], ["data_dependent must be off", "future"]),
        (["--scores", "left"], ["both", "e", "r"]),
        (["--top-fraction", "0"], ["top_fraction (0.0) must be above 0 and at most 1"]),
        (["--validation", "1"], ["validation (1.0) must be at least 0 and below 1"]),
        (["--expectile", "1"], ["expectile (1.0) must be above 0 and below 1"]),
        (["--critic-weight", "-1"], ["critic_weight (-1.0) must be at least 0"]),
        (["--conditioning", "none", "--targets", "1"], ["targets have no effect with conditioning none"]),
        (["--threads", "0"], ["threads (0) must be at least 1 and at most 4096"]),
        (["--threads", "100000000"], ["threads (100000000) must be at least 1 and at most 4096"]),
        (["--lr", "inf"], ["lr (inf) must be above 0 and at most 1e+15"]),
        (["--lr", "1e300"], ["lr (1e+300) must be above 0 and at most 1e+15"]),
        (["--targets", "nan"], ["targets (nan) must be from -1e+15 to 1e+15"]),
        (["--targets", "1", "inf"], ["targets (inf) must be from -1e+15 to 1e+15"]),
        (["--targets", "1e308"], ["targets (1e+308) must be from -1e+15 to 1e+15"]),
        (["--seed", str(2**64)], [f"seed ({2**64}) must be at least 0 and at"]),
        (["--eval-seed", str(2**63 - 1)], [f"eval_seed ({2**63 - 1}) must be at least 0"]),
    ],
)
def test_wrong_flags_are_explained(script: Script, arguments: list[str], words: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        script.run(*arguments)
    assert caught.value.code == 2
    shown = "".join(script.capture.readouterr())
    assert all(word in shown for word in words)


def test_help_explains_every_flag(script: Script) -> None:
    with pytest.raises(SystemExit) as caught:
        script.run("quick", "--help")
    assert caught.value.code == 0
    shown = script.capture.readouterr().out
    assert all(f"{flag} " in shown for flag in FLAGS)
    words = " ".join(re.sub(r"[│╭╮╰╯─]", " ", shown).split())
    for part in (Config, ModelConfig, OptimizerConfig, EvaluationConfig, RunConfig):
        for name, text in docstrings_of(part).items():
            assert f"--{name.replace('_', '-')}" in words
            assert text.partition(".")[0] in words, name


def test_help_without_preset_leads_to_the_flags(script: Script) -> None:
    with pytest.raises(SystemExit):
        script.run("--help")
    assert "python train.py quick --help" in script.capture.readouterr().out


def docstrings_of(part: type) -> dict[str, str]:
    """Field -> its docstring, from the source."""
    body = ast.parse(inspect.getsource(part)).body[0].body  # type: ignore[attr-defined]
    texts = {}
    for field, text in pairwise(body):
        if isinstance(field, ast.AnnAssign) and not ast.unparse(field.annotation).endswith("Config"):
            assert isinstance(text, ast.Expr), ast.unparse(field)
            texts[ast.unparse(field.target)] = " ".join(str(ast.literal_eval(text.value)).split())
    return texts


def test_flags_reach_the_model_and_the_trainer(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    trainers: list[Trainer] = []

    class Watched(Trainer):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            trainers.append(self)

    monkeypatch.setattr(train, "Trainer", Watched)
    flags = "--scores e --feature-map exponential --penalty sum --init small --primal-init orthonormal"
    flags += " --attention-dropout 0.3 --eta 0 --eval-every-steps 0"
    assert script.run(*SMALL, "--dataset", script.data, *flags.split()) == 0
    (trainer,) = trainers
    shape = trainer.model.shape
    assert (shape.scores, shape.feature_map, shape.attention_dropout) == ("e", "exponential", 0.3)
    assert (shape.init, shape.primal_init) == ("small", "orthonormal")
    assert (trainer.objective.penalty, trainer.objective.eta) == ("sum", 0.0)
    (folder,) = Path("runs").iterdir()
    assert load_checkpoint(folder).shape == shape


@pytest.mark.parametrize(
    ("flags", "target"),
    [
        ("--conditioning none --top-fraction 0.1", "none"),
        ("--conditioning max-return", "predicted"),
        ("--conditioning max-return --critic-weight 0.5 --action-loss gaussian", "predicted"),
        ("--action-dropout 0.5 --critic-weight 0.5", "3600"),
    ],
)
def test_other_policies_train_resume_and_evaluate(script: Script, flags: str, target: str) -> None:
    """The run stops on the way and resumes to the same end. A policy without targets is evaluated without one."""
    assert script.start(*flags.split(), "--name", "whole") == 0
    assert f"| {target}" in script.capture.readouterr().out
    with pytest.MonkeyPatch.context() as patch:
        after_update(patch, 15, lambda trainer: os.kill(os.getpid(), signal.SIGINT))
        assert script.start(*flags.split(), "--name", "stopped") == 130
    assert script.resume(Path("runs/stopped")) == 0
    assert_same(Path("runs/whole"), Path("runs/stopped"))
    script.capture.readouterr()
    assert run_program(evaluate, script.patch, "runs/whole", "--episodes", 2, "--device", "cpu", "--json") == 0
    (group,) = json.loads(script.capture.readouterr().out)["groups"]
    assert group["headline"] == (3600.0 if target == "3600" else None)
    assert (group["results"][0]["predicted_mean"] is not None) == (target == "predicted")
    given = run_program(evaluate, script.patch, "runs/whole", "--episodes", 1, "--device", "cpu", "--targets", 100)
    assert given == (0 if target == "3600" else 1)
    assert ("follows no target return" in script.err()) == (target != "3600")


def test_policies_with_and_without_targets_share_a_report(script: Script) -> None:
    """Eight targets for the one; for the other, what it does without a target."""
    for conditioning in ("return", "max-return"):
        assert script.start("--conditioning", conditioning, "--name", conditioning, *SHORT) == 0
    script.capture.readouterr()
    runs = ("runs/return", "runs/max-return", "--episodes", 1, "--device", "cpu", "--targets", "auto", "--json")
    assert run_program(evaluate, script.patch, *runs) == 0
    groups = json.loads(script.capture.readouterr().out)["groups"]
    assert {group["headline"]: len(group["results"]) for group in groups} == {3600.0: 9, None: 1}


def test_held_out_episodes_are_measured(script: Script) -> None:
    """Two of 20 episodes are held out: their errors are logged, and no batch has them."""
    assert script.start("--validation", "0.1") == 0
    for line in read_metrics(only_run()):
        assert {"valid/action_mse", "valid/action_mse_best", "train/return_sensitivity"} <= line.keys()
        assert line["train/return_sensitivity"] > 0
    dataset, config = load_dataset(script.data), parse_config(["--validation", "0.1"])
    trainer = train.make_trainer(config, dataset, Processes(0, 1, torch.device("cpu")))
    assert len(trainer.sampler.episodes) == 18


def test_diverged_critics_are_reported(script: Script) -> None:
    script.patch.setattr(ValueRange, "is_beyond", lambda *_: True)
    assert script.start("--critic-weight", "1") == 0
    assert script.err().count("warning: the critics have diverged") == 1


def test_attention_flag_has_all_stacks_of_the_model() -> None:
    assert get_args(Attention) == ATTENTION_STACKS


def test_terminal_shows_a_progress_bar(script: Script) -> None:
    script.patch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert script.start("--steps", "25") == 0
    shown = script.err()
    assert "training: 100%" in shown
    assert "25/25" in shown
    assert "evaluating:" in shown
    assert re.search(r"loss 0\.\d+  score -?\d", shown)
