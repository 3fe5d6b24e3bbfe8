"""The trained policies that come with the package."""

import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from envs.make import make_environment
from envs.tasks import task_of
from primal_dt.evaluation.rollout import Episode, rollout
from primal_dt.hub.card import Card, write_card
from primal_dt.hub.results import PolicyResult
from primal_dt.hub.sources import PRETRAINED_FOLDER, find_policy, load_policy, pretrained_names
from primal_dt.training.checkpoint import load_checkpoint
from primal_dt.training.policy_folder import read_settings

ROOT = Path(__file__).parent.parent
NAMES = ("halfcheetah", "hopper", "walker2d")
EPISODES = 8


def test_each_environment_has_a_pretrained_policy() -> None:
    assert tuple(pretrained_names()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_pretrained_weights_are_small(name: str) -> None:
    assert (PRETRAINED_FOLDER / name / "model.safetensors").stat().st_size < 1e6


def without_results(card: str) -> str:
    """A card without what only its evaluation says."""
    card = re.sub(r"^(      value:|\* Evaluated) .*\n", "", card, flags=re.MULTILINE)
    return re.sub(r"^## Scores\n.*?(?=^## )", "", card, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", NAMES)
def test_the_cards_are_what_the_program_writes(name: str) -> None:
    """Apart from the results. The card's table of them says whether the policy follows its target."""
    folder = PRETRAINED_FOLDER / name
    card, checkpoint = (folder / "README.md").read_text(), load_checkpoint(folder)
    rows = re.findall(r"^\| (\d+)\*? .*?\|\s+(\d+) ± ", card, re.MULTILINE)
    result = PolicyResult(
        folder=folder,
        mode="window",
        environment=checkpoint.task.environment_text,
        reference=checkpoint.task.reference,
        headline=checkpoint.task.headline,
        episodes=tuple(Episode(float(target), 0, float(achieved), 1) for target, achieved in rows),
        notes=(),
        num_policies=1,
        seeds=None,
        provenance=read_settings(folder)["provenance"],
    )
    written = write_card(
        Card(
            source=f"pretrained:{name}",
            checkpoint=checkpoint,
            results=[result],
            provenance=result.provenance,
            start=None,
            plots=(),
            has_video=False,
        )
    )
    assert without_results(card) == without_results(written)


def test_the_readme_has_the_command_of_the_cards() -> None:
    readme = (ROOT / "README.md").read_text()
    for name in NAMES:
        command = "train.py --dataset primal/hopper/medium-expert-v0 --width 64 --threads 1"
        assert f"They were trained by `python {command}`" in readme
        command = command.replace("hopper", name)
        assert f"* Trained by `{command} --out" in (PRETRAINED_FOLDER / name / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_pretrained_policies_reach_the_best_of_the_data(name: str) -> None:
    """In a quarter of the episodes at least: some fall, and on other processors they are other episodes."""
    task = load_checkpoint(find_policy(f"pretrained:{name}")).task
    assert task.data_returns is not None
    environment = partial(make_environment, task_of(f"{task.env_id}"))
    policy = load_policy(f"pretrained:{name}")
    episodes = rollout(
        policy, environment, targets=[task.headline] * EPISODES, seeds=range(EPISODES), num_environments=EPISODES
    )
    assert np.quantile([episode.total_reward for episode in episodes], 0.75) > 0.9 * task.data_returns[-1]
