"""Crafted checkpoints end in one kind of message, before anything large is built."""

import math
import zipfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from primal_dt.model.critic import TwinCritic
from primal_dt.training.checkpoint import CheckpointError, CheckpointFolder, load_checkpoint
from primal_dt.training.recorder import restore
from tests.conftest import SHAPE
from tests.training.test_checkpoint import CONFIG, make
from tests.training.test_trainer import make as make_trainer

Content = dict[Any, Any]


def put(path: str, value: Any) -> Callable[[Content], object]:
    """A change that sets the value at a path, such as ``config/run/seed``."""

    def change(content: Content) -> None:
        *parents, last = path.split("/")
        for name in parents:
            content = content[name]
        content[last] = value

    return change


def drop(path: str) -> Callable[[Content], object]:
    """A change that removes the value at a path."""

    def change(content: Content) -> None:
        *parents, last = path.split("/")
        for name in parents:
            content = content[name]
        del content[last]

    return change


def nested(depth: int) -> list[Any]:
    """Lists that are small in memory, and have 2 ** depth items if one looks into each of them."""
    value: list[Any] = []
    for _ in range(depth):
        value = [value, value]
    return value


def both(name: str, value: Any) -> Callable[[Content], object]:
    """A change of the model's shape and of the configuration, so that they agree."""

    def change(content: Content) -> None:
        content["shape"][name] = content["config"]["model"][name] = value

    return change


