"""The record of a run: no step twice, none missing, and the curves agree with it."""

from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from primal_dt.training.metrics_log import MetricsLog, read_metrics


def curves(folder: Path) -> dict[str, list[tuple[int, Any]]]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, pytest.approx(e.value)) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_points_are_in_the_record_and_in_the_curves(tmp_path: Path) -> None:
    logbook = MetricsLog(tmp_path, texts={"about": "a run"})
    logbook.write(10, {"train/loss": 1.0})
    logbook.write(20, {"train/loss": 0.5, "eval/return": 7.0})
    assert [line["step"] for line in read_metrics(tmp_path)] == [10, 20]  # on disk at once
    logbook.close()
    assert curves(tmp_path) == {"train/loss": [(10, 1.0), (20, 0.5)], "eval/return": [(20, 7.0)]}


def test_going_on_forgets_what_came_after(tmp_path: Path) -> None:
    logbook = MetricsLog(tmp_path, texts={})
    for step in (10, 20, 30):
        logbook.write(step, {"train/loss": float(step)})
    logbook.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 40, "trai')  # killed while writing
    again = MetricsLog(tmp_path, texts={}, until_step=20)
    again.write(30, {"train/loss": 3.0})
    again.close()
    lines = read_metrics(tmp_path)
    assert [(line["step"], line["train/loss"]) for line in lines] == [(10, 10.0), (20, 20.0), (30, 3.0)]
    assert curves(tmp_path) == {"train/loss": [(10, 10.0), (20, 20.0), (30, 3.0)]}


def test_hyper_parameters_are_in_the_table(tmp_path: Path) -> None:
    logbook = MetricsLog(tmp_path, texts={"config": "all of it"})
    logbook.write(1, {"eval/normalized_return": 5.0})
    logbook.finish({"attention": "softmax", "bf16": False, "lr": 0.1}, ["eval/normalized_return"], first=["lr", "seed"])
    logbook.close()
    assert curves(tmp_path) == {"eval/normalized_return": [(1, 5.0)]}  # the table adds nothing to the curves
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    summaries = events.summary_metadata
    assert {"_hparams_/session_start_info", "config/text_summary"} <= set(summaries)
    content = summaries["_hparams_/experiment"].plugin_data.content
    experiment = HParamsPluginData.FromString(content).experiment
    assert {info.name: info.differs for info in experiment.hparam_infos} == {
        "attention": False,
        "bf16": False,
        "lr": True,
    }
    assert [info.name.tag for info in experiment.metric_infos] == ["eval/normalized_return"]
