"""Trajectories on disk: stores are complete or absent, and round-trip."""

import json
import os
import re
import shutil
import stat
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from primal_dt.data.sampler import WindowSampler
from primal_dt.data.store import StoreError, Verification, open_store, write_store
from primal_dt.data.trajectories import Trajectory
from tests.conftest import file_size_limit
from tests.system.disk import Disk, Names, watched_disk


def episodes(*lengths: int, seed: int = 0, width: int = 3) -> list[Trajectory]:
    random = np.random.default_rng(seed)
    return [
        Trajectory(
            (100 + random.normal(size=(length, width))).astype(np.float32),
            random.normal(size=(length, 2)).astype(np.float32),
            random.normal(size=length).astype(np.float32),
        )
        for length in lengths
    ]


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def overwrite(path: Path, content: bytes, at: int = 0) -> None:
    """Write to a file in place. Its time also differs if its clock is coarse."""
    with path.open("r+b") as file:
        file.seek(at)
        file.write(content)
    os.utime(path, ns=(0, 0))


def test_store_round_trip(tmp_path: Path) -> None:
    source = episodes(5, 1, 30)
    source[2] = replace(source[2], is_complete=False)
    store = write_store(tmp_path, source)
    data = store.trajectories
    for name in ("observations", "actions", "rewards"):
        np.testing.assert_array_equal(getattr(data, name), np.concatenate([getattr(e, name) for e in source]))
    assert data.lengths.tolist() == [5, 1, 30]
    for episode, left in zip(source, np.split(data.returns_to_go, data.offsets[1:-1]), strict=True):
        np.testing.assert_allclose(left, [episode.rewards[t:].sum() for t in range(len(left))], atol=1e-5)
    assert store.is_complete.tolist() == [True, True, False]
    assert names(tmp_path) == [store.fingerprint]


def test_arrays_are_read_only_memory_maps(tmp_path: Path) -> None:
    observations = write_store(tmp_path, episodes(5)).trajectories.observations
    assert isinstance(observations, np.memmap)
    assert not observations.flags.writeable


def test_statistics_are_those_of_all_states(tmp_path: Path) -> None:
    """Merged from episodes of very different lengths, with a mean far from zero."""
    source = episodes(1, 500, 2, 77)
    store = write_store(tmp_path, source)
    states = np.concatenate([e.observations for e in source]).astype(np.float64)
    np.testing.assert_allclose(store.state_mean, states.mean(0), rtol=1e-12)
    np.testing.assert_allclose(store.state_std, states.std(0), rtol=1e-9)
    standard = store.normalizer(return_scale=1.0).states(store.trajectories.observations)
    np.testing.assert_allclose(standard.mean(0), 0, atol=1e-4)
    np.testing.assert_allclose(standard.std(0), 1, atol=1e-4)


def test_sampler_reads_a_store(tmp_path: Path) -> None:
    store = write_store(tmp_path, episodes(9, 4))
    sampler = WindowSampler(store.trajectories, store.normalizer(return_scale=10.0), context=4, batch_size=8, seed=0)
    batch = sampler.batch(0)
    assert batch.states[batch.valid].abs().max() < 6  # standardized: the raw states are about 100


def test_fingerprint_is_a_digest_of_the_content(tmp_path: Path) -> None:
    def fingerprint(source: list[Trajectory], folder: str = "here") -> str:
        return write_store(tmp_path / folder, source).fingerprint

    first = fingerprint(episodes(5, 6))
    assert fingerprint(episodes(5, 6), "there") == first
    assert fingerprint(episodes(5, 6, seed=1)) != first
    assert fingerprint(episodes(5, 6)[::-1]) != first
    for name in ("observations", "actions", "rewards"):
        one, two = episodes(5, 6)
        array = getattr(two, name).copy()
        array.flat[-1] += 1
        assert fingerprint([one, replace(two, **{name: array})]) != first, name
    (whole,) = episodes(11)
    cut = [Trajectory(whole.observations[s], whole.actions[s], whole.rewards[s]) for s in (slice(5), slice(5, 11))]
    assert fingerprint([whole]) != fingerprint(cut)


def test_writing_holds_one_episode_at_a_time(tmp_path: Path) -> None:
    def stream() -> Iterator[Trajectory]:
        for _ in range(60):
            rows = np.ones((1000, 100), np.float32)
            yield Trajectory(rows, np.ones((1000, 2), np.float32), np.ones(1000, np.float32))

    tracemalloc.start()
    try:
        write_store(tmp_path, stream())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 * 400_000  # an episode is 0.4 MB, all are 24 MB


