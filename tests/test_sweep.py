"""``sweep.py`` on real Ray clusters: no work is repeated or lost, whatever dies."""

import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import sweep
from primal_dt.sweep import estimate
from primal_dt.sweep.arguments import SweepConfig
from primal_dt.sweep.estimate import Trial, this_machine
from primal_dt.sweep.grid import SWEEPS
from primal_dt.sweep.job import Job
from primal_dt.sweep.worker import run_job
from primal_dt.system.files import lock_folder
from primal_dt.training.checkpoint import load_checkpoint
from primal_dt.training.metrics_log import read_metrics
from tests.conftest import SMALL, data_variables, run_program, small_data

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.xdist_group("sweep"), pytest.mark.filterwarnings("ignore")]  # Ray has many warnings
ROOT = Path(__file__).parent.parent
SAVE_EVERY, MANY, FEW = 200, 1000, 40
"""Steps. A job that is stopped in the middle has many, so that there is time to stop it."""
JOB = [*SMALL, *shlex.split(f"--log-every-steps 20 --save-every-steps {SAVE_EVERY} --eval-every-steps 0")]
JOB += shlex.split("--episodes 2 --seeds 0 --memory-per-job 0.2")
Process = subprocess.Popen[str]
Call = Callable[..., tuple[str, str]]
Result = tuple[dict[str, torch.Tensor], list[Any]]


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A working folder with a data set, a cache and Ray's token."""
    folder = tmp_path_factory.mktemp("sweep")
    small_data(folder / "hopper.hdf5")
    (folder / "token").write_text("0123456789abcdef" * 4)
    variables = {"RAY_AUTH_TOKEN_PATH": str(folder / "token"), "PYTHONPATH": str(ROOT)}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (data_variables(folder) | variables).items():
            patch.setenv(name, value)
        patch.chdir(folder)
        yield


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs ``sweep.py`` in this process, checks its exit code, and returns what it writes to stdout and stderr."""

    def run(*arguments: str, code: int = 0) -> tuple[str, str]:
        capsys.readouterr()
        result = run_program(sweep, monkeypatch, *arguments)
        out, err = capsys.readouterr()
        assert result == code, err
        return out, err

    return run


def flags(out: str, *attention: str, steps: int = FEW) -> list[str]:
    grid = ["grid", "--datasets", "hopper.hdf5", "--attention", *attention]
    return [*grid, *JOB, "--steps", str(steps), "--out", out]


def jobs_of(*arguments: str) -> list[Job]:
    return sweep.parse(list(arguments))[1]


def start(*arguments: str) -> Process:
    """Start ``sweep.py`` as a process."""
    command = [sys.executable, str(ROOT / "sweep.py"), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: Process, code: int = 0) -> tuple[str, str]:
    """Wait for a process, check its exit code, and return what it wrote to stdout and stderr."""
    out, err = process.communicate(timeout=240)
    assert process.returncode == code, err
    return out, err


def wait_for(condition: Callable[[], bool], process: Process) -> None:
    for _ in range(2400):
        if condition():
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    raise TimeoutError


def training_of(job: Job) -> tuple[int, int]:
    """The process ids of a job's training and of the Ray worker that runs it."""
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            command = (status.parent / "cmdline").read_bytes()
            if b"train.py\0" in command and job.config.run.out.encode() in command:
                (parent,) = re.findall(r"^PPid:\s+(\d+)", status.read_text(), re.MULTILINE)
                return int(status.parent.name), int(parent)
        except OSError:  # the process has ended meanwhile
            continue
    raise LookupError(job.name)


def result(job: Job) -> Result:
    """The last weights, and the episodes of the evaluation."""
    checkpoint = load_checkpoint(job.folder / "checkpoints" / f"step-{job.config.optimizer.steps:09d}.pt")
    (group,) = json.loads((job.folder / "report" / "report.json").read_text())["groups"]
    return dict(checkpoint.weights), group["runs"][0]["episodes"]


@pytest.fixture(scope="module")
def undisturbed() -> Iterator[Future[Result]]:
    """The result of a job with many steps that runs without a sweep, in a thread while the first test runs."""
    (job,) = jobs_of(*flags("alone", "primal-plus", steps=MANY))

    def run() -> Result:
        assert run_job(job, sweep.programs()).state == "done"
        return result(job)

    with ThreadPoolExecutor() as pool:
        yield pool.submit(run)


