"""The model card says what was measured, and only that; the folder has what it shows."""

import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import ModelCard

import evaluate
import train
from envs.tasks import task_of
from primal_dt.evaluation.statistics import mean_interval
from primal_dt.evaluation.trained_run import open_run
from primal_dt.task import Specification
from primal_dt.training.checkpoint import load_checkpoint, save_checkpoint
from primal_dt.training.run_folder import read_record
from tests.conftest import ON_ONE_CORE, SMALL, run_program
from tests.envs.datasets.test_environments import RESCALED, forget, recorded
from tests.envs.files import d4rl_arrays, write_d4rl
from tests.hub.conftest import Call, fine_tuned
from tests.hub.server import metadata_errors

pytestmark = pytest.mark.xdist_group("hub")
OWN = "tests.envs.odd:Odd-v0"
LAST = "step-000000020.pt"


def saved(call: Call, run: Path, *flags: Any) -> str:
    """The card of a run that is saved to the folder ``policy``."""
    call("save", run, "--out", "policy", *flags)
    return Path("policy/README.md").read_text()


def metadata(card: str) -> Any:
    """The YAML of a card, as the hub's client reads it."""
    return ModelCard(card).data


def row(card: str, target: str) -> list[str]:
    (line,) = [line for line in card.splitlines() if line.startswith(f"| {target} ")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def evaluation(run: Path, monkeypatch: pytest.MonkeyPatch, *flags: Any) -> Any:
    """Evaluate a run into the folder ``report``. Returns the run's part of ``report.json``."""
    assert run_program(evaluate, monkeypatch, run, "--out", "report", *flags) == 0
    return json.loads(Path("report/report.json").read_text())["groups"][0]["runs"][0]


def test_the_card_is_one_that_the_hub_reads(run: Path, call: Call) -> None:
    card = saved(call, run)
    data = metadata(card)
    assert data.library_name == "primal-dt"
    assert data.license == "mit"
    assert data.datasets is None  # the hub refuses names that are not those of its own data sets
    assert metadata_errors(card) == []
    assert {"reinforcement-learning", "Hopper-v5"} <= set(data.tags)
    results = {result.metric_type: result for result in data.eval_results}
    assert results.keys() == {"mean_reward", "normalized_return"}
    assert results["mean_reward"].dataset_type == "Hopper-v5"
    assert re.fullmatch(r"-?[\d.]+ \+/- [\d.]+", results["mean_reward"].metric_value)


def test_the_numbers_are_those_of_the_given_report(run: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    own = evaluation(run, monkeypatch, "--episodes", 12)
    card = saved(call, run, "--report", "report")
    summary = own["summaries"][0]
    assert row(card, "3600*")[1] == f"{summary['normalized_mean']:.1f} ± {summary['normalized_std']:.1f}"
    assert row(card, "3600*")[-1] == row(card, "1800")[-1] == "12"
    value = {result.metric_type: result.metric_value for result in metadata(card).eval_results}
    assert value["normalized_return"] == round(summary["normalized_mean"], 2)
    assert "too few" not in card
    assert "Environments are reset with the seeds 2000000 to 2000011" in card


def test_without_a_given_report_the_training_s_is_used(run: Path, call: Call) -> None:
    card = saved(call, run)
    assert row(card, "3600*")[-1] == "1"
    assert "**1 episode is too few for a reliable result.**" in card
    assert "Evaluated (mode window) at the end of the training." in card


def test_a_policy_without_evaluation_says_so(run: Path, call: Call) -> None:
    card = saved(call, (run / "checkpoints" / LAST).rename("alone.pt"))
    assert "This policy has not been evaluated." in card
    assert "model-index" not in card
    assert "* Trained: not recorded." in card


def test_a_report_about_another_run_is_refused(run: Path, call: Call) -> None:
    path = run / "report" / "report.json"
    content = json.loads(path.read_text())
    content["groups"][0]["runs"][0]["seed"] = 5
    path.write_text(json.dumps(content))
    assert "is not a report about" in call("save", run, "--out", "policy", "--report", path.parent, code=1)[1]
    path.write_text("{")
    assert "cannot be read by this version" in call("save", run, "--out", "policy", code=1)[1]
    assert "is not a report: report.json is missing" in call("save", run, "--out", "p", "--report", run, code=1)[1]
    assert not Path("policy").exists()


def run_examples(card: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Run the card's code for an episode, and its command for another one."""
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    capsys.readouterr()
    exec(compile(code, "README.md", "exec"), {})
    assert np.isfinite(float(capsys.readouterr().out.splitlines()[-1]))
    (command,) = re.findall(r"```sh\npython evaluate.py (.*?)\n```", card)
    words = shlex.split(command.replace(" --video", "").replace("10", "1"))
    assert run_program(evaluate, monkeypatch, *words, "--out", "report") == 0


def test_the_code_in_the_card_runs(
    run: Path, call: Call, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    card = saved(call, run, "--source", "policy")
    assert 'gymnasium.make("Hopper-v5")' in card
    run_examples(card, monkeypatch, capsys)


CODE = {
    "choices": (Specification("CartPole-v1"), [], "task_of_run(checkpoint.task))\n"),
    "a goal, by its module": (Specification(OWN), ["--env-id", OWN], "trusted=True))  # imports tests.envs.odd\n"),
    "a goal, by its class": (Specification(OWN), ["--trust-env"], "trusted=True))  # imports tests.envs.odd\n"),
    "whole numbers": (Specification("Growing-v0"), ["--trust-env"], "trusted=True))  # imports tests.envs.odd\n"),
    "a wrapper": (
        Specification("Hopper-v5", '{"healthy_reward": 2.0}', 9, (RESCALED,)),
        [],
        "task_of_run(checkpoint.task))\n",
    ),
    "a maze": (Specification("PointMaze_UMaze-v3", max_episode_steps=12), [], "task_of_run(checkpoint.task))\n"),
}
"""What is special about an environment -> the environment, flags of the training, and a part of the code."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", CODE)
def test_the_code_runs_in_every_kind_of_environment(
    kind: str, own_folders: Path, call: Call, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    specification, flags, part = CODE[kind]
    if "Maze" in specification.env_id:
        pytest.importorskip("gymnasium_robotics")
    data = recorded(task_of(specification, trusted=True))
    flags = ["--dataset", data, *SMALL, *ON_ONE_CORE, "--name", "run", *flags, "--eval-every-steps", "0"]
    assert run_program(train, monkeypatch, *flags) == 0
    forget(monkeypatch)
    card = saved(call, Path("runs/run"), "--source", "policy")
    assert part in card
    assert ("int(action[0])" in card) is (kind == "choices" or "goal" in kind)
    run_examples(card, monkeypatch, capsys)


def test_without_an_environment_the_code_names_none(
    own_folders: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_d4rl(Path("robot.hdf5"), d4rl_arrays((30, 30)))
    flags = ["--dataset", data, *SMALL, *ON_ONE_CORE, "--name", "run", "--eval-every-steps", "0"]
    assert run_program(train, monkeypatch, *flags) == 0
    card = saved(call, Path("runs/run"), "--source", "policy")
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    exec(compile(code, "README.md", "exec"), {"observation": np.zeros(11), "reward": 1.0})
    assert "evaluate.py" not in card


def test_plots_and_the_video_of_this_policy_are_shared(run: Path, call: Call) -> None:
    digest = open_run(run).digest
    report = run / "report"
    (report / f"run-{digest}-window-target-1800.mp4").write_bytes(b"at another target")
    (report / f"run-{digest}-window-target-3600.mp4").write_bytes(b"at the headline target")
    (report / "run-0123456789abcdef-window-target-3600.mp4").write_bytes(b"of another policy")
    card = saved(call, run)
    assert Path("policy/replay.mp4").read_bytes() == b"at the headline target"
    linked = set(re.findall(r"\]\(((?!http)[^)]+)\)", card))
    assert linked == {"replay.mp4", *(f"plots/{path.name}" for path in report.glob("*.png"))}
    assert all(Path("policy", name).exists() for name in linked)


def test_no_folder_of_this_machine_is_published(
    run: Path, call: Call, own_folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither of the data, nor of the run that a fine-tuned one started with, nor in notes."""
    run = fine_tuned(run, run, monkeypatch)
    path = run / "checkpoints" / LAST
    checkpoint = load_checkpoint(path)
    data = checkpoint.task.dataset
    assert Path(data).is_absolute()
    note = f"{data}: actions out of bounds are clipped"
    save_checkpoint(path, replace(checkpoint, task=replace(checkpoint.task, notes=(note,))))
    (run / "metrics.jsonl").write_text("damaged\n")
    evaluation(run, monkeypatch, "--episodes", 1)
    card = saved(call, run, "--report", "report")
    for name in ("README.md", "config.json"):
        assert "/tmp" not in Path("policy", name).read_text()
        assert str(own_folders.parent) not in Path("policy", name).read_text()
    assert "--dataset=more.hdf5 --out=runs --init-from=run --name=tuned" in card
    assert "more.hdf5: actions out of bounds are clipped" in card
    assert "damaged lines in metrics.jsonl: 1" in card
    assert load_checkpoint("policy").config["model"]["init_from"] == "run"


def test_fine_tuning_is_stated(run: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "fine-tuned" not in saved(call, run)
    shutil.rmtree("policy")
    source = read_record(tuned := fine_tuned(run, run, monkeypatch)).initial_weights
    assert source is not None
    card = saved(call, tuned)
    assert "It is fine-tuned: its training started with the weights of `run`, step 20." in card
    assert row(card, "started with")[1] == f"`run`, step 20, digest `{source.digest}`"
    assert metadata(card).base_model is None
    shutil.rmtree("policy")
    alone = (tuned / "checkpoints" / LAST).rename("alone.pt")
    assert row(saved(call, alone), "started with")[1] == "`run`"


@pytest.mark.parametrize(("returns", "is_ignored"), [((1179, 1000), True), ((1181, 1000), False), ((900, 1000), True)])
def test_a_policy_that_ignores_its_target_says_so(
    run: Path, call: Call, returns: tuple[float, float], is_ignored: bool
) -> None:
    """Its returns at the targets 3600 and 1800 differ by less than a tenth of 1800."""
    path = run / "report" / "report.json"
    content = json.loads(path.read_text())
    for episode in content["groups"][0]["runs"][0]["episodes"]:
        episode["total_reward"] = float(returns[episode["target"] == 1800])
    path.write_text(json.dumps(content))
    words = f"asked for returns of 1800 and 3600, it achieves {returns[1]} and {returns[0]}."
    limits = saved(call, run).partition("## Limits")[2]
    assert (words in limits) is ("does not follow its target" in limits) is is_ignored


def test_the_license_is_stored_with_the_weights(run: Path, call: Call) -> None:
    assert load_checkpoint(run).license is None
    card = saved(call, run, "--license", "apache-2.0")
    assert metadata(card).license == load_checkpoint("policy").license == "apache-2.0"
    assert (
        "the license 'Apache 2.0' is not written as on the hub"
        in call("save", run, "--out", "p", "--license", "Apache 2.0", code=1)[1]
    )
    assert not Path("p").exists()
    assert (
        "--license is for runs: policy has its card already"
        in call("push", "policy", "owner/policy", "--license", "mit", code=1)[1]
    )


def test_a_shared_policy_is_not_saved_again(run: Path, call: Call) -> None:
    saved(call, run)
    message = "policy is a shared policy already: edit its card, policy/README.md"
    assert message in call("save", "policy", "--out", "again", code=1)[1]
    assert not Path("again").exists()


def test_a_folder_with_files_is_not_overwritten(run: Path, call: Call) -> None:
    Path("policy").mkdir()
    Path("policy/mine.txt").write_text("mine")
    assert "policy is not empty: give another --out" in call("save", run, "--out", "policy", code=1)[1]
    assert [path.name for path in Path("policy").iterdir()] == ["mine.txt"]


def test_the_interval_covers_the_mean_in_95_percent() -> None:
    random = np.random.default_rng(0)
    covered = 0
    for _ in range(200):
        interval = mean_interval(random.normal(3.0, 2.0, size=50), random=random, num_resamples=500)
        assert interval is not None
        covered += interval.low <= 3.0 <= interval.high
    assert 0.88 <= covered / 200 <= 0.99
    assert mean_interval([1.0], random=random) is None
