"""Behaviour policies -> Minari data sets.

Episode i is seeded with ``seed + i``, the environment and the policy's noise alike, so that a recipe always gives the
same data on the same machine.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

import primal_dt
from envs.behaviour import BehaviourPolicy, load_policy, read_card
from envs.minari_data import RecordedEpisode, write_minari
from envs.mujoco import Env, make_environment
from envs.tasks import DatasetName, Task

__all__ = ["Ingredient", "builtin_recipe", "record", "run_episode"]

STANDARD_STEPS = 100_000
"""Of each tier; medium-expert has as many of either."""


@dataclass(frozen=True)
class Ingredient:
    """A policy, and how many steps of it."""

    policy: str
    """As :func:`envs.behaviour.load_policy` takes it."""
    steps: int
    """At least so many: the last episode is not cut off."""


def builtin_recipe(name: DatasetName, steps: int = STANDARD_STEPS) -> list[Ingredient]:
    """What a built-in data set is made of."""
    if name.tier == "medium-expert":
        return [Ingredient(f"{name.environment}/{tier}", steps) for tier in ("medium", "expert")]
    if name.tier == "medium-replay":
        snapshots = [snapshot["policy"] for snapshot in read_card(name.environment)["replay"]]
        return [Ingredient(policy, steps // len(snapshots)) for policy in snapshots]
    return [Ingredient(f"{name.environment}/{name.tier}", steps)]


def run_episode(env: Env, policy: BehaviourPolicy, *, seed: int) -> RecordedEpisode:
    """One episode, until the environment or its time limit ends it."""
    random = np.random.default_rng(seed)
    observation, _ = env.reset(seed=seed)
    observations, actions, rewards = [observation], [], []
    terminated = truncated = False
    while not (terminated or truncated):
        action = np.asarray(policy(observation, random), np.float32)
        if not env.action_space.contains(action):
            raise ValueError(f"the policy's action {action} is not in the environment's {env.action_space}")
        observation, reward, terminated, truncated, _ = env.step(action)
        observations.append(observation)
        actions.append(action)
        rewards.append(reward)
    return RecordedEpisode(
        observations=np.stack(observations),
        actions=np.stack(actions),
        rewards=np.array(rewards, np.float64),
        terminated=bool(terminated),
        truncated=bool(truncated),
        seed=seed,
    )


def record(
    dataset_id: str,
    recipe: Sequence[Ingredient],
    *,
    task: Task,
    seed: int = 0,
    algorithm: str = "PPO",
    replace: bool = False,
) -> Path:
    """Record a new Minari data set, with a progress bar, and return its folder.

    Args:
        dataset_id: its name.
        recipe: what to record, in order.
        task: where.
        seed: of the first episode.
        algorithm: what made the policies.
        replace: whether it may take the place of a data set of that name.
    """
    return write_minari(
        dataset_id,
        _episodes(recipe, task=task, seed=seed, label=dataset_id),
        task=task,
        algorithm=algorithm,
        description=f"{task.env_id}: " + ", ".join(f"{part.steps:,} steps of {part.policy}" for part in recipe),
        facts={
            "recipe": [asdict(part) for part in recipe],
            "seed": seed,
            "recorded_by": f"primal-dt {primal_dt.__version__}",
        },
        replace=replace,
    )


def _episodes(recipe: Sequence[Ingredient], *, task: Task, seed: int, label: str) -> Iterator[RecordedEpisode]:
    policies = [load_policy(part.policy, task) for part in recipe]
    env = make_environment(task)
    try:
        with tqdm(total=sum(part.steps for part in recipe), unit=" steps", desc=f"recording {label}") as progress:
            for part, policy in zip(recipe, policies, strict=True):
                steps = 0
                while steps < part.steps:
                    episode = run_episode(env, policy, seed=seed)
                    steps, seed = steps + len(episode.rewards), seed + 1
                    progress.update(len(episode.rewards))
                    yield episode
    finally:
        env.close()
