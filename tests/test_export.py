"""``export.py``: from a trained run to a file that acts as the policy does, in whole episodes."""

import importlib.util
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

import export
import train
from envs.make import make_environment
from envs.tasks import task_of
from primal_dt.data.normalizer import Normalizer
from primal_dt.hub.sources import load_policy
from primal_dt.model.transformer import DecisionTransformer
from primal_dt.policy.export import export_policy
from primal_dt.policy.exported_file import KEY
from primal_dt.policy.inference import InferenceMode
from primal_dt.policy.onnx_runner import OnnxPolicy
from primal_dt.policy.policy import DecisionTransformerPolicy
from primal_dt.system.provenance import commit, versions
from primal_dt.task import Specification
from primal_dt.training.checkpoint import load_checkpoint, save_policy
from tests.conftest import ON_ONE_CORE, SHAPE, SMALL, run_program, small_data
from tests.model.small import random_model

ROOT = Path(__file__).parent.parent
TASKS = ["Hopper-v5", "HalfCheetah-v5", "Walker2d-v5", "CartPole-v1", "PointMaze_UMaze-v3"]


@pytest.fixture
def run(own_folders: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """A trained run, in the working folder."""
    data = small_data(own_folders / "data.hdf5")
    flags = [*SMALL, *ON_ONE_CORE, "--eval-every-steps", "0", "--name", "run"]
    assert run_program(train, monkeypatch, "--dataset", data, *flags) == 0
    capsys.readouterr()
    return own_folders / "runs" / "run"


class Robot:
    """Three steps of a robot whose first and third readings are lost and whose motors do half of what they are told."""

    def __init__(self) -> None:
        self.told: list[np.ndarray] = []
        self.num_read = self.num_waits = 0

    def start(self) -> None:
        assert not self.told

    def is_done(self) -> bool:
        return len(self.told) == 3

    def read_sensors(self) -> list[float]:
        self.num_read += 1
        return [np.nan if self.num_read in (1, 3) else 0.5] * 11

    def wait_for_sensors(self) -> None:
        self.num_waits += 1

    def send(self, action: np.ndarray) -> np.ndarray:
        self.told.append(action)
        return action / 2

    def reward(self) -> float:
        return 1.0

    def time_left_in_step(self) -> float:
        return 0.0


def snippets(language: str) -> list[str]:
    """The code blocks of docs/deployment.md."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "docs/deployment.md").read_text(), re.DOTALL)


@pytest.mark.slow
def test_a_run_becomes_a_file_that_a_robot_runs(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the loop in docs/deployment.md."""
    assert run_program(export, monkeypatch, run, "--mode", "streaming", "--license", "mit") == 0
    shown, errors = capsys.readouterr()
    assert re.search(r"checked: actions within \S+e-0\d of the policy in torch, 8 steps", shown)
    assert "task:    Hopper-v5" in shown
    assert not errors
    (metadata,) = [onnxruntime.InferenceSession("policy.onnx").get_modelmeta().custom_metadata_map[KEY]]
    assert json.loads(metadata)["about"] == {
        "task": "Hopper-v5",
        "dataset": str(run.parent.parent / "data.hdf5"),
        "targets": [3600, 1800],
        "unit": "Hopper-v5, 0 at a return of -20.2723, 100 at 3234.3",
        "attention": "primal-plus",
        "conditioning": "return",
        "action_low": [-1] * 3,
        "action_high": [1] * 3,
        "step": 20,
        "training": {"commit": commit(), "versions": versions()},
        "export": {"commit": commit(), "versions": versions()},
        "license": "mit",
    }
    (loop,) = snippets("python robot")
    robot = Robot()
    exec(compile(loop, "deployment.md", "exec"), {"robot": robot})
    assert np.shape(robot.told) == (3, 3)
    assert robot.num_waits == 1
    assert list(Path().glob(".*partial*")) == []


@pytest.mark.slow
def test_a_run_becomes_a_file_of_torch_export(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The example in docs/deployment.md runs it without this package's modules."""
    assert run_program(export, monkeypatch, run, "--format", "torch") == 0
    shown, errors = capsys.readouterr()
    assert re.search(r"checked: actions within \S+e[-+]0\d of the policy in torch, 8 steps", shown)
    assert not errors
    (example,) = snippets("python program")
    session: dict[str, Any] = {"K": 4, "observation": [0.5] * 11}
    exec(compile(example, "deployment.md", "exec"), session)
    policy = load_policy(run)
    policy.reset(3600.0)
    np.testing.assert_allclose(session["action"][0], policy.act([0.5] * 11), atol=1e-5)
    assert json.loads(session["files"][f"{KEY}.json"])["about"]["license"] is None


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["onnx", "torch"])
def test_a_file_whose_actions_differ_does_not_appear(
    kind: str, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By 3e-5 of half the range."""

    def export_another(path: Path, model: DecisionTransformer, units: Normalizer, **options: Any) -> None:
        with torch.no_grad():
            model.head.bias.add_(3e-5)
        export_policy(path, model, units, **options)

    monkeypatch.setattr(export, "export_policy", export_another)
    assert run_program(export, monkeypatch, run, "--format", kind, "--mode", "streaming") == 1
    assert re.search(r"actions differ .* by [23]\.\de-05, more than 1e-05: nothing is saved", capsys.readouterr().err)
    assert sorted(path.name for path in Path().iterdir()) == ["cache", "data.hdf5", "runs"]


@pytest.mark.parametrize("kind", ["attention_bn", "linear"])
def test_attention_bn_has_a_larger_tolerance(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rounding is magnified."""

    class Off:
        """Takes actions that differ by 5e-5."""

        mode = "window"

        def __init__(self, path: Path) -> None:
            self._policy = policy()

        def reset(self, targets: Any = None) -> None:
            self._policy.reset(targets)

        def act(self, observations: Any) -> Any:
            return self._policy.act(observations) + np.float32(5e-5)

        def observe(self, rewards: Any, actions: Any = None) -> None:
            self._policy.observe(rewards)

    model = random_model(replace(SHAPE, attention=kind), 0.2)
    units = Normalizer(np.zeros(3, np.float32), np.ones(3, np.float32), 1.0)

    def policy(**_: Any) -> DecisionTransformerPolicy:
        return DecisionTransformerPolicy(model, units)

    checkpoint: Any = SimpleNamespace(shape=model.shape, normalizer=units, policy=policy)
    checkpoint.task = SimpleNamespace(headline=1.0)
    monkeypatch.setattr(export, "OnnxPolicy", Off)
    if kind == "attention_bn":
        assert "actions within 5.0e-05" in export.compare(Path(), checkpoint, "onnx")
    else:
        with pytest.raises(ValueError, match=r"by 5\.\de-05, more than 1e-05"):
            export.compare(Path(), checkpoint, "onnx")


def test_provenance_of_the_training_comes_from_the_source(run: Path, tmp_path: Path) -> None:
    """From a run, its checkpoint, or the folder of a shared policy; it may be unknown."""
    record = {"commit": "abc", "versions": {"torch": "1"}}
    (checkpoint,) = (run / "checkpoints").iterdir()
    for source in (run, checkpoint):
        assert export.training_of(source) == {"commit": commit(), "versions": versions()}
    save_policy(tmp_path / "shared", load_checkpoint(run), provenance={"command": ["train.py"], **record})
    assert export.training_of(tmp_path / "shared") == record
    save_policy(tmp_path / "unknown", load_checkpoint(run))
    assert export.training_of(tmp_path / "unknown") is None
    shutil.copy(checkpoint, tmp_path / "copy.pt")
    assert export.training_of(tmp_path / "copy.pt") is None


def test_mistakes_end_in_messages(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("folder").mkdir()
    Path("policy.onnx").write_text("an earlier export")
    (checkpoint,) = (run / "checkpoints").iterdir()
    content = checkpoint.read_bytes()
    shutil.copy(checkpoint, "copy.pt")
    shutil.copy(checkpoint, "copy.onnx")
    mistakes: list[tuple[list[Any], str]] = [
        (["nowhere"], "the checkpoint nowhere does not exist"),
        ([run, "--out", "folder"], "--out folder is a folder: give the name of a file, such as folder/policy.onnx"),
        ([run, "--out", "policy.onnx/policy.onnx"], "policy.onnx"),
        (["copy.pt", "--out", "./copy.pt"], "--out copy.pt is the policy itself, which would be lost: give another"),
        (["copy.onnx", "--out", "copy.onnx"], "is the policy itself, which would be lost: give another name"),
        (
            [run, "--out", checkpoint],
            "is among the checkpoints of a run: give another folder, such as step-000000020.onnx",
        ),
        ([run, "--out", run / "checkpoints" / "a.onnx"], "is among the checkpoints of a run"),
        ([run, "--out", "copy.pt"], "--out copy.pt must end in .onnx for --format onnx: copy.onnx, for example"),
        ([run, "--out", "model.safetensors", "--format", "torch"], "must end in .pt2 for --format torch: model.pt2"),
        ([run, "--out", "config.json"], "--out config.json must end in .onnx"),
        ([run, "--out", "a.onnx", "--format", "torch"], "--out a.onnx must end in .pt2"),
    ]
    for arguments, message in mistakes:
        assert run_program(export, monkeypatch, *arguments) == 1
        assert message in capsys.readouterr().err
    assert checkpoint.read_bytes() == Path("copy.pt").read_bytes() == Path("copy.onnx").read_bytes() == content
    monkeypatch.setattr(export, "export_policy", lambda path, *_, **__: path.write_text("half"))
    monkeypatch.setattr(export, "compare", lambda *_: (_ for _ in ()).throw(ValueError("actions differ")))
    assert run_program(export, monkeypatch, run) == 1
    assert "actions differ" in capsys.readouterr().err
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert run_program(export, monkeypatch, run) == 1
    assert "onnx is not installed: pip install" in capsys.readouterr().err
    assert Path("policy.onnx").read_text() == "an earlier export"
    assert list(Path().glob(".*partial*")) == []


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["window", "streaming"])
@pytest.mark.parametrize("env_id", TASKS)
def test_whole_episodes_have_the_same_actions(env_id: str, mode: InferenceMode, tmp_path: Path) -> None:
    """Of two environments. Both policies see the same observations and rewards, each has its own history."""
    if env_id.startswith("PointMaze"):
        pytest.importorskip("gymnasium_robotics")
    task = task_of(Specification(env_id))
    actions = task.environment.actions
    changes: dict[str, Any] = {"state_width": task.environment.state_width, "max_timesteps": 1000}
    changes |= {"action_low": actions.low, "action_high": actions.high, "categories": actions.categories}
    model = random_model(replace(SHAPE, **changes), 0.2)
    units = Normalizer.of(np.random.default_rng(0).normal(size=(50, task.environment.state_width)), return_scale=100.0)
    export_policy(tmp_path / "policy.onnx", model, units, mode=mode, about={})
    exported, policy = OnnxPolicy(tmp_path / "policy.onnx"), DecisionTransformerPolicy(model, units, mode=mode)
    environment = make_environment(task)
    for seed in range(2):
        observation, _ = environment.reset(seed=seed)
        exported.reset(300.0)
        policy.reset(300.0)
        ended, length = False, 0
        while not ended:
            expected = policy.act(observation)
            np.testing.assert_allclose(exported.act(observation), expected, atol=1e-5)
            observation, reward, terminated, truncated, _ = environment.step(expected)
            policy.observe(float(reward))
            exported.observe(float(reward))
            ended, length = terminated or truncated, length + 1
        assert length > 4
    environment.close()
