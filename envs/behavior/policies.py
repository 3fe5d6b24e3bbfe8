"""Policies that make data: small networks in numpy, the uniform policy, and anybody's own by ``module:name``.

Axes: S state, A action.
"""

import importlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from envs.errors import DataError
from envs.tasks import ActionBox, Task
from primal_dt.system.files import atomic_write

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
"""The weights that come with the package, a folder for each environment, and how they were made."""

ACTIVATIONS: dict[str, Callable[[NDArray[np.float32]], NDArray[np.float32]]] = {
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0),
}
OBSERVATION_CLIP = 10.0
"""Standardized observations are kept within it, as they were in training."""


class BehaviorPolicy(Protocol):
    """Anything that can be called like this can be recorded."""

    def __call__(self, observation: NDArray[np.floating], random: np.random.Generator, /) -> NDArray[np.floating]:
        """The action (A,) for an observation (S,). All randomness comes from ``random``."""


@dataclass(frozen=True)
class UniformPolicy:
    """Any action of the box, all being as likely."""

    box: ActionBox
    width: int
    """A."""

    def __call__(self, observation: NDArray[np.floating], random: np.random.Generator, /) -> NDArray[np.floating]:
        return random.uniform(self.box.low, self.box.high, self.width).astype(np.float32)


@dataclass(frozen=True)
class GaussianPolicy:
    """``a = clip(mlp((s - mean) / std) + exp(log_std) * noise, low, high)``, with two hidden layers.

    Its file is an ``.npz`` of these arrays: numbers and a word, nothing that could be executed.
    """

    state_mean: NDArray[np.float32]
    """(S,)."""
    state_std: NDArray[np.float32]
    """(S,)."""
    weight1: NDArray[np.float32]
    """(hidden, S)."""
    bias1: NDArray[np.float32]
    weight2: NDArray[np.float32]
    """(hidden, hidden)."""
    bias2: NDArray[np.float32]
    weight3: NDArray[np.float32]
    """(A, hidden)."""
    bias3: NDArray[np.float32]
    log_std: NDArray[np.float32]
    """(A,)."""
    low: NDArray[np.float32]
    """(A,), the least action."""
    high: NDArray[np.float32]
    """(A,), the most."""
    activation: str
    """``tanh`` or ``relu``."""
    deterministic: bool = False
    """Whether to leave the noise out. Not in the file."""

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
        """Write it atomically."""
        arrays = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "deterministic"}
        with atomic_write(path) as file:
            np.savez(file, **arrays)

    @classmethod
    def load(cls, path: Path, *, deterministic: bool = False) -> Self:
        """Read it. Numbers only: a file with objects in it is refused."""
        with np.load(path, allow_pickle=False) as arrays:
            values = {name: arrays[name] for name in arrays}
        return cls(**values | {"activation": str(values["activation"])}, deterministic=deterministic)


class BatchedPolicy:
    """A behavior policy as rollouts take it: environment by environment, whatever the target.

    The n-th episode that is begun has random numbers of its own, from (seed, n): it does not depend on how many run at
    a time.

    Args:
        policy: acts in one environment.
        seed: of its random numbers.
    """

    def __init__(self, policy: BehaviorPolicy, seed: int) -> None:
        self._policy = policy
        self._seed = seed
        self._begun = 0
        self._randoms: list[np.random.Generator] = []

    def reset(self, targets: NDArray[np.float64], /) -> None:
        """Begin an episode in each of E environments."""
        numbers = range(self._begun, self._begun + len(targets))
        self._randoms = [np.random.default_rng((self._seed, number)) for number in numbers]
        self._begun += len(targets)

    def act(self, observations: NDArray[np.floating], /) -> NDArray[np.floating]:
        """(E, S) -> (E, A)."""
        return np.stack([self._policy(*each) for each in zip(observations, self._randoms, strict=True)])

    def observe(self, rewards: NDArray[np.float64], /) -> None:
        """It does not care."""

    def keep(self, rows: NDArray[np.bool_], /) -> None:
        """Go on with some of the environments."""
        self._randoms = [random for random, kept in zip(self._randoms, rows, strict=True) if kept]


def read_card(environment: str) -> dict[str, Any]:
    """The model card of an environment's policies: how they were trained, and what they reach."""
    return json.loads((POLICIES / environment / "card.json").read_text())


def load_policy(name: str, task: Task) -> BehaviorPolicy:
    """A policy by its name.

    Args:
        name: ``random``; a built-in one such as ``hopper/medium``; or somebody's own as ``module:name``.
        task: where it is to act.

    Raises:
        DataError: if there is none of that name, or it is made for another environment.
    """
    if ":" in name:
        return load_callable(name)
    environment = task.environment
    if name in ("random", f"{environment.name}/random"):
        return UniformPolicy(environment.action_box, environment.action_width)
    path = POLICIES / f"{name}.npz"
    if re.fullmatch(r"\w+/\w+", name) is None or not path.is_file():
        known = sorted(f"{file.parent.name}/{file.stem}" for file in POLICIES.glob("*/*.npz"))
        raise DataError(f"there is no policy {name!r}: it must be random, module:name, or one of {', '.join(known)}")
    if path.parent.name != environment.name:
        raise DataError(f"the policy {name!r} is not made for {task.env_id}")
    return GaussianPolicy.load(path)


def load_callable(name: str) -> BehaviorPolicy:
    """Somebody's policy, as ``module:name``. This runs their module, as importing it would.

    Raises:
        DataError: if there is no such thing, or it cannot be called.
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise DataError(f"a policy is given as module:name, such as my_policies:walk, not {name!r}")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise DataError(
            f"there is no module {error.name!r} for the policy {name!r}: run from its folder, or install it"
        ) from error
    except TypeError as error:  # a relative name
        raise DataError(f"the module of the policy {name!r} cannot be imported: {error}") from error
    policy = getattr(found, attribute, None)
    if policy is None:
        raise DataError(f"the module {module!r} has no {attribute!r}")
    if not callable(policy):
        raise DataError(f"{name!r} must be a function of (observation, random), not {policy!r}")
    return policy
