"""From a name to trajectories: every source, every way in which it can fail, and the cache between."""

import multiprocessing
import os
import shutil
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import minari
import numpy as np
import platformdirs
import pytest

from envs.behavior.recipes import Ingredient
from envs.datasets import cache, sources
from envs.datasets.load import load_dataset
from envs.datasets.minari import minari_folder
from envs.datasets.names import DatasetName
from envs.errors import DataError
from primal_dt.data.trajectories import Trajectories
from tests.envs.datasets.test_download import Server, server
from tests.envs.files import d4rl_arrays, recorded_episodes, write_d4rl, write_small_minari

__all__ = ["server"]  # a fixture


def assert_holds(data: Trajectories, arrays: dict[str, np.ndarray]) -> None:
    for key in ("observations", "actions", "rewards"):
        np.testing.assert_array_equal(getattr(data, key), arrays[key])


# Paths


def test_a_file_in_d4rls_layout_says_its_environment(tmp_path: Path) -> None:
    arrays = d4rl_arrays()
    path = write_d4rl(tmp_path / "data.hdf5", arrays, env_id="Hopper-v5")
    dataset = load_dataset(str(path))
    assert_holds(dataset.trajectories, arrays)
    assert dataset.task.env_id == "Hopper-v5"
    assert dataset.task.tier is None
    assert dataset.normalizer.return_scale == 1000
    (part,) = dataset.parts
    assert (part.path, part.env_id, part.cut_off_episodes) == (path, "Hopper-v5", 0)


def test_a_file_that_does_not_say_is_asked_about(tmp_path: Path) -> None:
    path = write_d4rl(tmp_path / "data.hdf5", d4rl_arrays())
    with pytest.raises(DataError, match=r"data\.hdf5 does not say which environment it is from: give it with --env-id"):
        load_dataset(str(path))
    assert load_dataset(str(path), env_id="Hopper-v4").task.env_id == "Hopper-v4"


def test_a_minari_folder_is_a_name(tmp_path: Path) -> None:
    folder = write_small_minari("test/hopper/small-v0")
    expected = np.concatenate([episode.rewards for episode in recorded_episodes()]).astype(np.float32)
    for path in (folder, folder / "data"):
        dataset = load_dataset(str(path))
        np.testing.assert_array_equal(dataset.trajectories.rewards, expected)
        assert dataset.parts[0].about["description"] == "for a test"


def test_what_does_not_fit_its_environment_is_refused(tmp_path: Path) -> None:
    path = str(write_d4rl(tmp_path / "data.hdf5", d4rl_arrays(), env_id="Walker2d-v5"))
    with pytest.raises(DataError, match="of width 11 and actions of width 3, but Walker2d-v5 has 17 and 6"):
        load_dataset(path)
    other = str(write_d4rl(tmp_path / "ant.hdf5", d4rl_arrays(), env_id="Ant-v5"))
    with pytest.raises(DataError, match=r"ant\.hdf5: there is no task for the environment 'Ant-v5': .*Hopper-v5"):
        load_dataset(other)
    with pytest.raises(DataError, match="there is no task for the environment 'hopper'"):
        load_dataset(str(write_d4rl(tmp_path / "silent.hdf5", d4rl_arrays())), env_id="hopper")


def test_a_cut_off_episode_is_kept_and_counted_also_when_it_comes_from_the_cache(tmp_path: Path) -> None:
    arrays = d4rl_arrays()
    arrays["terminals"][-1] = False
    path = str(write_d4rl(tmp_path / "data.hdf5", arrays, env_id="Hopper-v5"))
    for _ in range(2):
        dataset = load_dataset(path)
        assert dataset.parts[0].cut_off_episodes == 1
        assert dataset.trajectories.lengths.tolist() == [4, 1, 3]


@pytest.mark.parametrize(
    "name", ["/nowhere/data", "./data.hdf5", "missing.h5", "~/no such folder", "~nobody-at-all/x.hdf5"]
)
def test_a_path_that_is_not_there_is_told(name: str) -> None:
    with pytest.raises(DataError, match="there is no file or folder"):
        load_dataset(name)


# Versions and joins


