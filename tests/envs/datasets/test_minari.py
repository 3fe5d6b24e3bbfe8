"""Minari data sets: Minari reads ours, we read Minari's, and data sets that break a rule are refused."""

import json
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, get_args

import h5py
import minari
import numpy as np
import pytest
from gymnasium.spaces import Box
from minari.data_collector import EpisodeBuffer
from minari.namespace import list_local_namespaces

from envs.datasets.checks import ActionCheck
from envs.datasets.minari import open_minari
from envs.datasets.minari_folder import datasets_path, minari_folder, restore_all, staged
from envs.datasets.sources import find_here
from envs.errors import DataError
from tests.envs.files import HOPPER_ACTIONS, NAME, read_minari, recorded_episodes, write_small_minari
from tests.system.disk import Disk, Names, watched_disk

ROOT = Path(__file__).parents[3]
INVALID_NAMES = ("no version", "mine/hopper/walk", "x/a-v0", "../up-v0", "a//b-v0")
MAIN, METADATA = "data/main_data.hdf5", "data/metadata.json"
EMPTY = {key: np.zeros(0) for key in ("rewards", "terminations", "truncations")}
EMPTY |= {"observations": np.zeros((1, 11)), "actions": np.zeros((0, 3))}


@pytest.fixture
def folder() -> Path:
    """The folder of a data set with three episodes of 4, 1 and 3 steps."""
    return write_small_minari()


@pytest.fixture
def staging() -> Path:
    """The path of the folder in which the data set is written before it is moved to its place."""
    return minari_folder() / ".partial-test+hopper+small-v0"


def change(folder: Path, **arrays: Any) -> None:
    """Replace arrays of episode 1, or delete those that are None."""
    with h5py.File(folder / MAIN, "a") as file:
        group = file["episode_1"]
        for key, rows in arrays.items():
            del group[key]
            if rows is not None:
                group[key] = rows


def test_reading_drops_the_last_observation(folder: Path) -> None:
    data = open_minari(folder)
    assert (data.widths, data.num_episodes) == ((11, 3), 3)
    assert str(data.recorded_in) == "Hopper-v5 (at most 1000 steps)"
    for mine, source in zip(read_minari(folder), recorded_episodes(), strict=True):
        np.testing.assert_array_equal(mine.observations, source.observations[:-1].astype(np.float32))
        np.testing.assert_array_equal(mine.actions, source.actions)
        np.testing.assert_array_equal(mine.rewards, source.rewards.astype(np.float32))
        assert mine.is_complete


@pytest.mark.usefixtures("folder")
def test_minari_reads_our_episodes() -> None:
    dataset = minari.load_dataset(NAME)
    for theirs, source in zip(dataset.iterate_episodes(), recorded_episodes(), strict=True):
        for key in ("observations", "actions", "rewards"):
            np.testing.assert_array_equal(getattr(theirs, key), getattr(source, key))
        assert theirs.terminations.tolist() == [False] * (len(source.rewards) - 1) + [source.terminated]
        assert theirs.truncations.tolist() == [False] * (len(source.rewards) - 1) + [source.truncated]
    assert [next(iter(dataset.storage.get_episode_metadata([i])))["seed"] for i in range(3)] == [0, 1, 2]


@pytest.mark.usefixtures("folder")
def test_minari_reads_our_metadata() -> None:
    dataset = minari.load_dataset(NAME)
    env = dataset.recover_environment()
    assert env.spec is not None
    assert env.spec.id == "Hopper-v5"
    assert minari.get_normalized_score(dataset, np.array([-20.272305, 3234.3])) == pytest.approx([0, 1])
    assert dataset.storage.metadata["seed"] == 7
    assert NAME in minari.list_local_datasets()
    assert "test/hopper" in list_local_namespaces()


