"""Loading a data set by name or path: every source, its errors, and the cache."""

import json
import multiprocessing
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import minari
import numpy as np
import platformdirs
import pytest

from envs.behavior.recipes import Ingredient
from envs.datasets import cache, sources
from envs.datasets.load import load_dataset, reload_dataset
from envs.datasets.minari_folder import minari_folder
from envs.datasets.names import KNOWN_NAMES
from envs.datasets.part_tasks import DataOptions
from envs.errors import DataError
from primal_dt.config import Config
from primal_dt.data.trajectories import Trajectories
from primal_dt.training.run_folder import DataPart, RunRecord
from tests.envs.datasets.conftest import Server
from tests.envs.files import NAME, cut_off_arrays, d4rl_arrays, recorded_episodes, write_d4rl, write_small_minari

MEDIUM = "primal/hopper/medium-v0"
Arrays = dict[str, np.ndarray]
SetDownload = Callable[[Callable[[str], object]], None]


def hopper_file(name: str = "data.hdf5", arrays: Arrays | None = None, env_id: str | None = "Hopper-v5") -> str:
    """The path of a small D4RL file in the working folder. If ``env_id`` is None, it names no environment."""
    attributes = {} if env_id is None else {"env_id": env_id}
    return str(write_d4rl(Path.cwd() / name, arrays or d4rl_arrays(), **attributes))


def assert_holds(data: Trajectories, arrays: Arrays) -> None:
    for key in ("observations", "actions", "rewards"):
        np.testing.assert_array_equal(getattr(data, key), arrays[key])


def assert_refused(name: str, message: str, **options: Any) -> None:
    with pytest.raises(DataError, match=message):
        load_dataset(name, DataOptions(**options))


def fail(*_: object) -> None:
    pytest.fail("this must not be called")


# Paths


def test_a_d4rl_file_names_its_environment() -> None:
    path = hopper_file()
    dataset = load_dataset(path)
    assert_holds(dataset.trajectories, d4rl_arrays())
    assert (dataset.task.env_id, dataset.task.tier) == ("Hopper-v5", None)
    assert dataset.normalizer.return_scale == 1000
    (part,) = dataset.parts
    assert (part.path, part.env_id, part.cut_off_episodes) == (Path(path), "Hopper-v5", 0)


def test_an_unnamed_environment_must_be_given() -> None:
    path = hopper_file(env_id=None)
    assert_refused(path, r"data\.hdf5 does not name its environment: pass --env-id")
    assert load_dataset(path, DataOptions(env_id="Hopper-v4")).task.env_id == "Hopper-v4"


def test_a_minari_folder_is_a_name() -> None:
    folder = write_small_minari()
    expected = np.concatenate([episode.rewards for episode in recorded_episodes()]).astype(np.float32)
    for path in (folder, folder / "data"):
        dataset = load_dataset(str(path))
        np.testing.assert_array_equal(dataset.trajectories.rewards, expected)
        assert dataset.parts[0].about["description"] == "for a test"


def test_data_of_another_environment_is_refused() -> None:
    walker = hopper_file(env_id="Walker2d-v5")
    assert_refused(walker, "observations of width 11 and actions of width 3, but Walker2d-v5 has 17 and 6")
    ant = hopper_file("ant.hdf5", env_id="Ant-v5")
    assert_refused(ant, r"ant\.hdf5 has observations of width 11 and actions of width 3, but Ant-v5 has 105 and 8")
    assert_refused(hopper_file(env_id=None), "the environment hopper is not registered: there are ", env_id="hopper")


def test_cut_off_episodes_are_counted_from_the_cache_too() -> None:
    path = hopper_file(arrays=cut_off_arrays())
    for _ in range(2):
        dataset = load_dataset(path)
        assert dataset.parts[0].cut_off_episodes == 1
        assert dataset.trajectories.lengths.tolist() == [4, 1, 3]


def test_episodes_that_the_environment_ended_are_known() -> None:
    """Not those that the time limit ended, nor one that the recording cut off."""
    arrays = d4rl_arrays((1000, 7, 5))
    arrays["terminals"][-1] = False
    dataset = load_dataset(str(write_d4rl(Path("ends.hdf5"), arrays, env_id="Hopper-v5")))
    assert dataset.is_terminated.tolist() == [False, True, False]


