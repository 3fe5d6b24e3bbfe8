"""The training of behavior policies: its snapshots, how it resumes, and the choice of policies."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import VecNormalize
from tqdm import tqdm

from envs.behavior import train as train_policies
from envs.behavior.policies import GaussianPolicy
from envs.behavior.train import Keeper, Recipe, behavior_policy, choose, make_model, snapshot_path, train

SHORT = Recipe(steps=768, hidden=8, rollout_steps=256, batch_size=64, epochs=2)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(train_policies.RECIPES, "hopper", SHORT)
    monkeypatch.setattr(train_policies, "SNAPSHOT_EVERY_STEPS", 256)


def restored(folder: Path, *, seed: int) -> tuple[PPO, VecNormalize]:
    model, environments = make_model("Hopper-v5", SHORT, seed=seed)
    with tqdm(total=1) as progress:
        Keeper(folder, SHORT, progress).restore(model, environments)
    return model, environments


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """The folder of a training that was interrupted after its second snapshot."""
    keep = Keeper.keep

    def stop_after_the_second(self: Keeper) -> None:
        keep(self)
        if len(self.curve) == 2:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Keeper, "keep", stop_after_the_second)
        with pytest.raises(KeyboardInterrupt):
            train("hopper", seed=0, folder=tmp_path)
    return tmp_path


def snapshots(folder: Path) -> list[int]:
    return sorted(int(path.stem) for path in (folder / "snapshots").iterdir())


def test_the_training_state_is_restored(stopped: Path) -> None:
    model, environments = restored(stopped, seed=0)
    policy = behavior_policy(model, environments, "tanh")
    snapshot = GaussianPolicy.load(snapshot_path(stopped, 256))
    for name in ("weight1", "bias3", "log_std", "state_mean", "state_std"):
        np.testing.assert_array_equal(getattr(policy, name), getattr(snapshot, name))
    assert model.policy.optimizer.state_dict()["state"]  # the optimizer's moments


def test_training_resumes_where_it_was_stopped(stopped: Path) -> None:
    assert snapshots(stopped) == [0, 256]
    curve = train("hopper", seed=0, folder=stopped)
    assert [steps for steps, _ in curve] == snapshots(stopped) == [0, 256, 512, 768]
    before, after = (GaussianPolicy.load(snapshot_path(stopped, steps)) for steps in (256, 768))
    assert not np.array_equal(before.weight1, after.weight1)
    np.testing.assert_array_equal(train("hopper", seed=0, folder=stopped), curve)  # complete: nothing happens


def test_a_snapshot_acts_as_the_model_does(tmp_path: Path) -> None:
    train("hopper", seed=0, folder=tmp_path)
    model, environments = restored(tmp_path, seed=1)
    policy = replace(GaussianPolicy.load(snapshot_path(tmp_path, 768)), deterministic=True)
    random = np.random.default_rng(0)
    for observation in random.normal(size=(10, 11)):
        expected, _ = model.predict(environments.normalize_obs(observation), deterministic=True)
        np.testing.assert_allclose(policy(observation, random), expected, atol=1e-5)


def test_policies_are_chosen_by_rule() -> None:
    returns = [float("nan"), 0, 50, 100, 200, 300, 500, 800, 1000, 1200, 1400, 3000, 2500]
    curve = [(1000 * i, value) for i, value in enumerate(returns)]
    # Only snapshots whose training return is near the range of scores are measured.
    measured = {7000: [25.0, 25.0], 8000: [31.0, 29.0], 9000: [51.0, 40.0], 10_000: [30.0, 50.0]}
    chosen = choose(curve, "hopper", measured.__getitem__)
    assert (chosen["medium"], chosen["expert"]) == (10_000, 11_000)
    assert [chosen[f"replay{i}"] for i in range(6)] == [0, 2000, 4000, 6000, 8000, 10_000]
    with pytest.raises(SystemExit, match=r"no snapshot of hopper scores from 30\.0 to 50\.0"):
        choose(curve[:10], "hopper", measured.__getitem__)