def test_a_data_set_created_by_minari_is_read() -> None:
    """With infos and without an environment."""
    episode = EpisodeBuffer(
        observations=np.ones((3, 11)),
        actions=np.zeros((2, 3)),
        rewards=[1.0, 2.0],
        terminations=[False, False],
        truncations=[False, False],
        infos={"x_position": np.zeros(3)},
    )
    spaces = {"observation_space": Box(-np.inf, np.inf, (11,)), "action_space": Box(-1, 1, (3,))}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about missing metadata
        minari.create_dataset_from_buffers("other/plain-v1", [episode], **spaces)
    data = open_minari(minari_folder("other/plain-v1"))
    assert data.specification is None
    (read,) = data.episodes(ActionCheck(HOPPER_ACTIONS))
    assert read.rewards.tolist() == [1, 2]
    assert not read.is_complete


@pytest.mark.parametrize(("limit", "value"), [("STEPS_PER_WRITE", 5), ("EPISODES_PER_OPEN", 2)])
def test_blocks_of_episodes_are_complete(limit: str, value: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Episodes are written in blocks of steps and read in blocks of episodes."""
    monkeypatch.setattr(f"envs.datasets.minari.{limit}", value)
    lengths = (3, 1, 4, 1, 5)
    for mine, source in zip(read_minari(write_small_minari(lengths=lengths)), recorded_episodes(lengths), strict=True):
        np.testing.assert_array_equal(mine.actions, source.actions)
    assert minari.load_dataset(NAME).total_steps == sum(lengths)


def test_an_interrupted_recording_changes_nothing() -> None:
    def interrupted() -> None:
        with staged(NAME, replace=True) as staging, datasets_path(staging):
            path = minari_folder(NAME) / METADATA
            path.parent.mkdir(parents=True)
            path.write_text("{}")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [path.name for path in minari_folder().iterdir()] == [".locks"]
    path = write_small_minari() / MAIN
    before = path.read_bytes()
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_bytes() == before
    assert os.environ["MINARI_DATASETS_PATH"] == str(minari_folder())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (NAME, f"the data set '{NAME}' already exists in .*small-v0"),
        (f"{NAME}/inner-v0", f"would be inside the data set '{NAME}'"),
        ("team-v1", "exists but is not a data set"),
        *((name, "is not a valid data set name") for name in INVALID_NAMES),
    ],
)
@pytest.mark.usefixtures("folder")
def test_a_name_that_cannot_be_used_is_refused(name: str, message: str) -> None:
    other = write_small_minari("team-v1/one-v0")
    with pytest.raises(DataError, match=message):
        write_small_minari(name)
    assert (other / "data").exists()


def test_a_recording_without_episodes_is_refused() -> None:
    with pytest.raises(DataError, match="no episodes to write"):
        write_small_minari(lengths=())
    assert not minari_folder(NAME).exists()


def test_a_pipe_is_not_metadata(folder: Path) -> None:
    """Reading it would wait forever."""
    (folder / METADATA).unlink()
    os.mkfifo(folder / METADATA)
    with pytest.raises(DataError, match=r"is not a Minari data set: there is no metadata\.json"):
        open_minari(folder)


def test_a_failed_replacement_restores_the_old_data(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = Path.replace

    def fail(self: Path, target: Path) -> Path:
        if target == folder and self.parent.name == "hopper":
            raise PermissionError("not today")
        return rename(self, target)

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(PermissionError):
        write_small_minari(lengths=(2,), replace=True)
    assert len(read_minari(folder)) == 3


KILLED = """
import os
from pathlib import Path
from envs.datasets import minari_folder
from tests.envs.files import write_small_minari
rename = Path.replace
def die_after_the_first(self, target):
    if self == minari_folder.minari_folder("test/hopper/small-v0"):
        rename(self, target)
        os._exit(9)
    return rename(self, target)
Path.replace = die_after_the_first
write_small_minari(lengths=(2,), replace=True)
"""


def test_a_kill_between_the_renames_keeps_the_old_data(
    folder: Path, staging: Path, caplog: pytest.LogCaptureFixture
) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", KILLED], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 9, done.stderr
    assert not folder.exists()
    assert (staging / ".replaced").exists()
    with pytest.raises(DataError, match="no episodes to write"):
        write_small_minari(lengths=(), replace=True)
    assert len(read_minari(folder)) == 3
    assert caplog.messages == [f"{NAME} is restored: its replacement was interrupted"]
    assert not staging.exists()


@pytest.mark.parametrize("names", get_args(Names))
def test_a_power_failure_leaves_the_old_data_or_the_new(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, rest, seen = minari_folder(), tmp_path_factory.mktemp("rest"), []

    def fail(disk: Disk) -> None:
        with monkeypatch.context() as patch:
            patch.setenv("MINARI_DATASETS_PATH", str(disk.fail(rest / "disk", names)))
            assert find_here(NAME) is not None
            seen.append(len(read_minari(minari_folder(NAME))))

    with watched_disk(root, on_event=fail) as disk:
        write_small_minari(lengths=(2,), replace=True)
        fail(disk)
    assert set(seen) == {3, 1}
    assert seen == sorted(seen, reverse=True)


def test_data_whose_replacement_was_killed_can_be_used(folder: Path, staging: Path) -> None:
    staging.mkdir()
    folder.rename(staging / ".replaced")
    source = find_here(NAME)
    assert source is not None
    assert len(read_minari(folder)) == 3
    assert not staging.exists()


def test_data_is_restored_under_its_own_name(folder: Path, staging: Path) -> None:
    """Another name with underscores in the place of slashes is another data set."""
    staging.mkdir()
    folder.rename(staging / ".replaced")
    with pytest.raises(DataError, match="no episodes to write"):
        write_small_minari("test__hopper__small-v0", lengths=(), replace=True)
    assert not folder.exists()
    restore_all()  # as when data sets are listed
    assert len(read_minari(folder)) == 3
    staging.mkdir()
    folder.rename(staging / ".replaced")
    assert find_here(str(folder)) is not None


def test_an_incomplete_data_set_is_never_restored(staging: Path) -> None:
    """Whatever its name is."""
    (staging.with_name(".partial-replaced+small-v0") / "replaced" / "small-v0" / "data").mkdir(parents=True)
    with pytest.raises(DataError, match="no episodes to write"):
        write_small_minari("replaced/small-v0", lengths=())
    assert [path.name for path in minari_folder().iterdir()] == [".locks"]


def test_data_that_cannot_be_restored_stays_in_staging(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = Path.replace

    def fail(self: Path, target: Path) -> Path:
        if target == folder:
            raise PermissionError("not today")
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", fail)
        with pytest.raises(PermissionError):
            write_small_minari(lengths=(2,), replace=True)
    assert not folder.exists()
    with pytest.raises(DataError, match="no episodes to write"):
        write_small_minari(lengths=(), replace=True)
    assert len(read_minari(folder)) == 3


def test_staging_is_not_written_through_a_link(staging: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / ".replaced").mkdir(parents=True)
    staging.parent.mkdir(parents=True, exist_ok=True)
    staging.symlink_to(outside)
    with pytest.raises(OSError, match="it is a link"):
        write_small_minari()
    staging.unlink()
    assert [path.name for path in outside.rglob("*")] == [".replaced"]


@pytest.mark.parametrize("lengths", [(1,) * 200, (1000,), (1000, 1, 300)])
def test_space_for_a_block_is_an_upper_bound(lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr("envs.datasets.minari.check_space", lambda folder, size, start: asked.append(size))
    used = (write_small_minari(lengths=lengths) / MAIN).stat().st_size
    assert used <= sum(asked) <= 3 * used


def test_the_remains_of_a_killed_process_are_deleted(staging: Path) -> None:
    (staging / "junk").mkdir(parents=True)
    write_small_minari()
    assert not staging.exists()


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"observations": np.zeros((1, 11))}, r"episode 1: 3 steps must have 4 observations, .* not 1"),
        ({"observations": np.zeros((4, 10))}, "episode 1: .* the widths of episode 0, 11 and 3, not 10 and 3"),
        ({"rewards": np.zeros(2)}, "episode 1: there must be one row per step, but there are actions 3, rewards 2"),
        ({"rewards": np.array([0, np.nan, 0])}, "episode 1, step 1: rewards must be finite, not nan"),
        ({"observations": np.full((4, 11), 1e300)}, "episode 1, step 0: observations must be finite, not inf"),
        ({"actions": None}, "episode 1 lacks actions: it has observations, rewards"),
        ({"actions": np.array([[b"x"]])}, "episode 1: actions must be an array of real numbers with 2 dimension"),
        ({"actions": np.zeros((3, 3), complex)}, "episode 1: actions must be an array of real numbers"),
        ({"terminations": np.array(True)}, "episode 1: terminations must be an array of real numbers with 1 dimension"),
        ({"terminations": np.array([0.5, 0, 0])}, "episode 1: terminations must be 0 or 1 everywhere"),
        ({"terminations": np.array([0, 1, 0])}, "episode 1: it continues after its end at step 1"),
        (EMPTY, "episode 1: an episode must have at least one step"),
    ],
)
def test_an_episode_that_breaks_a_rule_is_named(arrays: dict[str, Any], message: str) -> None:
    folder = write_small_minari(lengths=(4, 3))
    change(folder, **arrays)
    with pytest.raises(DataError, match=rf"main_data\.hdf5, {message}"):
        read_minari(folder)


def test_a_missing_episode_is_reported(folder: Path) -> None:
    with h5py.File(folder / MAIN, "a") as file:
        file.move("episode_2", "episode_7")
    with pytest.raises(DataError, match="episode 2 is missing"):
        read_minari(folder)
    with h5py.File(folder / MAIN, "a") as file:
        del file["episode_7"]
    with pytest.raises(DataError, match=r"has 2 episodes, but its metadata\.json says 3"):
        open_minari(folder)


def test_arrays_in_other_files_are_refused(folder: Path, tmp_path: Path) -> None:
    raw = tmp_path / "raw.bin"
    raw.write_bytes(np.ones(1).tobytes())
    change(folder, rewards=None)
    with h5py.File(folder / MAIN, "a") as file:
        file["episode_1"].create_dataset("rewards", (1,), "f8", external=[(str(raw), 0, 8)])
    with pytest.raises(DataError, match="rewards must be an array stored in this file"):
        read_minari(folder)
    for link in (h5py.ExternalLink(str(folder / MAIN), "/episode_0/rewards"), h5py.SoftLink("/nowhere")):
        change(folder, rewards=link)
        with pytest.raises(DataError, match="rewards must be an array stored in this file"):
            read_minari(folder)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"total_episodes": 0}, "has no episode"),
        ({"data_format": "arrow"}, "is in Minari's format 'arrow'; only 'hdf5' can be read"),
        ({"env_spec": "{"}, r"metadata\.json: the specification of the environment cannot be read"),
        ({"action_space": "{}"}, r"data, action_space: the space cannot be read: KeyError"),
        ({"total_episodes": "many"}, r"metadata\.json cannot be read"),
    ],
)
def test_unusable_metadata_is_refused(folder: Path, entry: dict[str, object], message: str) -> None:
    path = folder / METADATA
    path.write_text(json.dumps(json.loads(path.read_text()) | entry))
    with pytest.raises(DataError, match=message):
        open_minari(folder)


def test_an_incomplete_data_set_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"is not a Minari data set: there is no metadata\.json"):
        open_minari(tmp_path)
    (folder / MAIN).write_bytes((folder / MAIN).read_bytes()[:2000])
    with pytest.raises(DataError, match=r"main_data\.hdf5 is not an HDF5 file, or is incomplete"):
        open_minari(folder)


def test_reading_executes_no_code_from_the_data(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the module that an environment's description names nor a pickle in an attribute."""
    trace, path = tmp_path / "trace", folder / METADATA
    (tmp_path / "evil_module.py").write_text(f"open({str(trace)!r}, 'w')\nmake = None\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    metadata = json.loads(path.read_text())
    spec = json.loads(metadata["env_spec"]) | {"entry_point": "evil_module:make"}
    del metadata["observation_space"], metadata["action_space"]
    path.write_text(json.dumps(metadata | {"env_spec": json.dumps(spec)}))
    with h5py.File(folder / MAIN, "a") as file:
        file.attrs["payload"] = np.void(pickle.dumps(Path.home))
    assert len(read_minari(folder)) == 3
    assert not trace.exists()
