"""``python -m envs``, as a person meets it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import minari
import pytest

from envs.__main__ import main
from tests.envs.files import d4rl_arrays, write_d4rl, write_small_minari

ROOT = Path(__file__).parents[2]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["envs", *arguments])
    monkeypatch.setattr(sys, "path", list(sys.path))
    main()


def fails(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        run(monkeypatch, *arguments)
    return str(caught.value)


@pytest.fixture
def file(tmp_path: Path) -> str:
    arrays = d4rl_arrays((4, 1, 3))
    arrays["rewards"][:] = [1, 1, 1, 1, 10, 100, 100, 100]
    return str(write_d4rl(tmp_path / "data.hdf5", arrays, env_id="Hopper-v5"))


def test_info_tells_what_is_in_a_data_set(
    file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "info", file, "--json")
    facts = json.loads(capsys.readouterr().out)
    assert (facts["episodes"], facts["steps"], facts["environment"]) == (3, 8, "Hopper-v5")
    returns = facts["returns"]
    assert (returns["least"], returns["median"], returns["most"]) == (4, 10, 300)
    assert returns["mean"] == pytest.approx(314 / 3)
    assert facts["scores"]["most"] == pytest.approx(100 * (300 + 20.272305) / (3234.3 + 20.272305))
    assert (facts["lengths"]["least"], facts["lengths"]["most"]) == (1, 4)
    assert len(facts["fingerprint"]) == 64
    assert facts["parts"][0]["path"] == file
    run(monkeypatch, "info", file)
    shown = capsys.readouterr().out
    for word in (facts["fingerprint"], "Hopper-v5", "3, of which 0 cut off", "104.7", "300.0", file):
        assert word in shown


def test_info_saves_a_histogram(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "returns.png"
    run(monkeypatch, "info", file, "--plot", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")
    assert str(path) in capsys.readouterr().out


def test_a_plot_of_an_unknown_kind_is_told_after_the_facts(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("plot", "plot.xyz"):
        assert "--plot must end in one of" in fails(monkeypatch, "info", file, "--plot", str(tmp_path / name))
        assert "fingerprint" in capsys.readouterr().out
    assert "File exists" in fails(monkeypatch, "info", file, "--plot", f"{file}/plot.png")


def test_flags_reach_the_resolver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arrays = d4rl_arrays()
    arrays["terminals"][-1] = False
    silent = str(write_d4rl(tmp_path / "silent.hdf5", arrays))
    run(monkeypatch, "info", silent, "--env-id", "Hopper-v4")
    assert "of which 1 cut off" in capsys.readouterr().out
    loud = str(write_d4rl(tmp_path / "loud.hdf5", arrays, env_id="Hopper-v5"))
    run(monkeypatch, "info", loud, "--env-id", "Hopper-v4", "--mix-versions")
    assert "was recorded in Hopper-v5, and is used for Hopper-v4" in capsys.readouterr().out


def test_a_reader_who_has_seen_enough_is_no_error() -> None:
    command = f"{sys.executable} -m envs list | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "0"
    assert done.stderr == ""


def test_a_folder_that_cannot_be_written_is_told(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIMAL_DT_CACHE", file)  # a file, not a folder
    assert "Not a directory" in fails(monkeypatch, "info", file)


def test_list_tells_what_is_here_and_what_is_known(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "list")
    before = capsys.readouterr().out
    assert "nothing yet" in before
    assert "  here" not in before
    write_small_minari("primal/hopper/medium-v0")
    write_small_minari("mine/hopper-v3")
    run(monkeypatch, "list")
    lines = capsys.readouterr().out.splitlines()
    (mine,) = (line for line in lines if "mine/hopper-v3" in line)
    assert mine.split() == ["|", "mine/hopper-v3", "|", "Hopper-v5", "|", "3", "|", "8", "|"]
    here = [line.split()[0] for line in lines if line.endswith("  here")]
    assert here == ["primal/hopper/medium-v0"]


def test_a_policy_of_ones_own_is_recorded(tmp_path: Path) -> None:
    """In a process of its own, from the folder where the policy is."""
    (tmp_path / "walk.py").write_text("def still(observation, random):\n    return random.uniform(-0.1, 0.1, 3)\n")
    command = ["record", "mine/hopper/still-v0", "--policy", "walk:still", "--env-id", "Hopper-v5", "--steps", "50"]
    done = subprocess.run(
        [sys.executable, "-m", "envs", *command],
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


def test_a_built_in_data_set_is_recorded_and_not_twice_unless_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = ("record", "primal/hopper/random-v0", "--steps", "30")
    run(monkeypatch, *command)

    def seed() -> int:
        storage = minari.load_dataset("primal/hopper/random-v0").storage
        return next(iter(storage.get_episode_metadata([0])))["seed"]

    assert "already" in fails(monkeypatch, *command, "--seed", "9")
    assert seed() == 0
    run(monkeypatch, *command, "--seed", "9", "--overwrite")
    assert seed() == 9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["record", "mine/a-v0"], "mine/a-v0 is not built in: give --policy and --env-id"),
        (["record", "primal/hopper/medium-v0", "--policy", "random"], "is built in and has its own policy"),
        (["record", "mine/a-v0", "--policy", "random", "--env-id", "Ant-v5"], "no task for the environment 'Ant-v5'"),
        (["record", "mine/a-v0", "--policy", "best", "--env-id", "Hopper-v5"], "there is no policy 'best'"),
        (["record", "mine/a-v0", "--policy", "random", "--env-id", "Hopper-v5", "--steps", "0"], "must be at least 1"),
        (["record", "mujoco/hopper/medium-v0", "--policy", "random", "--env-id", "Hopper-v5"], "somebody else's"),
        (["record", "mine/walk", "--policy", "random", "--env-id", "Hopper-v5"], "cannot be a data set's name"),
        (
            ["record", "mine/a-v0", "--policy", "random", "--env-id", "Hopper-v5", "--seed", str(2**64)],
            "from 0 to 2^31",
        ),
        (["info", "nonsense"], "there is no data set 'nonsense'"),
        (["info", "./nothing.hdf5"], "there is no file or folder"),
    ],
)
def test_a_mistake_ends_in_a_message(arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said = fails(monkeypatch, *arguments)
    assert said.startswith("error: ")
    assert message in said


def test_the_cache_is_shown_and_cleared(
    file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "info", file)
    capsys.readouterr()
    run(monkeypatch, "cache")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1:4:2] for line in lines if "stores" in line] == [["stores", "7"]]
    run(monkeypatch, "cache", "--clear")
    assert "cleared" in capsys.readouterr().out
    run(monkeypatch, "cache")
    assert [line.split()[1:4:2] for line in capsys.readouterr().out.splitlines() if "stores" in line] == [
        ["stores", "0"]
    ]
