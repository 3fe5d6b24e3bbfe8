"""``train.py`` and ``evaluate.py`` in environments of every kind of space, on data that is recorded here."""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import evaluate
import train
from envs.tasks import task_of
from primal_dt.task import Specification
from tests.conftest import ON_ONE_CORE, SMALL, run_program
from tests.envs.datasets.test_environments import RESCALED, forget, recorded
from tests.envs.files import d4rl_arrays, write_d4rl

ROOT = Path(__file__).parent.parent
ENVIRONMENTS = ["CartPole-v1", "Acrobot-v1", "Pendulum-v1", "Reacher-v5", "Ant-v5"]
ROBOTICS = ["PointMaze_UMaze-v3", "AntMaze_UMaze-v5", "AdroitHandDoor-v1"]
OWN = "tests.envs.odd:Odd-v0"
pytestmark = pytest.mark.usefixtures("own_folders")


def train_and_evaluate(patch: pytest.MonkeyPatch, name: str, *flags: str) -> dict[str, Any]:
    """Train a small model on a data set, evaluate it, and return the only group of the report."""
    assert run_program(train, patch, "--dataset", name, *SMALL, *ON_ONE_CORE, *flags) == 0
    flags = tuple(flag for flag in flags if not flag.startswith("--reference"))
    assert run_program(evaluate, patch, *Path("runs").iterdir(), "--episodes", 2, "--out", "report", *flags[:2]) == 0
    (group,) = json.loads(Path("report/report.json").read_text())["groups"]
    return group


@pytest.mark.slow
@pytest.mark.parametrize("env_id", [*ENVIRONMENTS, *ROBOTICS])
def test_a_policy_is_trained_and_reported(env_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if env_id in ROBOTICS:
        pytest.importorskip("gymnasium_robotics")
    task = task_of(Specification(env_id, max_episode_steps=12))
    group = train_and_evaluate(monkeypatch, recorded(task))
    assert group["environment_text"] == f"{env_id} (at most 12 steps)"
    assert (group["results"][0]["success_rate"] is not None) is (env_id in ROBOTICS)
    text = Path("report/report.md").read_text()
    assert ("changed the environment's reward" in text) is env_id.startswith("AdroitHandDoor")


def test_a_variant_is_never_taken_for_the_plain_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    task = task_of(Specification("Hopper-v5", '{"healthy_reward": 2.0}', wrappers=(RESCALED,)))
    group = train_and_evaluate(monkeypatch, recorded(task))
    assert group["environment_text"] == (
        "Hopper-v5 (healthy_reward = 2.0, RescaleAction(max_action = 0.5, min_action = -0.5))"
    )
    capsys.readouterr()
    runs = [*Path("runs").iterdir(), "--episodes", "1", "--env-id", "Hopper-v5"]
    assert run_program(evaluate, monkeypatch, *runs) == 1
    assert "which differs from Hopper-v5 in physics or reward" in capsys.readouterr().err
    assert run_program(evaluate, monkeypatch, *runs, "--allow-version-mismatch") == 0, capsys.readouterr().err
    assert "‡" in capsys.readouterr().out  # a marked row


def test_an_environment_of_ones_own(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Nested observations, choices that do not start at 0, and a success rate."""
    name = recorded(task_of(OWN, trusted=True))
    group = train_and_evaluate(monkeypatch, name, "--env-id", OWN, "--reference", "0", "10")
    assert group["results"][0]["success_rate"] == 1.0
    assert "--reference" in Path("report/report.md").read_text()
    # A checkpoint names the module, which is not the user's word.
    forget(monkeypatch)
    capsys.readouterr()
    runs = [*Path("runs").iterdir(), "--episodes", "2", "--out", "report"]
    assert run_program(evaluate, monkeypatch, *runs) == 1
    assert f"{OWN} would import tests.envs.odd" in capsys.readouterr().err
    assert "tests.envs.odd" not in sys.modules
    assert run_program(evaluate, monkeypatch, *runs, "--trust-env") == 0


def test_a_run_on_minari_data_resumes(monkeypatch: pytest.MonkeyPatch) -> None:
    name = recorded(task_of(OWN, trusted=True))
    flags = ["--dataset", name, "--env-id", OWN, *SMALL, *ON_ONE_CORE, "--name", "one"]
    assert run_program(train, monkeypatch, *flags, "--save-every-steps", "10") == 0
    Path("runs/one/checkpoints/step-000000020.pt").unlink()
    assert run_program(train, monkeypatch, "--resume", "runs/one", "--trust-env") == 0
    assert Path("runs/one/checkpoints/step-000000020.pt").exists()


def test_a_log_without_an_environment(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    actions = np.random.default_rng(0).normal(5.0, 9.0, (60, 2))
    data = write_d4rl(Path("robot.hdf5"), d4rl_arrays((30, 30)) | {"actions": actions})
    flags = ["--dataset", data, *SMALL, *ON_ONE_CORE, "--eval-every-steps", "0"]
    assert run_program(train, monkeypatch, *flags) == 0
    capsys.readouterr()
    assert run_program(evaluate, monkeypatch, *Path("runs").iterdir()) == 1
    assert "names no environment, so the policy cannot act: name one with --env-id" in capsys.readouterr().err
    assert run_program(evaluate, monkeypatch, *Path("runs").iterdir(), "--env-id", "Hopper-v5") == 1
    assert "its model takes 11 observation entries and 2 action entries" in capsys.readouterr().err


def test_references_in_the_wrong_order_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run_program(train, monkeypatch, "--reference", "5", "1")
    assert "reference must be two finite returns in rising order" in capsys.readouterr().err


@pytest.mark.slow
def test_the_page_about_your_own_environment_runs(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "your_environment.md").read_text()
    (tmp_path / "my_env.py").write_text(page.partition("```python\n")[2].partition("```")[0])
    commands = [line.strip() for line in page.splitlines() if line.startswith("    python ")]
    assert len(commands) == 5
    for command in commands:
        words = shlex.split(command.replace("--steps 20000", "--steps 600"))
        if words[1] == "train.py":
            words += [*SMALL, *ON_ONE_CORE, *(["--eval-every-steps", "0"] if "without" in words else [])]
        if words[1] == "evaluate.py":
            words[2:3] = [str(path) for path in (tmp_path / "runs").iterdir()]
            words += ["--episodes", "2"]
        words[1] = str(ROOT / words[1]) if words[1].endswith(".py") else words[1]
        done = subprocess.run([sys.executable, *words[1:]], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        if "evaluate.py" in command:
            assert "success" in done.stdout
