"""The command ``python -m envs``."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import minari
import pytest

from envs.__main__ import main
from envs.datasets.load import load_dataset
from envs.datasets.minari_folder import minari_folder
from tests.conftest import file_size_limit
from tests.envs.files import cut_off_arrays, d4rl_arrays, write_d4rl, write_small_minari

ROOT = Path(__file__).parents[2]
Run = Callable[..., str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """A function that runs the command with arguments and returns its output."""

    def call(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["envs", *arguments])
        main()
        return capsys.readouterr().out

    return call


def error_of(run: Run, *arguments: str) -> str:
    """The error message of a command that fails."""
    with pytest.raises(SystemExit) as caught:
        run(*arguments)
    return str(caught.value)


@pytest.fixture
def file(tmp_path: Path) -> str:
    arrays = d4rl_arrays((4, 1, 3))
    arrays["rewards"][:] = [1, 1, 1, 1, 10, 100, 100, 100]
    return str(write_d4rl(tmp_path / "data.hdf5", arrays, env_id="Hopper-v5"))


def test_info_summarizes_a_data_set(file: str, run: Run) -> None:
    summary = json.loads(run("info", file, "--json"))
    assert (summary["episodes"], summary["steps"], summary["environment"]) == (3, 8, "Hopper-v5")
    returns = summary["returns"]
    assert (returns["least"], returns["median"], returns["most"]) == (4, 10, 300)
    assert returns["mean"] == pytest.approx(314 / 3)
    assert summary["scores"]["most"] == pytest.approx(100 * (300 + 20.272305) / (3234.3 + 20.272305))
    assert (summary["lengths"]["least"], summary["lengths"]["most"]) == (1, 4)
    assert len(summary["fingerprint"]) == 64
    assert summary["parts"][0]["path"] == file


def test_info_prints_the_summary(file: str, run: Run) -> None:
    shown = run("info", file)
    fingerprint = load_dataset(file).store.fingerprint
    for word in (fingerprint, "Hopper-v5", "3, of which 0 cut off", "104.7", "300.0", file):
        assert word in shown


def test_info_of_damaged_data_is_refused(file: str, run: Run) -> None:
    rewards = load_dataset(file).store.folder / "rewards.f32"
    rewards.write_bytes(bytes(rewards.stat().st_size))
    assert "is damaged" in error_of(run, "info", file)


def test_info_checks_the_reference_returns(file: str, run: Run) -> None:
    error = error_of(run, "info", file, "--reference", "5", "5")
    assert error.startswith("error: reference must be two finite returns in rising order")


@pytest.mark.slow
def test_info_saves_a_histogram(file: str, tmp_path: Path, run: Run) -> None:
    path = tmp_path / "new" / "returns.png"
    assert str(path) in run("info", file, "--plot", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_plot_error_comes_after_the_summary(file: str, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("plot", "plot.xyz"):
        assert "--plot must end in one of" in error_of(run, "info", file, "--plot", name)
        assert "fingerprint" in capsys.readouterr().out
    assert "File exists" in error_of(run, "info", file, "--plot", f"{file}/plot.png")


def test_info_flags_reach_load_dataset(file: str, tmp_path: Path, run: Run) -> None:
    unnamed = write_d4rl(tmp_path / "unnamed.hdf5", cut_off_arrays())
    assert "of which 1 cut off" in run("info", str(unnamed), "--env-id", "Hopper-v4")
    shown = run("info", file, "--env-id", "Hopper-v4", "--mix-versions")
    assert "was recorded in Hopper-v5 but is used for Hopper-v4" in shown


@pytest.mark.slow
def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m envs list | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "0"
    assert done.stderr == ""


def test_an_unwritable_cache_is_reported(file: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIMAL_DT_CACHE", file)  # a file, not a folder
    assert "Not a directory" in error_of(run, "info", file)


def test_list_shows_local_and_known_data_sets(run: Run) -> None:
    before = run("list")
    assert "none yet" in before
    assert "  local" not in before
    write_small_minari("primal/hopper/medium-v0")
    write_small_minari("mine/hopper-v3")
    lines = run("list").splitlines()
    (mine,) = (line for line in lines if "mine/hopper-v3" in line)
    assert mine.split() == ["|", "mine/hopper-v3", "|", "Hopper-v5", "|", "3", "|", "8", "|"]
    assert sum("| primal/hopper/medium-v0 " in line for line in lines) == 1
    assert all(len(line) <= 80 for line in lines[1:])


@pytest.mark.slow
def test_a_user_defined_policy_is_recorded(tmp_path: Path) -> None:
    """In a separate process, started in the policy's folder."""
    (tmp_path / "walk.py").write_text("def still(observation, random):\n    return random.uniform(-0.1, 0.1, 3)\n")
    command = "record mine/hopper/still-v0 --policy walk:still --env-id Hopper-v5 --steps 50"
    done = subprocess.run(
        [sys.executable, "-m", "envs", *command.split()],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "mine/hopper/still-v0 is in" in done.stdout
    assert "recording mine/hopper/still-v0" in done.stderr
    dataset = minari.load_dataset("mine/hopper/still-v0")
    assert dataset.total_steps >= 50
    assert all(abs(episode.actions).max() <= 0.1 for episode in dataset.iterate_episodes())


def test_recording_again_needs_overwrite(run: Run) -> None:
    def seed() -> int:
        storage = minari.load_dataset("primal/hopper/random-v0").storage
        return next(iter(storage.get_episode_metadata([0])))["seed"]

    command = ("record", "primal/hopper/random-v0", "--steps", "30")
    run(*command)
    assert "already" in error_of(run, *command, "--seed", "9")
    assert seed() == 0
    run(*command, "--seed", "9", "--overwrite")
    assert seed() == 9


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("record mine/a-v0", "mine/a-v0 is not built in: pass --policy and --env-id"),
        ("record primal/hopper/medium-v0 --policy random", "is built in and has its own policy"),
        ("record mine/a-v0 --policy random --env-id Own-v5", "the environment Own-v5 is not registered"),
        ("record mine/a-v0 --policy best --env-id Hopper-v5", "there is no policy 'best'"),
        ("record mine/a-v0 --policy random --env-id Hopper-v5 --steps 0", "must be at least 1"),
        ("record mujoco/hopper/medium-v0 --policy random --env-id Hopper-v5", "reserved namespace"),
        ("record mine/walk --policy random --env-id Hopper-v5", "is not a valid data set name"),
        (f"record mine/a-v0 --policy random --env-id Hopper-v5 --seed {2**64}", "from 0 to 2^31"),
        ("info nonsense", "there is no data set 'nonsense'"),
        ("info ./nothing.hdf5", "there is no file or folder"),
    ],
)
def test_a_user_error_prints_a_message(command: str, message: str, run: Run) -> None:
    error = error_of(run, *command.split())
    assert error.startswith("error: ")
    assert message in error


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="the system cannot reserve space")
def test_a_full_disk_ends_a_recording_with_a_message(run: Run) -> None:
    with file_size_limit(100_000):
        error = error_of(run, "record", "primal/hopper/random-v0", "--steps", "500")
    folder = minari_folder("primal/hopper/random-v0")
    assert error.splitlines() == [
        f"error: {folder} cannot be used: File too large. Raise the limit of file sizes (ulimit -f)",
        "no incomplete data set was saved; give the same command to start again",
    ]
    assert not folder.exists()
    assert not list(minari_folder().glob(".partial-*"))


@pytest.mark.parametrize("shortage", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_missing_memory_ends_a_recording_with_a_message(
    run: Run, shortage: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out(*arguments: object, **options: object) -> None:
        raise shortage

    monkeypatch.setattr("envs.behavior.record.run_episode", run_out)
    error = error_of(run, "record", "primal/hopper/random-v0", "--steps", "500")
    assert error.startswith("error: there is not enough memory")
    assert "no incomplete data set was saved" in error


def test_the_cache_is_shown_and_cleared(file: str, run: Run) -> None:
    def num_files() -> str:
        (line,) = (line for line in run("cache").splitlines() if "stores" in line)
        return line.split()[3]

    run("info", file)
    assert num_files() == "7"
    assert "cleared" in run("cache", "--clear")
    assert num_files() == "0"
