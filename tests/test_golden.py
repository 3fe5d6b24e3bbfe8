"""Files that an earlier version wrote are read, resumed, evaluated and recognized by this one (tests/golden)."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import evaluate
import train
from envs.datasets.load import load_dataset
from primal_dt.config import EARLIER_VALUES, config_from_dict
from primal_dt.data.store import open_store
from primal_dt.evaluation import evaluate as evaluate_module
from primal_dt.sweep.grid import SWEEPS
from primal_dt.sweep.job import identity_of, jobs_of
from primal_dt.training.arguments import parse_config
from primal_dt.training.checkpoint import load_checkpoint
from primal_dt.training.metrics_log import read_metrics
from primal_dt.training.run_folder import read_record
from tests.conftest import run_program

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture
def run(own_folders: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run, in a folder where its data is, evaluated with the packages of its time."""
    versions = json.loads((GOLDEN / "run" / "config.json").read_text())["versions"]
    monkeypatch.setattr(evaluate_module, "version", versions.__getitem__)
    shutil.copy(GOLDEN / "hopper.hdf5", own_folders)
    return Path(shutil.copytree(GOLDEN / "run", Path("runs") / "golden"))


def golden_groups() -> Any:
    groups = without_words(json.loads((GOLDEN / "groups.json").read_text()))
    for group in groups:
        group["settings"] |= EARLIER_VALUES  # what the run did without having these settings
    return groups


def without_words(groups: Any) -> Any:
    """All but notes, whose words may change."""
    for group in groups:
        for own in group["runs"]:
            del own["notes"]
    return groups


def with_keys_of(golden: Any, own: Any) -> Any:
    """The value without the keys that the golden one lacks: those that later versions have added."""
    if isinstance(golden, dict):
        return {key: with_keys_of(value, own[key]) for key, value in golden.items()}
    if isinstance(golden, list):
        return [with_keys_of(*pair) for pair in zip(golden, own, strict=True)]
    return own


def evaluated_groups(monkeypatch: pytest.MonkeyPatch, episodes: int) -> Any:
    flags = ["--episodes", str(episodes), "--device", "cpu", "--workers", "0", "--out", "report"]
    assert run_program(evaluate, monkeypatch, "runs/golden", *flags) == 0
    groups = without_words(json.loads(Path("report/report.json").read_text())["groups"])
    return with_keys_of(golden_groups(), groups)


def test_the_store_opens_bit_for_bit() -> None:
    (folder,) = (GOLDEN / "store").iterdir()
    store = open_store(folder)
    assert store.fingerprint == folder.name
    assert store.trajectories.lengths.tolist() == [6] * 20
    assert np.array_equal(store.trajectories.actions, np.tanh(store.trajectories.observations[:, :3]))


def test_the_data_makes_the_same_store(run: Path, tmp_path: Path) -> None:
    (golden,) = (GOLDEN / "store").iterdir()
    load_dataset("hopper.hdf5")
    (own,) = (tmp_path / "cache").glob("**/stores/*")
    assert own.name == golden.name
    for path in golden.iterdir():
        assert (own / path.name).read_bytes() == path.read_bytes(), path.name


def test_the_configuration_is_read(run: Path) -> None:
    config = read_record(run).config
    assert (config.dataset, config.model.width, config.optimizer.steps) == ("hopper.hdf5", 8, 20)
    assert config.run.name == "golden"


def test_the_checkpoint_acts(run: Path) -> None:
    checkpoint = load_checkpoint(run)
    assert checkpoint.step == 10
    policy = checkpoint.policy()
    policy.reset([3600.0])
    assert np.isfinite(policy.act(np.zeros((1, 11)))).all()


def test_the_run_resumes_to_the_same_end(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_program(train, monkeypatch, "--resume", "runs/golden") == 0
    expected = json.loads((GOLDEN / "finished.json").read_text())["metrics"]
    metrics = read_metrics(run)
    assert [line["step"] for line in metrics] == [line["step"] for line in expected] == [5, 10, 15, 20]
    for own, golden in zip(metrics, expected, strict=True):
        assert golden.keys() == own.keys() - {"time", "train/steps_per_second", "train/return_sensitivity"}
        for name, value in golden.items():
            tolerance = 1e-3 if name.startswith("eval/") else 1e-4  # a rollout magnifies rounding
            assert own[name] == pytest.approx(value, rel=tolerance, abs=1e-6), (own["step"], name)
    assert all(torch.isfinite(value).all() for value in load_checkpoint(run).weights.values())


def test_the_cached_evaluation_is_recognized(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path.name: path.read_bytes() for path in (run / "evaluations").iterdir()}
    assert evaluated_groups(monkeypatch, 2) == golden_groups()
    assert {path.name: path.read_bytes() for path in (run / "evaluations").iterdir()} == before  # none was run


def test_the_checkpoint_evaluates_as_it_did(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(run / "evaluations")
    (own,), (golden,) = evaluated_groups(monkeypatch, 2), golden_groups()
    for mine, theirs in zip(own["runs"][0]["episodes"], golden["runs"][0]["episodes"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3)


@pytest.mark.parametrize("name", json.loads((GOLDEN / "jobs.json").read_text()))
def test_sweeps_as_they_were_have_the_same_jobs(name: str, run: Path) -> None:
    golden = json.loads((GOLDEN / "jobs.json").read_text())[name]
    grid, flags = SWEEPS.get(name, SWEEPS["grid"]), []
    if name == "file":
        grid = replace(grid, datasets=("hopper.hdf5",), seeds=(0,), attention=("primal-plus",))
        flags = ["--steps", "20"]
    flags += ["--init", "small", "--primal-init", "orthonormal", "--penalty", "sum", "--attention-dropout", "0"]
    base = parse_config([grid.preset, *grid.flags, *flags])
    jobs = jobs_of(grid, base, out=Path("/sweep"), threads=1, device="cpu", fingerprint=lambda *_: "0" * 64)
    assert len(jobs) == golden["jobs"]
    assert set(golden["names"]) <= {job.name for job in jobs}


@pytest.mark.parametrize("job", json.loads((GOLDEN / "job_configs.json").read_text()), ids=lambda job: job["name"])
def test_stored_configurations_have_the_same_identity(job: dict[str, Any]) -> None:
    config = config_from_dict(job["config"])
    identity = identity_of(config, fingerprint=job["fingerprint"], episodes=job["episodes"])
    assert identity == job["identity"]
    assert job["name"].endswith(f"__s{config.run.seed}__{identity}")