def test_store_appears_only_when_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Path, target: Path) -> Path:
        assert (self / "store.json").exists()
        raise PermissionError("not today")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(PermissionError):
        write_store(tmp_path, episodes(5))
    assert names(tmp_path) == []


@pytest.mark.parametrize("names", get_args(Names))
def test_a_power_failure_leaves_no_part_of_a_store(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, names: Names
) -> None:
    rest, seen = tmp_path_factory.mktemp("rest"), []

    def fail(disk: Disk) -> None:
        stores = [path for path in disk.fail(rest / "disk", names).glob("*/*") if path.is_dir()]
        stores = [path for path in stores if not path.name.startswith(".")]
        seen.append(len(stores))
        for store in stores:
            open_store(store).verify()

    with watched_disk(tmp_path, on_event=fail) as disk:
        write_store(tmp_path / "stores", episodes(5))
        fail(disk)
    assert set(seen) == {0, 1}
    assert seen == sorted(seen)


@pytest.mark.parametrize("make", [os.mkfifo, Path.touch, lambda path: path.symlink_to("nowhere")])
def test_what_has_the_name_of_a_store_is_replaced(tmp_path: Path, make: Callable[[Path], object]) -> None:
    """A pipe is not read, which would wait forever."""
    folder = write_store(tmp_path, episodes(5)).folder
    shutil.rmtree(folder)
    make(folder)
    write_store(tmp_path, episodes(5)).verify()
    assert folder.is_dir()


def test_interrupted_write_leaves_nothing(tmp_path: Path) -> None:
    def stream() -> Iterator[Trajectory]:
        yield from episodes(5)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_store(tmp_path, stream())
    assert names(tmp_path) == []


def test_equal_episodes_are_stored_once(tmp_path: Path) -> None:
    first = write_store(tmp_path, episodes(5))
    description = tmp_path / first.fingerprint / "store.json"
    written = description.stat().st_mtime_ns
    assert write_store(tmp_path, episodes(5)).fingerprint == first.fingerprint
    assert names(tmp_path) == [first.fingerprint]
    assert description.stat().st_mtime_ns == written


def test_damaged_store_is_written_again(tmp_path: Path) -> None:
    folder = tmp_path / write_store(tmp_path, episodes(5)).fingerprint
    (folder / "actions.f32").unlink()
    store = write_store(tmp_path, episodes(5))
    np.testing.assert_array_equal(store.trajectories.actions, episodes(5)[0].actions)
    assert names(tmp_path) == [store.fingerprint]


def test_store_with_other_contents_is_written_again(tmp_path: Path) -> None:
    overwrite(tmp_path / write_store(tmp_path, episodes(5)).fingerprint / "actions.f32", bytes(40))
    store = write_store(tmp_path, episodes(5))
    np.testing.assert_array_equal(store.trajectories.actions, episodes(5)[0].actions)


def test_leftovers_of_killed_processes_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".partial-dead").mkdir()
    (tmp_path / ".partial-dead" / "actions.f32").write_bytes(b"half")
    (tmp_path / ".partial-late.lock").touch()
    store = write_store(tmp_path, episodes(5))
    assert names(tmp_path) == [store.fingerprint]


def test_stores_can_be_written_side_by_side(tmp_path: Path) -> None:
    inner = []

    def stream() -> Iterator[Trajectory]:
        inner.append(write_store(tmp_path, episodes(6)))
        yield from episodes(5)

    outer = write_store(tmp_path, stream())
    assert sorted(names(tmp_path)) == sorted([outer.fingerprint, inner[0].fingerprint])


def test_store_has_the_permissions_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        folder = tmp_path / write_store(tmp_path, episodes(5)).fingerprint
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o775
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o664}


