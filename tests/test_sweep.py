"""``sweep.py`` on real Ray clusters: nothing is done twice, nothing is lost, whatever dies."""

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
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import sweep
from primal_dt.sweep import estimate as sweep_plan
from primal_dt.sweep.estimate import Trial, this_machine
from primal_dt.sweep.grid import SWEEPS
from primal_dt.sweep.job import Job
from primal_dt.sweep.worker import run_job
from primal_dt.training.checkpoint import load_checkpoint
from primal_dt.training.metrics_log import read_metrics
from tests.envs.files import d4rl_arrays, write_d4rl

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.xdist_group("sweep"), pytest.mark.filterwarnings("ignore")]  # Ray has many of its own
ROOT = Path(__file__).parent.parent
SAVE_EVERY, MANY, FEW = 400, 2000, 100
"""Steps. What is to be stopped in the middle must take some time."""
SMALL = shlex.split(f"""
    --width 16 --context 4 --rank 4 --num-layers 2 --batch-size 8 --warmup-steps 5 --log-every-steps 20
    --save-every-steps {SAVE_EVERY} --eval-every-steps 0 --spectrum-every-steps 0 --episodes 2 --seeds 0
    --memory-per-job 0.2
""")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a data set in it, where the cache and Ray's files are too."""
    folder = tmp_path_factory.mktemp("sweep")
    write_d4rl(folder / "hopper.hdf5", d4rl_arrays((30,) * 20), env_id="Hopper-v5")
    (folder / "token").write_text("0123456789abcdef" * 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PRIMAL_DT_CACHE", str(folder / "cache"))
        patch.setenv("MINARI_DATASETS_PATH", str(folder / "minari"))
        patch.setenv("RAY_AUTH_TOKEN_PATH", str(folder / "token"))
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.chdir(folder)
        yield folder


def flags(out: str, *attention: str, steps: int = FEW) -> list[str]:
    grid = ["grid", "--datasets", "hopper.hdf5", "--attention", *attention]
    return [*grid, *SMALL, "--steps", str(steps), "--out", out]


def jobs_of(*arguments: str) -> list[Job]:
    return sweep.parse(list(arguments))[1]


def start(*arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, str(ROOT / "sweep.py"), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    out, err = process.communicate(timeout=240)
    return process.returncode, out, err


def wait_for(condition: Callable[[], bool], process: "subprocess.Popen[str]") -> None:
    for _ in range(2400):
        if condition():
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    raise TimeoutError


def training_of(job: Job) -> tuple[int, int]:
    """The process ids of a job's training, and of the Ray worker that runs it."""
    name = job.name.encode()
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            command = (status.parent / "cmdline").read_bytes().split(b"\0")
            if any(word.endswith(b"train.py") for word in command) and any(name in word for word in command):
                parent = re.findall(r"^PPid:\s+(\d+)", status.read_text(), re.MULTILINE)[0]
                return int(status.parent.name), int(parent)
        except OSError:  # it has ended meanwhile
            continue
    raise LookupError(job.name)


def undisturbed(job: Job, out: str) -> Job:
    """The same experiment without a sweep around it."""
    other = replace(job, config=replace(job.config, run=replace(job.config.run, out=str(Path(out).resolve()))))
    assert run_job(other, sweep.programs()).state == "done"
    return other


def result(job: Job) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """The last weights, and what was evaluated."""
    checkpoint = load_checkpoint(job.folder / "checkpoints" / f"step-{job.config.optimizer.steps:09d}.pt")
    (group,) = json.loads((job.folder / "report" / "report.json").read_text())["groups"]
    return dict(checkpoint.weights), group["runs"][0]["episodes"]


def assert_same_result(one: Job, other: Job) -> None:
    (weights, episodes), (expected, expected_episodes) = result(one), result(other)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert episodes == expected_episodes


def points(job: Job) -> dict[int, float]:
    """Step -> when it was done."""
    return {line["step"]: line["time"] for line in read_metrics(job.folder)}


def test_a_job_whose_node_is_killed_goes_on_elsewhere_and_ends_as_if_nothing_had_been(home: Path) -> None:
    from ray.cluster_utils import Cluster

    arguments = flags("killed", "primal-plus", steps=MANY)
    (job,) = jobs_of(*arguments)
    expected = undisturbed(job, "alone")
    soon = {"health_check_period_ms": 300, "health_check_failure_threshold": 3, "health_check_initial_delay_ms": 0}
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, "_system_config": soon}
    )
    try:
        first = cluster.add_node(num_cpus=1)
        process = start(*arguments, "--address", cluster.address, "--retries", "0")  # deaths do not count
        wait_for(lambda: job.progress()[0] >= SAVE_EVERY + 20, process)
        os.kill(training_of(job)[0], signal.SIGSTOP)  # it shall not end meanwhile
        cluster.add_node(num_cpus=1)
        assert job.record.state == "training"
        before = points(job)
        cluster.remove_node(first, allow_graceful=False)  # SIGKILL
        wait_for(lambda: job.record.attempts == 2 and job.progress()[0] >= 2 * SAVE_EVERY + 20, process)
        later = points(job)
        os.kill(training_of(job)[1], signal.SIGKILL)
        code, out, err = finish(process)
    finally:
        cluster.shutdown()
    assert code == 0, err
    assert (job.record.state, job.record.attempts) == ("done", 3)
    assert "its worker on " in job.record.errors[0]
    assert f"{job.name}  on " in err
    assert ", attempt 3" in err
    assert "(raylet)" not in out + err
    for earlier, saved in ((before, SAVE_EVERY), (later, 2 * SAVE_EVERY)):  # what was saved was not done again
        assert {step: at for step, at in points(job).items() if step <= saved} == {
            step: at for step, at in earlier.items() if step <= saved
        }
    assert "primal-plus" in out
    assert_same_result(job, expected)


