"""Trained runs: what identifies a configuration and an episode, and the curve of the training."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from primal_dt.evaluation import trained_run
from primal_dt.evaluation.evaluate import Arena, _depends_on, evaluate_run
from primal_dt.evaluation.plan import EpisodePlan
from primal_dt.evaluation.trained_run import TrainedRun, describe_run, open_run
from primal_dt.task import Reference, RunTask, Specification, Wrapper
from tests.conftest import SHAPE
from tests.training.test_checkpoint import make

CONFIG: dict[str, Any] = {
    "model": {"attention": "softmax"},
    "optimizer": {"steps": 1},
    "run": {"seed": 0, "log_every_steps": 1},
}
TASK = RunTask("Hopper-v4", None, "data", ("Hopper-v4",), "f", (3600.0,), Reference(0.0, 100.0))
SHORT = Specification("Hopper-v4", max_episode_steps=15)
WRAPPED = [replace(SHORT, wrappers=(Wrapper("Scale", "module:Scale", f'{{"by": {by}}}'),)) for by in (1, 2)]


def trained(folder: Path | None, task: RunTask) -> TrainedRun:
    checkpoint: Any = SimpleNamespace(config=CONFIG, task=task, step=1, training={"pending": {}})
    return TrainedRun(Path("a.pt"), "digest", folder, checkpoint, task, ())


def test_the_configuration_includes_the_specification() -> None:
    def configuration(specification: Specification | None) -> str:
        task = replace(TASK, specification=specification)
        return describe_run(CONFIG, task, (), step=1, checkpoint="", mode="window", curve=()).configuration

    assert len({configuration(each) for each in (None, SHORT, *WRAPPED)}) == 4
    assert configuration(replace(SHORT, entry_point="module:Hopper")) == configuration(SHORT)  # they are equal


def test_cached_episodes_depend_on_the_specification() -> None:
    """The key of a plain environment has none."""

    def key(specification: Specification | None) -> dict[str, Any]:
        plan = EpisodePlan((), 1, 0, 1, 0, False)
        run = trained(None, replace(TASK, specification=specification))
        return _depends_on(run, plan, mode="window", device=torch.device("cpu"))

    assert len({json.dumps(key(each), sort_keys=True) for each in (None, SHORT, *WRAPPED)}) == 4
    assert "specification" not in key(None)


class Endless:
    """An environment whose episodes never end."""

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        return np.zeros(SHAPE.state_width), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.zeros(SHAPE.state_width), 0.0, False, False, {}

    def close(self) -> None:
        pass


def test_an_episode_beyond_the_models_timesteps_is_an_error(tmp_path: Path) -> None:
    """Its later steps would not be the model's: there is no score for such an environment."""
    run = TrainedRun(tmp_path / "a.pt", "digest", None, make(), TASK, ())
    plan = EpisodePlan((), 1, 0, 1, 0, False)
    with pytest.raises(ValueError, match=rf"step {SHAPE.max_timesteps} must be below .* the episode is too long"):
        evaluate_run(run, Arena(Endless, 1000), plan, mode="window", device=torch.device("cpu"))


def test_the_curve_has_the_unit_of_the_results(tmp_path: Path) -> None:
    lines = [{"step": 1, "eval/normalized_return": 50.0}, {"step": 2, "eval/return": 0.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tasks = TASK, replace(TASK, reference=None)
    curves = [trained(tmp_path, task).evaluation((), mode="window").curve for task in tasks]
    assert curves == [((1, 50.0),), ((2, 0.5),)]


def test_points_that_are_missing_are_noted(tmp_path: Path) -> None:
    assert trained(tmp_path, TASK).evaluation((), mode="window").notes == (
        "points missing in metrics.jsonl: 1, the first is of step 1; its training curve lacks them",
    )


def test_another_environment_is_the_plain_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.pt"
    file.touch()
    checkpoint = SimpleNamespace(config=CONFIG, task=replace(TASK, specification=SHORT), step=1, shape=None)
    monkeypatch.setattr(trained_run, "load_checkpoint", lambda *_, **__: checkpoint)
    monkeypatch.setattr(trained_run, "require_mode", lambda *_: None)
    run = open_run(file, env_id="Hopper-v5")
    assert (run.task.env_id, run.task.environment_text) == ("Hopper-v5", "Hopper-v5")
    assert run.notes == ("trained for Hopper-v4 (at most 15 steps), evaluated in Hopper-v5",)
