"""The training of behavior policies: what it chooses, and that a stop loses nothing."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tqdm import tqdm

from envs.behavior import train as train_policies
from envs.behavior.policies import GaussianPolicy
from envs.behavior.train import Recipe, choose, make_model, snapshot_path, train

SHORT = Recipe(steps=768, hidden=8, rollout_steps=256, batch_size=64, epochs=2)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(train_policies.RECIPES, "hopper", SHORT)
    monkeypatch.setattr(train_policies, "SNAPSHOT_EVERY_STEPS", 256)


def snapshots(folder: Path) -> list[int]:
    return sorted(int(path.stem) for path in (folder / "snapshots").iterdir())


def test_training_goes_on_where_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep = train_policies.Keeper.keep

    def stop_after_the_second(self: train_policies.Keeper) -> None:
        keep(self)
        if len(self.curve) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(train_policies.Keeper, "keep", stop_after_the_second)
        with pytest.raises(KeyboardInterrupt):
            train("hopper", seed=0, folder=tmp_path)
    assert snapshots(tmp_path) == [0, 256]
    at_stop = GaussianPolicy.load(snapshot_path(tmp_path, 256))

    model, environments = make_model("Hopper-v5", SHORT, seed=0)
    with tqdm(total=1) as progress:
        keeper = train_policies.Keeper(tmp_path, SHORT, progress)
        keeper.restore(model, environments)
    restored = train_policies.behavior_policy(model, environments, "tanh")
    for name in ("weight1", "bias3", "log_std", "state_mean", "state_std"):
        np.testing.assert_array_equal(getattr(restored, name), getattr(at_stop, name))
    assert model.policy.optimizer.state_dict()["state"]  # the optimizer's moments came back as well

    curve = train("hopper", seed=0, folder=tmp_path)
    assert [steps for steps, _ in curve] == snapshots(tmp_path) == [0, 256, 512, 768]
    end = GaussianPolicy.load(snapshot_path(tmp_path, 768))
    assert not np.array_equal(end.weight1, at_stop.weight1)
    assert train("hopper", seed=0, folder=tmp_path)[1:] == curve[1:]  # it is done: nothing happens


def test_a_snapshot_acts_as_the_model_does(tmp_path: Path) -> None:
    train("hopper", seed=0, folder=tmp_path)
    model, environments = make_model("Hopper-v5", SHORT, seed=1)
    with tqdm(total=1) as progress:
        train_policies.Keeper(tmp_path, SHORT, progress).restore(model, environments)
    policy = replace(GaussianPolicy.load(snapshot_path(tmp_path, 768)), deterministic=True)
    random = np.random.default_rng(0)
    for observation in random.normal(size=(10, 11)):
        expected, _ = model.predict(environments.normalize_obs(observation), deterministic=True)
        np.testing.assert_allclose(policy(observation, random), expected, atol=1e-5)


def test_policies_are_chosen_by_rule() -> None:
    returns = [float("nan"), 0, 50, 100, 200, 300, 500, 800, 1000, 1200, 1400, 3000, 2500]
    curve = [(1000 * i, value) for i, value in enumerate(returns)]
    measured = {7000: [25.0, 25.0], 8000: [31.0, 29.0], 9000: [51.0, 40.0], 10_000: [30.0, 50.0]}
    chosen = choose(curve, "hopper", measured.__getitem__)  # those far off are not measured
    assert (chosen["medium"], chosen["expert"]) == (10_000, 11_000)
    assert [chosen[f"replay{i}"] for i in range(6)] == [0, 2000, 4000, 6000, 8000, 10_000]
    with pytest.raises(SystemExit, match=r"no snapshot of hopper scores from 30\.0 to 50\.0"):
        choose(curve[:10], "hopper", measured.__getitem__)