def test_another_version_is_refused_unless_asked_for(tmp_path: Path) -> None:
    path = str(write_d4rl(tmp_path / "data.hdf5", d4rl_arrays(), env_id="Hopper-v5"))
    with pytest.raises(DataError, match=r"differ in physics.*Hopper-v5, --env-id Hopper-v4.*--mix-versions"):
        load_dataset(path, env_id="Hopper-v4")
    mixed = load_dataset(path, env_id="Hopper-v4", mix_versions=True)
    assert (mixed.task.env_id, mixed.parts[0].env_id) == ("Hopper-v4", "Hopper-v5")
    with pytest.raises(DataError, match="all parts must be of one environment"):
        load_dataset(path, env_id="Walker2d-v5", mix_versions=True)


def test_parts_are_joined_in_order(tmp_path: Path) -> None:
    one, two = d4rl_arrays((4, 1)), d4rl_arrays((3, 2), seed=1)
    paths = [
        write_d4rl(tmp_path / f"{name}.hdf5", arrays, env_id="Hopper-v5")
        for name, arrays in (("one", one), ("two", two))
    ]
    folder = write_small_minari("test/hopper/small-v0")
    dataset = load_dataset(f"{paths[0]} + {paths[1]}+{folder}+test/hopper/small-v0")
    assert dataset.trajectories.lengths.tolist() == [4, 1, 3, 2, 4, 1, 3, 4, 1, 3]
    np.testing.assert_array_equal(dataset.trajectories.actions[:10], np.concatenate([one["actions"], two["actions"]]))
    np.testing.assert_array_equal(dataset.trajectories.rewards[10:18], dataset.trajectories.rewards[18:])
    assert [part.name for part in dataset.parts][3] == "test/hopper/small-v0"
    states = dataset.trajectories.observations.astype(np.float64)
    np.testing.assert_allclose(dataset.normalizer.state_mean, states.mean(0), atol=1e-6)


def test_parts_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    def path(name: str, env_id: str, environment: str = "hopper") -> str:
        return str(write_d4rl(tmp_path / name, d4rl_arrays(environment=environment), env_id=env_id))

    old, new = path("old.hdf5", "Hopper-v4"), path("new.hdf5", "Hopper-v5")
    with pytest.raises(DataError, match=r"these are mixed: .*old\.hdf5 Hopper-v4, .*new\.hdf5 Hopper-v5"):
        load_dataset(f"{old}+{new}")
    with pytest.raises(DataError, match="say with --env-id in which one to act"):
        load_dataset(f"{old}+{new}", mix_versions=True)
    assert load_dataset(f"{old}+{new}", env_id="Hopper-v5", mix_versions=True).task.env_id == "Hopper-v5"
    walker = path("walker.hdf5", "Walker2d-v5", "walker2d")
    with pytest.raises(DataError, match=r"of several: .*new\.hdf5 Hopper-v5, .*walker\.hdf5 Walker2d-v5"):
        load_dataset(f"{new}+{walker}")


def test_names_that_do_not_go_together_are_refused_before_anything_is_made() -> None:
    with pytest.raises(DataError, match="all parts must be of one environment"):
        load_dataset("primal/hopper/medium-v0+primal/walker2d/medium-v0")
    with pytest.raises(DataError, match="these are mixed"):
        load_dataset("primal/hopper/medium-v0+hopper-medium-v2")
    assert not minari_folder().exists()


def test_the_order_of_parts_is_kept(tmp_path: Path) -> None:
    one, two = (
        str(write_d4rl(tmp_path / f"{seed}.hdf5", d4rl_arrays(seed=seed), env_id="Hopper-v5")) for seed in (0, 1)
    )
    first = load_dataset(f"{one}+{two}").trajectories.rewards
    second = load_dataset(f"{two}+{one}").trajectories.rewards
    np.testing.assert_array_equal(first[:8], second[8:])
    assert not np.array_equal(first, second)


@pytest.mark.parametrize("other", ["nonsense", "/nowhere.hdf5", ""])
def test_a_part_that_cannot_be_is_told_before_the_others_are_made(other: str) -> None:
    with pytest.raises(DataError, match=r"there is no (data set|file or folder)"):
        load_dataset(f"primal/walker2d/medium-v0+{other}")
    assert not minari_folder().exists()


def test_a_known_name_is_not_hidden_by_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_small_minari("primal/hopper/medium-v0")
    monkeypatch.chdir(tmp_path)
    Path("primal/hopper/medium-v0").mkdir(parents=True)
    assert len(load_dataset("primal/hopper/medium-v0").trajectories.lengths) == 3


