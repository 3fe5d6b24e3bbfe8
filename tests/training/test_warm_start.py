"""Warm start: a run begins as the policy that another run has trained, and then learns from other data."""

import json
import os
import shlex
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import train
from envs.datasets.load import load_dataset
from primal_dt.data.normalizer import Normalizer
from primal_dt.system.files import file_digest
from primal_dt.training.checkpoint import Checkpoint, CheckpointError, load_checkpoint, save_policy
from primal_dt.training.run_folder import InitialWeights, read_record
from primal_dt.training.trainer import Trainer
from primal_dt.training.warm_start import WarmStart, read_warm_start
from tests.conftest import ON_ONE_CORE, SHAPE, SMALL, run_program
from tests.envs.files import d4rl_arrays, write_d4rl

RUN = [*SMALL, *ON_ONE_CORE, *shlex.split("--steps 20 --log-every-steps 5 --save-every-steps 10 --eval-every-steps 0")]
Start = Callable[..., int]
GUIDED = ["--critic-weight", "0.5"]


def data(path: Path, *, shift: float, scale: float, rewards: float = 1.0) -> str:
    """A D4RL file of Hopper-v5 whose states are moved and scaled, so that data sets have other statistics."""
    arrays = d4rl_arrays((30,) * 20)
    arrays["observations"] = (shift + scale * arrays["observations"]).astype(np.float32)
    arrays["rewards"] = (rewards * arrays["rewards"]).astype(np.float32)
    arrays["actions"] = np.tanh(arrays["observations"][:, :3])
    return str(write_d4rl(path, arrays, env_id="Hopper-v5"))


@pytest.fixture
def start(own_folders: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """``train.py`` on data of a name; returns its exit code."""
    data(own_folders / "old.hdf5", shift=0.0, scale=1.0)
    data(own_folders / "new.hdf5", shift=3.0, scale=2.0, rewards=0.5)
    data(own_folders / "better.hdf5", shift=3.0, scale=2.0, rewards=3.0)

    def run(name: str, dataset: str, *arguments: str) -> int:
        flags = ["--dataset", f"{dataset}.hdf5", *RUN, "--name", name, *arguments]
        return run_program(train, monkeypatch, *flags)

    return run


def actions_of(path: Path | str, *, steps: int = 12) -> list[np.ndarray]:
    """What a policy does on the same observations and rewards, in which its target falls."""
    policy = load_checkpoint(path).policy(reproducible=True)
    generator = np.random.default_rng(0)
    targets: Any = [3600.0, 50.0] if policy.model.shape.conditioning == "return" else [None, None]
    policy.reset(targets)
    found = []
    for _ in range(steps):
        found.append(policy.act(generator.normal(size=(2, 11))))
        policy.observe(generator.normal(size=2))
    return found


def first(name: str) -> Path:
    return Path("runs") / name / "checkpoints" / "step-000000000.pt"


def start_killed(start: Start, monkeypatch: pytest.MonkeyPatch, name: str, *arguments: str, killed_at: int = 0) -> int:
    """Start a run that is killed in its first update, or in a later one."""
    update = Trainer.update

    def killed(self: Trainer, batch: Any) -> None:
        if self.step == killed_at:
            raise KeyboardInterrupt
        update(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "update", killed)
        return start(name, *arguments)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        [],
        GUIDED,
        ["--conditioning", "none", "--attention", "softmax"],
        ["--conditioning", "max-return", "--action-loss", "gaussian"],
    ],
    ids=["return", "critics", "cloning", "max-return"],
)
def test_the_first_policy_is_the_old_one(start: Start, monkeypatch: pytest.MonkeyPatch, flags: list[str]) -> None:
    """Bit for bit, though the new data has other states and lower rewards."""
    assert start("old", "old", *flags) == 0
    flags = [*flags, "--init-from", "runs/old", "--seed", "1", "--dropout", "0.2"]
    assert start_killed(start, monkeypatch, "new", "new", *flags) == 130
    for new, old in zip(actions_of(first("new")), actions_of("runs/old"), strict=True):
        np.testing.assert_array_equal(new, old)


@pytest.mark.slow
def test_the_run_learns_from_the_new_data(start: Start) -> None:
    assert start("old", "old") == 0
    assert start("new", "new", "--init-from", "runs/old") == 0
    old, new = load_checkpoint("runs/old"), load_checkpoint("runs/new")
    assert any(not torch.equal(new.weights[name], weight) for name, weight in old.weights.items())
    assert new.task.fingerprint == load_dataset("new.hdf5").store.fingerprint != old.task.fingerprint
    assert new.step == 20


def test_the_units_of_the_old_run_are_kept(start: Start) -> None:
    assert start("old", "old") == 0
    assert start("new", "new", "--init-from", "runs/old") == 0
    old, new = load_checkpoint("runs/old").normalizer, load_checkpoint("runs/new").normalizer
    np.testing.assert_array_equal(new.state_mean, old.state_mean)
    np.testing.assert_array_equal(new.state_std, old.state_std)
    assert new.return_scale == old.return_scale
    assert np.abs(load_dataset("new.hdf5").normalizer.state_mean - old.state_mean).min() > 1


