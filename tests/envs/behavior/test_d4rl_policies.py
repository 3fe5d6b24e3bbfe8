"""Policies from D4RL files: they act as the file says, and other files are refused."""

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from scipy import stats

from envs.behavior.d4rl_policies import D4rlPolicy, open_d4rl_policy
from envs.behavior.policies import load_policy
from envs.behavior.recipes import Ingredient
from envs.behavior.record import record
from envs.datasets.minari import open_minari
from envs.errors import DataError
from envs.tasks import task_named

S, A = 11, 3
PATH = Path("policy.hdf5")


def write(**changes: Any) -> Path:
    """A file with a random policy for Hopper, with changes; None removes an entry."""
    random = np.random.default_rng(0)
    entries: dict[str, Any] = {"output_distribution": b"tanh_gaussian", "nonlinearity": b"relu"}
    for name, width, rows in (("fc0", S, 8), ("fc1", 8, 8), ("last_fc", 8, A), ("last_fc_log_std", 8, A)):
        entries[f"{name}/weight"] = random.normal(size=(rows, width)).astype(np.float32) / 4
        entries[f"{name}/bias"] = random.normal(size=rows).astype(np.float32) / 4
    with h5py.File(PATH, "w") as file:
        for name, value in (entries | changes).items():
            if value is not None:
                file[f"metadata/policy/{name}" if "infos" not in name else name] = value
    return PATH


def read() -> D4rlPolicy:
    return open_d4rl_policy(PATH, state_width=S, action_width=A)


@pytest.mark.usefixtures("own_folders")
def test_actions_have_the_stated_distribution() -> None:
    write()
    policy, random = read(), np.random.default_rng(1)
    state = random.normal(size=S)
    mean, log_std = (values[0] for values in policy.distribution_at(state[None]))
    samples = np.stack([policy(state, random) for _ in range(4000)])
    assert samples.dtype == np.float32
    before = np.arctanh(samples.astype(np.float64))
    np.testing.assert_allclose(before.mean(0), mean, atol=5 * np.exp(log_std).max() / 4000**0.5)
    np.testing.assert_allclose(before.std(0), np.exp(log_std), rtol=0.06)


@pytest.mark.usefixtures("own_folders")
def test_log_probabilities_are_those_of_a_squashed_normal() -> None:
    write()
    policy, random = read(), np.random.default_rng(1)
    states, actions = random.normal(size=(5, S)), random.uniform(-0.9, 0.9, size=(5, A))
    mean, log_std = policy.distribution_at(states)
    slow = stats.norm.logpdf(np.arctanh(actions), mean, np.exp(log_std)).sum(1) - np.log(1 - actions**2).sum(1)
    np.testing.assert_allclose(policy.log_probabilities(states, actions), slow, atol=1e-4)


@pytest.mark.usefixtures("own_folders")
def test_a_gaussian_policy_takes_its_spread_from_the_transitions() -> None:
    """As in Adroit's files, where the layer for it repeats that of the mean."""
    spread = np.array([[-1.0, -2.0, -9.0]], np.float32)
    write(output_distribution=b"gaussian", nonlinearity=b"tanh", **{"infos/action_log_std": spread})
    policy, random = read(), np.random.default_rng(0)
    mean, log_std = policy.distribution_at(np.zeros((2, S)))
    np.testing.assert_allclose(log_std, spread.repeat(2, 0))
    sample = policy(np.zeros(S), random)
    assert sample[2] == pytest.approx(np.clip(mean[0, 2], -1, 1), abs=1e-3)
    assert np.abs(sample).max() <= 1


@pytest.mark.usefixtures("own_folders")
def test_a_file_is_a_policy_by_its_path() -> None:
    policy = load_policy(str(write()), task_named("hopper"))
    assert isinstance(policy, D4rlPolicy)
    with pytest.raises(DataError, match=r"must have the shape \(8, 17\).*not for this environment"):
        load_policy(str(PATH), task_named("walker2d"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"output_distribution": b"deterministic"}, "must have the distribution tanh_gaussian or gaussian"),
        ({"nonlinearity": None}, "nonlinearity must be a text"),
        ({"fc1/weight": None, "fc1/bias": None}, "lacks the layer fc1"),
        ({"last_fc/weight": np.zeros((2, 8)), "last_fc/bias": np.zeros(2)}, "actions of width 2, but .* has 3"),
        ({"fc0/bias": np.array([b"x"] * 8)}, "bias must be an array of real numbers"),
        ({"output_distribution": b"gaussian"}, "needs infos/action_log_std"),
    ],
)
@pytest.mark.usefixtures("own_folders")
def test_another_form_is_refused(changes: dict[str, Any], message: str) -> None:
    write(**changes)
    with pytest.raises(DataError, match=message):
        read()


@pytest.mark.usefixtures("own_folders")
def test_a_file_without_a_policy_is_refused() -> None:
    with h5py.File(PATH, "w") as file:
        file["observations"] = np.zeros((3, S))
    with pytest.raises(DataError, match="has no policy"):
        read()


@pytest.mark.usefixtures("own_folders")
def test_recordings_name_the_file_but_not_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "private"
    folder.mkdir()
    path = write().rename(folder / "policy.hdf5")
    data = open_minari(record("mine/hopper/own-v0", [Ingredient(str(path), 20)], task=task_named("hopper")))
    assert data.metadata["recipe"] == [{"policy": "policy.hdf5", "steps": 20}]
    assert "private" not in str(data.metadata)
    assert data.metadata["algorithm_name"] == "unknown"
