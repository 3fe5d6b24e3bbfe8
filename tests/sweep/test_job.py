"""Jobs of a sweep: their identities and names, and how they run, with small scripts in place of the programs."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import train
from envs.published import TABLE_4
from primal_dt.config import PRESETS, Config, EvaluationConfig, ModelConfig, OptimizerConfig, RunConfig
from primal_dt.sweep import cluster, worker
from primal_dt.sweep.arguments import SweepConfig
from primal_dt.sweep.estimate import Trial
from primal_dt.sweep.grid import SWEEPS
from primal_dt.sweep.job import WHERE_AND_HOW, Job, JobRecord, flags_of, identity_of, jobs_of
from primal_dt.sweep.resources import Resources
from primal_dt.sweep.worker import Programs, run_job

QUICK = PRESETS["quick"][1]
REPORT = json.dumps({"groups": [{"unit": "return", "results": [{"mean": 42.5}]}]})

# Parts of scripts. ``folder`` is the job's run folder.
BEGIN = "folder.mkdir(exist_ok=True); (folder / 'config.json').write_text(os.environ['MARK']); print(sys.argv)"
TRAIN = f"""{BEGIN}
(folder / 'checkpoints').mkdir(exist_ok=True)
(folder / 'checkpoints' / 'step-{QUICK.optimizer.steps:09d}.pt').touch()"""
WAIT = f"""{BEGIN}
def stop(*_):
    (folder / 'saved').touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
(folder / 'pid').write_text(str(os.getpid()))
time.sleep(60)"""
Run = Callable[..., JobRecord]


def grid_jobs(name: str, folder: Path, **changes: Any) -> list[Job]:
    grid = replace(SWEEPS[name], **changes)
    options: Any = {"threads": 1, "device": "cpu", "fingerprint": lambda dataset, base: dataset}
    return jobs_of(grid, PRESETS[grid.preset][1], out=folder, **options)


def job_in(folder: Path) -> Job:
    return grid_jobs("grid", folder, seeds=(0,), attention=("softmax",))[0]


def programs(folder: Path, training: str = "", evaluation: str = f"print({REPORT!r})") -> Programs:
    """Scripts with this content, in place of ``train.py`` and ``evaluate.py``."""
    head = f"import os, sys, time, signal\nfrom pathlib import Path\nfolder = Path({str(job_in(folder).folder)!r})\n"
    (folder / "train.py").write_text(head + training)
    (folder / "evaluate.py").write_text(head + evaluation)
    return Programs(folder / "train.py", folder / "evaluate.py", {"MARK": "here"})


def test_arms_change_what_they_name(tmp_path: Path) -> None:
    jobs = grid_jobs("policies", tmp_path)
    arms = {job.name.split("__")[1]: job.config for job in jobs}
    assert len(jobs) == 3 * 3 * len(arms) == 45
    assert (arms["filtered"].model.conditioning, arms["filtered"].optimizer.top_fraction) == ("none", 0.1)
    assert arms["softmax"].model == replace(QUICK.model, attention="softmax")
    assert arms["primal-plus"].model == QUICK.model
    assert arms["max-return"].model == replace(QUICK.model, conditioning="max-return")
    assert arms["guided"].optimizer == replace(QUICK.optimizer, critic_weight=1.0)
    assert SWEEPS["policies"].arm_flags == {"--conditioning", "--top-fraction", "--critic-weight"}
    targets = replace(QUICK, evaluation=replace(QUICK.evaluation, targets=(100.0,)))
    options: Any = {"threads": 1, "device": "cpu", "fingerprint": lambda dataset, base: dataset}
    with_targets = jobs_of(SWEEPS["policies"], targets, out=tmp_path, **options)
    assert {job.config.evaluation.targets for job in with_targets} == {None, (100.0,)}
    with pytest.raises(ValueError, match="--attention cannot be given with the sweep policies"):
        SweepConfig("policies", attention=("softmax",))


def test_jobs_log_and_start_as_the_sweep_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if they resume, and wherever they run."""
    monkeypatch.chdir(tmp_path)
    base = replace(
        QUICK,
        model=replace(QUICK.model, init_from="runs/old"),
        run=replace(QUICK.run, logger="own_loggers:Lines"),
    )
    options: Any = {"threads": 1, "device": "cpu", "fingerprint": lambda dataset, base: dataset}
    job = jobs_of(SWEEPS["grid"], base, out=tmp_path, **options)[0]
    command = job.training_command(Path("train.py"))
    assert command[command.index("--logger") + 1] == "own_loggers:Lines"
    assert command[command.index("--init-from") + 1] == str(tmp_path / "runs" / "old")
    job.folder.mkdir(parents=True)
    (job.folder / "config.json").touch()
    assert job.training_command(Path("train.py"))[2:] == [
        *("--resume", str(job.folder)),
        *("--logger", "own_loggers:Lines"),
    ]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return job_in(tmp_path)


