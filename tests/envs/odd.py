"""Environments of the tests' own. Importing this module registers them, as a user's module would."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

KITCHEN = spaces.Dict(
    {
        "achieved_goal": spaces.Dict(
            {"kettle": spaces.Box(-np.inf, np.inf, (7,)), "microwave": spaces.Box(-9, 9, (1,))}
        ),
        "desired_goal": spaces.Dict(
            {"kettle": spaces.Box(-np.inf, np.inf, (7,)), "microwave": spaces.Box(-9, 9, (1,))}
        ),
        "observation": spaces.Box(-np.inf, np.inf, (59,), np.float64),
    }
)
"""The observations of FrankaKitchen, with two of its tasks."""


CHOICES = spaces.Discrete(3, start=5)


class Odd(gymnasium.Env[Any, Any]):
    """Observations are random. The reward is 1 for the first choice or for a positive action; the eighth step succeeds.

    Args:
        observations: the observation space.
        actions: the action space.
    """

    def __init__(
        self,
        observations: spaces.Space[Any] = KITCHEN,
        actions: spaces.Space[Any] = CHOICES,
        render_mode: str | None = None,
    ) -> None:
        self.observation_space, self.action_space, self.steps = observations, actions, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.observation_space.seed(seed)
        self.steps = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        self.steps += 1
        first = action == self.action_space.start if isinstance(self.action_space, spaces.Discrete) else None
        reward = float(np.min(action) > 0) if first is None else float(first)
        return self.observation_space.sample(), reward, False, False, {"success": self.steps >= 8}


current: list[spaces.Space[Any]] = []
"""The observation and action space of Shifting-v0, which a test sets."""


def shifting(**_: Any) -> Odd:
    return Odd(observations=current[0], actions=current[1])


class Growing(Odd):
    """Changes its observation in place, in a Box of integers; it takes actions that are integers or one-sided."""

    def __init__(self, actions: spaces.Space[Any] | None = None, render_mode: str | None = None) -> None:
        super().__init__(spaces.Box(0, 99, (2,), np.int64), actions or spaces.Box(0, 3, (1,), np.int64))
        self.state = np.zeros(2, np.int64)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.state[:] = 0
        return self.state, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        result = super().step(action)
        self.state += 1
        return self.state, *result[1:]


gymnasium.register("Growing-v0", "tests.envs.odd:Growing", max_episode_steps=6)
gymnasium.register("Odd-v0", "tests.envs.odd:Odd", max_episode_steps=10)
gymnasium.register("Shifting-v0", "tests.envs.odd:shifting", max_episode_steps=10)
gymnasium.register("Endless-v0", "tests.envs.odd:Odd")
