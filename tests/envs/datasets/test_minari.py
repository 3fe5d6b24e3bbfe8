"""Minari data sets: ours open in Minari, Minari's open here, and what breaks a rule opens nowhere."""

import json
import os
import pickle
import warnings
from pathlib import Path

import h5py
import minari
import numpy as np
import pytest

from envs.datasets.minari import (
    EPISODES_PER_OPEN,
    STEPS_PER_WRITE,
    RecordedEpisode,
    datasets_path,
    minari_folder,
    open_minari,
    staged,
    write_minari,
)
from envs.errors import DataError
from envs.tasks import ActionBox, task_of
from primal_dt.data.trajectories import Trajectory
from tests.envs.files import recorded_episodes, write_small_minari

BOX = ActionBox(-1.0, 1.0)


def read(folder: Path) -> list[Trajectory]:
    return list(open_minari(folder).episodes(BOX))


def test_what_is_written_is_read_without_the_last_observation() -> None:
    folder = write_small_minari("test/hopper/small-v0")
    data = open_minari(folder)
    assert (data.env_id, data.state_width, data.action_width, data.num_episodes) == ("Hopper-v5", 11, 3, 3)
    for mine, source in zip(read(folder), recorded_episodes(), strict=True):
        np.testing.assert_array_equal(mine.observations, source.observations[:-1].astype(np.float32))
        np.testing.assert_array_equal(mine.actions, source.actions)
        np.testing.assert_array_equal(mine.rewards, source.rewards.astype(np.float32))
        assert mine.is_complete


def test_minari_opens_it_with_environment_scores_and_metadata() -> None:
    write_small_minari("test/hopper/small-v0")
    dataset = minari.load_dataset("test/hopper/small-v0")
    for theirs, source in zip(dataset.iterate_episodes(), recorded_episodes(), strict=True):
        np.testing.assert_array_equal(theirs.observations, source.observations)
        np.testing.assert_array_equal(theirs.actions, source.actions)
        np.testing.assert_array_equal(theirs.rewards, source.rewards)
        assert theirs.terminations.tolist() == [False] * (len(source.rewards) - 1) + [source.terminated]
        assert theirs.truncations.tolist() == [False] * (len(source.rewards) - 1) + [source.truncated]
    env = dataset.recover_environment()
    assert env.spec is not None
    assert env.spec.id == "Hopper-v5"
    assert minari.get_normalized_score(dataset, np.array([-20.272305, 3234.3])) == pytest.approx([0, 1])
    assert dataset.storage.metadata["seed"] == 7
    assert "test/hopper/small-v0" in minari.list_local_datasets()
    assert [next(iter(dataset.storage.get_episode_metadata([i])))["seed"] for i in range(3)] == [0, 1, 2]


def test_a_data_set_by_minaris_own_collector_layout_is_read() -> None:
    """With infos and without an environment."""
    from gymnasium.spaces import Box
    from minari.data_collector import EpisodeBuffer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is left out
        minari.create_dataset_from_buffers(
            "other/plain-v1",
            [
                EpisodeBuffer(
                    observations=np.ones((3, 11)),
                    actions=np.zeros((2, 3)),
                    rewards=[1.0, 2.0],
                    terminations=[False, False],
                    truncations=[False, False],
                    infos={"x_position": np.zeros(3)},
                )
            ],
            observation_space=Box(-np.inf, np.inf, (11,)),
            action_space=Box(-1, 1, (3,)),
        )
    data = open_minari(minari_folder("other/plain-v1"))
    assert data.env_id is None
    (episode,) = data.episodes(BOX)
    assert episode.rewards.tolist() == [1, 2]
    assert not episode.is_complete


def test_many_steps_are_written_in_blocks() -> None:
    length = STEPS_PER_WRITE // 2 + 1
    episodes = (
        RecordedEpisode(np.full((length + 1, 11), i), np.zeros((length, 3)), np.ones(length), True, False)
        for i in range(5)
    )
    folder = write_minari(
        "test/hopper/many-v0", episodes, task=task_of("Hopper-v5"), algorithm="none", description="", facts={}
    )
    assert [int(episode.observations[0, 0]) for episode in read(folder)] == list(range(5))
    assert minari.load_dataset("test/hopper/many-v0").total_steps == 5 * length


