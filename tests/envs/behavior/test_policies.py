"""Behavior policies: the package's networks and user-defined policies."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from envs.behavior.policies import POLICIES, GaussianPolicy, UniformPolicy, load_policy, read_card
from envs.behavior.record import run_episode
from envs.make import make_environment
from envs.spaces import ActionBounds
from envs.tasks import ENVIRONMENTS, task_of
from primal_dt.evaluation.score import normalized

FILES = sorted(POLICIES.glob("*/*.npz"))
HOPPER = task_of("Hopper-v5")
each_environment = pytest.mark.parametrize("environment", ENVIRONMENTS)


def make(activation: str = "tanh", bound: float = 1.0) -> GaussianPolicy:
    """A random policy whose actions are mostly within [-1, 1]."""
    shapes: dict[str, Any] = {"state_mean": 11, "state_std": 11, "bias1": 8, "bias2": 8, "bias3": 3, "log_std": 3}
    shapes |= {"weight1": (8, 11), "weight2": (8, 8), "weight3": (3, 8)}
    random = np.random.default_rng(0)
    arrays: dict[str, Any] = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    arrays["state_std"] = np.abs(arrays["state_std"]) + np.float32(0.1)
    for name in ("weight3", "bias3", "log_std"):
        arrays[name] *= np.float32(0.25)
    arrays["log_std"] -= np.float32(1)
    arrays |= {"low": np.full(3, -bound, np.float32), "high": np.full(3, bound, np.float32)}
    return GaussianPolicy(**arrays, activation=activation)


@pytest.mark.parametrize(("activation", "module"), [("tanh", torch.nn.Tanh()), ("relu", torch.nn.ReLU())])
def test_the_network_matches_torch(activation: str, module: torch.nn.Module) -> None:
    policy = replace(make(activation), deterministic=True)
    linears = [torch.nn.Linear(11, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 3)]
    for number, linear in enumerate(linears, 1):
        linear.weight.data = torch.from_numpy(getattr(policy, f"weight{number}"))
        linear.bias.data = torch.from_numpy(getattr(policy, f"bias{number}"))
    network = torch.nn.Sequential(linears[0], module, linears[1], module, linears[2])
    random = np.random.default_rng(1)
    for observation in random.normal(size=(20, 11)) * 5:
        standard = ((observation - policy.state_mean) / policy.state_std).clip(-10, 10)
        expected = network(torch.from_numpy(standard.astype(np.float32))).clamp(-1, 1)
        np.testing.assert_allclose(policy(observation, random), expected.detach(), atol=1e-5)


def test_sampled_actions_have_the_policys_spread() -> None:
    random, policy, wide = np.random.default_rng(2), make(), make(bound=99)
    mean = replace(wide, deterministic=True)(wide.state_mean, random)
    actions = np.stack([wide(wide.state_mean, random) for _ in range(4000)])
    np.testing.assert_allclose(actions.mean(0), mean, atol=0.05)
    np.testing.assert_allclose(actions.std(0), np.exp(wide.log_std), rtol=0.06)
    clipped = np.stack([policy(wide.state_mean, random) for _ in range(1000)])
    assert clipped.min() >= -1
    assert clipped.max() <= 1


def test_a_policy_survives_a_round_trip(tmp_path: Path) -> None:
    policy, path = make("relu"), tmp_path / "new" / "policy.npz"
    policy.save(path)
    action, again = (each(np.ones(11), np.random.default_rng(3)) for each in (policy, GaussianPolicy.load(path)))
    np.testing.assert_array_equal(action, again)
    assert list(path.parent.iterdir()) == [path]


def test_a_file_with_pickled_objects_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "policy.npz"
    np.savez(path, state_mean=np.array([Path("x")], dtype=object))
    with pytest.raises(ValueError, match="allow_pickle=False"):
        GaussianPolicy.load(path)


def test_the_uniform_policy_fills_the_box() -> None:
    random = np.random.default_rng(0)
    policy = UniformPolicy(ActionBounds(low=(-2.0,) * 4, high=(3.0,) * 4))
    actions = np.stack([policy(np.zeros(1), random) for _ in range(2000)])
    assert actions.shape == (2000, 4)
    assert -2 <= actions.min() < -1.98
    assert 2.98 < actions.max() <= 3
    np.testing.assert_allclose(actions.mean(), 0.5, atol=0.06)


@pytest.mark.slow
@each_environment
def test_the_random_policy_scores_about_zero(environment: str) -> None:
    """One episode's score has a standard deviation of 0.7 or less, so ten episodes are enough."""
    task = task_of(f"{ENVIRONMENTS[environment].gymnasium_name}-v5")
    env, policy = make_environment(task), load_policy("random", task)
    returns = [run_episode(env, policy, seed=seed).rewards.sum() for seed in range(10)]
    assert abs(normalized(returns, task.environment.reference).mean()) < 2


