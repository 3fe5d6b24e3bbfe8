"""Run folders have safe names, and their configuration round-trips."""

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

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
    with pytest.raises(OSError, match=f"not a folder: .*{name}"), lock_run(run):
        pass
    assert partial.exists()


CRAFTED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "another value": (lambda content: 5, "config.json must be a mapping, not 5"),
    "no configuration": (lambda content: content.pop("config"), "config.json lacks config"),
    "no parts": (lambda content: content.update(parts=[]), "parts must have at least one part"),
    "no threads": (lambda content: content.pop("threads"), "config.json lacks threads"),
    "no versions": (lambda content: content.pop("versions"), "config.json lacks versions"),
    "threads as text": (lambda content: content.update(threads="2"), "config.json.threads must be int, not '2'"),
    "no threads at all": (lambda content: content.update(threads=0), "threads (0) must be at least 1"),
    "a million threads": (lambda content: content.update(threads=10**6), "threads (1000000) must be"),
    "parts as text": (lambda content: content.update(parts="data"), "config.json.parts must be tuple, not 'data'"),
    "a part without path": (lambda content: content["parts"][0].pop("path"), "config.json.parts[0] lacks path"),
    "no model": (lambda content: content["config"].pop("model"), "config lacks model"),
    "a model that is a list": (lambda content: content["config"].update(model=[]), "config.model must be a mapping"),
    "no seed": (lambda content: content["config"]["run"].pop("seed"), "config.run lacks seed"),
    "no rate": (lambda content: content["config"]["optimizer"].pop("lr"), "config.optimizer lacks lr"),
    "an unknown key": (lambda content: content["config"]["model"].update(depth=3), "has the unknown key 'depth'"),
    "a seed as text": (lambda content: content["config"]["run"].update(seed="0"), "config.run.seed must be int"),
    "a seed that is true": (lambda content: content["config"]["run"].update(seed=True), "must be int, not True"),
    "half a seed": (lambda content: content["config"]["run"].update(seed=0.5), "config.run.seed must be int, not 0.5"),
    "a huge rate": (lambda content: content["config"]["optimizer"].update(lr=1e300), "lr (1e+300) must be"),
    "a rate that is not a number": (
        lambda content: content["config"]["optimizer"].update(lr=float("nan")),
        "config.optimizer.lr must be a finite number, not nan",
    ),
    "a rate of 400 digits": (
        lambda content: content["config"]["optimizer"].update(lr=10**400),
        "config.optimizer.lr must be a finite number",
    ),
    "a bogus schedule": (
        lambda content: content["config"]["optimizer"].update(schedule="bogus"),
        "config.optimizer.schedule must be one of constant, cosine, not 'bogus'",
    ),
    "targets as text": (
        lambda content: content["config"]["evaluation"].update(targets="3600"),
        "config.evaluation.targets must be tuple, not '3600'",
    ),
    "a reference of three": (lambda content: content["config"].update(reference=[1, 2, 3]), "must have 2 values"),
    "no task": (lambda content: content.pop("task"), "config.json lacks task"),
    "a task without digest": (lambda content: content["task"].pop("fingerprint"), "task lacks fingerprint"),
    "equal references": (lambda content: content["task"].update(expert_return=0.0), "reference returns must differ"),
    "half a reference": (lambda content: content["task"].update(expert_return=None), "must be a finite number"),
    "a specification of nothing": (lambda content: content["task"].update(specification={}), "lacks env_id"),
    "arguments that are no JSON": (
        lambda content: content["task"].update(specification={"env_id": "A-v0", "arguments": "[1]"}),
        "the arguments of A-v0 must be a JSON object",
    ),
}
"""What is wrong -> a change of the content of ``config.json``, and the message."""


@pytest.mark.parametrize("kind", CRAFTED)
def test_crafted_configurations_are_refused(tmp_path: Path, kind: str) -> None:
    change, message = CRAFTED[kind]
    write_record(tmp_path, record_of(Config()))
    content = json.loads((tmp_path / "config.json").read_text())
    changed = change(content)
    (tmp_path / "config.json").write_text(json.dumps(changed if kind == "another value" else content))
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        read_record(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'} cannot be read by this version: ")


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[" * 100_000, b'{"config": 1' + b"0" * 5000 + b"}"])
def test_files_that_are_no_json_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"config\.json cannot be read by this version: "):
        read_record(tmp_path)


def test_a_name_is_free_until_the_run_has_started(tmp_path: Path) -> None:
    """A run that was killed before ``config.json`` left an empty folder, a lock or a partial file."""
    options: dict[str, Any] = {"dataset": "a", "attention": "b", "seed": 0}
    folder = make_run_folder(tmp_path, "name", **options)
    for left in (".lock", ".config.json.7-7.partial"):
        (folder / left).touch()
        assert make_run_folder(tmp_path, "name", **options) == folder
    with lock_run(folder, is_new=True):
        write_record(folder, record_of(Config()))
    assert not list(folder.glob(".*.partial"))
    with pytest.raises(ValueError, match="already exists: give another --name"):
        make_run_folder(tmp_path, "name", **options)
    with pytest.raises(ValueError, match="already exists"), lock_run(folder, is_new=True):
        pass  # another process has taken the name in the meantime
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").touch()
    (tmp_path / "file").touch()
    for name in ("notes", "file"):
        with pytest.raises(ValueError, match="already exists"):
            make_run_folder(tmp_path, name, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": ModelConfig(width=0)}, r"width \(0\) must be at least 1 and at most 65536"),
        ({"model": ModelConfig(eta=-0.1)}, r"eta \(-0\.1\) must be at least 0 and at most 1e\+15"),
        ({"optimizer": OptimizerConfig(lr=float("nan"))}, r"lr \(nan\) must be above 0 and at most 1e\+15"),
        ({"run": RunConfig(save_every_steps=150)}, r"save_every_steps \(150\) must be a multiple of log_every_steps"),
        ({"evaluation": EvaluationConfig(eval_episodes=0)}, r"eval_episodes \(0\) must be at least 1"),
        ({"optimizer": OptimizerConfig(lr=1e300)}, r"lr \(1e\+300\) must be above 0 and at most 1e\+15"),
        ({"evaluation": EvaluationConfig(targets=(1.0, 1e308))}, r"targets \(1e\+308\) must be from -1e\+15 to 1e\+15"),
        ({"evaluation": EvaluationConfig(eval_seed=2**63 - 1)}, r"eval_seed \(9223372036854775807\) must be"),
        ({"reference": (0.0, 1e308)}, r"reference must be two finite returns in rising order, of at most 1e\+15"),
        ({"run": RunConfig(threads=100_000_000)}, r"threads \(100000000\) must be at least 1 and at most 4096"),
        ({"run": RunConfig(seed=2**64)}, r"seed \(18446744073709551616\) must be at least 0 and at most"),
        ({"run": RunConfig(seed=-1)}, r"seed \(-1\) must be at least 0 and at most 4503599627370496"),
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