CRAFTED: dict[str, tuple[Callable[[Content], object], str]] = {
    # The whole
    "no shape": (drop("shape"), "it lacks shape"),
    "no weights": (drop("weights"), "it lacks weights"),
    "no task": (drop("task"), "it lacks task"),
    "no training": (drop("training"), "it lacks training"),
    "an unknown key": (put("more", 1), "it has the unknown key 'more'"),
    "an unknown key that is a number": (lambda content: content.update({7: 1}), "it has the unknown key 7"),
    "a later format": (put("format", 3), "it has format 3, but this code reads format 2"),
    "a format that is a tensor": (put("format", torch.ones(3)), "it has format tensor"),
    # The shape
    "a shape that is a list": (put("shape", [1, 2]), "shape must be a mapping, not [1, 2]"),
    "a shape without width": (drop("shape/width"), "shape lacks width"),
    "a shape with more": (put("shape/depth", 2), "shape has the unknown key 'depth'"),
    "a width as text": (put("shape/width", "16"), "shape.width must be int, not '16'"),
    "a width that is a tensor": (put("shape/width", torch.tensor(16)), "shape.width must be int, not tensor(16)"),
    "a negative width": (both("width", -16), "width (-16) must be at least 1"),
    "bounds as text": (put("shape/action_low", ("a", "b")), "shape.action_low[0] must be a finite number, not 'a'"),
    "bounds that are not numbers": (put("shape/action_low", (math.nan, 0.0)), "must be a finite number, not nan"),
    "bounds of another length": (put("shape/action_low", (-1.0,)), "must have the same length"),
    "an unknown stack": (put("shape/attention", "best"), "attention must be one of primal-plus"),
    "an unknown feature map": (
        put("shape/feature_map", "sine"),
        "shape.feature_map must be one of cosine, exponential",
    ),
    "another context": (put("shape/context", 9), "shape.context is 9, but config.model.context is 4"),
    "a huge width": (both("width", 10**6), "width (1000000) must be at least 1 and at most 65536"),
    "the largest width": (both("width", 2**16), "shape describes a larger model than the file has"),
    "a huge number of layers": (both("num_layers", 10**12), "num_layers (1000000000000) must be"),
    "many layers": (both("num_layers", 4096), "shape describes a larger model than the file has"),
    "a huge number of timesteps": (put("shape/max_timesteps", 10**15), "shape describes a larger model"),
    "a huge rank": (
        lambda content: [both("rank", None)(content), put("shape/rank", 10**15)(content)],
        "a larger model",
    ),
    "a huge state": (put("shape/state_width", 10**18), "shape describes a larger model"),
    "a huge number of choices": (
        lambda content: content["shape"].update(action_low=(), action_high=(), categories=(10**15,)),
        "shape describes a larger model",
    ),
    # The weights
    "weights that are a list": (put("weights", []), "weights must be a mapping, not []"),
    "no weight at all": (put("weights", {}), "weights lacks"),
    "a weight is missing": (drop("weights/head.weight"), "weights lacks head.weight"),
    "a weight too many": (put("weights/more", torch.ones(1)), "weights has the unknown key 'more'"),
    "a weight that is a number": (put("weights/head.weight", 1.0), "weights: 'head.weight' is not a tensor"),
    "a weight that is sparse": (put("weights/head.weight", torch.eye(2).to_sparse()), "'head.weight' is not a tensor"),
    "a weight of another shape": (
        put("weights/head.weight", torch.ones(2, 17)),
        "weights: head.weight is (2, 17) torch.float32, but the shape needs (2, 16) torch.float32",
    ),
    "a weight of another type": (put("weights/head.weight", torch.ones(2, 16, dtype=torch.int64)), "torch.int64, but"),
    "a weight that repeats one number": (
        put("weights/head.weight", torch.ones(1).expand(10**9, 16)),
        "it has a tensor of 64,000,000,000 bytes, more than the file",
    ),
    # The normalizer
    "a mean that is not a number": (put("state_mean", torch.full((3,), math.nan)), "must be finite"),
    "an infinite mean": (put("state_mean", torch.full((3,), math.inf)), "must be finite"),
    "a deviation of zero": (put("state_std", torch.zeros(3)), "state_std must be positive, but entry 0 is 0"),
    "a tiny deviation": (put("state_std", torch.full((3,), 1e-45)), "state_std must be at least 1e-07, but entry 0 is"),
    "a mean of another width": (put("state_mean", torch.ones(4)), "state_mean must be a tensor of 3 float32 numbers"),
    "a mean that is a list": (put("state_mean", [1.0, 2.0, 3.0]), "state_mean must be a tensor of 3 float32 numbers"),
    "a mean of integers": (put("state_mean", torch.ones(3, dtype=torch.int64)), "must be a tensor of 3 float32"),
    "a scale that is not a number": (put("return_scale", math.nan), "return_scale (nan) must be positive and finite"),
    "a scale as text": (put("return_scale", "1000"), "return_scale must be a number, not '1000'"),
    # The step and the configuration
    "a step as text": (put("step", "5"), "step must be from 0 to 100, not '5'"),
    "a negative step": (put("step", -1), "step must be from 0 to 100, not -1"),
    "a step beyond the end": (put("step", 101), "step must be from 0 to 100, not 101"),
    "a step that is true": (put("step", True), "step must be from 0 to 100, not True"),
    "a configuration that is text": (put("config", "{}"), "config must be a mapping, not '{}'"),
    "no optimizer": (drop("config/optimizer"), "config lacks optimizer"),
    "no seed": (drop("config/run/seed"), "config.run lacks seed"),
    "a seed as text": (put("config/run/seed", "3"), "config.run.seed must be int, not '3'"),
    "an impossible rate": (put("config/optimizer/lr", -1.0), "lr (-1.0) must be above 0"),
    "a bogus schedule": (put("config/optimizer/schedule", "bogus"), "schedule must be one of constant, cosine"),
    # The task
    "a task that is a tensor": (put("task", torch.ones(2)), "task must be a mapping"),
    "a task without environment": (drop("task/env_id"), "task lacks env_id"),
    "a task without reference": (drop("task/expert_return"), "task lacks expert_return"),
    "a task with more": (put("task/gravity", 9.81), "task has the unknown key 'gravity'"),
    "targets that are not numbers": (put("task/targets", (math.nan,)), "task.targets[0] must be a finite number"),
    "equal references": (put("task/expert_return", 0.0), "the reference returns must differ"),
    "falling references": (put("task/random_return", 1e6), "reference must be two finite returns in rising order"),
    "a huge target": (put("task/targets", (1e300,)), "targets (1e+300) must be from -1e+15 to 1e+15"),
    "lists in lists": (put("task/notes", nested(60)), "task.notes[0] must be str"),
    # The training
    "training without trainer": (drop("training/trainer"), "training lacks trainer"),
    "training without points": (drop("training/pending"), "training lacks pending"),
    "points that are text": (
        put("training/pending", {"train/loss": "low", "train/steps_per_second": 1.0}),
        "training.pending must have numbers",
    ),
    "points without a loss": (put("training/pending", {"a": 1.0}), "training.pending lacks train/loss"),
    "a trainer at another step": (put("training/trainer/step", 6), "training.trainer.step must be 5, not 6"),
    "a trainer that is a list": (put("training/trainer", [5]), "training.trainer must be a mapping, not [5]"),
    "a weight that is not a number": (put("weights/head.bias", torch.full((2,), math.nan)), "head.bias must be finite"),
    # The critics
    "critics that are a list": (put("critic", [1]), "critic must be a mapping, not [1]"),
    "critics that lack a weight": (
        lambda content: put("critic", dict(list(TwinCritic(SHAPE).state_dict().items())[1:]))(content),
        "critic lacks critics.0.0.weight",
    ),
}
"""What is wrong -> a change of a checkpoint's content, and the message."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return CheckpointFolder(tmp_path_factory.mktemp("whole")).save(make())


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("kind", CRAFTED)
def test_crafted_checkpoints_are_refused(whole: Path, tmp_path: Path, kind: str, mmap: bool) -> None:
    change, message = CRAFTED[kind]
    content = torch.load(whole, weights_only=True)
    change(content)
    path = tmp_path / "crafted.pt"
    torch.save(content, path)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path, mmap=mmap)
    text = str(caught.value)
    assert text.startswith(f"the checkpoint {path} is damaged or not a checkpoint of this version: ")
    assert message in text
    assert len(text) < 1000
    assert "\n" not in text


def test_unchanged_content_is_accepted(whole: Path, tmp_path: Path) -> None:
    content = torch.load(whole, weights_only=True)
    content["critic"] = TwinCritic(SHAPE).state_dict()
    torch.save(content, tmp_path / "again.pt")
    assert load_checkpoint(tmp_path / "again.pt").config == asdict(CONFIG)


def test_loading_draws_no_random_numbers(whole: Path) -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    load_checkpoint(whole)
    assert torch.equal(torch.rand(3), expected)


def test_a_tensor_larger_than_its_storage_is_refused(whole: Path, tmp_path: Path) -> None:
    """The file states 400 GB for the weight, and has 50 kB."""
    content = torch.load(whole, weights_only=True)
    content["weights"]["head.bias"] = torch.ones(12345)
    torch.save(content, tmp_path / "small.pt")
    with zipfile.ZipFile(tmp_path / "small.pt") as old, zipfile.ZipFile(tmp_path / "large.pt", "w") as new:
        for part in old.infolist():
            stored = old.read(part)
            if part.filename.endswith("data.pkl"):
                size = b"M" + (12345).to_bytes(2, "little") + b"\x85"  # the tuple (12345,) of the tensor, in pickle
                assert stored.count(size) == 1
                stored = stored.replace(size, b"\x8a\x05" + (10**11).to_bytes(5, "little") + b"\x85")
            new.writestr(part, stored)
    with pytest.raises(CheckpointError, match="is damaged or not a checkpoint"):
        load_checkpoint(tmp_path / "large.pt")


@pytest.mark.parametrize("kind", ["compressed", "overlapping"])
def test_zip_bombs_are_refused_before_they_are_unpacked(tmp_path: Path, kind: str) -> None:
    """Compressed parts, and parts that share their bytes: both unpack to far more than the file has."""
    path = tmp_path / "bomb.pt"
    if kind == "compressed":
        block = bytes(2**24)
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            for number in range(4):
                archive.writestr(f"bomb/data/{number}", block)
        message = "bomb/data/0 is compressed, which checkpoints are not"
    else:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("bomb/data/0", bytes(10**6))
            archive.filelist += archive.filelist * 999
        message = r"its parts have 1,000,000,000 bytes, more than the file"
    forbidden = mock.patch.object(zipfile.ZipFile, "open", side_effect=AssertionError)
    with forbidden as unpack, pytest.raises(CheckpointError, match=message):
        load_checkpoint(path)
    unpack.assert_not_called()


STATES: dict[str, tuple[Callable[[Content], object], str]] = {
    "no optimizers": (drop("optimizers"), "training.trainer lacks optimizers"),
    "too few optimizers": (put("optimizers", []), "training.trainer.optimizers must be a list of 1"),
    "an optimizer that is text": (put("optimizers", ["adamw"]), "optimizer must be a mapping, not 'adamw'"),
    "an optimizer without state": (put("optimizers", [{}]), "optimizer lacks state"),
    "an empty state": (lambda state: state["optimizers"][0]["state"].clear(), "optimizer.state is empty after step 1"),
    "a state of another step": (
        lambda state: state["optimizers"][0]["state"][0].update(step=torch.tensor(0.0)),
        "optimizer.state[0].step must be 1.0",
    ),
    "a moment of whole numbers": (
        lambda state: state["optimizers"][0]["state"][0].update(
            exp_avg=torch.zeros_like(state["optimizers"][0]["state"][0]["exp_avg"], dtype=torch.int64)
        ),
        "optimizer.state[0].exp_avg must be of floating point",
    ),
    "too few sums": (put("sums", torch.ones(1)), "training.trainer.sums must be a tensor of"),
    "sums as text": (put("sums", "1"), "training.trainer.sums must be a tensor of"),
    "the state of no parameter": (
        lambda state: state["optimizers"][0]["state"].update({999: {}}),
        "optimizer.state[999] is of no parameter",
    ),
    "a moment is missing": (
        lambda state: state["optimizers"][0]["state"][0].pop("exp_avg"),
        "optimizer.state[0] lacks exp_avg",
    ),
    "a moment of another shape": (
        lambda state: state["optimizers"][0]["state"][0].update(exp_avg=torch.ones(1)),
        "optimizer.state[0].exp_avg must be a tensor of shape",
    ),
    "a moment that is not a number": (
        lambda state: state["optimizers"][0]["state"][0]["exp_avg"].fill_(math.nan),
        "optimizer.state[0].exp_avg must be finite",
    ),
}
"""What is wrong -> a change of a trainer's state, and the message."""


@pytest.mark.parametrize("kind", STATES)
def test_crafted_training_states_are_refused(tmp_path: Path, kind: str) -> None:
    change, message = STATES[kind]
    trained = make_trainer()
    trained.update(trained.sampler.batch(0))
    state = trained.state_dict()
    change(state)
    CheckpointFolder(tmp_path / "checkpoints").save(replace(make(1), training={"trainer": state, "pending": {}}))
    with pytest.raises(CheckpointError) as caught:
        restore(make_trainer(), tmp_path)
    assert "step-000000001.pt is damaged or not a checkpoint of this version: " in str(caught.value)
    assert message in str(caught.value)