def assert_same_result(job: Job, other: Future[Result]) -> None:
    (weights, episodes), (expected, expected_episodes) = result(job), other.result()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert episodes == expected_episodes


def times(job: Job, until: int = MANY) -> dict[int, float]:
    """When each step was logged, up to a step."""
    return {line["step"]: line["time"] for line in read_metrics(job.folder) if line["step"] <= until}


@pytest.mark.slow
def test_a_job_survives_the_death_of_its_node(undisturbed: Future[Result]) -> None:
    from ray.cluster_utils import Cluster

    arguments = flags("killed", "primal-plus", steps=MANY)
    (job,) = jobs_of(*arguments)
    soon = {"health_check_period_ms": 300, "health_check_failure_threshold": 3, "health_check_initial_delay_ms": 0}
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, "_system_config": soon}
    )
    try:
        first = cluster.add_node(num_cpus=1)
        process = start(*arguments, "--address", cluster.address, "--retries", "0")  # deaths do not count
        wait_for(lambda: job.progress()[0] >= SAVE_EVERY + 20, process)
        os.kill(training_of(job)[0], signal.SIGSTOP)  # it must not end before its node is killed
        cluster.add_node(num_cpus=1)
        assert job.record.state == "training"
        before = times(job, SAVE_EVERY)
        cluster.remove_node(first, allow_graceful=False)  # SIGKILL
        wait_for(lambda: job.record.attempts == 2 and job.progress()[0] >= 2 * SAVE_EVERY + 20, process)
        later = times(job, 2 * SAVE_EVERY)
        os.kill(training_of(job)[1], signal.SIGKILL)
        out, err = finish(process)
    finally:
        cluster.shutdown()
    assert (job.record.state, job.record.attempts) == ("done", 3)
    assert "its worker on " in job.record.errors[0]
    assert f"{job.name}  on " in err
    assert ", attempt 3" in err
    assert "(raylet)" not in out + err
    assert "primal-plus" in out
    assert times(job, SAVE_EVERY) == before  # saved steps are not repeated
    assert times(job, 2 * SAVE_EVERY) == later
    assert_same_result(job, undisturbed)


@pytest.mark.slow
def test_a_failing_job_is_retried_and_stops_no_other(call: Call) -> None:
    arguments = flags("failing", "softmax", "linear")
    good, bad = jobs_of(*arguments)
    bad.folder.mkdir(parents=True)
    (bad.folder / "config.json").write_text("{}")  # such a run cannot be resumed
    out, err = finish(start(*arguments, "--retries", "1"), code=sweep.EXIT_FAILED_JOBS)
    assert (good.record.state, good.record.attempts) == ("done", 1)
    assert (bad.record.state, bad.record.attempts, len(bad.record.errors)) == ("failed", 2, 2)
    assert "cannot be read by this version" in err
    assert f"error: {bad.name} failed. Its last error:" in err
    assert "softmax" in out  # in the report
    assert "linear" not in out.split("report:")[0].split("curves: ")[1]

    (bad.folder / "config.json").unlink()
    before = (good.folder / "metrics.jsonl").read_bytes()
    out, _ = finish(start(*arguments))
    assert "jobs in failing: 2, already done: 1" in out
    assert (good.record.attempts, bad.record.attempts, bad.record.state) == (1, 3, "done")
    assert (good.folder / "metrics.jsonl").read_bytes() == before
    assert "linear" in out
    assert "jobs in failing: 2, already done: 2" in call(*arguments)[0]
    assert (good.record.attempts, bad.record.attempts) == (1, 3)