@each_environment
def test_scores_on_the_card_fit_their_tiers(environment: str) -> None:
    policies = read_card(environment)["policies"]
    expert = 40 if environment == "halfcheetah" else 80
    for mode in ("sampled", "deterministic"):
        assert policies["expert"][mode]["score"] >= expert
        assert 25 <= policies["medium"][mode]["score"] <= 55
    assert abs(policies["random"]["sampled"]["score"]) < 2


@each_environment
def test_replay_policies_are_snapshots_before_medium(environment: str) -> None:
    card = read_card(environment)
    policies = card["policies"]
    steps = [policies[entry["policy"].rpartition("/")[2]]["steps"] for entry in card["replay"]]
    assert len(steps) >= 5
    assert steps == sorted(set(steps))
    assert steps[-1] <= policies["medium"]["steps"] < policies["expert"]["steps"]
    assert sum(entry["share"] for entry in card["replay"]) == pytest.approx(1, abs=1e-3)


@each_environment
def test_the_card_lists_every_file(environment: str) -> None:
    card, files = read_card(environment), [file for file in FILES if file.parent.name == environment]
    assert {file.stem for file in files} == set(card["policies"]) - {"random"}
    assert all(file.stat().st_size < 400_000 for file in files)
    assert card["command"] in (POLICIES / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sampled", "deterministic"])
@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_a_policys_returns_match_its_card(file: Path, mode: str) -> None:
    """Run three of the card's episodes and compare with its mean and standard deviation."""
    environment = file.parent.name
    expected = read_card(environment)["policies"][file.stem][mode]
    env = make_environment(task_of(f"{ENVIRONMENTS[environment].gymnasium_name}-v5"))
    policy = GaussianPolicy.load(file, deterministic=mode == "deterministic")
    returns = [run_episode(env, policy, seed=seed).rewards.sum() for seed in range(10_000, 10_003)]
    assert np.mean(returns) == pytest.approx(expected["return_mean"], abs=4 * expected["return_std"] / 3**0.5 + 1)


@pytest.fixture
def _my_policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_policies.py").write_text("def still(observation, random):\n    return [0, 0, 0]\n\nnumber = 3\n")
    (tmp_path / "broken_policies.py").write_text("import numpy\nnumpy.no_such_thing\n")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("_my_policies")
def test_a_user_defined_policy_acts() -> None:
    episode = run_episode(make_environment(HOPPER), load_policy("my_policies:still", HOPPER), seed=0)
    assert not episode.actions.any()


@pytest.mark.usefixtures("_my_policies")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_policies:missing", "the module 'my_policies' has no attribute 'missing'"),
        ("no_such_module:policy", "there is no module 'no_such_module'"),
        ("my_policies:number", r"must be a function of \(observation, random\): 3 is not a callable object"),
        ("os:getcwd", r"must be a function of \(observation, random\): too many positional arguments"),
        (":still", "given as module:name"),
        (".relative:policy", "cannot be imported"),
        ("walker2d/expert", "the policy 'walker2d/expert' was not trained for Hopper-v5"),
        ("hopper/best", r"there is no policy 'hopper/best': .* hopper/expert, hopper/medium"),
        ("../weights/hopper/medium", "there is no policy"),
    ],
)
def test_an_unusable_policy_is_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_policy(name, HOPPER)


@pytest.mark.usefixtures("_my_policies")
def test_an_error_in_a_users_module_is_not_hidden() -> None:
    with pytest.raises(AttributeError, match="no_such_thing"):
        load_policy("broken_policies:policy", HOPPER)
