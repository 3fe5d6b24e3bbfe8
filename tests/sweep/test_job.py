"""Jobs of a sweep: what they are, and how they end, with programs of our own in the place of the scripts."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import train
from envs.published import TABLE_4
from primal_dt.config import PRESETS, Config, EvaluationConfig, ModelConfig, OptimizerConfig, RunConfig
from primal_dt.sweep import cluster
from primal_dt.sweep.cluster import Resources
from primal_dt.sweep.estimate import Trial
from primal_dt.sweep.grid import SWEEPS, jobs_of
from primal_dt.sweep.job import WHERE_AND_HOW, Job, flags_of, identity_of
from primal_dt.sweep.worker import Programs, run_job

QUICK = PRESETS["quick"][1]
REPORT = json.dumps({"groups": [{"results": [{"mean": 42.5}]}]})


@pytest.mark.parametrize("preset", list(PRESETS))
@pytest.mark.parametrize(
    "config",
    [
        QUICK,
        Config(),
        Config(
            dataset="PATH/a b.hdf5+other",
            env_id="Hopper-v4",
            mix_versions=True,
            model=ModelConfig(attention="softmax", rank=7, eta=0.0, dropout=0.25, num_heads=2),
            optimizer=OptimizerConfig(lr=3.5e-5, bf16=True, schedule="cosine", shards=2),
            evaluation=EvaluationConfig(targets=(100.0, 2.5), eval_every_steps=0),
            run=RunConfig(seed=3, threads=2, device="cpu", name="some-run"),
        ),
    ],
)
def test_a_configuration_comes_back_from_its_flags(config: Config, preset: str, tmp_path: Path) -> None:
    config = replace(config, run=replace(config.run, out=str(tmp_path)))
    assert train.parse(flags_of(config, preset))[0] == config


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for field in fields(value):
        own = getattr(value, field.name)
        if is_dataclass(own):
            yield from leaves(own, (*path, field.name))
        else:
            yield (*path, field.name)


def changed(config: Any, path: tuple[str, ...]) -> Any:
    """With another value at one place; whether it is a sensible one does not matter here."""
    name, *rest = path
    own = getattr(config, name)
    value = changed(own, tuple(rest)) if rest else ("other" if own != "other" else "another")
    copy = object.__new__(type(config))
    copy.__dict__.update({**config.__dict__, name: value})
    return copy


@pytest.mark.parametrize("path", list(leaves(QUICK)), ids=".".join)
def test_a_jobs_identity_is_all_that_makes_its_result(path: tuple[str, ...]) -> None:
    def identity(config: Config) -> str:
        return identity_of(config, fingerprint="data", episodes=100)

    same = identity(changed(QUICK, path)) == identity(QUICK)
    assert same == (path[0] == "run" and path[1] in WHERE_AND_HOW)
    assert identity_of(QUICK, fingerprint="other data", episodes=100) != identity(QUICK)
    assert identity_of(QUICK, fingerprint="data", episodes=10) != identity(QUICK)
    for name in ("hopper.hdf5", "medium-v0"):
        here, there = (replace(QUICK, dataset=f"/{folder}/{name}+other") for folder in ("here", "there"))
        assert identity(here) == identity(there)


def grid_jobs(name: str, tmp_path: Path, **changes: Any) -> list[Job]:
    grid = replace(SWEEPS[name], **changes)
    return jobs_of(
        grid,
        PRESETS[grid.preset][1],
        out=tmp_path,
        threads=1,
        device="cpu",
        fingerprint=lambda dataset, base: dataset,
    )


def test_table_4_is_the_papers_tasks_with_every_stack_and_five_seeds(tmp_path: Path) -> None:
    jobs = grid_jobs("table4", tmp_path)
    assert len(jobs) == 9 * 10 * 5
    assert {job.config.dataset for job in jobs} == {f"{name}-{tier}-v2" for name, tier in TABLE_4}
    assert {job.config.model.attention for job in jobs} >= set(TABLE_4["hopper", "medium"])
    assert {job.config.run.seed for job in jobs} == {0, 1, 2, 3, 4}
    assert all(job.preset == "paper" and job.config.model.width == 256 for job in jobs)
    assert len({job.name for job in jobs}) == len(jobs)


def test_table_7_varies_the_rank(tmp_path: Path) -> None:
    jobs = grid_jobs("table7", tmp_path)
    assert len(jobs) == 9 * 3 * 5
    assert {job.config.model.rank for job in jobs} == {32, 64, 96}
    assert any("__primal-plus__rank96__s4__" in job.name for job in jobs)


def test_rank_and_eta_vary_where_there_is_a_primal_layer_only(tmp_path: Path) -> None:
    jobs = grid_jobs("grid", tmp_path, seeds=(0,), ranks=(4, 8), etas=(0.0, 0.1))
    by_kind = [job.config.model.attention for job in jobs]
    assert (by_kind.count("primal-plus"), by_kind.count("softmax")) == (4, 1)
    assert len(grid_jobs("grid", tmp_path, seeds=(0, 0), attention=("softmax",))) == 1  # one experiment, once


def test_a_job_has_the_same_name_in_a_larger_grid(tmp_path: Path) -> None:
    def names(**changes: Any) -> set[str]:
        return {job.name for job in grid_jobs("grid", tmp_path, **changes)}

    small = names(ranks=(4,), etas=(0.1,))
    assert small < names(ranks=(4, 8), etas=(0.1, 0.0))
    assert any("__primal-plus__rank4__eta0.1__s0__" in name for name in small)
    assert any("__softmax__s0__" in name for name in small)
    assert names() < names(ranks=(None, 8), etas=(None, 0.0))


def job_in(tmp_path: Path) -> Job:
    (job,) = grid_jobs("grid", tmp_path, seeds=(0,), attention=("softmax",))
    return job


def programs(tmp_path: Path, *, training: str = "", evaluation: str = f"print({REPORT!r})") -> Programs:
    """Scripts that do what they are told, with the job's folder in ``folder``."""
    for name, text in (("train.py", training), ("evaluate.py", evaluation)):
        (tmp_path / name).write_text(
            "import os, sys, time, signal\nfrom pathlib import Path\n"
            f"folder = Path({str(job_in(tmp_path).folder)!r})\n{text}\n"
        )
    return Programs(tmp_path / "train.py", tmp_path / "evaluate.py", {"MARK": "here"})