@pytest.mark.slow
def test_ctrl_c_stops_at_a_checkpoint_and_resumes(undisturbed: Future[Result], call: Call) -> None:
    arguments = [*flags("stopped", "primal-plus", steps=MANY), "--save-every-steps", str(MANY)]
    (job,) = jobs_of(*arguments)
    process = start(*arguments)
    wait_for(lambda: job.progress()[0] >= 60, process)
    process.send_signal(signal.SIGINT)
    _, err = finish(process, code=130)
    assert "Traceback" not in err
    assert re.search(r"stopped; finished work is saved. To resume: python .*sweep\.py grid", err)
    assert job.record.state == "stopped"
    (saved,) = (job.folder / "checkpoints").glob("*.pt")
    step = int(saved.stem.removeprefix("step-"))
    assert step < MANY  # the step of the only regular checkpoint
    before = times(job)

    _, err = call(*arguments, "--cpus-per-job", "2", code=1)
    assert "was started with threads=1, device=cpu; resuming it with threads=2" in err

    process = start(*arguments)
    wait_for(lambda: job.record.attempts == 2 and job.progress()[0] > step + 60, process)
    process.send_signal(signal.SIGTERM)  # as batch systems do
    assert "To resume: python" in finish(process, code=130)[1]
    assert job.record.state == "stopped"
    finish(start(*arguments))
    assert job.record.attempts == 3
    assert before.items() <= times(job).items()
    assert_same_result(job, undisturbed)


@pytest.mark.slow
def test_a_dry_run_shows_jobs_resources_and_time(call: Call) -> None:
    arguments = flags("dry", "softmax", "primal-plus")
    out, _ = call(*arguments, "--dry-run", "--cpus-per-job", "0.5")
    for job in jobs_of(*arguments):
        assert f"| {job.name}" in out
        assert not job.folder.exists()
    assert "each requests 0.5 CPU, 0 GPU, 0.2 GiB memory; threads per job: 1" in out
    (minutes,) = re.findall(r"estimate: ([0-9.]+) minutes on this machine \(jobs at a time: 2\)", out)
    assert 0 < float(minutes) < 10


def test_a_dry_run_downloads_nothing(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Job] = []

    def try_job(job: Job, *_: object) -> Trial:
        tried.append(job)
        return Trial(100.0, 1000.0, 0.0, peak_gib=0.5, num_targets=2, episode_limit=1000)

    monkeypatch.setattr(estimate, "try_job", try_job)
    out, err = call("table4", "--dry-run", "--seeds", "0", "--out", "dry")
    assert "hopper-medium-v2__primal-plus__s0" in out
    assert "jobs: 90 (" in out
    assert "hopper-medium-v2 is not downloaded yet: the sweep would download it first" in err
    assert [job.config.model.attention for job in tried] == list(SWEEPS["table4"].attention)
    assert {job.config.dataset for job in tried} == {"primal/hopper/medium-expert-v0"}
    # 100,000 steps at 100 per second, then 10 * 10 + 100 episodes for each of 2 targets at 1,000 steps per second
    assert out.count("|                  23.3 |") == 90
    (hours,) = re.findall(r"estimate: ([0-9.]+) hours on this machine \(jobs at a time: \d+\)", out)
    cores = this_machine().room_for(SweepConfig().resources)
    assert float(hours) == pytest.approx(math.ceil(90 / cores) * 1400 / 3600, abs=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--seed 3", "--seed is set by the sweep for each run: use --seeds"),
        ("demo", "the name of the sweep must come first: python sweep.py demo"),
        ("--address 127.0.0.1:1", "no server answers at --address 127.0.0.1:1"),
        ("--datasets nowhere.hdf5", "nowhere.hdf5"),
        ("--cpus-per-job 4096 --datasets hopper.hdf5", "a job requests 4096 CPU"),
    ],
)
def test_mistakes_are_explained(call: Call, arguments: str, message: str) -> None:
    _, err = call("grid", "--out", "wrong", *arguments.split(), code=1)
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("cpus_per_job", value) for value in (0, math.inf, math.nan, 1e308)],
        *[("memory_per_job", value) for value in (-1, math.inf)],
        *[("gpus_per_job", value) for value in (2, math.nan)],
        *[("seeds", value) for value in ((), (0, -1), (2**64,), (2**63 - 1,))],
        *[("rank", (0,)), ("eta", (math.inf,)), ("retries", -1), ("episodes", 0)],
    ],
)
def test_invalid_settings_are_rejected(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name.removesuffix("s")):
        SweepConfig(**{name: value})


def test_two_sweeps_cannot_share_a_folder() -> None:
    Path("shared").mkdir()
    with lock_folder(Path("shared"), ""), pytest.raises(ValueError, match="another sweep is running in shared"):
        sweep.run(SweepConfig(out=Path("shared")), [], [])


def test_missing_memory_ends_in_a_message(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out(*arguments: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(sweep, "parse", run_out)
    _, err = call("demo", code=1)
    assert err.startswith("error: there is not enough memory")
    assert "Traceback" not in err