def test_an_interrupted_recording_leaves_nothing_and_the_old_one_stays() -> None:
    def broken() -> None:
        with staged("test/hopper/small-v0", replace=True) as staging, datasets_path(staging):
            write = minari_folder("test/hopper/small-v0/data")
            write.mkdir(parents=True)
            (write / "metadata.json").write_text("{}")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        broken()
    assert [path.name for path in minari_folder().iterdir()] == [".locks"]
    write_small_minari("test/hopper/small-v0")
    before = (minari_folder("test/hopper/small-v0") / "data" / "main_data.hdf5").read_bytes()
    with pytest.raises(KeyboardInterrupt):
        broken()
    assert (minari_folder("test/hopper/small-v0") / "data" / "main_data.hdf5").read_bytes() == before
    assert os.environ["MINARI_DATASETS_PATH"] == str(minari_folder())


def test_a_name_that_is_taken_or_cannot_be_one_is_refused() -> None:
    write_small_minari("test/hopper/small-v0")
    with pytest.raises(DataError, match=r"there is a data set 'test/hopper/small-v0' already, in .*small-v0"):
        write_small_minari("test/hopper/small-v0")
    for name in ("no version", "mine/hopper/walk", "x/a-v0", "../up-v0", "a//b-v0"):
        with pytest.raises(DataError, match="cannot be a data set's name"):
            write_small_minari(name)
    with pytest.raises(DataError, match=r"would lie inside the data set 'test/hopper/small-v0'"):
        write_small_minari("test/hopper/small-v0/inner-v0")
    write_small_minari("team-v1/one-v0")
    with pytest.raises(DataError, match="is there and is not a data set"):
        write_small_minari("team-v1")
    assert minari_folder("team-v1/one-v0/data").exists()
    with pytest.raises(DataError, match="no episode to write"):
        write_small_minari("test/hopper/none-v0", lengths=())
    assert not minari_folder("test/hopper/none-v0").exists()


def test_the_old_one_comes_back_if_the_new_one_cannot_take_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_small_minari("test/hopper/small-v0")
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if target == folder and self.parent.name == "hopper":
            raise PermissionError("not today")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(PermissionError):
        write_minari(
            "test/hopper/small-v0",
            recorded_episodes((2,)),
            task=task_of("Hopper-v5"),
            algorithm="none",
            description="",
            facts={},
            replace=True,
        )
    assert len(read(folder)) == 3


def test_what_a_killed_process_left_is_cleared_away() -> None:
    stale = minari_folder() / ".partial-test__hopper__small-v0"
    (stale / "junk").mkdir(parents=True)
    write_small_minari("test/hopper/small-v0")
    assert not stale.exists()


def test_many_episodes_are_all_read() -> None:
    lengths = tuple(range(1, 2 * EPISODES_PER_OPEN + 2))
    folder = write_small_minari("test/hopper/many-v0", lengths=lengths)
    assert [len(episode.rewards) for episode in read(folder)] == list(lengths)


def test_namespaces_are_minaris() -> None:
    from minari.namespace import list_local_namespaces

    write_small_minari("test/hopper/small-v0")
    assert "test/hopper" in list_local_namespaces()


def edit(folder: Path, key: str, rows: np.ndarray | None, episode: int = 1) -> None:
    with h5py.File(folder / "data" / "main_data.hdf5", "a") as file:
        group = file[f"episode_{episode}"]
        del group[key]
        if rows is not None:
            group[key] = rows


@pytest.mark.parametrize(
    ("key", "rows", "message"),
    [
        ("observations", np.zeros((1, 11)), r"episode 1: 1 steps must have 2 observations, .* not 1"),
        ("observations", np.zeros((2, 10)), "episode 1: observations and actions have the widths 10 and 3, those of"),
        ("rewards", np.zeros(2), "episode 1: there must be one row per step, but there are actions 1, rewards 2"),
        ("rewards", np.array([np.nan]), "episode 1, step 0: rewards must be finite, not nan"),
        ("observations", np.full((2, 11), 1e300), "episode 1, step 0: observations must be finite, not inf"),
        ("actions", np.full((1, 3), -1.5), r"episode 1, step 0: actions must be within \[-1, 1\], not -1.5 \(3 such"),
        ("actions", None, "episode 1 lacks actions: it has observations, rewards"),
        ("actions", np.array([[b"x"]]), "episode 1: actions must be an array of real numbers with 2 dimension"),
        ("actions", np.zeros((1, 3), complex), "episode 1: actions must be an array of real numbers"),
        ("terminations", np.array(True), "episode 1: terminations must be an array of real numbers with 1 dimension"),
        ("terminations", np.array([0.5]), "episode 1: terminations must be 0 or 1 everywhere"),
    ],
)
def test_an_episode_that_breaks_a_rule_is_named(key: str, rows: np.ndarray | None, message: str) -> None:
    folder = write_small_minari("test/hopper/small-v0")
    edit(folder, key, rows)
    with pytest.raises(DataError, match=rf"main_data\.hdf5, {message}"):
        read(folder)