BEGIN = "folder.mkdir(exist_ok=True); (folder / 'config.json').write_text(os.environ['MARK']); print(sys.argv)"
TRAIN = (
    f"{BEGIN}; (folder / 'checkpoints').mkdir(exist_ok=True)\n"
    f"(folder / 'checkpoints' / 'step-{QUICK.optimizer.steps:09d}.pt').touch()"
)


def test_a_job_trains_then_evaluates_and_is_done(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    record = run_job(job, programs(tmp_path, training=TRAIN))
    assert (record.state, record.score, record.attempts, record.errors) == ("done", 42.5, 1, ())
    assert job.record == record
    assert (job.folder / "config.json").read_text() == "here"
    log = job.log_path.read_text()
    assert "'--attention', 'softmax'" in log  # what it was told
    assert f"evaluate.py {job.folder} --episodes 100 --device cpu --workers 0" in log


def test_what_was_done_counts_as_long_as_it_is_there(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    run_job(job, programs(tmp_path, training=TRAIN))
    shutil.rmtree(job.folder)
    assert (job.record.state, job.record.is_trained, job.record.score) == ("queued", False, None)
    assert run_job(job, programs(tmp_path, training=TRAIN)).state == "done"
    assert job.record.attempts == 2


def test_what_was_begun_is_gone_on_with_and_what_was_not_begun_well_is_begun_anew(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    job.folder.mkdir()  # killed before it had written anything
    (job.folder / "half.partial").touch()
    run_job(job, programs(tmp_path, training="assert not folder.exists();" + TRAIN))
    assert "--resume" not in job.log_path.read_text()
    job.note(state="queued", is_trained=False)
    run_job(job, programs(tmp_path, training=TRAIN))
    assert f"'--resume', '{job.folder}'" in job.log_path.read_text()
    assert job.record.attempts == 2


def test_a_failure_is_kept_and_a_trained_job_is_not_trained_again(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    record = run_job(job, programs(tmp_path, training=BEGIN + "; print('no data', file=sys.stderr); sys.exit(3)"))
    assert record.state == "failed"
    assert record.errors[0].startswith("train.py ended with code 3:\n")
    assert "no data" in record.errors[0]
    record = run_job(job, programs(tmp_path, training=TRAIN, evaluation="sys.exit('no environment')"))
    assert [record.state, record.is_trained, len(record.errors)] == ["failed", True, 2]
    assert "no environment" in record.errors[1]
    record = run_job(job, programs(tmp_path, training="sys.exit('it was trained again')"))
    assert (record.state, record.attempts, len(record.errors)) == ("done", 3, 2)


def test_an_interrupted_job_has_its_program_stop_by_itself(tmp_path: Path) -> None:
    """As ``train.py`` does, which saves a checkpoint when it gets SIGTERM."""
    job = job_in(tmp_path)
    waits = (
        BEGIN + "\ndef stop(*_):\n    (folder / 'saved').touch()\n    sys.exit(143)\n"
        "signal.signal(signal.SIGTERM, stop)\n(folder / 'ready').touch()\ntime.sleep(60)"
    )

    def interrupt() -> None:
        while not (job.folder / "ready").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    record = run_job(job, programs(tmp_path, training=waits))
    assert record.state == "stopped"
    assert (job.folder / "saved").exists()


def test_an_attempt_that_was_believed_dead_gives_way_to_the_next(tmp_path: Path) -> None:
    """As on a node that is cut off from the others, and then not."""
    job = job_in(tmp_path)
    waits = BEGIN + "; (folder / 'pid').write_text(str(os.getpid())); time.sleep(60); (folder / 'end').touch()"

    def begin_another() -> None:
        while not (job.folder / "pid").exists():
            time.sleep(0.02)
        job.note(state="evaluating", attempts=2, node="another")

    threading.Thread(target=begin_another, daemon=True).start()
    begin = time.monotonic()
    record = run_job(job, programs(tmp_path, training=waits))
    assert time.monotonic() - begin < 30
    assert (record.state, record.attempts, record.node) == ("evaluating", 2, "another")
    assert job.record == record
    assert not Path("/proc", (job.folder / "pid").read_text()).exists()


def test_deaths_count_only_if_a_job_has_not_come_further(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    job.folder.mkdir()
    tries = cluster._Tries(job, furthest=0)

    def dies_at(step: int) -> int:
        (job.folder / "metrics.jsonl").write_text(json.dumps({"step": step}) + "\n")
        tries.count(died=True)
        return tries.deaths

    assert [dies_at(100), dies_at(300), dies_at(300), dies_at(200), dies_at(400)] == [0, 0, 1, 2, 0]
    assert tries.failures == 0
    for seconds in (2, 4, 8):
        tries.count(died=False)
        assert seconds - 1 < tries.begin_at - time.monotonic() <= seconds
    assert (tries.failures, tries.deaths) == (3, 0)


@pytest.mark.parametrize(
    ("node", "job", "number"),
    [((8, 2, 64), (1, 0.25, 4), 8), ((64, 2, 64), (1, 0.25, 4), 8), ((64, 2, 24), (1, 0.25, 4), 6)],
)
def test_a_node_has_room_for_what_its_scarcest_resource_allows(node: Any, job: Any, number: int) -> None:
    assert Resources(*node).room_for(Resources(*job)) == number
    assert Resources(2, 0, 16).room_for(Resources(0.1, 0, 0.5)) == 20
    assert Resources(2, 0, 16).room_for(Resources(1, 1, 1)) == 0
    assert Resources(64, 2, 64).room_for(Resources(1, 0.6, 1)) == 2  # a job is on one GPU


def test_what_is_left_of_a_job_is_what_it_has_not_done(tmp_path: Path) -> None:
    trial = Trial(10.0, 100.0, start_seconds=3.0, peak_gib=1.0, num_targets=2, episode_limit=1000)
    job = job_in(tmp_path)  # 5,000 steps, 10 episodes after every 1,000, 100 at the end
    rollout = 2 * 1000 / 100.0
    assert trial.seconds_left(job) == pytest.approx(6 + 500 + 5 * 10 * rollout + 100 * rollout)
    job.folder.mkdir()
    (job.folder / "metrics.jsonl").write_text(json.dumps({"step": 3200}) + "\n")
    assert trial.seconds_left(job) == pytest.approx(6 + 180 + 2 * 10 * rollout + 100 * rollout)
    run_job(job, programs(tmp_path, training=TRAIN, evaluation="sys.exit(1)"))
    assert trial.seconds_left(job) == pytest.approx(3 + 100 * rollout)
    run_job(job, programs(tmp_path))
    assert trial.seconds_left(job) == 0


def test_a_file_system_that_does_not_answer_at_once_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    asked = 0

    def answer_after(times: int) -> int:
        nonlocal asked
        asked += 1
        if asked <= times:
            raise OSError("stale file handle")
        return asked

    assert cluster._patiently(lambda: answer_after(2)) == 3
    with pytest.raises(OSError, match="stale"):
        cluster._patiently(lambda: answer_after(1000))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the system has no such thing")
def test_a_program_dies_with_its_worker(tmp_path: Path) -> None:
    """Otherwise it would go on training beside the one that takes over."""
    job = job_in(tmp_path)
    own = programs(tmp_path, training=BEGIN + "; (folder / 'pid').write_text(str(os.getpid())); time.sleep(60)")
    code = f"""
from pathlib import Path
from primal_dt.sweep.worker import Programs, run_job
from tests.sweep.test_job import job_in

scripts = Path({str(own.train)!r}), Path({str(own.evaluate)!r})
run_job(job_in(Path({str(tmp_path)!r})), Programs(*scripts, {{"MARK": "here"}}))
"""
    worker = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[2])
    try:
        while not (job.folder / "pid").exists() or not (job.folder / "pid").read_text():
            assert worker.poll() is None
            time.sleep(0.05)
        program = int((job.folder / "pid").read_text())
    finally:
        worker.kill()
        worker.wait()
    for _ in range(100):
        if not Path(f"/proc/{program}").exists() or "Z" in Path(f"/proc/{program}/stat").read_text().split()[2]:
            return
        time.sleep(0.05)
    pytest.fail("the program outlives its worker")