@pytest.fixture
def run(job: Job, tmp_path: Path) -> Run:
    """Runs the job with scripts of this content."""
    return lambda *scripts: run_job(job, programs(tmp_path, *scripts))


def program_id(job: Job) -> int:
    """The process id of the job's program, as soon as it waits."""
    path = job.folder / "pid"
    for _ in range(3000):
        if path.exists() and path.read_text():
            return int(path.read_text())
        time.sleep(0.02)
    raise TimeoutError


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
            run=RunConfig(
                seed=3, threads=2, device="cpu", name="some-run", logger="tests.training.test_loggers:Memory"
            ),
        ),
    ],
)
def test_flags_give_back_the_configuration(config: Config, preset: str, tmp_path: Path) -> None:
    config = replace(config, run=replace(config.run, out=str(tmp_path)))
    assert train.parse(flags_of(config, preset))[0] == config


def variants(config: Any) -> Iterator[tuple[str, Any]]:
    """The path of each field, and a copy of the configuration with another value there."""
    for field in fields(config):
        value = getattr(config, field.name)
        for path, other in variants(value) if is_dataclass(value) else [("", "another value")]:
            copy = object.__new__(type(config))  # without the checks of the constructor
            copy.__dict__.update(config.__dict__ | {field.name: other})
            yield f"{field.name}.{path}".rstrip("."), copy


def identity(config: Config, *, fingerprint: str = "data", episodes: int = 100) -> str:
    return identity_of(config, fingerprint=fingerprint, episodes=episodes)


@pytest.mark.parametrize(("path", "other"), [pytest.param(*pair, id=pair[0]) for pair in variants(QUICK)])
def test_identity_depends_on_what_affects_the_result(path: str, other: Config) -> None:
    assert (identity(other) == identity(QUICK)) == (path in [f"run.{name}" for name in WHERE_AND_HOW])


def test_identity_depends_on_data_and_episodes() -> None:
    assert len({identity(QUICK), identity(QUICK, fingerprint="other"), identity(QUICK, episodes=10)}) == 3


@pytest.mark.parametrize("name", ["hopper.hdf5", "medium-v0"])
def test_identity_does_not_depend_on_the_data_folder(name: str) -> None:
    here, there = (replace(QUICK, dataset=f"/{folder}/{name}+other") for folder in ("here", "there"))
    assert identity(here) == identity(there)


def test_table_4_has_every_task_stack_and_seed(tmp_path: Path) -> None:
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


def test_rank_and_eta_vary_for_primal_stacks_only(tmp_path: Path) -> None:
    jobs = grid_jobs("grid", tmp_path, seeds=(0,), ranks=(4, 8), etas=(0.0, 0.1))
    stacks = [job.config.model.attention for job in jobs]
    assert (stacks.count("primal-plus"), stacks.count("softmax")) == (4, 1)


def test_a_repeated_setting_gives_one_job(tmp_path: Path) -> None:
    assert len(grid_jobs("grid", tmp_path, seeds=(0, 0), attention=("softmax",))) == 1


def test_a_job_has_the_same_name_in_a_larger_grid(tmp_path: Path) -> None:
    def names(**changes: Any) -> set[str]:
        return {job.name for job in grid_jobs("grid", tmp_path, **changes)}

    small = names(ranks=(4,), etas=(0.1,))
    assert small < names(ranks=(4, 8), etas=(0.1, 0.0))
    assert any("__primal-plus__rank4__eta0.1__s0__" in name for name in small)
    assert any("__softmax__s0__" in name for name in small)
    assert names() < names(ranks=(None, 8), etas=(None, 0.0))


def test_a_job_trains_then_evaluates(job: Job, run: Run) -> None:
    record = run(TRAIN)
    assert (record.state, record.score, record.attempts, record.errors) == ("done", 42.5, 1, ())
    assert record.is_plain
    assert job.record == record
    assert (job.folder / "config.json").read_text() == "here"
    log = job.log_path.read_text()
    assert "'--attention', 'softmax'" in log  # the arguments, which the script prints
    assert f"evaluate.py {job.folder} --episodes 100 --device cpu --workers 0" in log


def test_a_done_job_without_its_folder_is_run_again(job: Job, run: Run) -> None:
    run(TRAIN)
    shutil.rmtree(job.folder)
    assert (job.record.state, job.record.is_trained, job.record.score) == ("queued", False, None)
    assert run(TRAIN).state == "done"
    assert job.record.attempts == 2


def test_a_job_resumes_its_run_or_restarts_a_broken_one(job: Job, run: Run) -> None:
    job.folder.mkdir()  # as if killed before config.json was written
    (job.folder / "half.partial").touch()
    run("assert not folder.exists();" + TRAIN)
    assert "--resume" not in job.log_path.read_text()
    job.note(state="queued", is_trained=False)
    run(TRAIN)
    assert f"'--resume', '{job.folder}'" in job.log_path.read_text()
    assert job.record.attempts == 2


