"""Checkpoints are complete, safe to load, and self-contained."""

import os
import pickle
import resource
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from primal_dt.config import Config, ModelConfig, OptimizerConfig
from primal_dt.data.normalizer import Normalizer
from primal_dt.model.transformer import DecisionTransformer
from primal_dt.task import Reference, RunTask
from primal_dt.training.checkpoint import Checkpoint, CheckpointError, CheckpointFolder, load_checkpoint
from tests.conftest import SHAPE, file_size_limit

CONFIG = Config(
    model=ModelConfig(width=16, context=4, rank=4, attention_dropout=0.0), optimizer=OptimizerConfig(steps=100)
)
"""The settings of a run whose model is the small one."""


def make(step: int = 5) -> Checkpoint:
    torch.manual_seed(step)
    return Checkpoint(
        shape=SHAPE,
        weights=DecisionTransformer(SHAPE).state_dict(),
        normalizer=Normalizer(np.array([1, 2, 3], np.float32), np.array([4, 5, 6], np.float32), 1000.0),
        step=step,
        config=asdict(CONFIG),
        task=RunTask("Hopper-v5", None, "data", ("Hopper-v5",), "f", (3600.0,), Reference(0.0, 1.0)),
        training={"trainer": {"step": step, "sums": torch.arange(3.0)}, "pending": {}},
    )


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    """The checkpoints of the run ``tmp_path``, with one of step 5."""
    folder = CheckpointFolder(tmp_path / "checkpoints")
    folder.save(make(5))
    return folder


def names(folder: CheckpointFolder) -> list[str]:
    return [path.name for path in folder.paths()]


def test_checkpoint_round_trip(folder: CheckpointFolder) -> None:
    source, again = make(), load_checkpoint(folder.path(5))
    assert (again.shape, again.step) == (source.shape, source.step)
    assert (again.config, again.task) == (source.config, source.task)
    torch.testing.assert_close(again.weights, source.weights, rtol=0, atol=0)
    torch.testing.assert_close(again.training, source.training, rtol=0, atol=0)
    np.testing.assert_array_equal(again.normalizer.state_mean, source.normalizer.state_mean)
    np.testing.assert_array_equal(again.normalizer.state_std, source.normalizer.state_std)
    assert again.normalizer.return_scale == 1000


@pytest.mark.slow
def test_policy_acts_the_same_in_a_new_process(folder: CheckpointFolder, tmp_path: Path) -> None:
    moved = folder.path(5).rename(tmp_path / "moved.pt")
    policy = load_checkpoint(moved).policy()
    policy.reset([3600.0, 10.0])
    code = """
import sys, numpy as np
from primal_dt.training.checkpoint import load_checkpoint
policy = load_checkpoint(sys.argv[1]).policy()
policy.reset([3600.0, 10.0])
sys.stdout.buffer.write(policy.act(np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])).tobytes())
"""
    done = subprocess.run([sys.executable, "-c", code, str(moved)], capture_output=True, check=True)
    assert done.stdout == policy.act(np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])).tobytes()


def test_files_that_execute_code_are_refused(tmp_path: Path) -> None:
    trace, path = tmp_path / "trace", tmp_path / "evil.pt"

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[object, ...]]:
            return (open, (str(trace), "w"))

    torch.save({"format": 1, "weights": Evil()}, path)
    with pytest.raises(CheckpointError, match="damaged or not a checkpoint"):
        load_checkpoint(path)
    path.write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match="damaged or not a checkpoint"):
        load_checkpoint(path)
    assert not trace.exists()