def test_a_plus_in_a_path_joins_nothing() -> None:
    assert len(load_dataset(hopper_file("a+b.hdf5")).parts) == 1


# Versions and joins


def test_another_version_needs_mix_versions() -> None:
    path = hopper_file()
    assert_refused(path, "differ in physics.*Hopper-v5, --env-id Hopper-v4.*--mix-versions", env_id="Hopper-v4")
    mixed = load_dataset(path, DataOptions(env_id="Hopper-v4", mix_versions=True))
    assert (mixed.task.env_id, mixed.parts[0].env_id) == ("Hopper-v4", "Hopper-v5")
    assert_refused(path, "all parts must be from one environment", env_id="Walker2d-v5", mix_versions=True)


def test_parts_are_joined_in_order() -> None:
    one, two = d4rl_arrays((4, 1)), d4rl_arrays((3, 2), seed=1)
    paths = hopper_file("one.hdf5", one), hopper_file("two.hdf5", two)
    data = load_dataset(" + ".join(paths)).trajectories
    assert data.lengths.tolist() == [4, 1, 3, 2]
    assert_holds(data, {key: np.concatenate([one[key], two[key]]) for key in one})
    data = load_dataset("+".join(reversed(paths))).trajectories
    assert_holds(data, {key: np.concatenate([two[key], one[key]]) for key in one})


def test_files_and_names_are_joined() -> None:
    dataset = load_dataset(f"{hopper_file()}+{write_small_minari()}+{NAME}")
    data = dataset.trajectories
    assert data.lengths.tolist() == [4, 1, 3] * 3
    np.testing.assert_array_equal(data.rewards[8:16], data.rewards[16:])
    assert [part.name for part in dataset.parts][2] == NAME
    np.testing.assert_allclose(dataset.normalizer.state_mean, data.observations.mean(0, np.float64), atol=1e-6)


def test_parts_that_do_not_match_are_refused() -> None:
    old, new = hopper_file("old.hdf5", env_id="Hopper-v4"), hopper_file("new.hdf5")
    assert_refused(f"{old}+{new}", r"these are mixed: .*old\.hdf5 Hopper-v4, .*new\.hdf5 Hopper-v5")
    assert_refused(f"{old}+{new}", "needs --env-id, the version to act in", mix_versions=True)
    assert load_dataset(f"{old}+{new}", DataOptions(env_id="Hopper-v5", mix_versions=True)).task.env_id == "Hopper-v5"
    walker = hopper_file("walker.hdf5", d4rl_arrays(environment="walker2d"), env_id="Walker2d-v5")
    assert_refused(f"{new}+{walker}", r"from several: .*new\.hdf5 Hopper-v5, .*walker\.hdf5 Walker2d-v5")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (f"{MEDIUM}+primal/walker2d/medium-v0", "all parts must be from one environment"),
        (f"{MEDIUM}+hopper-medium-v2", "these are mixed"),
        (f"{MEDIUM}+nonsense", "there is no data set"),
        (f"{MEDIUM}+/nowhere.hdf5", "there is no file or folder"),
        (f"{MEDIUM}+", "there is no data set"),
    ],
)
def test_a_bad_join_is_refused_before_recording(name: str, message: str) -> None:
    assert_refused(name, message)
    assert not minari_folder().exists()


def test_medium_plus_expert_is_the_papers_task() -> None:
    for tier in ("medium", "expert"):
        write_small_minari(f"primal/hopper/{tier}-v0")
    assert load_dataset(f"{MEDIUM}+primal/hopper/expert-v0").task.paper_rank == 64
    assert load_dataset(MEDIUM).task.paper_rank == 96


def test_unusual_data_is_noted() -> None:
    write_small_minari(MEDIUM)
    (note,) = load_dataset(MEDIUM).parts[0].notes
    assert "nonstandard steps, seed or policies" in note
    path = hopper_file()
    assert load_dataset(path).parts[0].notes == ()
    (note,) = load_dataset(path, DataOptions(env_id="Hopper-v4", mix_versions=True)).parts[0].notes
    assert "was recorded in Hopper-v5 but is used for Hopper-v4" in note


# Names


def test_a_folder_does_not_hide_a_known_name() -> None:
    write_small_minari(MEDIUM)
    Path(MEDIUM).mkdir(parents=True)
    assert len(load_dataset(MEDIUM).trajectories.lengths) == 3