def test_failures_are_stored_and_training_is_not_repeated(run: Run) -> None:
    record = run(BEGIN + "; print('no data', file=sys.stderr); sys.exit(3)")
    assert record.state == "failed"
    assert record.errors[0].startswith("train.py ended with code 3:\n")
    assert "no data" in record.errors[0]
    record = run(TRAIN, "sys.exit('no environment')")
    assert (record.state, record.is_trained, len(record.errors)) == ("failed", True, 2)
    assert "no environment" in record.errors[1]
    record = run("sys.exit('it was trained again')")
    assert (record.state, record.attempts, len(record.errors)) == ("done", 3, 2)


def test_an_interrupted_job_lets_its_program_save(job: Job, run: Run) -> None:
    """Its program gets SIGTERM, on which ``train.py`` saves a checkpoint."""

    def interrupt() -> None:
        program_id(job)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    assert run(WAIT).state == "stopped"
    assert (job.folder / "saved").exists()


def test_a_superseded_attempt_ends(job: Job, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, if the network cuts a node off for a while, and the job is started again elsewhere."""
    monkeypatch.setattr(worker, "POLLS_PER_LOOK", 1)

    def start_another() -> None:
        program_id(job)
        job.note(state="evaluating", attempts=2, node="another")

    threading.Thread(target=start_another, daemon=True).start()
    begin = time.monotonic()
    record = run(WAIT)
    assert time.monotonic() - begin < 30
    assert (record.state, record.attempts, record.node) == ("evaluating", 2, "another")
    assert job.record == record
    assert not Path(f"/proc/{program_id(job)}").exists()


def test_deaths_count_only_without_progress(job: Job) -> None:
    job.folder.mkdir()
    tries = cluster._Tries(job, furthest=0)

    def deaths_after(step: int) -> int:
        (job.folder / "metrics.jsonl").write_text(json.dumps({"step": step}) + "\n")
        tries.count(died=True)
        return tries.deaths

    assert [deaths_after(step) for step in (100, 300, 300, 200, 400)] == [0, 0, 1, 2, 0]
    assert tries.failures == 0
    for seconds in (2, 4, 8):
        tries.count(died=False)
        assert seconds - 1 < tries.begin_at - time.monotonic() <= seconds
    assert (tries.failures, tries.deaths) == (3, 0)


@pytest.mark.parametrize(
    ("node", "requested", "number"),
    [
        ((8, 2, 64), (1, 0.25, 4), 8),
        ((64, 2, 64), (1, 0.25, 4), 8),
        ((64, 2, 24), (1, 0.25, 4), 6),
        ((2, 0, 16), (0.1, 0, 0.5), 20),
        ((2, 0, 16), (1, 1, 1), 0),
        ((64, 2, 64), (1, 0.6, 1), 2),  # a job cannot span two GPUs
    ],
)
def test_the_scarcest_resource_limits_a_node(node: Any, requested: Any, number: int) -> None:
    assert Resources(*node).room_for(Resources(*requested)) == number


def test_time_left_counts_only_unfinished_work(job: Job, run: Run) -> None:
    """The job has 5,000 steps, 10 episodes after every 1,000 steps and 100 at the end."""
    trial = Trial(10.0, 100.0, start_seconds=3.0, peak_gib=1.0, num_targets=2, episode_limit=1000)
    rollout = 2 * 1000 / 100.0
    assert trial.seconds_left(job) == pytest.approx(6 + 500 + 5 * 10 * rollout + 100 * rollout)
    job.folder.mkdir()
    (job.folder / "metrics.jsonl").write_text(json.dumps({"step": 3200}) + "\n")
    assert trial.seconds_left(job) == pytest.approx(6 + 180 + 2 * 10 * rollout + 100 * rollout)
    run(TRAIN, "sys.exit(1)")
    assert trial.seconds_left(job) == pytest.approx(3 + 100 * rollout)
    run()
    assert trial.seconds_left(job) == 0


def test_file_system_errors_are_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    read = Mock(side_effect=[OSError, OSError, "content", *[OSError("stale file handle")] * 1000])
    assert cluster._patiently(read) == "content"
    with pytest.raises(OSError, match="stale"):
        cluster._patiently(read)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux can tie a process to its parent")
def test_a_program_dies_with_its_worker(job: Job, tmp_path: Path) -> None:
    """Otherwise it would keep training alongside the attempt that takes over."""
    code = f"""
from pathlib import Path
from tests.sweep.test_job import WAIT, job_in, programs, run_job
folder = Path({str(tmp_path)!r})
run_job(job_in(folder), programs(folder, WAIT))
"""
    with subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[2]) as process:
        try:
            program = program_id(job)
        finally:
            process.kill()
    for _ in range(100):
        if not Path(f"/proc/{program}").exists() or "Z" in Path(f"/proc/{program}/stat").read_text().split()[2]:
            return
        time.sleep(0.05)
    pytest.fail("the program outlives its worker")