def test_what_is_unusual_is_noted(tmp_path: Path) -> None:
    write_small_minari("primal/hopper/medium-v0")
    (note,) = load_dataset("primal/hopper/medium-v0").parts[0].notes
    assert "other steps, seed or policies than the standard ones" in note
    path = str(write_d4rl(tmp_path / "data.hdf5", d4rl_arrays(), env_id="Hopper-v5"))
    assert load_dataset(path).parts[0].notes == ()
    (note,) = load_dataset(path, env_id="Hopper-v4", mix_versions=True).parts[0].notes
    assert "was recorded in Hopper-v5, and is used for Hopper-v4" in note


def test_a_path_with_a_plus_in_it_is_one_path(tmp_path: Path) -> None:
    path = write_d4rl(tmp_path / "a+b.hdf5", d4rl_arrays(), env_id="Hopper-v5")
    assert len(load_dataset(str(path)).parts) == 1


def test_medium_and_expert_together_are_the_papers_task(monkeypatch: pytest.MonkeyPatch) -> None:
    for tier in ("medium", "expert"):
        write_small_minari(f"primal/hopper/{tier}-v0")
    assert load_dataset("primal/hopper/medium-v0+primal/hopper/expert-v0").task.paper_rank == 64
    assert load_dataset("primal/hopper/medium-v0").task.paper_rank == 96


# Names


def test_a_minari_id_is_taken_from_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(minari, "download_dataset", lambda name: pytest.fail("downloaded what is here"))
    write_small_minari("mujoco/hopper/medium-v0")
    dataset = load_dataset("mujoco/hopper/medium-v0")
    assert (dataset.task.env_id, dataset.task.tier) == ("Hopper-v5", "medium")
    assert len(dataset.trajectories.lengths) == 3


