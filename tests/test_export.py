"""``export.py``: from a trained run to a file that acts as the policy does, in whole episodes."""

import importlib.util
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

import export
import train
from envs.make import make_environment
from envs.tasks import task_of
from primal_dt.data.normalizer import Normalizer
from primal_dt.policy.export import export_policy
from primal_dt.policy.exported_file import KEY
from primal_dt.policy.inference import InferenceMode
from primal_dt.policy.onnx_runner import OnnxPolicy
from primal_dt.policy.policy import DecisionTransformerPolicy
from primal_dt.task import Specification
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
    """Three steps of a robot whose second reading is lost and whose motors do half of what they are told."""

    def __init__(self) -> None:
        self.told: list[np.ndarray] = []

    def start(self) -> None:
        assert not self.told

    def is_done(self) -> bool:
        return len(self.told) == 3

    def read_sensors(self) -> list[float]:
        return [np.nan if len(self.told) == 1 else 0.5] * 11

    def send(self, action: np.ndarray) -> np.ndarray:
        self.told.append(action)
        return action / 2

    def reward(self) -> float:
        return 1.0

    def time_left_in_step(self) -> float:
        return 0.0


@pytest.mark.slow
def test_a_run_becomes_a_file_that_a_robot_runs(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the loop in docs/deployment.md."""
    assert run_program(export, monkeypatch, run, "--mode", "streaming") == 0
    shown, errors = capsys.readouterr()
    assert re.search(r"checked: actions within \S+e-0\d of the policy in torch, 8 steps", shown)
    assert "task:    Hopper-v5" in shown
    assert not errors
    (metadata,) = [onnxruntime.InferenceSession("policy.onnx").get_modelmeta().custom_metadata_map[KEY]]
    about = json.loads(metadata)["about"]
    assert (about["task"], about["targets"], about["license"]) == ("Hopper-v5", [3600, 1800], "MIT")
    assert about["versions"]["torch"]
    (loop,) = re.findall(r"```python no-run\n(.*?)```", (ROOT / "docs/deployment.md").read_text(), re.DOTALL)
    robot = Robot()
    exec(compile(loop, "deployment.md", "exec"), {"robot": robot})
    assert np.shape(robot.told) == (3, 3)
    assert list(Path().glob(".*partial")) == []


def test_mistakes_end_in_messages(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("folder").mkdir()
    Path("policy.onnx").write_text("an earlier export")
    mistakes: list[tuple[list[Any], str]] = [
        (["nowhere"], "the checkpoint nowhere does not exist"),
        ([run, "--out", "folder"], "--out folder is a folder: give the name of a file, such as folder/policy.onnx"),
        ([run, "--out", "policy.onnx/policy.onnx"], "policy.onnx"),
    ]
    for arguments, message in mistakes:
        assert run_program(export, monkeypatch, *arguments) == 1
        assert message in capsys.readouterr().err
    monkeypatch.setattr(export, "export_policy", lambda path, *_, **__: path.write_text("half"))
    monkeypatch.setattr(export, "compare", lambda *_: (_ for _ in ()).throw(ValueError("actions differ")))
    assert run_program(export, monkeypatch, run) == 1
    assert "actions differ" in capsys.readouterr().err
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert run_program(export, monkeypatch, run) == 1
    assert "onnx is not installed: pip install" in capsys.readouterr().err
    assert Path("policy.onnx").read_text() == "an earlier export"
    assert list(Path().glob(".*partial")) == []


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
