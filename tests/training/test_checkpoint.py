"""Checkpoints: whole or not there, safe to load, and enough to act and to go on."""

import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from primal_dt.data.normalizer import Normalizer
from primal_dt.model.transformer import DecisionTransformer, ModelShape
from primal_dt.task import Reference, RunTask
from primal_dt.training.checkpoint import (
    Checkpoint,
    CheckpointError,
    CheckpointFolder,
    load_checkpoint,
    save_checkpoint,
)

SHAPE = ModelShape(3, (-1.0,), (2.0,), width=16, context=4, rank=4, max_timesteps=12)


def make(step: int = 5) -> Checkpoint:
    torch.manual_seed(step)
    return Checkpoint(
        shape=SHAPE,
        weights=DecisionTransformer(SHAPE).state_dict(),
        normalizer=Normalizer(np.array([1, 2, 3], np.float32), np.array([4, 5, 6], np.float32), 1000.0),
        step=step,
        config={"run": {"seed": 3}},
        task=RunTask("Hopper-v5", None, "data", ("Hopper-v5",), "f", (3600.0,), Reference(0.0, 1.0)),
        training={"trainer": {"step": step, "sums": torch.arange(3.0)}, "pending": {}},
    )


def test_a_checkpoint_comes_back_whole(tmp_path: Path) -> None:
    source = make()
    save_checkpoint(tmp_path / "a.pt", source)
    again = load_checkpoint(tmp_path / "a.pt")
    assert (again.shape, again.step) == (source.shape, source.step)
    assert (again.config, again.task) == (source.config, source.task)
    assert again.weights.keys() == source.weights.keys()
    assert all(torch.equal(again.weights[name], source.weights[name]) for name in source.weights)
    np.testing.assert_array_equal(again.normalizer.state_mean, source.normalizer.state_mean)
    np.testing.assert_array_equal(again.normalizer.state_std, source.normalizer.state_std)
    assert again.normalizer.return_scale == 1000
    assert torch.equal(again.training["trainer"]["sums"], torch.arange(3.0))


def test_a_policy_acts_alike_in_a_fresh_process_and_another_folder(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "a.pt", make())
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "a.pt").rename(tmp_path / "elsewhere" / "b.pt")
    policy = load_checkpoint(tmp_path / "elsewhere" / "b.pt").policy()
    policy.reset([3600.0, 10.0])
    expected = policy.act(np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
    code = """
import sys, numpy as np
from primal_dt.training.checkpoint import load_checkpoint
policy = load_checkpoint(sys.argv[1]).policy()
policy.reset([3600.0, 10.0])
sys.stdout.buffer.write(policy.act(np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])).tobytes())
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "elsewhere" / "b.pt")],
        capture_output=True,
        check=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())},
    )
    assert done.stdout == expected.tobytes()


def test_a_file_that_would_execute_something_is_refused(tmp_path: Path) -> None:
    trace = tmp_path / "trace"

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[object, ...]]:
            return (open, (str(trace), "w"))

    torch.save({"format": 1, "weights": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(CheckpointError, match="damaged or not a checkpoint"):
        load_checkpoint(tmp_path / "evil.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match="damaged or not a checkpoint"):
        load_checkpoint(tmp_path / "plain.pt")
    assert not trace.exists()


def test_damage_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    save_checkpoint(path, make())
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=r"a\.pt is damaged or not a checkpoint"):
        load_checkpoint(path)
    place = whole.index(make().weights["head.weight"].numpy().tobytes())
    path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    with pytest.raises(CheckpointError, match=r"a\.pt is damaged"):
        load_checkpoint(path)
    path.write_bytes(b"")
    with pytest.raises(CheckpointError):
        load_checkpoint(path)
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        load_checkpoint(tmp_path / "none.pt")


def test_another_format_is_told(tmp_path: Path) -> None:
    torch.save({"format": 99}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="has format 99; this version reads 2"):
        load_checkpoint(tmp_path / "a.pt")
    torch.save({"format": 2}, tmp_path / "b.pt")  # no more than that
    with pytest.raises(CheckpointError, match="not a checkpoint: KeyError"):
        load_checkpoint(tmp_path / "b.pt")


def test_the_newest_two_stay(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoints")
    for step in (5, 10, 15, 100):
        folder.save(make(step))
    assert [path.name for path in folder.paths()] == ["step-000000015.pt", "step-000000100.pt"]
    path, checkpoint, problems = folder.newest()
    assert (path.name, checkpoint.step, problems) == ("step-000000100.pt", 100, {})
    assert load_checkpoint(tmp_path).step == 100  # by the run's folder


def test_a_damaged_newest_one_falls_back_and_says_so(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoints")
    folder.save(make(5))
    folder.save(make(10)).write_bytes(b"half")
    path, checkpoint, problems = folder.newest()
    assert (path.name, checkpoint.step) == ("step-000000005.pt", 5)
    ((damaged, problem),) = problems.items()
    assert damaged.name in problem
    with pytest.warns(UserWarning, match=r"step-000000010\.pt is damaged.*this is step-000000005\.pt"):
        assert load_checkpoint(tmp_path).step == 5
    folder.set_aside(damaged)
    assert [path.name for path in folder.paths()] == ["step-000000005.pt"]
    damaged.write_bytes(b"half")
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"no checkpoint that can be read .*step-000000010.*step-000000005"):
        folder.newest()
    with pytest.raises(CheckpointError, match="it has none yet"):
        CheckpointFolder(tmp_path / "nothing").newest()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_leaves_the_previous_one_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoints")
    folder.save(make(5))
    open_file = Path.open

    def full(path: Path, mode: str = "r", *rest: object) -> object:
        return open_file(Path("/dev/full") if "partial" in path.name else path, mode, *rest)  # type: ignore[call-overload]

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", full)
        with pytest.raises((OSError, RuntimeError)):
            folder.save(make(10))
    assert [path.name for path in folder.paths()] == ["step-000000005.pt"]
    assert folder.newest()[1].step == 5


def test_a_shape_is_all_it_takes_to_build_the_model() -> None:
    checkpoint = make()
    assert replace(checkpoint, step=6).model().shape == SHAPE
    assert not checkpoint.model().training