def test_a_minari_id_that_is_not_here_is_downloaded_by_minari(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = write_small_minari("elsewhere/hopper-v0")

    def fetch(name: str) -> None:
        target = minari_folder(name)
        target.parent.mkdir(parents=True)
        shutil.copytree(elsewhere, target)

    monkeypatch.setattr(minari, "download_dataset", fetch)
    monkeypatch.setattr("envs.datasets.sources.socket.getaddrinfo", lambda host, port: [])
    assert len(load_dataset("mujoco/hopper/medium-v0").trajectories.lengths) == 3
    assert minari_folder("mujoco/hopper/medium-v0/data/metadata.json").exists()


@pytest.mark.parametrize(
    ("name", "meanwhile"),
    [
        ("mujoco/walker2d/simple-v0", "primal/walker2d/medium-v0 is built in"),
        ("mujoco/hoper/medium-v0", r"did you mean mujoco/hopper/medium-v0"),
    ],
)
def test_a_minari_id_that_cannot_be_had_ends_in_one_message(
    name: str, meanwhile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str) -> None:
        (minari_folder(name) / "data").mkdir(parents=True)  # it came half
        raise RuntimeError("the network\nis down")

    monkeypatch.setattr(minari, "download_dataset", fail)
    monkeypatch.setattr("envs.datasets.sources.socket.getaddrinfo", lambda host, port: [])
    with pytest.raises(DataError) as caught:
        load_dataset(name)
    message = str(caught.value)
    assert str(minari_folder(name)) in message
    assert "which failed: the network is down" in message
    assert f"minari download {name}" in message
    assert meanwhile in message
    assert not minari_folder(name).exists()


def test_without_a_network_the_answer_comes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(host: str, port: object) -> None:
        raise OSError(f"no address for {host}")

    monkeypatch.setattr("envs.datasets.sources.socket.getaddrinfo", fail)
    monkeypatch.setattr("envs.datasets.sources.urllib.request.getproxies", dict)
    monkeypatch.setattr(minari, "download_dataset", lambda name: pytest.fail("tried all the same"))
    with pytest.raises(DataError, match="no address for huggingface"):
        load_dataset("mujoco/hopper/medium-v0")


@pytest.mark.parametrize("name", ["hopper medium", "hopper", "primal/hopper/medium", "", "a" * 300 + "-v0"])
def test_what_cannot_be_a_name_is_told_what_could(name: str) -> None:
    with pytest.raises(DataError, match=r"there is no data set .*: it is neither a file or folder nor a name such as"):
        load_dataset(name)


def test_a_built_in_name_is_recorded_when_first_used(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "envs.datasets.sources.builtin_recipe", lambda name: [Ingredient(f"{name.environment}/random", 100)]
    )
    dataset = load_dataset("primal/hopper/random-v0")
    assert 100 <= len(dataset.trajectories.rewards) < 250
    assert dataset.task == DatasetName("primal", "hopper", "random").task
    assert "recording primal/hopper/random-v0" in capfd.readouterr().err
    monkeypatch.setattr("envs.datasets.sources.builtin_recipe", lambda name: pytest.fail("recorded again"))
    assert load_dataset("primal/hopper/random-v0").store.fingerprint == dataset.store.fingerprint


# D4RL


@pytest.fixture
def d4rl_file(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> dict[str, np.ndarray]:
    """What D4RL's server has, played by one on this machine."""
    arrays = d4rl_arrays((40, 10, 30))
    server.content = write_d4rl(tmp_path / "served.hdf5", arrays).read_bytes()
    monkeypatch.setattr(sources, "D4RL_URL", server.url.rpartition("/")[0])
    return arrays


def test_a_d4rl_name_is_downloaded_once(d4rl_file: dict[str, np.ndarray], server: Server) -> None:
    for _ in range(2):
        dataset = load_dataset("hopper-medium-replay-v2")
        assert_holds(dataset.trajectories, d4rl_file)
        assert (dataset.task.env_id, dataset.task.tier) == ("Hopper-v4", "medium-replay")
    assert server.paths == ["/hopper_medium_replay-v2.hdf5"]


def test_a_d4rl_name_and_its_file_are_one_store(d4rl_file: dict[str, np.ndarray]) -> None:
    by_name = load_dataset("hopper-medium-v2")
    by_path = load_dataset(str(by_name.parts[0].path), env_id="Hopper-v4")
    assert by_name.parts[0].path.name == "hopper_medium-v2.hdf5"
    assert by_name.store.fingerprint == by_path.store.fingerprint
    assert not minari_folder().exists()


def test_two_processes_that_want_the_same_data_make_it_once(
    d4rl_file: dict[str, np.ndarray], server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")) as pool:
        lengths = list(pool.map(_steps_of, ["hopper-medium-v2"] * 2))
    assert lengths == [80, 80]
    assert server.paths == ["/hopper_medium-v2.hdf5"]


def _steps_of(name: str) -> int:
    return len(load_dataset(name).trajectories.rewards)


def test_a_d4rl_file_of_another_environment_is_not_taken(
    tmp_path: Path, d4rl_file: dict[str, np.ndarray], server: Server
) -> None:
    with pytest.raises(DataError, match=r"is not what was expected: .* but HalfCheetah-v4 has 17 and 6"):
        load_dataset("halfcheetah-medium-v2")
    right = d4rl_arrays(environment="halfcheetah")
    server.content = write_d4rl(tmp_path / "right.hdf5", right).read_bytes()
    assert_holds(load_dataset("halfcheetah-medium-v2").trajectories, right)


def test_a_d4rl_file_put_there_by_hand_is_taken(d4rl_file: dict[str, np.ndarray], server: Server) -> None:
    path = cache.downloads_folder() / "hopper_expert-v2.hdf5"
    path.parent.mkdir(parents=True)
    arrays = {key: array for key, array in d4rl_arrays().items() if key != "next_observations"}
    arrays["terminals"][-1] = False
    write_d4rl(path, arrays)
    dataset = load_dataset("hopper-expert-v2")
    assert_holds(dataset.trajectories, arrays)
    assert dataset.parts[0].cut_off_episodes == 1
    assert server.paths == []


def test_a_d4rl_file_that_cannot_be_had_ends_in_one_message(d4rl_file: dict[str, np.ndarray], server: Server) -> None:
    server.behavior = ["404"]
    with pytest.raises(DataError) as caught:
        load_dataset("walker2d-medium-v2")
    message = str(caught.value)
    assert str(cache.downloads_folder() / "walker2d_medium-v2.hdf5") in message
    assert "answers 404 Not Found" in message
    assert "primal/walker2d/medium-v0 is built in" in message


def test_a_d4rl_file_of_another_structure_is_not_kept(d4rl_file: dict[str, np.ndarray], server: Server) -> None:
    server.content = b"<html>moved</html>"
    with pytest.raises(DataError, match=r"is not what was expected: .* is not an HDF5 file"):
        load_dataset("hopper-medium-v2")
    assert [path.name for path in cache.downloads_folder().iterdir() if not path.name.startswith(".")] == []


def test_d4rl_data_that_breaks_a_rule_is_refused(tmp_path: Path, server: Server, d4rl_file: object) -> None:
    arrays = d4rl_arrays()
    arrays["actions"][5] = 1.5
    server.content = write_d4rl(tmp_path / "bad.hdf5", arrays).read_bytes()
    with pytest.raises(DataError, match=r"hopper_medium-v2\.hdf5, episode 2, step 0: actions must be within"):
        load_dataset("hopper-medium-v2")


# The cache


def test_a_file_is_converted_once_and_anew_when_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_d4rl(tmp_path / "data.hdf5", d4rl_arrays(), env_id="Hopper-v5")
    first = load_dataset(str(path))
    with monkeypatch.context() as patch:
        patch.setattr("envs.datasets.load.write_store", lambda *_: pytest.fail("converted again"))
        assert load_dataset(str(path)).store.fingerprint == first.store.fingerprint
        joined = f"{path}+{path}"
        with pytest.raises(pytest.fail.Exception):
            load_dataset(joined)
    load_dataset(joined)
    with monkeypatch.context() as patch:
        patch.setattr("envs.datasets.load.write_store", lambda *_: pytest.fail("joined again"))
        assert load_dataset(joined).trajectories.lengths.tolist() == [4, 1, 3, 4, 1, 3]
    before = path.stat()
    changed = d4rl_arrays((4, 1, 30), seed=1)
    write_d4rl(path, changed, env_id="Hopper-v5")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # the time alone does not tell
    assert_holds(load_dataset(str(path)).trajectories, changed)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("envs.datasets.load.write_store", lambda *_: pytest.fail("converted again"))
    assert_holds(load_dataset("./data.hdf5").trajectories, changed)


def test_a_data_set_is_read_anew_when_its_description_changes() -> None:
    folder = write_small_minari("test/hopper/small-v0")
    load_dataset("test/hopper/small-v0")
    path = folder / "data" / "metadata.json"
    path.write_text(path.read_text().replace('"total_episodes": 3', '"total_episodes": 2 '))
    with pytest.raises(DataError, match="has 3 episodes"):
        load_dataset("test/hopper/small-v0")


def test_a_cache_that_was_cleared_or_damaged_is_made_again(tmp_path: Path) -> None:
    arrays = d4rl_arrays()
    path = str(write_d4rl(tmp_path / "data.hdf5", arrays, env_id="Hopper-v5"))
    fingerprint = load_dataset(path).store.fingerprint
    (cache.stores_folder() / fingerprint / "rewards.f32").write_bytes(b"")
    assert_holds(load_dataset(path).trajectories, arrays)
    for damage in (b"{", b"[]", b'{"fingerprint": null}', b"\xff\xfe"):
        for note in (cache.cache_folder() / "notes").iterdir():
            note.write_bytes(damage)
        assert_holds(load_dataset(path).trajectories, arrays)
    unrelated = cache.cache_folder() / "mine.txt"
    unrelated.write_text("not of the cache")
    kept = cache.downloads_folder() / "by-hand.hdf5"
    kept.parent.mkdir()
    kept.write_text("precious")
    cache.clear_cache()
    assert sorted(cache.cache_folder().iterdir()) == [kept.parent, unrelated]
    cache.clear_cache(downloads=True)
    assert list(cache.cache_folder().iterdir()) == [unrelated]
    assert_holds(load_dataset(path).trajectories, arrays)


def test_the_cache_is_where_the_variable_says_or_the_user_keeps_such_things(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIMAL_DT_CACHE", "/somewhere/else")
    assert cache.cache_folder() == Path("/somewhere/else/primal-dt")
    monkeypatch.setenv("PRIMAL_DT_CACHE", "~/caches")
    assert cache.cache_folder() == Path.home() / "caches" / "primal-dt"
    monkeypatch.delenv("PRIMAL_DT_CACHE")
    assert cache.cache_folder() == Path(platformdirs.user_cache_dir(), "primal-dt")
