"""Behavior policies: small networks in numpy, the uniform policy, and user-defined policies as ``module:name``.

Axes: E environments, S state, A action.
"""

import inspect
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol, Self, cast

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from envs.errors import DataError
from envs.spaces import ActionBounds
from envs.tasks import Task
from primal_dt.system.files import atomic_write
from primal_dt.system.modules import import_from_here

__all__ = [
    "BatchedPolicy",
    "BehaviorPolicy",
    "GaussianPolicy",
    "UniformPolicy",
    "load_callable",
    "load_policy",
    "read_card",
]

POLICIES = Path(__file__).parent / "weights"
"""The package's weights and model cards, in one folder per environment."""

ACTIVATIONS: dict[str, Callable[[NDArray[np.float32]], NDArray[np.float32]]] = {
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0),
}
OBSERVATION_CLIP = 10.0
"""The limit that standardized observations are clipped to, as in training."""


class BehaviorPolicy(Protocol):
    """Interface of a behavior policy: any callable with this signature can be recorded."""

    def __call__(self, observation: NDArray[np.floating], random: np.random.Generator, /) -> NDArray[np.floating]:
        """Return the action (A,) for an observation (S,). All randomness must come from ``random``."""


@dataclass(frozen=True)
class UniformPolicy:
    """Actions drawn uniformly: within the bounds, standard normal numbers where there are none, or choices."""

    actions: ActionBounds

    def __call__(self, observation: NDArray[np.floating], random: np.random.Generator, /) -> NDArray[np.floating]:
        if self.actions.categories:
            return (random.integers(self.actions.categories) + self.actions.start).astype(np.int64)
        low, high = np.array(self.actions.low), np.array(self.actions.high)
        if np.isfinite(low).all() and np.isfinite(high).all():
            return random.uniform(low, high).astype(np.float32)
        return np.clip(random.standard_normal(len(low)), low, high).astype(np.float32)


@dataclass(frozen=True)
class GaussianPolicy:
    """``a = clip(mlp((s - mean) / std) + exp(log_std) * noise, low, high)``, with two hidden layers.

    The policy is saved as an ``.npz`` file of these arrays: numbers and one string, no executable content.
    """

    state_mean: NDArray[np.float32]
    """Mean of the states, (S,)."""
    state_std: NDArray[np.float32]
    """Standard deviation of the states, (S,)."""
    weight1: NDArray[np.float32]
    """Weights of the first hidden layer, (hidden, S)."""
    bias1: NDArray[np.float32]
    weight2: NDArray[np.float32]
    """Weights of the second hidden layer, (hidden, hidden)."""
    bias2: NDArray[np.float32]
    weight3: NDArray[np.float32]
    """Weights of the output layer, (A, hidden)."""
    bias3: NDArray[np.float32]
    log_std: NDArray[np.float32]
    """Log standard deviation of the action noise, (A,)."""
    low: NDArray[np.float32]
    """Lower bounds of actions, (A,)."""
    high: NDArray[np.float32]
    """Upper bounds of actions, (A,)."""
    activation: str
    """Activation function: ``tanh`` or ``relu``."""
    deterministic: bool = False
    """Whether to omit the noise. This field is not saved."""

    def __call__(self, observation: NDArray[np.floating], random: np.random.Generator, /) -> NDArray[np.floating]:
        activate = ACTIVATIONS[self.activation]
        x = ((observation - self.state_mean) / self.state_std).astype(np.float32)
        x = np.clip(x, -OBSERVATION_CLIP, OBSERVATION_CLIP)
        x = activate(self.weight1 @ x + self.bias1)
        x = activate(self.weight2 @ x + self.bias2)
        action = self.weight3 @ x + self.bias3
        if not self.deterministic:
            action += np.exp(self.log_std) * random.standard_normal(len(action), np.float32)
        return np.clip(action, self.low, self.high)

    def save(self, path: Path) -> None:
        """Save the policy atomically."""
        arrays = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "deterministic"}
        with atomic_write(path) as file:
            np.savez(file, **arrays)

    @classmethod
    def load(cls, path: Path, *, deterministic: bool = False) -> Self:
        """Load a policy. A file that contains pickled objects is refused."""
        with np.load(path, allow_pickle=False) as arrays:
            values = {name: arrays[name] for name in arrays}
        return cls(**values | {"activation": str(values["activation"])}, deterministic=deterministic)


