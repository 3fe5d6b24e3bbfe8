"""Recording: seeded, complete, and open to anybody's policy."""

from pathlib import Path

import minari
import numpy as np
import pytest

from envs.behavior.policies import UniformPolicy
from envs.behavior.recipes import STANDARD_STEPS, Ingredient, builtin_recipe
from envs.behavior.record import record, run_episode
from envs.datasets.minari import open_minari
from envs.datasets.names import DatasetName
from envs.errors import DataError
from envs.make import make_environment
from envs.tasks import ActionBox, task_of
from primal_dt.data.trajectories import Trajectory

HOPPER = task_of("Hopper-v5")
UNIFORM = UniformPolicy(ActionBox(-1.0, 1.0), 3)


def read(folder: Path) -> list[Trajectory]:
    return list(open_minari(folder).episodes(ActionBox(-1.0, 1.0)))


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


def test_what_a_policy_draws_has_nothing_to_do_with_how_the_episode_begins() -> None:
    env = make_environment(HOPPER)
    first = [run_episode(env, UNIFORM, seed=seed) for seed in range(200)]
    states = np.stack([episode.observations[0] for episode in first])
    actions = np.stack([episode.actions[0] for episode in first])
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


def test_the_seed_decides_and_each_episode_has_its_own() -> None:
    recipe = [Ingredient("random", 60)]
    first = read(record("test/hopper/a-v0", recipe, task=HOPPER, seed=3))
    again = read(record("test/hopper/b-v0", recipe, task=HOPPER, seed=3))
    later = read(record("test/hopper/c-v0", recipe, task=HOPPER, seed=4))
    for one, two in zip(first, again, strict=True):
        np.testing.assert_array_equal(one.observations, two.observations)
        np.testing.assert_array_equal(one.actions, two.actions)
    np.testing.assert_array_equal(later[0].observations, first[1].observations)  # seed 4 is the second of seed 3
    assert not np.array_equal(first[0].observations[0], first[1].observations[0])


def test_a_recipe_is_followed_in_order_without_cutting_episodes() -> None:
    folder = record(
        "test/hopper/mixed-v0", [Ingredient("random", 50), Ingredient("hopper/replay0", 100)], task=HOPPER, seed=0
    )
    episodes = read(folder)
    assert all(episode.is_complete for episode in episodes)
    env, lengths = make_environment(HOPPER), [len(episode.rewards) for episode in episodes]
    first = int(np.searchsorted(np.cumsum(lengths), 50)) + 1
    assert sum(lengths[:first]) - lengths[first - 1] < 50 <= sum(lengths[:first])
    assert sum(lengths[first:]) - lengths[-1] < 100 <= sum(lengths[first:])
    for number in range(first):
        np.testing.assert_array_equal(episodes[number].actions, run_episode(env, UNIFORM, seed=number).actions)
    metadata = minari.load_dataset("test/hopper/mixed-v0").storage.metadata
    assert metadata["recipe"] == [{"policy": "random", "steps": 50}, {"policy": "hopper/replay0", "steps": 100}]
    assert metadata["ref_max_score"] == 3234.3
    assert metadata["algorithm_name"] == "PPO"
    record("test/hopper/uniform-v0", [Ingredient("random", 5)], task=HOPPER)
    assert minari.load_dataset("test/hopper/uniform-v0").storage.metadata["algorithm_name"] == "uniform actions"


def test_built_in_recipes_have_the_standard_number_of_steps() -> None:
    def recipe(tier: str) -> dict[str, int]:
        return {part.policy: part.steps for part in builtin_recipe(DatasetName("primal", "walker2d", tier))}

    assert recipe("random") == {"walker2d/random": STANDARD_STEPS}
    assert recipe("medium") == {"walker2d/medium": STANDARD_STEPS}
    assert recipe("medium-expert") == {"walker2d/medium": STANDARD_STEPS, "walker2d/expert": STANDARD_STEPS}
    replay = recipe("medium-replay")
    assert len(replay) >= 5
    assert STANDARD_STEPS <= sum(replay.values()) < STANDARD_STEPS + len(replay)


def test_an_action_out_of_the_box_ends_the_recording() -> None:
    def wild(observation: np.ndarray, random: np.random.Generator) -> np.ndarray:
        return np.full(3, 2.0)

    with pytest.raises(ValueError, match=r"the policy's action \[2\. 2\. 2\.\] is not in the environment's Box"):
        run_episode(make_environment(HOPPER), wild, seed=0)


def test_an_environment_that_cannot_be_made_is_told() -> None:
    with pytest.raises(DataError, match=r"the environment Hopper-v2 cannot be made: .*Hopper-v5 and Hopper-v4 can"):
        make_environment(task_of("Hopper-v2"))


@pytest.mark.parametrize("env_id", ["Hopper-v4", "HalfCheetah-v5", "HalfCheetah-v4", "Walker2d-v5", "Walker2d-v4"])
def test_environments_are_as_the_table_says(env_id: str, capfd: pytest.CaptureFixture[str]) -> None:
    task = task_of(env_id)
    env = make_environment(task)
    box = env.action_space
    assert env.observation_space.shape == (task.environment.state_width,)
    assert (box.low.min(), box.low.max()) == (task.environment.action_box.low,) * 2  # type: ignore[attr-defined]
    assert (box.high.min(), box.high.max()) == (task.environment.action_box.high,) * 2  # type: ignore[attr-defined]
    assert env.spec is not None
    assert env.spec.max_episode_steps == task.environment.episode_limit
    assert capfd.readouterr() == ("", "")  # MuJoCo keeps quiet
    assert not Path("MUJOCO_LOG.TXT").exists()
