"""Recording: seeded, complete, and open to user-defined policies."""

from pathlib import Path

import gymnasium
import minari
import numpy as np
import pytest

from envs.behavior.policies import UniformPolicy
from envs.behavior.recipes import STANDARD_STEPS, Ingredient, builtin_recipe
from envs.behavior.record import record, run_episode
from envs.datasets.names import KNOWN_NAMES, builtin_name
from envs.errors import DataError
from envs.make import make_environment
from envs.tasks import task_of
from tests.envs.files import HOPPER_ACTIONS, read_minari

HOPPER = task_of("Hopper-v5")
UNIFORM = UniformPolicy(HOPPER_ACTIONS)


def test_an_episode_replays_in_the_environment() -> None:
    episode = run_episode(make_environment(HOPPER), UNIFORM, seed=5)
    env = make_environment(HOPPER)
    observation, _ = env.reset(seed=5)
    for step, action in enumerate(episode.actions):
        np.testing.assert_array_equal(episode.observations[step], observation)
        observation, reward, terminated, truncated, _ = env.step(action)
        assert reward == episode.rewards[step]
        assert (terminated or truncated) == (step == len(episode.actions) - 1)
    np.testing.assert_array_equal(episode.observations[-1], observation)
    assert (terminated, truncated) == (episode.terminated, episode.truncated)


def test_policy_noise_is_independent_of_the_reset() -> None:
    env = make_environment(HOPPER, max_episode_steps=1)
    episodes = [run_episode(env, UNIFORM, seed=seed) for seed in range(200)]
    states = np.stack([episode.observations[0] for episode in episodes])
    actions = np.stack([episode.actions[0] for episode in episodes])
    correlation = np.corrcoef(states.T, actions.T)[:11, 11:]
    assert np.abs(correlation).max() < 0.35  # five standard deviations


def test_a_policy_may_work_in_place() -> None:
    buffer = np.zeros(3, np.float32)

    def reuse(observation: np.ndarray, random: np.random.Generator) -> np.ndarray:
        buffer[:] = random.uniform(-1, 1, 3)
        observation[:] = 0
        return buffer

    episode = run_episode(make_environment(HOPPER), reuse, seed=0)
    assert len(np.unique(episode.actions[:, 0])) == len(episode.actions)
    assert np.abs(episode.observations).max() > 0.1


def test_episodes_are_seeded_one_by_one() -> None:
    first, again, later = (
        read_minari(record(f"test/hopper/{name}-v0", [Ingredient("random", 60)], task=HOPPER, seed=seed))
        for name, seed in (("first", 3), ("again", 3), ("later", 4))
    )
    for one, two in zip(first, again, strict=True):
        np.testing.assert_array_equal(one.observations, two.observations)
        np.testing.assert_array_equal(one.actions, two.actions)
    np.testing.assert_array_equal(later[0].observations, first[1].observations)  # both have seed 4
    assert not np.array_equal(first[0].observations[0], first[1].observations[0])


def test_a_recipe_is_followed_in_order() -> None:
    recipe = [Ingredient("random", 50), Ingredient("hopper/replay0", 100)]
    episodes = read_minari(record("test/hopper/mixed-v0", recipe, task=HOPPER, seed=0))
    assert all(episode.is_complete for episode in episodes)
    env, lengths = make_environment(HOPPER), [len(episode.rewards) for episode in episodes]
    first = int(np.searchsorted(np.cumsum(lengths), 50)) + 1
    assert sum(lengths[:first]) - lengths[first - 1] < 50 <= sum(lengths[:first])
    assert sum(lengths[first:]) - lengths[-1] < 100 <= sum(lengths[first:])
    for number in range(first):
        np.testing.assert_array_equal(episodes[number].actions, run_episode(env, UNIFORM, seed=number).actions)


@pytest.mark.parametrize(("policy", "algorithm"), [("random", "uniform actions"), ("hopper/replay0", "PPO")])
def test_a_recording_names_its_recipe_and_algorithm(policy: str, algorithm: str) -> None:
    record("test/hopper/mixed-v0", [Ingredient("random", 5), Ingredient(policy, 10)], task=HOPPER)
    metadata = minari.load_dataset("test/hopper/mixed-v0").storage.metadata
    assert metadata["recipe"] == [{"policy": "random", "steps": 5}, {"policy": policy, "steps": 10}]
    assert metadata["ref_max_score"] == 3234.3
    assert metadata["algorithm_name"] == algorithm


def test_built_in_recipes_have_the_standard_steps() -> None:
    def recipe(tier: str) -> dict[str, int]:
        return {part.policy: part.steps for part in builtin_recipe(KNOWN_NAMES[builtin_name("walker2d", tier)])}

    assert recipe("random") == {"walker2d/random": STANDARD_STEPS}
    assert recipe("medium") == {"walker2d/medium": STANDARD_STEPS}
    assert recipe("medium-expert") == {"walker2d/medium": STANDARD_STEPS, "walker2d/expert": STANDARD_STEPS}
    replay = recipe("medium-replay")
    assert len(replay) >= 5
    assert STANDARD_STEPS <= sum(replay.values()) < STANDARD_STEPS + len(replay)


def test_an_action_outside_the_box_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"action \[2\. 2\. 2\.\] is not in the environment's action space Box"):
        run_episode(make_environment(HOPPER), lambda observation, random: np.full(3, 2.0), seed=0)


def test_an_unavailable_version_is_reported() -> None:
    with pytest.raises(DataError, match=r"the environment Hopper-v2 cannot be created: .*"):
        make_environment(task_of("Hopper-v2"))


@pytest.mark.parametrize("env_id", ["Hopper-v4", "HalfCheetah-v5", "HalfCheetah-v4", "Walker2d-v5", "Walker2d-v4"])
def test_environments_match_the_table(env_id: str, capfd: pytest.CaptureFixture[str]) -> None:
    task = task_of(env_id)
    env, expected = make_environment(task), task.environment
    assert env.observation_space.shape == (expected.state_width,)
    assert isinstance(box := env.action_space, gymnasium.spaces.Box)
    assert tuple(box.low) == expected.actions.low
    assert tuple(box.high) == expected.actions.high
    assert env.spec is not None
    assert env.spec.max_episode_steps == 1000
    assert capfd.readouterr() == ("", "")  # MuJoCo prints nothing
    assert not Path("MUJOCO_LOG.TXT").exists()