def test_invalid_episodes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no episode"):
        write_store(tmp_path, [])
    with pytest.raises(StoreError, match="state and action widths: episode 2 has 4 and 2, earlier episodes 3 and 2"):
        write_store(tmp_path, [*episodes(5, 5), *episodes(5, width=4)])
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("store.json", None, r"not a store of trajectories: .*store\.json is missing"),
        ("actions.f32", lambda old: old[:-4], r"damaged: actions\.f32 has 36 bytes, not 40; delete the folder"),
        ("actions.f32", None, r"actions\.f32 is missing"),
        (
            "store.json",
            lambda old: old.replace(b'"format": 2', b'"format": 99'),
            "has format 99, but .* format 2",
        ),
        ("offsets.i64", lambda old: bytes(len(old)), "is damaged"),
        ("store.json", lambda old: b"{", "is damaged"),
        ("store.json", lambda old: old.replace(b'"state_mean": [', b'"state_mean": [1, '), "is damaged"),
        ("store.json", lambda old: old.replace(b'"num_steps": 5', b'"num_steps": Infinity'), "is damaged"),
        ("store.json", lambda old: re.sub(rb'"state_std": \[\s*[^,]*', b'"state_std": [NaN', old), "must be finite"),
        ("store.json", lambda old: b"[" * 100_000, "is damaged"),
    ],
)
def test_damaged_stores_are_refused(
    name: str, change: Callable[[bytes], bytes] | None, message: str, tmp_path: Path
) -> None:
    path = tmp_path / write_store(tmp_path, episodes(5)).fingerprint / name
    old = path.read_bytes()
    path.unlink()
    if change is not None:
        path.write_bytes(change(old))
    with pytest.raises(StoreError, match=message):
        open_store(path.parent)


def test_intact_stores_are_verified(tmp_path: Path) -> None:
    """With blocks of rows that are not those of the episodes, and a constant entry."""
    source = episodes(1, 20_000, 7)
    for episode in source:
        episode.observations[:, 1] = 0.1
    Verification(write_store(tmp_path, source)).wait()


@pytest.mark.parametrize(
    "name", ["observations.f32", "actions.f32", "rewards.f32", "returns_to_go.f32", "offsets.i64", "is_complete.bool"]
)
def test_every_changed_byte_is_found(name: str, tmp_path: Path) -> None:
    path = tmp_path / write_store(tmp_path, episodes(3, 2)).fingerprint / name
    content = path.read_bytes()
    for at, byte in enumerate(content):
        overwrite(path, bytes([byte ^ 1]), at)
        with pytest.raises(StoreError, match=r"is damaged.*python -m envs cache --clear"):
            Verification(open_store(path.parent)).wait()
        overwrite(path, bytes([byte]), at)
    open_store(path.parent).verify()


@pytest.mark.parametrize("name", ["state_mean", "state_std", "fingerprint"])
def test_changed_description_is_found(name: str, tmp_path: Path) -> None:
    path = tmp_path / write_store(tmp_path, episodes(3, 2)).fingerprint / "store.json"
    description = json.loads(path.read_text())
    if name == "fingerprint":
        description[name] = "0" * 64
    else:
        description[name][1] *= 1 + 1e-9
    path.write_text(json.dumps(description))
    with pytest.raises(StoreError, match="is damaged"):
        open_store(path.parent).verify()


@pytest.mark.parametrize("name", ["observations.f32", "actions.f32", "rewards.f32", "returns_to_go.f32"])
@pytest.mark.parametrize("change", [lambda path: os.truncate(path, 4), lambda path: overwrite(path, b"1")])
def test_files_that_change_in_use_are_noticed(name: str, change: Callable[[Path], None], tmp_path: Path) -> None:
    store = write_store(tmp_path, episodes(9, 4))
    sampler = WindowSampler(store.trajectories, store.normalizer(return_scale=10.0), context=4, batch_size=8, seed=0)
    sampler.batch(0)
    change(tmp_path / store.fingerprint / name)
    with pytest.raises(StoreError, match=rf"{name} was changed while it was in use; .*python -m envs cache --clear"):
        sampler.batch(1)
    with pytest.raises(StoreError, match=name):
        store.verify()


def test_deleted_store_can_still_be_read(tmp_path: Path) -> None:
    store = write_store(tmp_path, episodes(9, 4))
    shutil.rmtree(tmp_path / store.fingerprint)
    store.verify()


@pytest.mark.parametrize("name", ["store.json", "actions.f32"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_links_and_pipes_in_a_store_are_refused(tmp_path: Path, name: str, kind: str) -> None:
    folder = tmp_path / write_store(tmp_path, episodes(5)).fingerprint
    outside = (folder / name).rename(tmp_path / name)
    if kind == "link":
        (folder / name).symlink_to(outside)
    else:
        os.mkfifo(folder / name)
    with pytest.raises(StoreError, match=f"not a regular file: .*{name}"):
        open_store(folder)


def test_a_full_disk_names_the_folder_of_stores(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="File too large") as caught, file_size_limit(1000):
        write_store(tmp_path, episodes(500))
    assert caught.value.filename == str(tmp_path)
    assert names(tmp_path) == []
