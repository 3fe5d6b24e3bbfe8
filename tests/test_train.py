"""``train.py``, as a person meets it: it learns, it stops, it goes on, and it explains itself."""

import ast
import inspect
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
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import train
from primal_dt.config import PRESETS, Attention, Config, EvaluationConfig, ModelConfig, OptimizerConfig, RunConfig
from primal_dt.evaluation.evaluate import evaluate_episodes
from primal_dt.model.transformer import ATTENTION_STACKS
from primal_dt.system.provenance import commit
from primal_dt.training import checkpoint as checkpoint_module
from primal_dt.training.checkpoint import CheckpointError, load_checkpoint
from primal_dt.training.metrics_log import read_metrics
from primal_dt.training.run_folder import lock_run
from primal_dt.training.trainer import Trainer
from tests.envs.files import d4rl_arrays, write_d4rl

SMALL = shlex.split("""
    --width 16 --context 4 --rank 4 --num-layers 2 --batch-size 8 --dropout 0.1 --warmup-steps 5 --steps 60
    --log-every-steps 5 --save-every-steps 10 --eval-every-steps 20 --eval-episodes 1 --spectrum-every-steps 30
    --threads 1 --device cpu
""")
FLAGS = shlex.split("""
    --dataset --attention --rank --eta --steps --batch-size --context --width --lr --seed --device --out --resume
""")


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIMAL_DT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def data(tmp_path: Path) -> str:
    arrays = d4rl_arrays((30,) * 20)
    arrays["actions"] = np.tanh(arrays["observations"][:, :3])  # there is something to learn
    return str(write_d4rl(tmp_path / "small data.hdf5", arrays, env_id="Hopper-v5"))


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    return train.main()


def only_run(folder: Path = Path("runs")) -> Path:
    (found,) = folder.iterdir()
    return found


def record(folder: Path) -> list[dict[str, float]]:
    """All that was logged but for times."""
    lines = read_metrics(folder)
    return [
        {name: value for name, value in line.items() if name not in ("time", "train/steps_per_second")}
        for line in lines
    ]


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder))
    events.Reload()
    tags = [tag for tag in events.Tags()["scalars"] if "per_second" not in tag]
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in tags}


def assert_same(one: Path, two: Path) -> None:
    """Weights, optimizer, metrics and curves, bit for bit."""
    first, second = load_checkpoint(one), load_checkpoint(two)
    assert first.step == second.step
    assert all(torch.equal(first.weights[name], second.weights[name]) for name in first.weights)
    for mine, theirs in zip(*(c.training["trainer"]["optimizers"] for c in (first, second)), strict=True):
        for key, moments in mine["state"].items():
            assert all(torch.equal(value, theirs["state"][key][name]) for name, value in moments.items())
    assert record(one) == record(two)
    assert curves(one) == curves(two)


# A run


def test_a_run_leaves_everything_behind(
    data: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--dataset", data, *SMALL) == 0
    folder = only_run()
    assert folder.name.startswith("small-data__primal-plus__s0__")
    shown = capsys.readouterr()
    for word in (str(folder), "tensorboard --logdir runs", "normalized return", "3600", "1800", "step-000000060.pt"):
        assert word in shown.out
    assert "step 60 of 60  loss" in shown.err
    report = json.loads((folder / "report" / "report.json").read_text())
    (result, _) = report["groups"][0]["results"]
    assert result["mean"] == pytest.approx(record(folder)[-1]["eval/normalized_return"])
    assert str(folder / "report" / "report.md") in shown.out
    lines = record(folder)
    assert [line["step"] for line in lines] == list(range(5, 61, 5))
    assert [line["step"] for line in lines if "eval/normalized_return" in line] == [20, 40, 60]
    assert [line["step"] for line in lines if "spectrum/effective_rank/layer_1" in line] == [30, 60]
    assert {"train/loss", "train/action_mse", "train/penalty", "train/J/layer_1", "train/gradient_norm"} <= set(
        lines[0]
    )
    assert lines[-1]["eval/normalized_return"] == lines[-1]["eval/normalized_return/target_3600"]
    for line in lines:
        for name, value in line.items():
            if name != "step":
                assert dict(curves(folder)[name])[int(line["step"])] == pytest.approx(value, rel=1e-6)
    config = json.loads((folder / "config.json").read_text())
    assert config["config"]["dataset"] == data
    assert config["task"]["fingerprint"] == load_checkpoint(folder).task.fingerprint
    assert config["versions"]["torch"] == torch.__version__
    assert config["commit"] == commit()
    assert load_checkpoint(folder).config == config["config"]
    assert config["command"][0] == "train.py"
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
        "step-000000050.pt",
        "step-000000060.pt",
    ]