@pytest.mark.slow
def test_optimizers_start_from_zero(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    assert start("old", "old", *GUIDED) == 0
    assert start_killed(start, monkeypatch, "new", "new", *GUIDED, "--init-from", "runs/old") == 130
    state = load_checkpoint(first("new")).training["trainer"]
    assert state["step"] == 0
    assert not any(optimizer["state"] for optimizer in [*state["optimizers"], state["guidance"]["optimizer"]])


@pytest.mark.slow
def test_critics_are_taken_with_their_unit(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewards of the new data are half as large. The range of values has that of both."""
    assert start("old", "old", *GUIDED) == 0
    assert start_killed(start, monkeypatch, "new", "new", *GUIDED, "--init-from", "runs/old") == 130
    old = load_checkpoint("runs/old").training["trainer"]["guidance"]
    new = load_checkpoint(first("new")).training["trainer"]["guidance"]
    for part in ("critic", "average_critic"):
        torch.testing.assert_close(new[part], old[part], rtol=0, atol=0)
    assert new["values"] == old["values"]
    assert start("alone", "new", *GUIDED) == 0
    assert load_checkpoint("runs/alone").training["trainer"]["guidance"]["values"]["scale"] < old["values"]["scale"]


@pytest.mark.slow
def test_new_critics_follow_the_old_model(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run without critics has none to give: the moving average of the model begins with its weights."""
    assert start("old", "old") == 0
    assert start_killed(start, monkeypatch, "new", "new", *GUIDED, "--init-from", "runs/old") == 130
    average = load_checkpoint(first("new")).training["trainer"]["guidance"]["average_model"]
    torch.testing.assert_close(average, dict(load_checkpoint("runs/old").weights), rtol=0, atol=0)


@pytest.mark.slow
def test_better_data_raises_the_cap_of_returns(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--conditioning", "max-return"]
    assert start("old", "old", *flags) == 0
    caps = {}
    for name in ("new", "better"):
        assert start_killed(start, monkeypatch, name, name, *flags, "--init-from", "runs/old") == 130
        caps[name] = load_checkpoint(first(name)).weights["return_cap"]
    old = load_checkpoint("runs/old").weights["return_cap"]
    assert torch.equal(caps["new"], old)
    torch.testing.assert_close(caps["better"], torch.maximum(old, 3 * old))
    assert (caps["better"] > old).any()


# Resuming


@pytest.mark.slow
@pytest.mark.parametrize("step", [0, 12])
def test_resume_does_not_need_the_other_run(start: Start, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    assert start("old", "old", *GUIDED) == 0
    flags = [*GUIDED, "--init-from", "runs/old"]
    assert start("whole", "new", *flags) == 0
    assert start_killed(start, monkeypatch, "killed", "new", *flags, killed_at=step) == 130
    assert load_checkpoint("runs/killed").step == step // 10 * 10
    shutil.rmtree("runs/old")
    assert run_program(train, monkeypatch, "--resume", "runs/killed") == 0
    whole, killed = load_checkpoint("runs/whole"), load_checkpoint("runs/killed")
    torch.testing.assert_close(killed.weights, whole.weights, rtol=0, atol=0)
    torch.testing.assert_close(killed.training["trainer"], whole.training["trainer"], rtol=0, atol=0)
    np.testing.assert_array_equal(killed.normalizer.state_mean, whole.normalizer.state_mean)


@pytest.mark.slow
@pytest.mark.parametrize("accident", ["none", "changed", "removed"])
def test_a_run_without_a_checkpoint_starts_again(
    start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], accident: str
) -> None:
    """From the weights that it began with, and from no others."""
    assert start("old", "old") == 0
    assert start_killed(start, monkeypatch, "new", "new", "--init-from", "runs/old") == 130
    shutil.rmtree("runs/new/checkpoints")
    if accident == "changed":
        os.replace("runs/old/checkpoints/step-000000010.pt", "runs/old/checkpoints/step-000000020.pt")
    if accident == "removed":
        shutil.rmtree("runs/old")
    code = run_program(train, monkeypatch, "--resume", "runs/new")
    words = {"changed": "has changed since: start a new run", "removed": "step-000000020.pt does not exist"}
    assert (code, accident == "none") in [(0, True), (1, False)]
    assert words.get(accident, "") in capsys.readouterr().err


@pytest.mark.slow
def test_the_record_names_the_weights(start: Start) -> None:
    assert start("old", "old") == 0
    assert start("new", "new", "--init-from", "runs/old/checkpoints/step-000000010.pt") == 0
    content = json.loads(Path("runs/new/config.json").read_text())
    file = Path("runs/old/checkpoints/step-000000010.pt").resolve()
    assert content["initial_weights"] == {"path": str(file), "digest": file_digest(file), "step": 10}
    assert read_record(Path("runs/new")).initial_weights == InitialWeights(str(file), file_digest(file), 10)
    assert content["config"]["model"]["init_from"] == "runs/old/checkpoints/step-000000010.pt"
    assert "initial_weights" not in json.loads(Path("runs/old/config.json").read_text())


# Mistakes


@pytest.mark.slow
def test_a_shared_policy_can_be_fine_tuned(
    start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its critics cannot: the state of their training is not shared."""
    assert start("old", "old", *GUIDED) == 0
    save_policy(Path("shared"), load_checkpoint("runs/old"))
    assert start_killed(start, monkeypatch, "new", "new", "--init-from", "shared") == 130
    weights, expected = load_checkpoint(first("new")).weights, load_checkpoint("runs/old").weights
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert start("guided", "new", "--init-from", "shared", *GUIDED) == 1
    assert "is a shared policy: it has critics, but not the state to train them further" in capsys.readouterr().err


def test_all_differences_are_listed(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    assert start("old", "old") == 0
    flags = ["--width", "32", "--num-layers", "3", "--attention", "primalformer", "--context", "5"]
    assert start("new", "new", *flags, "--init-from", "runs/old") == 1
    file = Path("runs/old/checkpoints/step-000000020.pt").resolve()
    words = "attention is primalformer, there primal-plus; width is 32, there 16; num_layers is 3, there 2; "
    words += "context is 5, there 4. To agree with it: --attention primal-plus --width 16 --num-layers 2 --context 4"
    assert f"the weights of {file} do not fit this run: {words}" in capsys.readouterr().err
    assert not Path("runs/new").exists()


def warm(**changes: Any) -> WarmStart:
    """A warm start from a run of a shape that differs from the small one in some fields."""
    width = changes.get("state_width", SHAPE.state_width)
    normalizer = Normalizer(np.zeros(width, np.float32), np.ones(width, np.float32), 1.0)
    unused: Any = None
    checkpoint = Checkpoint(replace(SHAPE, **changes), {}, normalizer, 7, {}, unused, {})
    return WarmStart(InitialWeights("FILE", "digest", 7), checkpoint)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"state_width": 5}, "state_width is 3, there 5$"),
        ({"state_width": 5, "width": 32}, "state_width is 3, there 5; width is 16, there 32$"),
        ({"action_high": (2.0, 1.0)}, r"action_high is \(1.0, 1.0\), there \(2.0, 1.0\)$"),
        ({"action_low": (), "action_high": (), "categories": (4,)}, r"categories is \(\), there \(4,\)$"),
        ({"unbounded": (True, False)}, r"unbounded is \(\), there \(True, False\)$"),
        ({"max_timesteps": 10}, "max_timesteps is 20, there 10$"),
        ({"rank": 8}, "rank is 4, there 8. To agree with it: --rank 8$"),
        ({"action_loss": "gaussian"}, "action_loss is mse, there gaussian. To agree with it: --action-loss gaussian$"),
    ],
)
def test_weights_that_do_not_fit_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        warm(**changes).fit(SHAPE)


def test_what_a_trained_policy_does_not_depend_on_may_differ() -> None:
    own = replace(
        SHAPE, dropout=0.3, attention_dropout=0.2, action_dropout=0.1, init="small", primal_init="orthonormal"
    )
    assert warm().fit(own) == own


def test_rank_matters_only_with_a_primal_layer() -> None:
    softmax = replace(SHAPE, attention="softmax")
    assert warm(attention="softmax", rank=8).fit(softmax) == softmax


def test_a_longer_timestep_table_is_kept() -> None:
    assert warm(max_timesteps=50).fit(SHAPE).max_timesteps == 50


def test_actions_without_bounds_keep_their_scale() -> None:
    """Bounds of the data for the first entry, of the environment for the second."""
    own = replace(SHAPE, action_low=(-3.0, -1.0), action_high=(5.0, 1.0), unbounded=(True, False))
    fitted = warm(action_low=(-2.0, -1.0), action_high=(2.0, 1.0), unbounded=(True, False)).fit(own)
    assert (fitted.action_low, fitted.action_high) == ((-2.0, -1.0), (2.0, 1.0))


def test_states_far_from_the_old_data_are_reported() -> None:
    """Such as an entry that was constant there: its standard deviation is the floor."""
    near = Normalizer(np.full(3, 5.0, np.float32), np.full(3, 9.0, np.float32), 1.0)
    assert warm().problem(near) is None
    far = replace(near, state_std=np.array([9.0, 500.0, 9.0], np.float32))
    assert str(warm().problem(far)).startswith("state entries 1 of the new data are up to 505 standard deviations away")


def test_init_from_and_resume_exclude_each_other(
    start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start("old", "old") == 0
    assert run_program(train, monkeypatch, "--resume", "runs/old", "--init-from", "runs/old") == 1
    assert "--resume takes all settings from the run" in (err := capsys.readouterr().err)
    assert "not --init-from" in err


def test_missing_weights_are_an_error_before_the_work(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    assert start("new", "nowhere", "--init-from", "runs/old") == 1
    assert "error: the checkpoint runs/old does not exist" in capsys.readouterr().err


def test_a_damaged_last_checkpoint_is_not_replaced(start: Start) -> None:
    assert start("old", "old") == 0
    Path("runs/old/checkpoints/step-000000020.pt").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"To use an older checkpoint, give its path: .*step-000000010\.pt"):
        read_warm_start("runs/old")
