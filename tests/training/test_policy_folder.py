"""Shared policies: a round trip loses nothing, and crafted files end in an error that says what is wrong."""

import hashlib
import json
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor

from primal_dt.model.critic import TwinCritic
from primal_dt.system.records import CHECKSUM, checksum
from primal_dt.training.checkpoint import Checkpoint, CheckpointError, load_checkpoint, save_policy
from primal_dt.training.policy_folder import is_policy_folder
from tests.conftest import SHAPE
from tests.training.test_checkpoint import make

Values = dict[str, Any]
Tensors = dict[str, Tensor]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A policy with critics."""
    save_policy(tmp_path / "policy", guided())
    return tmp_path / "policy"


def guided() -> Checkpoint:
    checkpoint = make()
    units = replace(checkpoint.normalizer, state_mean=np.array([0.1, 1e-30, -3e30], np.float32))
    return replace(checkpoint, critic=TwinCritic(SHAPE).state_dict(), normalizer=units)


def rewrite(folder: Path, change: Callable[[Values, Tensors], object]) -> None:
    """Change the content of both files, with the checksums of somebody who knows the format."""
    config, weights = folder / "config.json", folder / "model.safetensors"
    values, tensors = json.loads(config.read_text()), safetensors.torch.load(weights.read_bytes())
    change(values, tensors)
    raw = safetensors.torch.save(tensors)
    weights.write_bytes(raw)
    values["weights_sha256"] = hashlib.sha256(raw).hexdigest()
    values.pop(CHECKSUM, None)
    config.write_text(json.dumps({**values, CHECKSUM: checksum(values)}))


def test_policy_round_trip(tmp_path: Path) -> None:
    source = guided()
    save_policy(tmp_path, source, provenance={"commit": "abc"})
    again = load_checkpoint(tmp_path)
    assert is_policy_folder(tmp_path)
    assert (again.shape, again.step, again.task) == (source.shape, source.step, source.task)
    assert again.config == json.loads(json.dumps(source.config))
    assert again.weights.keys() == source.weights.keys()
    torch.testing.assert_close(again.weights, source.weights, rtol=0, atol=0)
    torch.testing.assert_close(again.critic, source.critic, rtol=0, atol=0)
    np.testing.assert_array_equal(again.normalizer.state_mean, source.normalizer.state_mean)
    np.testing.assert_array_equal(again.normalizer.state_std, source.normalizer.state_std)
    assert json.loads((tmp_path / "config.json").read_text())["provenance"] == {"commit": "abc"}


def test_the_license_is_stored(tmp_path: Path) -> None:
    """Folders of earlier versions have none."""
    save_policy(tmp_path, replace(make(), license="apache-2.0"))
    assert load_checkpoint(tmp_path).license == "apache-2.0"
    rewrite(tmp_path, lambda values, tensors: values.pop("license"))
    assert load_checkpoint(tmp_path).license is None


def test_the_state_of_the_training_is_not_shared(folder: Path) -> None:
    assert load_checkpoint(folder).training == {"trainer": {"step": 5}, "pending": {}}
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v, t: v.pop("shape"), "config.json lacks shape"),
        (lambda v, t: v.update(format=2), "config.json has format 2, but this code reads format 1"),
        (lambda v, t: v["shape"].update(width=2**15), r"shape\.width is 32768, but config\.model\.width is 16"),
        (lambda v, t: v["shape"].update(extra=1), "shape has the unknown key 'extra'"),
        (lambda v, t: v["shape"].update(max_timesteps=10**9), "shape describes a larger model than the file has"),
        (lambda v, t: v.update(license=5), "license must be a text, not 5"),
        (lambda v, t: v.update(step="5"), "step must be from 0 to 100, not '5'"),
        (lambda v, t: v["task"].pop("env_id"), "task lacks env_id"),
        (lambda v, t: v["normalizer"].update(state_mean=[1.0]), "state_mean must be a tensor of 3 float32 numbers"),
        (lambda v, t: v["normalizer"].update(state_std=[1.0, 0.0, 1.0]), "state_std must be positive"),
        (lambda v, t: v["normalizer"].update(state_mean=[1.0, 1e300, 1.0]), "must be finite"),
        (lambda v, t: v["normalizer"].update(return_scale=float("nan")), "return_scale must be a finite number"),
        (lambda v, t: v["normalizer"].update(state_mean="abc"), "normalizer.state_mean must be tuple"),
        (lambda v, t: t.pop("model.head.bias"), "weights lacks head.bias"),
        (lambda v, t: t.update({"model.extra": torch.ones(1)}), "weights has the unknown key 'extra'"),
        (lambda v, t: t.update({"extra": torch.ones(1)}), "model.safetensors has the unknown key 'extra'"),
        (lambda v, t: t["model.head.bias"].fill_(torch.nan), "weights: head.bias must be finite"),
        (lambda v, t: t.update({"model.head.bias": torch.ones(7)}), r"head\.bias is \(7,\) torch\.float32, but"),
        (lambda v, t: t.update({"model.head.bias": torch.ones(2).half()}), r"head\.bias is \(2,\) torch\.float16"),
        (lambda v, t: t.update({"critic.extra": torch.ones(1)}), "critic has the unknown key 'extra'"),
    ],
)
def test_crafted_content_is_refused(folder: Path, change: Any, message: str) -> None:
    rewrite(folder, change)
    with pytest.raises(CheckpointError, match=f"the policy {folder} is damaged or not a policy .*{message}"):
        load_checkpoint(folder)


def test_damage_is_noticed(folder: Path) -> None:
    """In every region of both files."""
    random = np.random.default_rng(0)
    for name in ("config.json", "model.safetensors"):
        good = (folder / name).read_bytes()
        for place in random.integers(len(good), size=20):
            bad = bytearray(good)
            bad[place] ^= 1 << random.integers(7)
            (folder / name).write_bytes(bad)
            if name == "config.json" and json_equal(bytes(bad), good):
                continue  # a changed space
            with pytest.raises(CheckpointError):
                load_checkpoint(folder)
        (folder / name).write_bytes(good[: len(good) // 2])
        with pytest.raises(CheckpointError):
            load_checkpoint(folder)
        (folder / name).unlink()
        with pytest.raises(CheckpointError, match=f"{name} is missing"):
            load_checkpoint(folder)
        (folder / name).write_bytes(good)
    load_checkpoint(folder)


@pytest.mark.parametrize("name", ["README.md", "config.json", "model.safetensors"])
def test_a_file_of_a_policy_is_not_called_damaged(folder: Path, name: str) -> None:
    (folder / "README.md").touch()
    with pytest.raises(CheckpointError, match=f"{name} is a file of the shared policy {folder}: give the folder$"):
        load_checkpoint(folder / name)


def json_equal(one: bytes, two: bytes) -> bool:
    try:
        return bool(json.loads(one) == json.loads(two))
    except ValueError:
        return False


def test_a_pickle_in_place_of_the_weights_is_not_executed(folder: Path, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[object, ...]]:
            return (open, (str(tmp_path / "trace"), "w"))

    raw = pickle.dumps(Evil())
    (folder / "model.safetensors").write_bytes(raw)
    values = json.loads((folder / "config.json").read_text())
    values["weights_sha256"] = hashlib.sha256(raw).hexdigest()
    values.pop(CHECKSUM)
    (folder / "config.json").write_text(json.dumps({**values, CHECKSUM: checksum(values)}))
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a safetensors file"):
        load_checkpoint(folder)
    assert not (tmp_path / "trace").exists()


def test_links_lead_only_to_regular_files(folder: Path, tmp_path: Path) -> None:
    """The hub's cache consists of links."""
    weights = folder / "model.safetensors"
    moved = weights.rename(tmp_path / "blob")
    weights.symlink_to(moved)
    load_checkpoint(folder)
    weights.unlink()
    os.mkfifo(tmp_path / "pipe")
    weights.symlink_to(tmp_path / "pipe")
    with pytest.raises((OSError, CheckpointError)):
        load_checkpoint(folder)
