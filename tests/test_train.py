"""``train.py``, as a person meets it: it learns, it stops, it goes on, and it explains itself."""

import json
import multiprocessing
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import train
from envs.evaluation import evaluate
from primal_dt import checkpoint as checkpoint_module
from primal_dt.checkpoint import CheckpointError, load_checkpoint
from primal_dt.logbook import read_metrics
from primal_dt.trainer import Trainer
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
    """Weights, optimiser, metrics and curves, bit for bit."""
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
    assert config["task"]["fingerprint"] == load_checkpoint(folder).task["fingerprint"]
    assert config["versions"]["torch"] == torch.__version__.partition("+")[0] or config["versions"]["torch"]
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
            assert two[name] == pytest.approx(one[name], abs=1e-5, rel=1e-3), (one["step"], name)
    assert load_checkpoint(only_run(Path("shared"))).step == 60


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
    update = Trainer._update
    at = {"between points": 23, "at a point": 24, "while evaluating": None}[moment]

    def interrupted(self: Trainer, batch: Any) -> None:
        update(self, batch)
        if self.step == at:
            os.kill(os.getpid(), number)

    def interrupted_evaluation(*arguments: Any, **options: Any) -> Any:
        if moment == "while evaluating":
            os.kill(os.getpid(), number)
        return evaluate(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_update", interrupted)
        patch.setattr(train, "evaluate", interrupted_evaluation)
        assert run(patch, "--dataset", data, *SMALL, "--out", "cut") == code
    folder = only_run(Path("cut"))
    stopped_at = {"between points": 24, "at a point": 25, "while evaluating": 20}[moment]
    assert load_checkpoint(folder).step == stopped_at
    assert f"stopped after step {stopped_at}; to go on: python train.py --resume {folder}" in capsys.readouterr().out
    assert run(monkeypatch, "--resume", str(folder)) == 0
    assert_same(folder, only_run(Path("whole")))


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
    assert "going on from step-000000050.pt" in said
    assert_same(folder, only_run(Path("whole")))


def _train(arguments: list[str]) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.argv = ["train.py", *arguments]
    sys.exit(train.main())


def test_killed_at_any_moment_a_run_is_never_lost(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill -9 at twenty random moments; after each, what is there can be read; in the end, nothing has changed."""
    longer = [*SMALL, "--steps", "1300", "--save-every-steps", "5", "--eval-every-steps", "100"]
    run(monkeypatch, "--dataset", data, *longer, "--out", "whole")
    whole = only_run(Path("whole"))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["train"])
    chance = random.Random(0)
    kills, arguments = 0, ["--dataset", data, *longer, "--out", "cut"]
    while True:
        process = context.Process(target=_train, args=(arguments,))
        process.start()
        if kills < 20:
            # At a random time, but before the run can get far, so that there is a run to kill twenty times.
            started, points = time.monotonic(), num_points()
            moment = chance.uniform(0.0, 1.0)
            while process.is_alive() and time.monotonic() - started < moment and num_points() < points + 8:
                time.sleep(0.005)
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
                assert_whole(folder)
            else:  # killed before it was a run
                shutil.rmtree(folder)
    assert kills == 20
    assert_same(only_run(Path("cut")), whole)


def num_points() -> int:
    return sum(len(path.read_bytes().splitlines()) for path in Path("cut").glob("*/metrics.jsonl"))


def assert_whole(folder: Path) -> None:
    """Every checkpoint that has its name is whole, and the record goes at least as far."""
    steps = [load_checkpoint(path).step for path in sorted((folder / "checkpoints").glob("step-*.pt"))]
    if steps:
        assert [line["step"] for line in record(folder)][: max(steps) // 5] == list(range(5, max(steps) + 1, 5))


# Trouble


def test_a_loss_that_is_not_finite_stops_the_run(
    data: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    update = Trainer._update

    def poisoned(self: Trainer, batch: Any) -> None:
        if self.step == 22:
            torch.nn.init.constant_(self.model.head.weight, float("nan"))
        update(self, batch)

    monkeypatch.setattr(Trainer, "_update", poisoned)
    assert run(monkeypatch, "--dataset", data, *SMALL) == 3
    said = capsys.readouterr().err
    assert "not finite at step 22" in said
    assert "step-000000020.pt" in said
    for path in (only_run() / "checkpoints").iterdir():
        weights = load_checkpoint(path).weights
        assert all(torch.isfinite(value).all() for value in weights.values())
    assert [line["step"] for line in record(only_run())] == [5, 10, 15, 20]


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
    assert "is not what it was when" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dataset", "nonsense"], "there is no data set 'nonsense'"),
        (["--dataset", "DATA", "--attention", "best"], "attention must be one of primal-plus"),
        (["--dataset", "DATA", "--num-heads", "3"], "width (128) must be divisible by num_heads (3)"),
        (["--dataset", "DATA", "--env-id", "Hopper-v4"], "--mix-versions"),
        (["--resume", "nowhere"], "nowhere is not a run"),
        (["--resume", "nowhere", "--steps", "7"], "only --device can be given besides"),
        (["--dataset", "DATA", "--device", "cuda:77"], "the device 'cuda:77' cannot be used"),
        (["--dataset", "DATA", "--out", "DATA"], "File exists"),
    ],
)
def test_a_mistake_ends_in_a_message(
    arguments: list[str], message: str, data: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *[data if word == "DATA" else word for word in arguments]) == 1
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
    with pytest.raises(SystemExit):
        run(monkeypatch, "--help")
    assert "quick" in capsys.readouterr().out


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