def test_damage_is_detected(folder: CheckpointFolder) -> None:
    path = folder.path(5)
    whole = path.read_bytes()
    flipped, place = bytearray(whole), whole.index(make().weights["head.weight"].numpy().tobytes())
    flipped[place] ^= 1
    for content in (whole[: len(whole) // 2], flipped, b""):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"step-000000005\.pt is damaged"):
            load_checkpoint(path)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"the checkpoint .* does not exist"):
        load_checkpoint(path)


def test_a_missing_weight_is_named() -> None:
    checkpoint = make()
    weights = {name: weight for name, weight in checkpoint.weights.items() if name != "head.bias"}
    with pytest.raises(CheckpointError, match=r'do not fit: .*Missing key\(s\).*"head\.bias"'):
        replace(checkpoint, weights=weights).policy()


@pytest.mark.parametrize(
    ("version", "message"),
    [(99, "has format 99, but this code reads format 2"), (2, "it lacks shape, weights, state_mean")],
)
def test_other_formats_are_refused(version: int, message: str, tmp_path: Path) -> None:
    torch.save({"format": version}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path / "a.pt")


def test_newest_two_are_kept(folder: CheckpointFolder, tmp_path: Path) -> None:
    for step in (10, 15, 100):
        folder.save(make(step))
    assert names(folder) == ["step-000000015.pt", "step-000000100.pt"]
    path, checkpoint, problems = folder.newest()
    assert (path.name, checkpoint.step, problems) == ("step-000000100.pt", 100, {})
    assert load_checkpoint(tmp_path).step == 100


def test_damaged_newest_falls_back_to_the_previous(folder: CheckpointFolder, tmp_path: Path) -> None:
    folder.save(make(10)).write_bytes(b"half")
    path, checkpoint, problems = folder.newest()
    assert (path.name, checkpoint.step) == ("step-000000005.pt", 5)
    ((damaged, problem),) = problems.items()
    assert damaged.name in problem
    with pytest.warns(UserWarning, match=r"step-000000010\.pt is damaged.*using step-000000005\.pt instead"):
        assert load_checkpoint(tmp_path).step == 5
    damaged.with_name(f"{damaged.name}.damaged").write_bytes(b"an earlier one")
    folder.set_aside(damaged)
    assert damaged.with_name(f"{damaged.name}.damaged-2").exists()
    assert names(folder) == ["step-000000005.pt"]


def test_missing_readable_checkpoint_is_an_error(folder: CheckpointFolder, tmp_path: Path) -> None:
    folder.save(make(10)).write_bytes(b"half")
    folder.path(5).write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"no readable checkpoint .*step-000000010.*step-000000005"):
        folder.newest()
    shutil.rmtree(folder.folder)
    with pytest.raises(CheckpointError, match=f"{tmp_path} is not a run or a shared policy: it has no config.json and"):
        folder.newest()
    (tmp_path / "config.json").touch()
    with pytest.raises(CheckpointError, match="none was saved yet"):
        folder.newest()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("config.json", "config.json is a file of the run {run}: give the folder"),
        ("../policy.onnx", "policy.onnx is an exported policy, which has no checkpoint in it: give the run or the"),
        ("../policy.pt2", "policy.pt2 is an exported policy"),
        ("../data.hdf5", r"data.hdf5 is not a checkpoint: give a run folder, a checkpoint file \(.pt\), or"),
        ("checkpoints/step-000000010.pt", "step-000000010.pt is damaged or not a checkpoint of this version"),
    ],
)
def test_another_file_is_not_called_damaged(folder: CheckpointFolder, tmp_path: Path, name: str, message: str) -> None:
    run = tmp_path / "run"
    run.mkdir()
    folder.folder.rename(run / "checkpoints")
    path = run / name
    path.write_bytes(b"other")
    with pytest.raises(CheckpointError, match=message.format(run=run)):
        load_checkpoint(path)


@pytest.mark.parametrize("num_bytes", [0, 1000, 10_000, -1], ids=["at once", "early", "later", "at the end"])
def test_full_disk_leaves_the_previous_intact(folder: CheckpointFolder, num_bytes: int) -> None:
    """The error is the system's, with the path of the checkpoint, wherever ``torch.save`` notices it."""
    limit = num_bytes if num_bytes >= 0 else folder.path(5).stat().st_size - 1
    with pytest.raises(OSError, match="File too large") as caught, file_size_limit(limit):
        folder.save(make(10))
    assert caught.value.filename == str(folder.path(10))
    assert names(folder) == ["step-000000005.pt"]
    assert folder.newest()[1].step == 5


def test_model_has_its_shape_and_is_in_evaluation_mode() -> None:
    model = make().model()
    assert model.shape == SHAPE
    assert not model.training


def test_a_linked_or_piped_checkpoint_is_not_used(folder: CheckpointFolder, tmp_path: Path) -> None:
    outside = folder.path(5).rename(tmp_path / "outside.pt")
    folder.path(5).symlink_to(outside)
    os.mkfifo(folder.path(7))
    with pytest.raises(CheckpointError, match=r"step-000000007\.pt cannot be used: it is a link.*step-000000005\.pt"):
        folder.newest()
    with pytest.raises(CheckpointError, match=r"step-000000007\.pt is not a regular file"):
        load_checkpoint(folder.path(7))
    assert load_checkpoint(outside).step == 5


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_memory_shortage_is_not_called_damage(tmp_path: Path) -> None:
    """The error is the system's, so that a run which resumes does not rename its checkpoint to ``*.damaged``."""
    shape = replace(SHAPE, max_timesteps=2**21)  # 128 MiB
    folder = CheckpointFolder(tmp_path / "checkpoints")
    path = folder.save(replace(make(), shape=shape, weights=DecisionTransformer(shape).state_dict()))
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    try:
        resource.setrlimit(resource.RLIMIT_AS, (used + path.stat().st_size // 2, before[1]))
        with pytest.raises(OSError, match=r"not enough memory to load the checkpoint.*step-000000005\.pt"):
            folder.newest()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert folder.newest()[2] == {}


def test_a_forbidden_file_is_not_called_damaged(folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("primal_dt.training.checkpoint.check_archive", forbidden)
    with pytest.raises(PermissionError):
        folder.newest()