@pytest.fixture
def set_download(monkeypatch: pytest.MonkeyPatch) -> SetDownload:
    """A function that replaces Minari's download, as if there were a network."""
    monkeypatch.setattr("envs.datasets.sources.socket.getaddrinfo", lambda host, port: [])
    monkeypatch.setattr(sources, "remote_metadata", lambda name: {"total_episodes": 3})
    return lambda download: monkeypatch.setattr(minari, "download_dataset", download)


def test_a_local_minari_data_set_is_not_downloaded(set_download: SetDownload) -> None:
    set_download(fail)
    write_small_minari("mujoco/hopper/medium-v0")
    dataset = load_dataset("mujoco/hopper/medium-v0")
    assert (dataset.task.env_id, dataset.task.tier) == ("Hopper-v5", "medium")
    assert len(dataset.trajectories.lengths) == 3


def test_minari_downloads_its_own_data_sets(set_download: SetDownload) -> None:
    remote = write_small_minari("remote/hopper-v0")
    set_download(lambda name: shutil.copytree(remote, minari_folder(name)))
    assert len(load_dataset("mujoco/hopper/medium-v0").trajectories.lengths) == 3
    assert minari_folder("mujoco/hopper/medium-v0/data/metadata.json").exists()


def test_what_cannot_be_used_is_told_before_the_download(
    set_download: SetDownload, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_download(fail)
    low, high = ([[[value] * 3] * 2] * 2 for value in (0, 255))
    images = {"type": "Box", "dtype": "uint8", "shape": [2, 2, 3], "low": low, "high": high}
    for metadata, message in (
        ({"observation_space": json.dumps(images)}, r"some/thing-v0: observations of shape \(2, 2, 3\) \(images\)"),
        ({"action_space": json.dumps({"type": "Text", "max_length": 3})}, "actions must be a Box of one dimension"),
        ({"data_format": "arrow"}, "only 'hdf5' can be read here"),
    ):
        monkeypatch.setattr(sources, "remote_metadata", lambda name, own=metadata: {"total_episodes": 3} | own)
        assert_refused("some/thing-v0", message)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("mujoco/walker2d/simple-v0", "primal/walker2d/medium-v0 is built in"),
        ("mujoco/hoper/medium-v0", "did you mean mujoco/hopper/medium-v0"),
    ],
)
def test_a_failed_minari_download_gives_advice(name: str, advice: str, set_download: SetDownload) -> None:
    def disconnect(name: str) -> None:
        (minari_folder(name) / "data").mkdir(parents=True)  # an incomplete download
        raise RuntimeError("the network\nis down")

    set_download(disconnect)
    with pytest.raises(DataError) as caught:
        load_dataset(name)
    for text in (str(minari_folder(name)), "which failed: the network is down", f"minari download {name}", advice):
        assert text in str(caught.value)
    assert not minari_folder(name).exists()


def test_without_a_network_minari_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_address(host: str, port: object) -> None:
        raise OSError(f"no address for {host}")

    monkeypatch.setattr("envs.datasets.sources.socket.getaddrinfo", no_address)
    monkeypatch.setattr("envs.datasets.sources.urllib.request.getproxies", dict)
    monkeypatch.setattr(minari, "download_dataset", fail)
    assert_refused("mujoco/hopper/medium-v0", "no address for huggingface")


@pytest.mark.parametrize("name", ["hopper medium", "hopper", "primal/hopper/medium", "", "a" * 300 + "-v0"])
def test_an_unknown_name_is_refused(name: str) -> None:
    assert_refused(name, "there is no data set .*: it is neither a file or folder nor a name such as")


@pytest.mark.parametrize("name", ["/nowhere/data", "./data.hdf5", "missing.h5", "~/no folder", "~no-user/x.hdf5"])
def test_a_missing_path_is_reported(name: str) -> None:
    assert_refused(name, "there is no file or folder")


def test_a_built_in_data_set_is_recorded_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sources, "builtin_recipe", lambda name: [Ingredient(f"{name.environment}/random", 100)])
    dataset = load_dataset("primal/hopper/random-v0")
    assert 100 <= len(dataset.trajectories.rewards) < 250
    assert dataset.task == KNOWN_NAMES["primal/hopper/random-v0"].task
    assert "recording primal/hopper/random-v0" in capfd.readouterr().err
    monkeypatch.setattr(sources, "builtin_recipe", fail)
    assert load_dataset("primal/hopper/random-v0").store.fingerprint == dataset.store.fingerprint


