"""The trained policies that come with the package."""

from functools import partial

import numpy as np
import pytest

from envs.make import make_environment
from envs.tasks import task_of
from primal_dt.evaluation.rollout import rollout
from primal_dt.hub.sources import PRETRAINED_FOLDER, find_policy, load_policy, pretrained_names
from primal_dt.training.checkpoint import load_checkpoint

NAMES = ("halfcheetah", "hopper", "walker2d")
EPISODES = 8


def test_each_environment_has_a_pretrained_policy() -> None:
    assert tuple(pretrained_names()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_pretrained_weights_are_small(name: str) -> None:
    assert (PRETRAINED_FOLDER / name / "model.safetensors").stat().st_size < 1e6


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