def test_a_job_that_fails_does_not_stop_others_and_only_it_is_tried_again(home: Path) -> None:
    arguments = flags("failing", "softmax", "linear")
    good, bad = jobs_of(*arguments)
    bad.folder.mkdir(parents=True)
    (bad.folder / "config.json").write_text("{}")  # nothing can go on from that
    code, out, err = finish(start(*arguments, "--retries", "1"))
    assert code == sweep.EXIT_FAILED_JOBS
    assert (good.record.state, good.record.attempts) == ("done", 1)
    assert (bad.record.state, bad.record.attempts, len(bad.record.errors)) == ("failed", 2, 2)
    assert "cannot be read by this version" in err
    assert f"error: {bad.name} has failed. The last time:" in err
    assert "softmax" in out  # the report on what was done
    assert "linear" not in out.split("report:")[0].split("watch them")[1]

    (bad.folder / "config.json").unlink()
    before = (good.folder / "metrics.jsonl").read_bytes()
    code, out, err = finish(start(*arguments))
    assert code == 0, err
    assert "2 jobs in failing, 1 of them done before" in out
    assert (good.record.attempts, bad.record.attempts, bad.record.state) == (1, 3, "done")
    assert (good.folder / "metrics.jsonl").read_bytes() == before
    assert "linear" in out
    code, out, err = finish(start(*arguments))
    assert (code, "2 jobs in failing, 2 of them done before" in out) == (0, True)
    assert (good.record.attempts, bad.record.attempts) == (1, 3)