def test_a_missing_episode_is_found() -> None:
    folder = write_small_minari("test/hopper/small-v0")
    path = folder / "data" / "main_data.hdf5"
    with h5py.File(path, "a") as file:
        file.move("episode_2", "episode_7")
    with pytest.raises(DataError, match="episode 2 is missing"):
        read(folder)
    with h5py.File(path, "a") as file:
        del file["episode_7"]
    with pytest.raises(DataError, match=r"has 2 episodes, but its metadata\.json says 3"):
        open_minari(folder)


def test_an_episode_that_goes_on_after_its_end_or_has_no_step_is_refused() -> None:
    folder = write_small_minari("test/hopper/small-v0")
    edit(folder, "terminations", np.array([0, 1, 0, 0]), episode=0)
    with pytest.raises(DataError, match="episode 0: it goes on after its end at step 1"):
        read(folder)
    folder = write_small_minari("test/hopper/empty-v0")
    for key, width in (("actions", (3,)), ("rewards", ()), ("terminations", ()), ("truncations", ())):
        edit(folder, key, np.zeros((0, *width)))
    edit(folder, "observations", np.zeros((1, 11)))
    with pytest.raises(DataError, match="episode 1: an episode must have at least one step"):
        read(folder)


def test_what_lies_in_another_file_is_not_read(tmp_path: Path) -> None:
    folder = write_small_minari("test/hopper/small-v0")
    (tmp_path / "raw.bin").write_bytes(np.ones(1).tobytes())
    path = folder / "data" / "main_data.hdf5"
    with h5py.File(path, "a") as file:
        del file["episode_1/rewards"]
        file["episode_1"].create_dataset("rewards", (1,), "f8", external=[(str(tmp_path / "raw.bin"), 0, 8)])
    with pytest.raises(DataError, match="rewards must be an array in this very file"):
        read(folder)
    for link in (h5py.ExternalLink(str(path), "/episode_0/rewards"), h5py.SoftLink("/nowhere")):
        with h5py.File(path, "a") as file:
            del file["episode_1/rewards"]
            file["episode_1/rewards"] = link
        with pytest.raises(DataError, match="rewards must be an array in this very file"):
            read(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"total_episodes": 0}, "has no episode"),
        ({"data_format": "arrow"}, "is in Minari's format 'arrow'; only 'hdf5' can be read"),
        ({"env_spec": "{"}, r"metadata\.json cannot be read"),
        ({"total_episodes": "many"}, r"metadata\.json cannot be read"),
    ],
)
def test_metadata_that_cannot_be_used_are_refused(change: dict[str, object], message: str) -> None:
    folder = write_small_minari("test/hopper/small-v0")
    path = folder / "data" / "metadata.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(DataError, match=message):
        open_minari(folder)


def test_what_is_no_data_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"is not a Minari data set: there is no metadata\.json"):
        open_minari(tmp_path)
    folder = write_small_minari("test/hopper/small-v0")
    path = folder / "data" / "main_data.hdf5"
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(DataError, match=r"main_data\.hdf5 is not an HDF5 file, or not all of one"):
        open_minari(folder)


def test_reading_executes_nothing_that_the_data_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A description of an environment whose module, if imported, would leave a trace; and a pickle as an attribute."""
    trace = tmp_path / "trace"
    (tmp_path / "evil_module.py").write_text(f"open({str(trace)!r}, 'w')\nmake = None\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = write_small_minari("test/hopper/small-v0")
    path = folder / "data" / "metadata.json"
    metadata = json.loads(path.read_text())
    spec = json.loads(metadata["env_spec"]) | {"entry_point": "evil_module:make"}
    del metadata["observation_space"], metadata["action_space"]
    path.write_text(json.dumps(metadata | {"env_spec": json.dumps(spec)}))
    with h5py.File(folder / "data" / "main_data.hdf5", "a") as file:
        file.attrs["payload"] = np.void(pickle.dumps(Path.home))
    assert len(read(folder)) == 3
    assert not trace.exists()