class BatchedPolicy:
    """Adapts a behavior policy to the batched interface of rollouts. The target is ignored.

    The n-th episode to start has its own random stream, seeded with (seed, n). The episodes therefore do not depend on
    the number of environments that run at the same time.

    Args:
        policy: the behavior policy, which acts in one environment.
        seed: the seed of the random streams.
        env: the environment whose spaces the policy knows. If it is given, the flattened observations of rollouts are
            converted to it, and its choices to entries from 0 on.
    """

    def __init__(self, policy: BehaviorPolicy, seed: int, env: gymnasium.Env[Any, Any] | None = None) -> None:
        self._policy = policy
        self._observations = None if env is None else env.observation_space
        self._start = None if env is None else getattr(env.action_space, "start", None)
        self._seed = seed
        self._begun = 0
        self._randoms: list[np.random.Generator] = []

    def reset(self, targets: NDArray[np.float64], /) -> None:
        """Start an episode in each of E environments."""
        numbers = range(self._begun, self._begun + len(targets))
        self._randoms = [np.random.default_rng((self._seed, number)) for number in numbers]
        self._begun += len(targets)

    def act(self, observations: NDArray[np.floating], /) -> NDArray[np.floating]:
        """Map observations (E, S) to actions (E, A)."""
        acted = [self._act(*each) for each in zip(observations, self._randoms, strict=True)]
        return np.stack(acted)

    def _act(self, observation: NDArray[np.floating], random: np.random.Generator) -> NDArray[np.floating]:
        if not isinstance(self._observations, spaces.Box | None):
            observation = spaces.unflatten(self._observations, observation)
        action = self._policy(observation, random)
        return action if self._start is None else np.reshape(action - self._start, -1)

    def observe(self, rewards: NDArray[np.float64], /) -> None:
        """Ignore the rewards (E,)."""

    def keep(self, rows: NDArray[np.bool_], /) -> None:
        """Continue only with the environments that the mask ``rows`` (E,) selects."""
        self._randoms = [random for random, selected in zip(self._randoms, rows, strict=True) if selected]


def read_card(environment: str) -> dict[str, Any]:
    """Read the model card of an environment's policies: their training and their returns."""
    return json.loads((POLICIES / environment / "card.json").read_text())


def load_policy(name: str, task: Task) -> BehaviorPolicy:
    """Load a policy by its name.

    Args:
        name: ``random``, a built-in policy such as ``hopper/medium``, the path of a D4RL file that carries its policy
            (``*.hdf5``), or a user-defined policy as ``module:name``.
        task: the task whose environment the policy will act in.

    Raises:
        DataError: if there is no such policy, or if it was trained for another environment.
    """
    environment = task.environment
    if name.endswith((".hdf5", ".h5")):
        from envs.behavior.d4rl_policies import open_d4rl_policy  # imports h5py, which the others do not need

        widths = {"state_width": environment.state_width, "action_width": environment.action_width}
        return open_d4rl_policy(Path(name).expanduser(), **widths)
    if ":" in name:
        return load_callable(name)
    if name in ("random", f"{environment.name}/random"):
        return UniformPolicy(environment.actions)
    path = POLICIES / f"{name}.npz"
    if re.fullmatch(r"\w+/\w+", name) is None or not path.is_file():
        known = sorted(f"{file.parent.name}/{file.stem}" for file in POLICIES.glob("*/*.npz"))
        raise DataError(
            f"there is no policy {name!r}: it must be random, module:name, a D4RL file, or one of {', '.join(known)}"
        )
    if path.parent.name != environment.name:
        raise DataError(f"the policy {name!r} was not trained for {task.env_id}")
    return GaussianPolicy.load(path)


def load_callable(name: str) -> BehaviorPolicy:
    """Load a user-defined policy, given as ``module:name``. This imports the module and so executes its code.

    Raises:
        DataError: if the module or the name does not exist, or if the object is not callable.
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise DataError(f"a policy must be given as module:name, such as my_policies:walk, not {name!r}")
    try:
        found = import_from_here(module)
    except ModuleNotFoundError as error:
        raise DataError(
            f"there is no module {error.name!r} for the policy {name!r}: run from the module's folder, or install it"
        ) from error
    except TypeError as error:  # a relative module name
        raise DataError(f"the module of the policy {name!r} cannot be imported: {error}") from error
    policy = getattr(found, attribute, None)
    if policy is None:
        raise DataError(f"the module {module!r} has no attribute {attribute!r}")
    try:
        inspect.signature(policy).bind("observation", "random")
    except TypeError as error:  # not callable, or with other arguments
        raise DataError(f"{name!r} must be a function of (observation, random): {error}") from error
    except ValueError:  # a function in C that does not say what it takes
        pass
    return cast(BehaviorPolicy, policy)
