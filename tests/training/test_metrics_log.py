"""Metrics on disk: no step is duplicated or missing, and TensorBoard's curves agree."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from primal_dt.system.records import dump_record
from primal_dt.task import Reference, RunTask
from primal_dt.training.metrics_log import MetricsLog, missing_points, read_metrics
from primal_dt.training.recorder import Recorder
from tests.conftest import file_size_limit

GOOD = [f'{{"step": {step}, "time": 1.5, "train/loss": {step}.0}}'.encode() for step in (10, 20, 30, 40)]
NOT_RECORDS = [
    *(b"5", b"{}", b"[]", b"", b"null", b"\xff\xfe", b"\0" * 20, b"[" * 100_000, b"9" * 5000),
    *(b'{"step": 20, "tr', b'{"time": 1.5}', b'{"step": "20"}', b'{"step": true}', b'{"step": -20}'),
    *(b'{"step": 20, "train/loss": "x"}', b'{"step": 20, "train/loss": 1' + b"0" * 400 + b"}"),
]


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


def resumed(folder: Path, content: bytes, until_step: int = 40) -> list[int]:
    """The steps of a run that resumes with these metrics."""
    (folder / "metrics.jsonl").write_bytes(content)
    log = MetricsLog(folder, texts={}, until_step=until_step)
    log.close()
    assert log.lines == read_metrics(folder)
    return [line["step"] for line in log.lines]


@pytest.mark.parametrize("bad", NOT_RECORDS, ids=lambda bad: repr(bad[:20]))
def test_a_damaged_line_costs_no_other(tmp_path: Path, bad: bytes, caplog: pytest.LogCaptureFixture) -> None:
    content = b"\n".join([GOOD[0], bad, *GOOD[2:], b""])
    assert resumed(tmp_path, content) == [10, 30, 40]
    assert curves(tmp_path) == {"train/loss": [(10, 10.0), (30, 30.0), (40, 40.0)]}
    copy = tmp_path / "metrics.jsonl.damaged"
    assert copy.read_bytes() == content
    assert caplog.messages == [
        f"damaged lines in {tmp_path / 'metrics.jsonl'}: 1, the first is line 2. "
        f"They are left out; {copy} is a copy of the file with them"
    ]


def test_steps_rise(tmp_path: Path) -> None:
    """A line that is there twice or at another place is damage."""
    assert resumed(tmp_path, b"\n".join([GOOD[0], GOOD[1], GOOD[1], GOOD[3], GOOD[2], b""])) == [10, 20, 40]
    assert (tmp_path / "metrics.jsonl.damaged").exists()


def test_a_step_may_have_several_points(tmp_path: Path) -> None:
    """With other scalars, as when a classifier is tested after an epoch."""
    assert resumed(tmp_path, b"\n".join([GOOD[0], b'{"step": 10, "test/accuracy": 1.0}', GOOD[1], b""])) == [10, 10, 20]


def test_a_line_without_its_checksum_is_damaged(tmp_path: Path) -> None:
    """Unless none has one, as in earlier versions."""
    lines = [dump_record({"step": step, "time": 1.5}) for step in (10, 20, 30)]
    lines[1] = lines[1].replace(b"crc32", b"crc33")
    assert resumed(tmp_path, b"\n".join([*lines, b""])) == [10, 30]


@pytest.mark.parametrize("tail", [b'{"step": 50, "time": 1.5, "trai', b'{"step": 50, "time": 1.5, "a": "\xc3', b"{"])
def test_only_a_cut_off_last_line_is_dropped_silently(
    tmp_path: Path, tail: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    content = b"\n".join([*GOOD, tail])
    assert resumed(tmp_path, content) == [10, 20, 30, 40]
    assert not caplog.messages
    assert not (tmp_path / "metrics.jsonl.damaged").exists()
    assert resumed(tmp_path, content + b"\n") == [10, 20, 30, 40]  # a complete line, so it is damaged
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("tail", [b"x", b"\0" * 20, GOOD[3] + b"x"])
def test_other_last_lines_are_set_aside(tmp_path: Path, tail: bytes) -> None:
    content = b"\n".join([*GOOD[:3], tail])
    assert resumed(tmp_path, content) == [10, 20, 30]
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == content


def test_a_last_line_that_lacks_only_its_end_is_kept(tmp_path: Path) -> None:
    assert resumed(tmp_path, b"\n".join(GOOD)) == [10, 20, 30, 40]


def test_no_damaged_copy_replaces_another(tmp_path: Path) -> None:
    contents = [b"\n".join([*GOOD, bad, b""]) for bad in (b"first", b"second", b"second")]
    for content in contents:
        resumed(tmp_path, content)
    copies = sorted(tmp_path.glob("metrics.jsonl.damaged*"))
    assert [copy.read_bytes() for copy in copies] == contents[:2]


def test_missing_points_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As after a file was cut off between two lines."""
    lines = [{"step": step} for step in (10, 30)]
    assert missing_points(lines, until_step=59, every_steps=10) == (
        "points missing in metrics.jsonl: 3, the first is of step 20"
    )
    assert missing_points(lines, until_step=39, every_steps=30) == ""
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([*GOOD[:2], b""]))
    trainer: Any = SimpleNamespace(step=40, log_every_steps=10)
    unused: Any = None
    Recorder(tmp_path, trainer, normalizer=unused, task=unused, config={}).close()
    assert caplog.messages == [
        f"points missing in metrics.jsonl: 2, the first is of step 30 ({tmp_path}). The curves lack them"
    ]


def test_a_finished_run_without_metrics_resumes(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b"\xff\n")
    trainer: Any = SimpleNamespace(step=1, log_every_steps=1)
    task = RunTask("Hopper-v5", None, "data", (), "f", (), None)
    normalizer: Any = None
    recorder = Recorder(tmp_path, trainer, normalizer=normalizer, task=task, config={"seed": 1})
    recorder.finish()
    recorder.close()
    assert recorder.score_curve == ()


@pytest.mark.parametrize(("reference", "value"), [(Reference(0.0, 1.0), 5.0), (None, 7.0)])
def test_the_score_curve_has_the_unit_of_the_task(tmp_path: Path, reference: Reference | None, value: float) -> None:
    """A policy without targets logs both the return and the normalized return."""
    trainer: Any = SimpleNamespace(step=1, log_every_steps=1)
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