def test_ctrl_c_stops_at_a_checkpoint_and_the_same_command_goes_on(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = flags("stopped", "softmax", steps=MANY)
    (job,) = jobs_of(*arguments)
    process = start(*arguments)
    wait_for(lambda: job.progress()[0] >= 60, process)
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert code == 130
    assert "Traceback" not in err
    assert re.search(r"stopped; what was done is kept. To go on: python .*sweep\.py grid", err)
    assert job.record.state == "stopped"
    (saved,) = sorted((job.folder / "checkpoints").glob("*.pt"))[-1:]
    step = int(saved.stem.removeprefix("step-"))
    assert step % SAVE_EVERY  # not one of those that are saved anyway
    before = points(job)
    code, _, err = run_main(monkeypatch, capsys, *arguments, "--cpus-per-job", "2")
    assert code == 1
    assert "was begun with 1 threads on cpu, and is asked for with 2" in err
    process = start(*arguments)
    wait_for(lambda: job.record.attempts == 2 and job.progress()[0] > step + 60, process)
    process.send_signal(signal.SIGTERM)  # as batch systems do
    code, _, err = finish(process)
    assert (code, job.record.state) == (130, "stopped"), err
    assert "To go on: python" in err
    code, _, err = finish(start(*arguments))
    assert code == 0, err
    assert job.record.attempts == 3
    assert before == {at: points(job)[at] for at in before}
    assert_same_result(job, undisturbed(job, "alone-too"))


def run_main(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["sweep.py", *arguments])
    capsys.readouterr()
    code = sweep.main()
    return code, *capsys.readouterr()


def test_a_dry_run_shows_jobs_and_what_they_take(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = flags("dry", "softmax", "primal-plus")
    code, out, err = run_main(monkeypatch, capsys, *arguments, "--dry-run", "--cpus-per-job", "0.5")
    assert code == 0, err
    for job in jobs_of(*arguments):
        assert f"| {job.name}" in out
        assert not job.folder.exists()
    assert "each asks for 0.5 cores, 0 GPUs and 0.2 GiB, and runs on 1 threads" in out
    (minutes,) = re.findall(r"estimate: ([0-9.]+) minutes on this machine, 2 jobs at a time", out)
    assert 0 < float(minutes) < 10


def test_a_plan_for_data_that_is_elsewhere_tries_built_in_data_and_downloads_nothing(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried: list[Job] = []

    def try_job(job: Job, _: object) -> Trial:
        tried.append(job)
        return Trial(100.0, 1000.0, 0.0, peak_gib=0.5, num_targets=2, episode_limit=1000)

    monkeypatch.setattr(sweep_plan, "try_job", try_job)
    code, out, err = run_main(monkeypatch, capsys, "table4", "--dry-run", "--seeds", "0", "--out", "dry")
    assert code == 0, err
    assert "hopper-medium-v2__primal-plus__s0" in out
    assert "90 jobs" in out
    assert "hopper-medium-v2 is not here yet: the sweep would download it first" in err
    assert [job.config.model.attention for job in tried] == list(SWEEPS["table4"].attention)
    assert {job.config.dataset for job in tried} == {"primal/hopper/medium-expert-v0"}
    # 100,000 steps at 100 a second, then 10 x 10 + 100 episodes for each of 2 targets at 1,000 steps a second
    assert out.count("|                  23.3 |") == 90
    (hours,) = re.findall(r"estimate: ([0-9.]+) hours on this machine, (?:\d+) jobs at a time", out)
    cores = this_machine().room_for(sweep.Config().resources)
    assert float(hours) == pytest.approx(math.ceil(90 / cores) * 1400 / 3600, abs=0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seed", "3"], "--seed is not for a sweep, which gives it to each run: give --seeds"),
        (["demo"], "the sweep's name comes first: python sweep.py demo"),
        (["--address", "127.0.0.1:1"], "nobody answers at --address 127.0.0.1:1"),
        (["--datasets", "nowhere.hdf5"], "nowhere.hdf5"),
        (["--cpus-per-job", "4096", "--datasets", "hopper.hdf5"], "a job asks for 4096 cores"),
    ],
)
def test_mistakes_are_told(
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    code, _, err = run_main(monkeypatch, capsys, "grid", "--out", "wrong", *arguments)
    assert code == 1
    assert re.search(message, err)
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("cpus_per_job", 0.0),
        ("memory_per_job", -1.0),
        ("retries", -1),
        ("gpus_per_job", 2.0),
        ("episodes", 0),
        ("seeds", ()),
    ],
)
def test_what_cannot_be_asked_for_is_told(flag: str, value: Any) -> None:
    with pytest.raises(ValueError, match=flag):
        sweep.Config(**{flag: value})


def test_two_sweeps_do_not_share_a_folder(home: Path) -> None:
    os.makedirs("shared", exist_ok=True)
    with sweep.locked(Path("shared")):
        other = sweep.locked(Path("shared"))
        with pytest.raises(ValueError, match="another sweep is running in shared"):
            other.__enter__()