def test_a_policy_acts_from_a_run_alone(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, "--dataset", data, *SMALL)
    Path(data).unlink()
    policy = load_checkpoint(only_run()).policy()
    policy.reset([3600.0])
    action = policy.act(np.zeros((1, 11)))
    assert action.shape == (1, 3)
    assert np.abs(action).max() <= 1


def test_two_runs_of_one_seed_are_equal_and_another_seed_is_not(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for out, seed in (("a", "3"), ("b", "3"), ("c", "4")):
        run(monkeypatch, "--dataset", data, *SMALL, "--seed", seed, "--out", out)
    a, b, c = (only_run(Path(out)) for out in "abc")
    assert_same(a, b)
    assert record(a) != record(c)


@pytest.mark.parametrize("attention", ["softmax", "primalformer", "linear", "cosformer"])
def test_other_stacks_train_too(data: str, attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, "--dataset", data, *SMALL, "--attention", attention, "--eval-every-steps", "0") == 0
    assert load_checkpoint(only_run()).shape.attention == attention
    losses = [line["train/action_mse"] for line in record(only_run())]
    assert losses[-1] < losses[0]


def test_torchrun_trains_as_one_process_does(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = [*SMALL, "--dropout", "0"]
    run(monkeypatch, "--dataset", data, *plain, "--out", "alone")
    script = Path(train.__file__)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(
        [*launch, "--dataset", data, *plain, "--out", "shared"],
        env=os.environ | {"PYTHONPATH": str(script.parent), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    alone, shared = record(only_run(Path("alone"))), record(only_run(Path("shared")))  # one writes: one run
    assert [line["step"] for line in alone] == [line["step"] for line in shared]
    for one, two in zip(alone, shared, strict=True):
        for name in ("train/loss", "train/action_mse", "train/penalty"):
            assert two[name] == pytest.approx(one[name], abs=1e-5, rel=0), (one["step"], name)
    assert load_checkpoint(only_run(Path("shared"))).step == 60


def test_torchrun_stops_and_goes_on(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = [*SMALL, "--dropout", "0", "--steps", "400", "--eval-every-steps", "0"]
    run(monkeypatch, "--dataset", data, *plain, "--out", "alone")
    script = Path(train.__file__)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = os.environ | {"PYTHONPATH": str(script.parent), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*launch, "--dataset", data, *plain, "--out", "shared"], env=environment)
    while not any(read_metrics(folder) for folder in Path("shared").glob("*")):
        assert process.poll() is None
        time.sleep(0.05)
    process.terminate()
    process.wait(60)
    folder = only_run(Path("shared"))
    stopped_at = load_checkpoint(folder).step
    assert 0 < stopped_at < 400
    subprocess.run([*launch, "--resume", str(folder)], env=environment, check=True)
    alone, shared = record(only_run(Path("alone"))), record(folder)
    assert [line["step"] for line in alone] == [line["step"] for line in shared]
    for one, two in zip(alone[:20], shared[:20], strict=True):
        assert two["train/loss"] == pytest.approx(one["train/loss"], abs=1e-4), one["step"]


# Stopping and going on


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("moment", ["between points", "at a point", "while evaluating"])
def test_a_stopped_run_goes_on_as_if_nothing_had_been(
    data: str,
    moment: str,
    number: int,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run(monkeypatch, "--dataset", data, *SMALL, "--out", "whole")
    update = Trainer.update
    at = {"between points": 24, "at a point": 25, "while evaluating": None}[moment]

    def interrupted(self: Trainer, batch: Any) -> None:
        update(self, batch)
        if self.step == at:
            os.kill(os.getpid(), number)

    def interrupted_evaluation(*arguments: Any, **options: Any) -> Any:
        if moment == "while evaluating":
            os.kill(os.getpid(), number)
        return evaluate_episodes(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "update", interrupted)
        patch.setattr(train, "evaluate_episodes", interrupted_evaluation)
        assert run(patch, "--dataset", data, *SMALL, "--out", "cut") == code
    folder = only_run(Path("cut"))
    stopped_at = {"between points": 24, "at a point": 25, "while evaluating": 20}[moment]
    assert load_checkpoint(folder).step == stopped_at
    assert f"stopped after step {stopped_at}; to resume: python train.py --resume {folder}" in capsys.readouterr().out
    with first_updates(monkeypatch) as begun:
        assert run(monkeypatch, "--resume", str(folder)) == 0
    assert begun == [stopped_at]  # and not from the beginning, where it would come to the same
    assert_same(folder, only_run(Path("whole")))


@contextmanager
def first_updates(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The steps at which runs begin or go on."""
    begun: list[int] = []
    original = Trainer.__iter__

    def watched(self: Trainer) -> Any:
        begun.append(self.step)
        return original(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "__iter__", watched)
        yield begun


def test_a_run_that_is_stopped_twice_in_one_evaluation_forgets_nothing(
    data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    every_step = [*SMALL, "--log-every-steps", "1", "--steps", "25"]
    run(monkeypatch, "--dataset", data, *every_step, "--out", "whole")

    def interrupted(*arguments: Any, **options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return evaluate_episodes(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(train, "evaluate_episodes", interrupted)
        assert run(patch, "--dataset", data, *every_step, "--out", "cut") == 143
        folder = only_run(Path("cut"))
        assert run(patch, "--resume", str(folder)) == 143
        assert run(patch, "--resume", str(folder)) == 143
    assert load_checkpoint(folder).step == 20
    assert run(monkeypatch, "--resume", str(folder)) == 0
    assert_same(folder, only_run(Path("whole")))


def test_a_run_goes_on_where_it_was_also_from_another_folder(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(monkeypatch, "--dataset", Path(data).name, *SMALL)
    folder = only_run().resolve()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert run(monkeypatch, "--resume", str(folder)) == 0


def test_a_run_is_on_its_device_again(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, "--dataset", data, *SMALL)
    folder = str(only_run())
    assert train.parse(["--resume", folder])[0].run.device == "cpu"
    assert train.parse(["--resume", folder, "--device", "cuda"])[0].run.device == "cuda"
    with pytest.raises(ValueError, match="only --device can be given with it"):
        train.parse(["--resume", folder, "--steps", str(PRESETS["quick"][1].optimizer.steps)])


def test_two_processes_do_not_train_one_run(
    data: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "--dataset", data, *SMALL)
    with lock_run(only_run()):
        assert run(monkeypatch, "--resume", str(only_run())) == 1
    assert "is being trained by another process" in capsys.readouterr().err


def test_a_finished_run_has_nothing_to_go_on_with(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, "--dataset", data, *SMALL)
    before = record(only_run()), curves(only_run())
    assert run(monkeypatch, "--resume", str(only_run())) == 0
    assert (record(only_run()), curves(only_run())) == before


def test_a_damaged_checkpoint_falls_back_to_the_one_before(
    data: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "--dataset", data, *SMALL, "--out", "whole")
    run(monkeypatch, "--dataset", data, *SMALL, "--out", "hurt")
    folder = only_run(Path("hurt"))
    last = folder / "checkpoints" / "step-000000060.pt"
    last.write_bytes(last.read_bytes()[:1000])
    assert run(monkeypatch, "--resume", str(folder)) == 0
    said = capsys.readouterr().err
    assert "step-000000060.pt is damaged" in said
    assert "resuming from step-000000050.pt" in said
    assert_same(folder, only_run(Path("whole")))
    left = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert left == ["step-000000050.pt", "step-000000060.pt", "step-000000060.pt.damaged"]


def _train(arguments: list[str]) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.argv = ["train.py", *arguments]
    sys.exit(train.main())


def test_killed_at_any_moment_a_run_is_never_lost(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill -9 at twenty random moments; after each, what is there can be read; in the end, nothing has changed."""
    longer = [*SMALL, "--steps", "600", "--save-every-steps", "5", "--eval-every-steps", "100"]
    run(monkeypatch, "--dataset", data, *longer, "--out", "whole")
    whole = only_run(Path("whole"))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["train"])
    chance = random.Random(0)
    kills, newest, arguments = 0, 0, ["--dataset", data, *longer, "--out", "cut"]
    while True:
        process = context.Process(target=_train, args=(arguments,))
        process.start()
        if kills < 20:
            # After some points that it has written, at any moment between two; now and then while it is starting.
            more, points = chance.randint(0, 5), num_points()
            while more and process.is_alive() and num_points() < points + more:
                time.sleep(0.005)
            time.sleep(chance.uniform(0.0, 0.06 if more else 1.0))
        else:
            process.join()
        if not process.is_alive():
            process.join()
            assert process.exitcode == 0
            break
        process.kill()
        process.join()
        kills += 1
        if Path("cut").exists() and (folders := list(Path("cut").iterdir())):
            (folder,) = folders
            if (folder / "config.json").exists():
                arguments = ["--resume", str(folder)]
                step = assert_whole(folder)
                assert step >= newest  # no checkpoint was lost, and none was begun again
                newest = step
            else:  # killed before it was a run
                shutil.rmtree(folder)
    assert kills == 20
    assert newest > 0
    assert_same(only_run(Path("cut")), whole)
    assert not list(Path("cut").glob("**/*.partial"))


def num_points() -> int:
    return sum(len(path.read_bytes().splitlines()) for path in Path("cut").glob("*/metrics.jsonl"))


def assert_whole(folder: Path) -> int:
    """Every checkpoint that has its name is whole, and the record goes at least as far. The newest's step, or 0."""
    steps = [load_checkpoint(path).step for path in sorted((folder / "checkpoints").glob("step-*.pt"))]
    if steps:
        assert [line["step"] for line in record(folder)][: max(steps) // 5] == list(range(5, max(steps) + 1, 5))
    return max(steps, default=0)


# Trouble


def test_a_loss_that_is_not_finite_stops_the_run(
    data: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    update = Trainer.update

    def poisoned(self: Trainer, batch: Any) -> None:
        if self.step == 22:
            torch.nn.init.constant_(self.model.head.weight, float("nan"))
        update(self, batch)

    monkeypatch.setattr(Trainer, "update", poisoned)
    assert run(monkeypatch, "--dataset", data, *SMALL) == 3
    said = capsys.readouterr().err
    assert "not finite at step 23" in said
    assert "step-000000020.pt" in said
    for path in (only_run() / "checkpoints").iterdir():
        weights = load_checkpoint(path).weights
        assert all(torch.isfinite(value).all() for value in weights.values())
    assert [line["step"] for line in record(only_run())] == [5, 10, 15, 20]


def test_weights_that_are_not_finite_are_never_saved(
    data: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loss was still finite: the last update itself went astray."""
    update = Trainer.update

    def poisoned(self: Trainer, batch: Any) -> None:
        update(self, batch)
        if self.step == 30:
            torch.nn.init.constant_(self.model.head.weight, float("inf"))

    monkeypatch.setattr(Trainer, "update", poisoned)
    assert run(monkeypatch, "--dataset", data, *SMALL) == 3
    said = capsys.readouterr().err
    assert "not finite at step 30" in said
    assert "the last good checkpoint" in said
    assert load_checkpoint(only_run()).step == 20


def test_a_full_disk_ends_in_a_message_and_the_last_checkpoint_stays(
    data: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save = checkpoint_module.save_checkpoint

    def full(path: Path, checkpoint: Any) -> None:
        if checkpoint.step == 30:
            raise OSError(28, "No space left on device", str(path))
        save(path, checkpoint)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_module, "save_checkpoint", full)
        assert run(patch, "--dataset", data, *SMALL, "--out", "cut") == 1
    assert "No space left on device" in capsys.readouterr().err
    folder = only_run(Path("cut"))
    assert load_checkpoint(folder).step == 20
    assert run(monkeypatch, "--resume", str(folder)) == 0
    run(monkeypatch, "--dataset", data, *SMALL, "--out", "whole")
    assert_same(folder, only_run(Path("whole")))


def test_going_on_with_other_data_is_refused(
    data: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "--dataset", data, *SMALL)
    write_d4rl(Path(data), d4rl_arrays((30,) * 20, seed=1), env_id="Hopper-v5")
    assert run(monkeypatch, "--resume", str(only_run())) == 1
    assert "has changed since the run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dataset", "nonsense"], "there is no data set 'nonsense'"),
        (["--dataset", "DATA", "--env-id", "Hopper-v4"], "--mix-versions"),
        (["--dataset", "OLD"], "the environment Hopper-v3 cannot be made"),
        (["--resume", "nowhere"], "nowhere is not a run"),
        (["--resume", "DATA"], "is a file: give the folder of a run"),
        (["--resume", "nowhere", "--steps", "7"], "only --device can be given with it"),
        (["--dataset", "DATA", "--device", "cuda:77"], "the device 'cuda:77' cannot be used"),
        (["--dataset", "DATA", "--out", "DATA"], "cannot be used: it is not a folder"),
    ],
)
def test_a_mistake_ends_in_a_message(
    arguments: list[str], message: str, data: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = str(write_d4rl(Path("old.hdf5"), d4rl_arrays((30,) * 20), env_id="Hopper-v3"))
    assert run(monkeypatch, *[{"DATA": data, "OLD": old}.get(word, word) for word in arguments]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert message in said
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
        (["--threads", "0"], ["threads (0) must be above 0"]),
        (["--lr", "inf"], ["lr (inf) must be above 0 and finite"]),
    ],
)
def test_a_wrong_flag_is_answered_with_the_right_ones(
    arguments: list[str], words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        run(monkeypatch, *arguments)
    assert caught.value.code == 2
    said = capsys.readouterr()
    assert all(word in said.err + said.out for word in words)


def test_help_explains_every_flag(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(monkeypatch, "quick", "--help")
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert all(f"{flag} " in shown for flag in FLAGS)
    words = " ".join(re.sub(r"[│╭╮╰╯─]", " ", shown).split())
    for part in (Config, ModelConfig, OptimizerConfig, EvaluationConfig, RunConfig):
        for name, text in docstrings_of(part).items():
            assert f"--{name.replace('_', '-')}" in words
            assert text.partition(".")[0] in words, name
    with pytest.raises(SystemExit):
        run(monkeypatch, "--help")
    assert "python train.py quick --help" in capsys.readouterr().out


def docstrings_of(part: type) -> dict[str, str]:
    """Field -> what stands under it, from the source."""
    body = ast.parse(inspect.getsource(part)).body[0].body  # type: ignore[attr-defined]
    texts = {}
    for field, text in pairwise(body):
        if isinstance(field, ast.AnnAssign) and not ast.unparse(field.annotation).endswith("Config"):
            assert isinstance(text, ast.Expr), ast.unparse(field)
            texts[ast.unparse(field.target)] = " ".join(str(ast.literal_eval(text.value)).split())
    return texts


def test_the_names_of_attention_stacks_are_those_of_the_model() -> None:
    assert get_args(Attention) == ATTENTION_STACKS


def test_a_terminal_has_a_bar(data: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert run(monkeypatch, "--dataset", data, *SMALL) == 0
    shown = capsys.readouterr().err
    assert "training: 100%" in shown
    assert "60/60" in shown
    assert "evaluating:" in shown
    assert re.search(r"loss 0\.\d+  score -?\d", shown)


def test_a_run_without_any_checkpoint_begins_anew(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, "--dataset", data, *SMALL, "--out", "whole")
    run(monkeypatch, "--dataset", data, *SMALL, "--out", "cut")
    folder = only_run(Path("cut"))
    for path in (folder / "checkpoints").iterdir():
        path.unlink()
    with pytest.raises(CheckpointError):
        load_checkpoint(folder)
    assert run(monkeypatch, "--resume", str(folder)) == 0
    assert_same(folder, only_run(Path("whole")))
