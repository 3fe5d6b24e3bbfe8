"""Records Minari data sets from behavior policies.

Episode i uses the seed ``seed + i`` for both the environment and the policy's noise, so a recipe always gives the same
data on the same machine.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

import primal_dt
from envs.behavior.policies import BehaviorPolicy, load_policy
from envs.behavior.recipes import Ingredient
from envs.datasets.minari import RecordedEpisode, write_minari
from envs.errors import DataError
from envs.make import Env, make_raw
from envs.spaces import Space
from envs.tasks import Task
from primal_dt.system.terminal import Counter

__all__ = ["record", "run_episode", "stacked"]

POLICY_STREAM = 1
"""The policy's random stream. The environment uses the seed itself; if both shared one stream, the first actions would
be a function of the first states."""


def run_episode(env: Env, policy: BehaviorPolicy, *, seed: int) -> RecordedEpisode:
    """Run one episode until the environment or its time limit ends it.

    Raises:
        DataError: if an action is not in the environment's action space.
    """
    random = np.random.default_rng([seed, POLICY_STREAM])
    observation, _ = env.reset(seed=seed)
    observations, actions, rewards = [copy.deepcopy(observation)], [], []
    terminated = truncated = False
    while not (terminated or truncated):
        # Copy both: a policy may modify its observation in place, and may return the same array every time.
        action = _as_action(env.action_space, policy(copy.deepcopy(observation), random))
        if not env.action_space.contains(action):
            raise DataError(f"the policy's action {action} is not in the environment's action space {env.action_space}")
        observation, reward, terminated, truncated, _ = env.step(action)
        observations.append(copy.deepcopy(observation))  # the environment may change its array in place
        actions.append(action)
        rewards.append(reward)
    return RecordedEpisode(
        observations=stacked(observations),
        actions=np.stack(actions),
        rewards=np.array(rewards, np.float64),
        terminated=bool(terminated),
        truncated=bool(truncated),
        seed=seed,
    )


def _as_action(space: Space, action: Any) -> Any:
    """A copy of a policy's action in the type of the space.

    Raises:
        DataError: if it cannot be converted.
    """
    try:
        if isinstance(space, spaces.Discrete):
            return np.asarray(action).item()
        return np.array(np.rint(action) if np.issubdtype(space.dtype, np.integer) else action, space.dtype)
    except (ValueError, TypeError) as error:
        raise DataError(f"the policy's action {action!r} is not in the action space {space}: {error}") from error


def stacked(observations: Sequence[Any]) -> Any:
    """Observations one after another, with a leading axis in each part."""
    first = observations[0]
    if isinstance(first, dict):
        return {name: stacked([each[name] for each in observations]) for name in first}
    if isinstance(first, tuple):
        return tuple(stacked(part) for part in zip(*observations, strict=True))
    return np.stack(observations)


def record(
    dataset_id: str,
    recipe: Sequence[Ingredient],
    *,
    task: Task,
    seed: int = 0,
    algorithm: str | None = None,
    replace: bool = False,
) -> Path:
    """Record a new Minari data set with a progress bar, and return its folder.

    Args:
        dataset_id: the data set's name.
        recipe: the policies and their steps, in order.
        task: the task whose environment the policies act in.
        seed: the seed of the first episode.
        algorithm: the algorithm that trained the policies. Default: derived from the recipe (PPO for the package's own
            policies).
        replace: whether to replace an existing data set of that name.

    Raises:
        DataError: if a policy cannot be loaded or acts out of bounds, or if the name cannot be used.
    """
    # A data set may be shared: it names the file of a policy, but not the folder.
    shown = [Ingredient(Path(part.policy).name, part.steps) if _is_file(part.policy) else part for part in recipe]
    return write_minari(
        dataset_id,
        _episodes(recipe, task=task, seed=seed, label=dataset_id),
        task=task,
        algorithm=algorithm or _algorithm(recipe),
        description=f"{task.env_id}: " + ", ".join(f"{part.steps:,} steps of {part.policy}" for part in shown),
        metadata={
            "recipe": [asdict(part) for part in shown],
            "seed": seed,
            "recorded_by": f"primal-dt {primal_dt.__version__}",
        },
        replace=replace,
    )


def _algorithm(recipe: Sequence[Ingredient]) -> str:
    names = {part.policy.rpartition("/")[2] for part in recipe}
    if any(":" in name or _is_file(name) for name in names):
        return "unknown"
    return "uniform actions" if names == {"random"} else "PPO"


def _is_file(policy: str) -> bool:
    return policy.endswith((".hdf5", ".h5"))


def _episodes(recipe: Sequence[Ingredient], *, task: Task, seed: int, label: str) -> Iterator[RecordedEpisode]:
    policies = [load_policy(part.policy, task) for part in recipe]
    env = make_raw(task)
    try:
        with Counter(f"recording {label}", total=sum(part.steps for part in recipe), unit="steps") as progress:
            for part, policy in zip(recipe, policies, strict=True):
                steps = 0
                while steps < part.steps:
                    episode = run_episode(env, policy, seed=seed)
                    steps, seed = steps + len(episode.rewards), seed + 1
                    progress.update(len(episode.rewards))
                    yield episode
    finally:
        env.close()
