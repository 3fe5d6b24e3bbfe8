"""D4RL's file layout: what is read, and every reason not to."""

import itertools
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from envs.datasets import d4rl
from envs.datasets.d4rl import _episode_offsets, open_d4rl
from envs.errors import DataError
from envs.tasks import ActionBox
from primal_dt.data.store import write_store
from primal_dt.data.trajectories import Trajectory

BOX = ActionBox(-1.0, 1.0)


def contents(lengths: tuple[int, ...] = (4, 1, 3), *, cut_off: bool = False) -> dict[str, Any]:
    """Three episodes: the first times out, the others end."""
    n = sum(lengths)
    random = np.random.default_rng(0)
    ends = np.cumsum(lengths) - 1
    terminals, timeouts = np.zeros(n, bool), np.zeros(n, bool)
    timeouts[ends[0]] = True
    terminals[ends[1:]] = True
    if cut_off:
        terminals[-1] = False
    return {
        "observations": random.normal(size=(n, 3)).astype(np.float32),
        "actions": random.uniform(-1, 1, size=(n, 2)).astype(np.float32),
        "rewards": random.normal(size=n).astype(np.float32),
        "terminals": terminals,
        "timeouts": timeouts,
    }


def write(path: Path, arrays: dict[str, Any], **attributes: Any) -> Path:
    with h5py.File(path, "w") as file:
        for key, array in arrays.items():
            file[key] = array
        file.attrs.update(attributes)
    return path


def read(path: Path) -> list[Trajectory]:
    return list(open_d4rl(path).episodes(BOX))


def test_episodes_end_at_terminals_and_timeouts(tmp_path: Path) -> None:
    source = contents()
    path = write(tmp_path / "data.hdf5", source, env_id="Hopper-v5")
    file = open_d4rl(path)
    assert (file.env_id, file.state_width, file.action_width) == ("Hopper-v5", 3, 2)
    assert file.offsets.tolist() == [0, 4, 5, 8]
    assert not file.last_is_cut_off
    episodes = read(path)
    for key in ("observations", "actions", "rewards"):
        np.testing.assert_array_equal(np.concatenate([getattr(e, key) for e in episodes]), source[key])
    assert [len(episode.rewards) for episode in episodes] == [4, 1, 3]


def test_a_last_episode_that_is_cut_off_is_kept_and_marked(tmp_path: Path) -> None:
    path = write(tmp_path / "data.hdf5", contents(cut_off=True))
    file = open_d4rl(path)
    assert file.last_is_cut_off
    assert file.env_id is None
    assert [len(episode.rewards) for episode in read(path)] == [4, 1, 3]
    assert [episode.is_complete for episode in read(path)] == [True, True, False]
    whole = write(tmp_path / "whole.hdf5", contents())
    assert all(episode.is_complete for episode in read(whole))


@given(arrays(bool, st.integers(1, 40)))
def test_offsets_split_the_transitions_after_each_end(ends: np.ndarray) -> None:
    offsets = _episode_offsets(ends)
    assert offsets[0] == 0
    assert offsets[-1] == len(ends)
    for begin, end in itertools.pairwise(offsets):
        assert begin < end
        assert not ends[begin : end - 1].any()
        assert ends[end - 1] or end == len(ends)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**31), rows_per_read=st.integers(1, 100))
def test_a_file_becomes_a_store_however_much_is_read_at_once(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, seed: int, rows_per_read: int
) -> None:
    monkeypatch.setattr(d4rl, "ROWS_PER_READ", rows_per_read)
    folder = tmp_path_factory.mktemp("store")
    source = contents(tuple(np.random.default_rng(seed).integers(1, 30, size=3)))
    file = open_d4rl(write(folder / "data.hdf5", source))
    store = write_store(folder, file.episodes(BOX))
    np.testing.assert_array_equal(store.trajectories.observations, source["observations"])
    np.testing.assert_array_equal(store.trajectories.offsets, file.offsets)