def test_a_runs_data_reloads_from_a_path_with_a_plus_sign(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "c++"
    folder.mkdir()
    for name, seed in (("a.hdf5", 0), ("b.hdf5", 1)):
        write_d4rl(folder / name, d4rl_arrays(seed=seed), env_id="Hopper-v5")
    monkeypatch.chdir(folder)
    dataset = load_dataset("a.hdf5+b.hdf5")
    parts = tuple(DataPart(part.name, str(part.path.resolve())) for part in dataset.parts)
    record = RunRecord(Config(dataset=dataset.name), dataset.run_task(), parts, 1, "cpu", num_parameters=0)
    monkeypatch.chdir(tmp_path)
    assert reload_dataset(record).run_task() == dataset.run_task()
    write_d4rl(folder / "b.hdf5", d4rl_arrays(seed=2), env_id="Hopper-v5")
    with pytest.raises(DataError, match="has changed since the run"):
        reload_dataset(record)


# D4RL


@pytest.fixture
def d4rl(server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """A server in place of D4RL's. Its file has 80 steps of Hopper."""
    server.content = content_of(d4rl_arrays((40, 10, 30)))
    folder = server.url.rpartition("/")[0]
    monkeypatch.setattr(sources, "d4rl_url", lambda name: f"{folder}/{sources.d4rl_path(name).name}")
    return server


def content_of(arrays: Arrays) -> bytes:
    return write_d4rl(Path("served.hdf5"), arrays).read_bytes()


def num_steps(name: str) -> int:
    return len(load_dataset(name).trajectories.rewards)


def test_a_d4rl_file_is_downloaded_once(d4rl: Server) -> None:
    for _ in range(2):
        dataset = load_dataset("hopper-medium-replay-v2")
        assert_holds(dataset.trajectories, d4rl_arrays((40, 10, 30)))
        assert (dataset.task.env_id, dataset.task.tier) == ("Hopper-v4", "medium-replay")
    assert d4rl.paths == ["/hopper_medium_replay-v2.hdf5"]


@pytest.mark.usefixtures("d4rl")
def test_a_d4rl_name_and_its_file_share_a_store() -> None:
    by_name = load_dataset("hopper-medium-v2")
    by_path = load_dataset(str(by_name.parts[0].path), DataOptions(env_id="Hopper-v4"))
    assert by_name.parts[0].path.name == "hopper_medium-v2.hdf5"
    assert by_name.store.fingerprint == by_path.store.fingerprint
    assert not minari_folder().exists()


def test_two_processes_download_once(d4rl: Server) -> None:
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")) as pool:
        assert list(pool.map(num_steps, ["hopper-medium-v2"] * 2)) == [80, 80]
    assert d4rl.paths == ["/hopper_medium-v2.hdf5"]


def test_a_d4rl_file_of_another_environment_is_refused(d4rl: Server) -> None:
    assert_refused("halfcheetah-medium-v2", r"is not as expected: .* but halfcheetah-medium-v2 has 17 and 6")
    right = d4rl_arrays(environment="halfcheetah")
    d4rl.content = content_of(right)
    assert_holds(load_dataset("halfcheetah-medium-v2").trajectories, right)


def test_a_d4rl_file_placed_by_hand_is_used(d4rl: Server) -> None:
    path = cache.downloads_folder() / "hopper_expert-v2.hdf5"
    path.parent.mkdir(parents=True)
    arrays = cut_off_arrays()
    write_d4rl(path, {key: array for key, array in arrays.items() if key != "next_observations"})
    dataset = load_dataset("hopper-expert-v2")
    assert_holds(dataset.trajectories, arrays)
    assert dataset.parts[0].cut_off_episodes == 1
    assert d4rl.paths == []


def test_a_failed_d4rl_download_gives_advice(d4rl: Server) -> None:
    d4rl.behavior = ["404"]
    with pytest.raises(DataError) as caught:
        load_dataset("walker2d-medium-v2")
    path = str(cache.downloads_folder() / "walker2d_medium-v2.hdf5")
    for text in (path, "returned 404 Not Found", "primal/walker2d/medium-v0 is built in"):
        assert text in str(caught.value)


def test_a_download_of_another_format_is_deleted(d4rl: Server) -> None:
    d4rl.content = b"<html>moved</html>"
    assert_refused("hopper-medium-v2", r"is not as expected: .* is not an HDF5 file")
    assert [path.name for path in cache.downloads_folder().iterdir() if not path.name.startswith(".")] == []


def test_d4rl_data_that_breaks_a_rule_is_refused(d4rl: Server) -> None:
    arrays = d4rl_arrays()
    arrays["actions"][5] = 1.5
    d4rl.content = content_of(arrays)
    assert_refused(
        "hopper-medium-v2",
        r"1 of 8 actions are out of bounds by up to 0\.5, the first at .*hopper_medium-v2\.hdf5, episode 2, step 0",
    )


# The cache


def test_files_and_joins_are_converted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    path = hopper_file()
    joined, fingerprint = f"{path}+{path}", load_dataset(path).store.fingerprint
    with monkeypatch.context() as patch:
        patch.setattr("envs.datasets.load.write_store", fail)
        for name in (path, "./data.hdf5"):
            assert load_dataset(name).store.fingerprint == fingerprint
        with pytest.raises(pytest.fail.Exception):
            load_dataset(joined)
    load_dataset(joined)
    monkeypatch.setattr("envs.datasets.load.write_store", fail)
    assert load_dataset(joined).trajectories.lengths.tolist() == [4, 1, 3, 4, 1, 3]


def test_a_changed_file_is_converted_again() -> None:
    path = Path(hopper_file())
    load_dataset(str(path))
    before = path.stat()
    changed = d4rl_arrays((4, 1, 30), seed=1)
    hopper_file(arrays=changed)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # only the size differs
    assert_holds(load_dataset("./data.hdf5").trajectories, changed)


def test_changed_metadata_is_read_again() -> None:
    path = write_small_minari() / "data" / "metadata.json"
    load_dataset(NAME)
    path.write_text(path.read_text().replace('"total_episodes": 3', '"total_episodes": 2 '))
    assert_refused(NAME, "has 3 episodes")


def test_a_damaged_or_cleared_cache_is_rebuilt() -> None:
    path = hopper_file()
    (cache.stores_folder() / load_dataset(path).store.fingerprint / "rewards.f32").write_bytes(b"")
    assert_holds(load_dataset(path).trajectories, d4rl_arrays())
    for damage in (b"{", b"[]", b'{"fingerprint": null}', b"\xff\xfe"):
        for note in (cache.cache_folder() / "notes").iterdir():
            note.write_bytes(damage)
        assert_holds(load_dataset(path).trajectories, d4rl_arrays())
    cache.clear_cache()
    assert_holds(load_dataset(path).trajectories, d4rl_arrays())


def test_damage_does_not_reach_joined_data() -> None:
    path = hopper_file()
    actions = load_dataset(path).store.folder / "actions.f32"
    actions.write_bytes(bytes(actions.stat().st_size))
    assert_refused(f"{path}+{path}", r"is damaged.*python -m envs cache --clear")
    cache.clear_cache()
    assert load_dataset(f"{path}+{path}").trajectories.actions.any()


def test_clearing_deletes_only_what_it_names() -> None:
    load_dataset(hopper_file())
    unrelated, download = cache.cache_folder() / "mine.txt", cache.downloads_folder() / "by-hand.hdf5"
    download.parent.mkdir()
    for file in (unrelated, download):
        file.touch()
    cache.clear_cache()
    assert sorted(cache.cache_folder().iterdir()) == [download.parent, unrelated]
    cache.clear_cache(downloads=True)
    assert list(cache.cache_folder().iterdir()) == [unrelated]


def test_a_variable_sets_the_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, folder in (("/somewhere/else", Path("/somewhere/else")), ("~/caches", Path.home() / "caches")):
        monkeypatch.setenv("PRIMAL_DT_CACHE", value)
        assert cache.cache_folder() == folder / "primal-dt"
    monkeypatch.delenv("PRIMAL_DT_CACHE")
    assert cache.cache_folder() == Path(platformdirs.user_cache_dir(), "primal-dt")
