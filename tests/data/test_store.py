"""Trajectories on disk: what goes in comes out, or nothing is there."""

import json
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from primal_dt.data.sampler import WindowSampler
from primal_dt.data.store import StoreError, open_store, write_store
from primal_dt.data.trajectories import Trajectory


def episodes(lengths: list[int], seed: int = 0, width: int = 3) -> list[Trajectory]:
    random = np.random.default_rng(seed)
    return [
        Trajectory(
            (100 + random.normal(size=(length, width))).astype(np.float32),
            random.normal(size=(length, 2)).astype(np.float32),
            random.normal(size=length).astype(np.float32),
        )
        for length in lengths
    ]


def test_what_goes_in_comes_out(tmp_path: Path) -> None:
    source = episodes([5, 1, 30])
    source[2] = replace(source[2], is_complete=False)
    store = write_store(tmp_path, source)
    data = store.trajectories
    np.testing.assert_array_equal(data.observations, np.concatenate([e.observations for e in source]))
    np.testing.assert_array_equal(data.actions, np.concatenate([e.actions for e in source]))
    np.testing.assert_array_equal(data.rewards, np.concatenate([e.rewards for e in source]))
    assert data.lengths.tolist() == [5, 1, 30]
    for number, episode in enumerate(source):
        left = data.returns_to_go[data.offsets[number] : data.offsets[number + 1]]
        np.testing.assert_allclose(left, [episode.rewards[t:].sum() for t in range(len(left))], atol=1e-5)
    assert store.is_complete.tolist() == [True, True, False]
    assert isinstance(data.observations, np.memmap)
    assert not data.observations.flags.writeable
    assert [path.name for path in tmp_path.iterdir()] == [store.fingerprint]


def test_the_statistics_are_those_of_all_states(tmp_path: Path) -> None:
    """Merged from episodes of very different lengths, with a mean far from zero."""
    source = episodes([1, 500, 2, 77])
    store = write_store(tmp_path, source)
    states = np.concatenate([e.observations for e in source]).astype(np.float64)
    np.testing.assert_allclose(store.state_mean, states.mean(0), rtol=1e-12)
    np.testing.assert_allclose(store.state_std, states.std(0), rtol=1e-9)
    standard = store.normalizer(return_scale=1.0).states(store.trajectories.observations)
    np.testing.assert_allclose(standard.mean(0), 0, atol=1e-4)
    np.testing.assert_allclose(standard.std(0), 1, atol=1e-4)


def test_a_store_feeds_the_sampler(tmp_path: Path) -> None:
    store = write_store(tmp_path, episodes([9, 4]))
    sampler = WindowSampler(store.trajectories, store.normalizer(return_scale=10.0), context=4, batch_size=8, seed=0)
    batch = sampler.batch(0)
    real = batch.states[batch.valid]
    assert real.abs().max() < 6  # standardized: the raw states are about 100


def test_the_fingerprint_is_that_of_the_contents(tmp_path: Path) -> None:
    def fingerprint(source: list[Trajectory], folder: str = "here") -> str:
        return write_store(tmp_path / folder, source).fingerprint

    first = fingerprint(episodes([5, 6]))
    assert fingerprint(episodes([5, 6]), "there") == first
    assert fingerprint(episodes([5, 6], seed=1)) != first
    assert fingerprint(episodes([5, 6])[::-1]) != first
    for name in ("observations", "actions", "rewards"):
        changed = episodes([5, 6])
        array = getattr(changed[1], name).copy()
        array.flat[-1] += 1
        changed[1] = replace(changed[1], **{name: array})
        assert fingerprint(changed) != first, name
    whole = episodes([11])[0]
    cut = [
        Trajectory(whole.observations[part], whole.actions[part], whole.rewards[part])
        for part in (slice(0, 5), slice(5, 11))
    ]
    assert fingerprint([whole]) != fingerprint(cut)


def test_writing_holds_one_episode_at_a_time(tmp_path: Path) -> None:
    def stream() -> Iterator[Trajectory]:
        for _ in range(60):
            yield Trajectory(
                np.ones((1000, 100), np.float32), np.ones((1000, 2), np.float32), np.ones(1000, np.float32)
            )

    tracemalloc.start()
    try:
        write_store(tmp_path, stream())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 * 400_000  # an episode is 0.4 MB, all are 24 MB


def test_a_store_takes_its_name_when_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Path, target: Path) -> Path:
        assert (self / "store.json").exists()
        raise PermissionError("not today")

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(PermissionError):
        write_store(tmp_path, episodes([5]))
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_write_leaves_nothing(tmp_path: Path) -> None:
    def stream() -> Iterator[Trajectory]:
        yield from episodes([5])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_store(tmp_path, stream())
    assert list(tmp_path.iterdir()) == []


def test_the_same_episodes_are_stored_once(tmp_path: Path) -> None:
    first = write_store(tmp_path, episodes([5]))
    written = (tmp_path / first.fingerprint / "store.json").stat().st_mtime_ns
    assert write_store(tmp_path, episodes([5])).fingerprint == first.fingerprint
    assert [path.name for path in tmp_path.iterdir()] == [first.fingerprint]
    assert (tmp_path / first.fingerprint / "store.json").stat().st_mtime_ns == written


def test_a_damaged_store_is_written_anew(tmp_path: Path) -> None:
    folder = tmp_path / write_store(tmp_path, episodes([5])).fingerprint
    (folder / "actions.f32").unlink()
    store = write_store(tmp_path, episodes([5]))
    np.testing.assert_array_equal(store.trajectories.actions, episodes([5])[0].actions)
    assert [path.name for path in tmp_path.iterdir()] == [store.fingerprint]


def test_episodes_that_cannot_be_stored_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no episode"):
        write_store(tmp_path, [])
    mixed = [*episodes([5, 5]), *episodes([5], width=4)]
    with pytest.raises(StoreError, match="episode 2 has states and actions of width 4 and 2, those before it 3 and 2"):
        write_store(tmp_path, mixed)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_store_is_told_apart(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"not a store of trajectories: .*store\.json is missing"):
        open_store(tmp_path)
    folder = tmp_path / write_store(tmp_path, episodes([5])).fingerprint
    actions = folder / "actions.f32"
    whole = actions.read_bytes()
    actions.write_bytes(whole[:-4])
    with pytest.raises(StoreError, match=r"is damaged: actions\.f32 has 36 bytes, not 40; delete the folder"):
        open_store(folder)
    actions.unlink()
    with pytest.raises(StoreError, match=r"actions\.f32 is missing"):
        open_store(folder)
    actions.write_bytes(whole)
    description = json.loads((folder / "store.json").read_text())
    (folder / "store.json").write_text(json.dumps(description | {"format": 99}))
    with pytest.raises(StoreError, match="has format 99, and this version reads 2"):
        open_store(folder)
    (folder / "store.json").write_text(json.dumps(description))
    offsets = (folder / "offsets.i64").read_bytes()
    (folder / "offsets.i64").write_bytes(bytes(len(offsets)))
    with pytest.raises(StoreError, match="is damaged"):
        open_store(folder)
    (folder / "offsets.i64").write_bytes(offsets)
    (folder / "store.json").write_text("{")
    with pytest.raises(StoreError, match="is damaged"):
        open_store(folder)
