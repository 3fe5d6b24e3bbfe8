"""Metrics on disk: no step is duplicated or missing, and TensorBoard's curves agree."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from primal_dt.task import Reference, RunTask
from primal_dt.training.metrics_log import MetricsLog, read_metrics
from primal_dt.training.recorder import Recorder
from tests.conftest import file_size_limit


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """TensorBoard's curves: tag -> step and value of each point."""
    events = EventAccumulator(str(folder)).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_points_are_in_the_file_and_the_curves(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, texts={"about": "a run"})
    log.write(10, {"train/loss": 1.0})
    log.write(20, {"train/loss": 0.5, "eval/return": 7.0})
    assert [line["step"] for line in read_metrics(tmp_path)] == [10, 20]  # before the log is closed
    log.close()
    assert curves(tmp_path) == {"train/loss": [(10, 1.0), (20, 0.5)], "eval/return": [(20, 7.0)]}


def test_resume_removes_later_points(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, texts={})
    for step in (10, 20, 30):
        log.write(step, {"train/loss": float(step)})
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 40, "trai')  # killed while writing
    log = MetricsLog(tmp_path, texts={}, until_step=20)
    log.write(30, {"train/loss": 3.0})
    log.close()
    points = [(10, 10.0), (20, 20.0), (30, 3.0)]
    assert [(line["step"], line["train/loss"]) for line in read_metrics(tmp_path)] == points
    assert curves(tmp_path) == {"train/loss": points}


@pytest.mark.parametrize(("reference", "value"), [(Reference(0.0, 1.0), 5.0), (None, 7.0)])
def test_the_score_curve_has_the_unit_of_the_task(tmp_path: Path, reference: Reference | None, value: float) -> None:
    """Of a policy without targets, both the return and the normalized return are logged."""
    trainer: Any = SimpleNamespace(step=1)
    task = RunTask("Hopper-v5", None, "data", (), "f", (), reference)
    normalizer: Any = None
    recorder = Recorder(tmp_path, trainer, normalizer=normalizer, task=task, config={})
    recorder.log({"eval/normalized_return": 5.0, "eval/return": 7.0})
    recorder.close()
    assert recorder.score_curve == ((1, value),)


def test_hyperparameters_are_in_the_table(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, texts={"config": "all of it"})
    log.write(1, {"eval/normalized_return": 5.0})
    log.finish({"attention": "softmax", "bf16": False, "lr": 0.1}, ["eval/normalized_return"], first=["lr", "seed"])
    log.close()
    assert curves(tmp_path) == {"eval/normalized_return": [(1, 5.0)]}  # the table adds nothing to the curves
    summaries = EventAccumulator(str(tmp_path)).Reload().summary_metadata
    assert {"_hparams_/session_start_info", "config/text_summary"} <= set(summaries)
    experiment = HParamsPluginData.FromString(summaries["_hparams_/experiment"].plugin_data.content).experiment
    differs = {info.name: info.differs for info in experiment.hparam_infos}
    assert differs == {"attention": False, "bf16": False, "lr": True}
    assert [info.name.tag for info in experiment.metric_infos] == ["eval/normalized_return"]


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.out.tfevents.7"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_metrics_are_not_written_elsewhere(tmp_path: Path, name: str, kind: str) -> None:
    outside, run = tmp_path / "outside", tmp_path / "run"
    outside.write_text('{"step": 1, "time": 0}\n')
    run.mkdir()
    if kind == "link":
        (run / name).symlink_to(outside)
    else:
        os.mkfifo(run / name)
    with pytest.raises(OSError, match="not a regular file") as caught:
        MetricsLog(run, texts={}, until_step=5)
    assert caught.value.filename == str(run / name)
    assert outside.read_text() == '{"step": 1, "time": 0}\n'


def test_a_failed_write_names_the_metrics(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, texts={})
    with pytest.raises(OSError, match="File too large") as caught, file_size_limit(5):
        log.write(1, {})
    assert caught.value.filename == str(tmp_path / "metrics.jsonl")
    log.close()
