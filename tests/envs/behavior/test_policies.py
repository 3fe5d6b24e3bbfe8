"""Behavior policies: the networks that come with the package, and anybody's own."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from envs.behavior.policies import POLICIES, GaussianPolicy, UniformPolicy, load_policy, read_card
from envs.behavior.record import run_episode
from envs.make import make_environment
from envs.tasks import ENVIRONMENTS, ActionBox, task_of
from primal_dt.evaluation.score import normalized

FILES = sorted(POLICIES.glob("*/*.npz"))


def make(activation: str = "tanh", hidden: int = 8) -> GaussianPolicy:
    random = np.random.default_rng(0)

    def normal(*shape: int) -> NDArray[np.float32]:
        return random.normal(size=shape).astype(np.float32)

    return GaussianPolicy(
        state_mean=normal(11),
        state_std=np.abs(normal(11)) + np.float32(0.1),
        weight1=normal(hidden, 11),
        bias1=normal(hidden),
        weight2=normal(hidden, hidden),
        bias2=normal(hidden),
        weight3=normal(3, hidden) * np.float32(0.25),
        bias3=normal(3) * np.float32(0.25),
        log_std=normal(3) * np.float32(0.25) - np.float32(1),
        low=np.full(3, -1, np.float32),
        high=np.full(3, 1, np.float32),
        activation=activation,
    )


@pytest.mark.parametrize(("activation", "module"), [("tanh", torch.nn.Tanh()), ("relu", torch.nn.ReLU())])
def test_the_network_is_that_of_torch(activation: str, module: torch.nn.Module) -> None:
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


def test_sampled_actions_have_the_policys_spread_and_stay_in_the_box() -> None:
    policy = make()
    random = np.random.default_rng(2)
    observation = policy.state_mean
    mean = replace(policy, deterministic=True, low=np.full(3, -99), high=np.full(3, 99))(observation, random)
    wide = replace(policy, low=np.full(3, -99), high=np.full(3, 99))
    actions = np.stack([wide(observation, random) for _ in range(4000)])
    np.testing.assert_allclose(actions.mean(0), mean, atol=0.05)
    np.testing.assert_allclose(actions.std(0), np.exp(policy.log_std), rtol=0.06)
    clipped = np.stack([policy(observation, random) for _ in range(1000)])
    assert clipped.min() >= -1
    assert clipped.max() <= 1


def test_a_policy_comes_back_from_its_file(tmp_path: Path) -> None:
    policy = make("relu")
    policy.save(tmp_path / "new" / "policy.npz")
    again = GaussianPolicy.load(tmp_path / "new" / "policy.npz")
    observation, seed = np.ones(11), 3
    np.testing.assert_array_equal(
        policy(observation, np.random.default_rng(seed)), again(observation, np.random.default_rng(seed))
    )
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["policy.npz"]


def test_a_file_with_objects_in_it_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "policy.npz"
    np.savez(path, state_mean=np.array([Path("x")], dtype=object))
    with pytest.raises(ValueError, match="allow_pickle=False"):
        GaussianPolicy.load(path)


def test_the_uniform_policy_fills_the_box() -> None:
    random = np.random.default_rng(0)
    policy = UniformPolicy(ActionBox(-2.0, 3.0), 4)
    actions = np.stack([policy(np.zeros(1), random) for _ in range(2000)])
    assert actions.shape == (2000, 4)
    assert -2 <= actions.min() < -1.98
    assert 2.98 < actions.max() <= 3
    np.testing.assert_allclose(actions.mean(), 0.5, atol=0.06)


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_the_random_policy_scores_about_zero(environment: str) -> None:
    """Over 100 episodes."""
    task = task_of(f"{ENVIRONMENTS[environment].gymnasium_name}-v5")
    env, policy = make_environment(task), load_policy("random", task)
    returns = [run_episode(env, policy, seed=seed).rewards.sum() for seed in range(100)]
    assert abs(normalized(returns, task.environment.reference).mean()) < 2


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_the_card_has_what_it_takes(environment: str) -> None:
    """Tiers within their bounds, snapshots on the way to medium, small files that are all on the card."""
    card = read_card(environment)
    policies = card["policies"]
    least = 40 if environment == "halfcheetah" else 80
    assert all(policies["expert"][mode]["score"] >= least for mode in ("sampled", "deterministic"))
    assert all(25 <= policies["medium"][mode]["score"] <= 55 for mode in ("sampled", "deterministic"))
    assert abs(policies["random"]["sampled"]["score"]) < 2
    replay = [policies[entry["policy"].rpartition("/")[2]]["steps"] for entry in card["replay"]]
    assert len(replay) >= 5
    assert replay == sorted(set(replay))
    assert replay[-1] <= policies["medium"]["steps"] < policies["expert"]["steps"]
    assert sum(entry["share"] for entry in card["replay"]) == pytest.approx(1, abs=1e-3)
    own = [file for file in FILES if file.parent.name == environment]
    assert {file.stem for file in own} == set(policies) - {"random"}
    assert all(file.stat().st_size < 400_000 for file in own)
    assert card["command"] in (POLICIES / "README.md").read_text()


@pytest.mark.parametrize("mode", ["sampled", "deterministic"])
@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_a_policy_does_what_its_card_says(file: Path, mode: str) -> None:
    """Three episodes of those that the card was measured over, against its mean and spread. Most vary little."""
    environment, name = file.parent.name, file.stem
    expected = json.loads((file.parent / "card.json").read_text())["policies"][name][mode]
    task = task_of(f"{ENVIRONMENTS[environment].gymnasium_name}-v5")
    env, policy = make_environment(task), GaussianPolicy.load(file, deterministic=mode == "deterministic")
    returns = [run_episode(env, policy, seed=seed).rewards.sum() for seed in range(10_000, 10_003)]
    assert np.mean(returns) == pytest.approx(expected["return_mean"], abs=4 * expected["return_std"] / 3**0.5 + 1)


def test_a_policy_of_ones_own_is_found_by_module_and_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_policies.py").write_text("def still(observation, random):\n    return [0, 0, 0]\n\nnumber = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    task = task_of("Hopper-v5")
    policy = load_policy("my_policies:still", task)
    episode = run_episode(make_environment(task), policy, seed=0)
    assert not episode.actions.any()
    with pytest.raises(ValueError, match="the module 'my_policies' has no 'missing'"):
        load_policy("my_policies:missing", task)
    with pytest.raises(ValueError, match="there is no module 'no_such_module'"):
        load_policy("no_such_module:policy", task)
    with pytest.raises(ValueError, match=r"must be a function of \(observation, random\), not 3"):
        load_policy("my_policies:number", task)
    with pytest.raises(ValueError, match="given as module:name"):
        load_policy(":still", task)
    with pytest.raises(ValueError, match="cannot be imported"):
        load_policy(".relative:policy", task)
    (tmp_path / "broken_policies.py").write_text("import numpy\nnumpy.no_such_thing\n")
    with pytest.raises(AttributeError, match="no_such_thing"):  # its own mistake, told as such
        load_policy("broken_policies:policy", task)


def test_a_policy_of_another_environment_or_name_is_refused() -> None:
    with pytest.raises(ValueError, match="the policy 'walker2d/expert' is not made for Hopper-v5"):
        load_policy("walker2d/expert", task_of("Hopper-v5"))
    with pytest.raises(ValueError, match=r"there is no policy 'hopper/best': .* hopper/expert, hopper/medium"):
        load_policy("hopper/best", task_of("Hopper-v5"))
    with pytest.raises(ValueError, match="there is no policy"):
        load_policy("../policies/hopper/medium", task_of("Hopper-v5"))