def test_what_is_no_such_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.hdf5"
    with pytest.raises(DataError, match=r"there is no file .*data\.hdf5"):
        open_d4rl(path)
    path.write_text("not HDF5")
    with pytest.raises(DataError, match=r"data\.hdf5 is not an HDF5 file, or not all of one"):
        open_d4rl(path)
    write(path, contents((400, 100, 300)))
    path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(DataError, match="not all of one"):
        open_d4rl(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"timeouts": None}, "lacks timeouts: .* this one has actions, observations, rewards, terminals"),
        ({"rewards": np.zeros(7, np.float32)}, "one row per transition, but there are .*rewards 7"),
        ({"rewards": np.zeros((8, 1), np.float32)}, r"rewards must be an array of real numbers with 1 dimension"),
        ({"terminals": np.full(8, 0.5)}, "terminals must be 0 or 1 everywhere"),
        ({"observations": np.zeros((8, 3), complex)}, "observations must be an array of real numbers"),
        ({"actions": np.array([b"x"] * 8)}, "actions must be an array of real numbers with 2 dimension"),
    ],
)
def test_a_file_of_another_structure_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    changed = {key: array for key, array in (contents() | change).items() if array is not None}
    with pytest.raises(DataError, match=message):
        open_d4rl(write(tmp_path / "data.hdf5", changed))


def test_a_file_without_episodes_is_refused(tmp_path: Path) -> None:
    empty = {key: array[:0] for key, array in contents().items()}
    with pytest.raises(DataError, match="has no episode"):
        open_d4rl(write(tmp_path / "data.hdf5", empty))


@pytest.mark.parametrize("key", ["observations", "actions", "rewards"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_number_that_is_not_finite_is_found(tmp_path: Path, key: str, value: float) -> None:
    source = contents()
    source[key][6] = value
    path = write(tmp_path / "data.hdf5", source)
    with pytest.raises(DataError, match=rf"data\.hdf5, episode 2, step 1: {key} must be finite"):
        read(path)


def test_an_action_out_of_bounds_is_found_and_not_clipped(tmp_path: Path) -> None:
    source = contents()
    source["actions"][4, 1] = 1.25
    path = write(tmp_path / "data.hdf5", source)
    with pytest.raises(DataError, match=r"episode 1, step 0: actions must be within \[-1, 1\], not 1\.25 \(1 such"):
        read(path)


def test_rewards_whose_sum_overflows_are_refused(tmp_path: Path) -> None:
    source = contents()
    source["rewards"][:] = 3e38
    path = write(tmp_path / "data.hdf5", source)
    with pytest.raises(DataError, match="episode 0, step 0: sums of rewards must be finite"):
        read(path)


def test_a_damaged_part_of_a_file_is_told(tmp_path: Path) -> None:
    path = tmp_path / "data.hdf5"
    random = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        for key, array in contents((400, 100, 300)).items():
            file.create_dataset(key, data=array, chunks=True, compression="gzip")
        chunk = file["observations"].id.get_chunk_info(0)
    content = bytearray(path.read_bytes())
    content[chunk.byte_offset : chunk.byte_offset + chunk.size] = random.bytes(chunk.size)
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"data\.hdf5 is damaged"):
        read(path)


@pytest.mark.parametrize("value", [5, np.array([b"a", b"b"]), h5py.Empty("S1"), np.void(b"x")])
def test_an_environment_that_is_no_text_is_told(tmp_path: Path, value: Any) -> None:
    path = write(tmp_path / "data.hdf5", contents(), env_id=value)
    with pytest.raises(DataError, match=r"data\.hdf5: the attribute env_id must be a text such as Hopper-v5"):
        open_d4rl(path)


def test_an_environment_in_bytes_is_a_text(tmp_path: Path) -> None:
    path = write(tmp_path / "data.hdf5", contents(), env_id=np.bytes_("Hopper-v5"))
    assert open_d4rl(path).env_id == "Hopper-v5"
