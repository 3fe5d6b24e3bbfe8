"""Run folders have safe names, and their configuration round-trips."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from primal_dt.config import PRESETS, Config, EvaluationConfig, ModelConfig, OptimizerConfig, RunConfig
from primal_dt.task import Reference, RunTask
from primal_dt.training.run_folder import DataPart, RunRecord, lock_run, make_run_folder, read_record, write_record

TASK = RunTask("Hopper-v5", None, "data", ("Hopper-v5",), "f", (3600.0,), Reference(0.0, 1.0))


def record_of(config: Config) -> RunRecord:
    return RunRecord(config, TASK, (DataPart("data", "/data"),), threads=2, device="cpu", num_parameters=7)


@pytest.mark.parametrize(
    ("dataset", "name"),
    [
        ("primal/hopper/medium-v0", "primal-hopper-medium-v0"),
        ("hopper-medium-v2+hopper-expert-v2", "hopper-medium-v2-and-hopper-expert-v2"),
        ("../some where/a b.hdf5 + /x/c.h5", "a-b-and-c"),
        ("../../etc/passwd", "etc-passwd"),
    ],
)
def test_folder_name_has_dataset_stack_and_seed(tmp_path: Path, dataset: str, name: str) -> None:
    folder = make_run_folder(tmp_path / "runs", None, dataset=dataset, attention="primal-plus", seed=3)
    assert folder.parent == tmp_path / "runs"
    assert re.fullmatch(rf"{re.escape(name)}__primal-plus__s3__\d{{8}}-\d{{6}}", folder.name)


def test_folders_are_never_shared(tmp_path: Path) -> None:
    folders = {make_run_folder(tmp_path, None, dataset="a", attention="b", seed=0) for _ in range(5)}
    assert len(folders) == 5


def test_flags_missing_in_old_runs_have_defaults(tmp_path: Path) -> None:
    write_record(tmp_path, record_of(Config(optimizer=OptimizerConfig(shards=3, steps=7))))
    content = json.loads((tmp_path / "config.json").read_text())
    del content["config"]["optimizer"]["shards"]
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert read_record(tmp_path).config == Config(optimizer=OptimizerConfig(steps=7))


def test_record_round_trip(tmp_path: Path) -> None:
    for _, preset in PRESETS.values():
        record = record_of(replace(preset, evaluation=replace(preset.evaluation, targets=(1.0, 2.5))))
        write_record(tmp_path, record)
        assert read_record(tmp_path) == record
        assert record.provenance["versions"]["torch"]
        assert isinstance(record.provenance["command"], list)


def test_folders_that_are_not_runs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is not a run: config\.json is missing"):
        read_record(tmp_path / "nowhere")
    for content in ("{", json.dumps({"config": {"dataset": "x"}})):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ValueError, match="cannot be read by this version"):
            read_record(tmp_path)


def test_a_linked_or_piped_config_is_refused(tmp_path: Path) -> None:
    outside, run = tmp_path / "outside", tmp_path / "run"
    run.mkdir()
    write_record(outside, record_of(Config()))
    for kind in (lambda path: path.symlink_to(outside / "config.json"), os.mkfifo):
        kind(run / "config.json")
        for use in (read_record, lambda folder: write_record(folder, record_of(Config()))):
            with pytest.raises(OSError, match="not a regular file"):
                use(run)
        (run / "config.json").unlink()
    assert read_record(outside) == record_of(Config())


@pytest.mark.parametrize("name", ["checkpoints", "evaluations", "report"])
def test_a_linked_subfolder_is_refused(tmp_path: Path, name: str) -> None:
    """Otherwise, partial files would be removed in the link's target, and checkpoints written to it."""
    outside, run = tmp_path / "outside", tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    outside.mkdir()
    partial = outside / ".file.partial"
    partial.touch()
    (run / "checkpoints").rmdir()
    (run / name).symlink_to(outside)
    with pytest.raises(NotADirectoryError, match=f"{name}"), lock_run(run):
        pass
    assert partial.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": ModelConfig(width=0)}, r"width \(0\) must be finite and above 0"),
        ({"model": ModelConfig(eta=-0.1)}, r"eta \(-0\.1\) must be finite and at least 0"),
        ({"optimizer": OptimizerConfig(lr=float("nan"))}, r"lr \(nan\) must be finite and above 0"),
        ({"run": RunConfig(save_every_steps=150)}, r"save_every_steps \(150\) must be a multiple of log_every_steps"),
        ({"evaluation": EvaluationConfig(eval_episodes=0)}, r"eval_episodes \(0\) must be at least 1"),
        ({"run": RunConfig(seed=-1)}, r"seed \(-1\) must be finite and at least 0"),
    ],
)
def test_impossible_values_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(Config(), **change)  # type: ignore[arg-type]


def test_paper_preset_has_the_papers_values() -> None:
    config = PRESETS["paper"][1]
    model, optimizer = config.model, config.optimizer
    assert (model.attention, model.width, model.num_heads, model.num_layers) == ("primal-plus", 256, 4, 3)
    assert (model.context, model.dropout, model.eta, model.rank) == (20, 0.1, 0.05, None)
    assert (optimizer.steps, optimizer.batch_size, optimizer.lr, optimizer.warmup_steps) == (100_000, 64, 1e-3, 10_000)
    assert (optimizer.schedule, optimizer.weight_decay, optimizer.clip) == ("constant", 1e-4, 0.25)
