"""D4RL's file layout: what is read, and what is refused."""

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
from envs.datasets.checks import ActionCheck
from envs.datasets.d4rl import _episode_offsets, open_d4rl
from envs.errors import DataError
from primal_dt.data.store import write_store
from primal_dt.data.trajectories import Trajectory
from tests.envs.files import HOPPER_ACTIONS, cut_off_arrays, d4rl_arrays, write_d4rl

PATH = Path("data.hdf5")


def read() -> list[Trajectory]:
    return list(open_d4rl(PATH).episodes(ActionCheck(HOPPER_ACTIONS)))


def test_episodes_end_at_terminals_and_timeouts() -> None:
    source = d4rl_arrays()
    file = open_d4rl(write_d4rl(PATH, source, env_id="Hopper-v5"))
    assert (file.env_id, file.widths) == ("Hopper-v5", (11, 3))
    assert file.offsets.tolist() == [0, 4, 5, 8]
    assert not file.last_is_cut_off
    episodes = read()
    for key in ("observations", "actions", "rewards"):
        np.testing.assert_array_equal(np.concatenate([getattr(e, key) for e in episodes]), source[key])
    assert [len(episode.rewards) for episode in episodes] == [4, 1, 3]
    assert all(episode.is_complete for episode in episodes)


def test_columns_and_float_flags_are_read_like_medium_replay() -> None:
    """D4RL's medium-replay files have float64 arrays, rewards of shape (N, 1) and float flags."""
    arrays = d4rl_arrays()
    plain = list(open_d4rl(write_d4rl(Path("plain.hdf5"), arrays)).episodes(ActionCheck(HOPPER_ACTIONS)))
    floats = {key: array.astype(np.float64) for key, array in arrays.items()}
    for key in ("rewards", "terminals", "timeouts"):
        floats[key] = floats[key][:, None]
    read = list(open_d4rl(write_d4rl(Path("columns.hdf5"), floats)).episodes(ActionCheck(HOPPER_ACTIONS)))
    for one, other in zip(plain, read, strict=True):
        np.testing.assert_array_equal(one.rewards, other.rewards)
        np.testing.assert_array_equal(one.actions, other.actions)
        assert one.is_complete == other.is_complete


def test_a_cut_off_last_episode_is_read_and_marked() -> None:
    file = open_d4rl(write_d4rl(PATH, cut_off_arrays()))
    assert file.last_is_cut_off
    assert file.env_id is None
    assert [(len(episode.rewards), episode.is_complete) for episode in read()] == [(4, True), (1, True), (3, False)]


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
def test_a_file_becomes_a_store_at_any_read_size(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, seed: int, rows_per_read: int
) -> None:
    monkeypatch.setattr(d4rl, "ROWS_PER_READ", rows_per_read)
    source = d4rl_arrays(tuple(np.random.default_rng(seed).integers(1, 30, size=3)))
    file = open_d4rl(write_d4rl(PATH, source))
    store = write_store(tmp_path_factory.mktemp("store"), file.episodes(ActionCheck(HOPPER_ACTIONS)))
    np.testing.assert_array_equal(store.trajectories.observations, source["observations"])
    np.testing.assert_array_equal(store.trajectories.offsets, file.offsets)


def test_a_missing_or_incomplete_file_is_refused() -> None:
    with pytest.raises(DataError, match=r"there is no file .*data\.hdf5"):
        open_d4rl(PATH)
    PATH.write_text("not HDF5")
    with pytest.raises(DataError, match=r"data\.hdf5 is not an HDF5 file, or is incomplete"):
        open_d4rl(PATH)
    write_d4rl(PATH, d4rl_arrays((400, 100, 300)))
    PATH.write_bytes(PATH.read_bytes()[:-500])
    with pytest.raises(DataError, match="or is incomplete"):
        open_d4rl(PATH)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"timeouts": None}, "lacks timeouts: .* this one has actions, next_observations, .*, rewards, terminals"),
        ({"rewards": np.zeros(7, np.float32)}, "one row per transition, but there are .*rewards 7"),
        ({"rewards": np.zeros((8, 2), np.float32)}, r"rewards must be an array of real numbers with 1 dimension"),
        ({"terminals": np.full(8, 0.5)}, "terminals must be 0 or 1 everywhere"),
        ({"observations": np.zeros((8, 3), complex)}, "observations must be an array of real numbers"),
        ({"actions": np.array([b"x"] * 8)}, "actions must be an array of real numbers with 2 dimension"),
        ({key: array[:0] for key, array in d4rl_arrays().items()}, "has no episode"),
    ],
)
def test_a_file_of_another_structure_is_refused(change: dict[str, Any], message: str) -> None:
    changed = {key: array for key, array in (d4rl_arrays() | change).items() if array is not None}
    with pytest.raises(DataError, match=message):
        open_d4rl(write_d4rl(PATH, changed))


@pytest.mark.parametrize(
    ("key", "rows", "value", "message"),
    [
        *(
            (key, 6, value, f"episode 2, step 1: {key} must be finite")
            for key in ("observations", "actions", "rewards")
            for value in (np.nan, np.inf)
        ),
        ("rewards", ..., 3e38, "episode 0, step 0: sums of rewards must be finite"),
    ],
)
def test_an_invalid_number_is_refused_with_its_place(key: str, rows: Any, value: float, message: str) -> None:
    source = d4rl_arrays()
    source[key][rows] = value
    write_d4rl(PATH, source)
    with pytest.raises(DataError, match=rf"data\.hdf5, {message}"):
        read()


def test_a_damaged_chunk_is_reported() -> None:
    with h5py.File(PATH, "w") as file:
        for key, array in d4rl_arrays((400, 100, 300)).items():
            file.create_dataset(key, data=array, chunks=True, compression="gzip")
        chunk = file["observations"].id.get_chunk_info(0)
    content = bytearray(PATH.read_bytes())
    content[chunk.byte_offset : chunk.byte_offset + chunk.size] = np.random.default_rng(0).bytes(chunk.size)
    PATH.write_bytes(content)
    with pytest.raises(DataError, match=r"data\.hdf5 is damaged"):
        read()


def test_missing_memory_is_not_called_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out(*arguments: object) -> None:
        raise MemoryError("Unable to allocate 9 TiB")

    write_d4rl(PATH, d4rl_arrays())
    monkeypatch.setattr("h5py.Dataset.__getitem__", run_out)
    with pytest.raises(DataError, match=r"data\.hdf5 cannot be read: there is not enough memory \(Unable to alloc"):
        read()


@pytest.mark.parametrize("value", [5, np.array([b"a", b"b"]), h5py.Empty("S1"), np.void(b"x")])
def test_an_env_id_that_is_no_string_is_refused(value: Any) -> None:
    with pytest.raises(DataError, match=r"data\.hdf5: the attribute env_id must be a string such as Hopper-v5"):
        open_d4rl(write_d4rl(PATH, d4rl_arrays(), env_id=value))


def test_an_env_id_in_bytes_is_decoded() -> None:
    assert open_d4rl(write_d4rl(PATH, d4rl_arrays(), env_id=np.bytes_("Hopper-v5"))).env_id == "Hopper-v5"
