"""The policies that D4RL's files carry: ``metadata/policy`` of its v1 and v2 data sets.

Recording such a policy in today's environment gives data with the same behavior and today's physics. Reading takes only
numbers from a file and executes nothing.

Axes: N transitions, S state, A action.
"""

from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
from numpy.typing import NDArray

from envs.datasets.checks import number_array, open_hdf5
from envs.errors import DataError

__all__ = ["D4rlPolicy", "open_d4rl_policy"]

Floats = NDArray[np.float32]
HIDDEN = ("fc0", "fc1")
LOG_STD_RANGE = (-20.0, 2.0)
"""Range of the log standard deviation of a ``tanh_gaussian`` policy, as in the code that trained them (rlkit)."""


@dataclass(frozen=True)
class D4rlPolicy:
    """An MLP with two hidden layers, whose output is the mean of a normal distribution.

    ``tanh_gaussian``: ``tanh(mean + std * noise)``, where the standard deviation depends on the state. ``gaussian``:
    ``clip(mean + std * noise, -1, 1)`` with a constant standard deviation.
    """

    layers: tuple[tuple[Floats, Floats], ...]
    """Weights (out, in) and biases (out,) of the hidden layers and of the mean."""
    log_std: tuple[Floats, Floats] | Floats
    """Weights and biases of the log standard deviation, or its constant value (A,)."""
    activation: str
    """``relu`` or ``tanh``."""
    distribution: str
    """``tanh_gaussian`` or ``gaussian``."""

    def __call__(self, observation: NDArray[np.floating], random: np.random.Generator, /) -> NDArray[np.floating]:
        mean, log_std = self.distribution_at(observation[None].astype(np.float64))
        action = mean[0] + np.exp(log_std[0]) * random.standard_normal(mean.shape[1])
        bounded = np.tanh(action) if self.distribution == "tanh_gaussian" else np.clip(action, -1, 1)
        return bounded.astype(np.float32)

    def distribution_at(self, states: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Mean and log standard deviation, (N, A) each, at states (N, S)."""
        x = states
        *hidden, last = self.layers
        for weight, bias in hidden:
            x = x @ weight.T + bias
            x = np.maximum(x, 0) if self.activation == "relu" else np.tanh(x)
        mean = x @ last[0].T + last[1]
        if not isinstance(self.log_std, tuple):
            return mean, np.broadcast_to(self.log_std.astype(np.float64), mean.shape)
        return mean, np.clip(x @ self.log_std[0].T + self.log_std[1], *LOG_STD_RANGE)

    def log_probabilities(self, states: NDArray[np.float64], actions: NDArray[np.float64]) -> NDArray[np.float64]:
        """Log-density of actions (N, A) at states (N, S), as D4RL's ``infos/action_log_probs`` has it: (N,).

        Only for ``tanh_gaussian``.
        """
        mean, log_std = self.distribution_at(states)
        before = np.arctanh(np.clip(actions, -1 + 1e-7, 1 - 1e-7))
        normal = -0.5 * ((before - mean) / np.exp(log_std)) ** 2 - log_std - 0.5 * np.log(2 * np.pi)
        return np.asarray((normal - np.log(1 - actions**2 + 1e-6)).sum(1))


def open_d4rl_policy(path: Path, *, state_width: int, action_width: int) -> D4rlPolicy:
    """Read the policy of a D4RL file.

    Args:
        path: the file.
        state_width: S, of the environment that the policy will act in.
        action_width: A.

    Raises:
        DataError: if the file has no policy, or none of a known form and of these widths.
    """
    with open_hdf5(path) as file:
        group = file.get("metadata/policy")
        if not isinstance(group, h5py.Group):
            raise DataError(f"{path} has no policy: D4RL's v1 and v2 files of single policies have metadata/policy")
        distribution, activation = (_text(group, name, path) for name in ("output_distribution", "nonlinearity"))
        if distribution not in ("tanh_gaussian", "gaussian") or activation not in ("relu", "tanh"):
            raise DataError(
                f"{path}: the policy must have the distribution tanh_gaussian or gaussian and the activation relu or "
                f"tanh, not {distribution!r} and {activation!r}"
            )
        width, layers = state_width, []
        for name in (*HIDDEN, "last_fc"):
            layers.append(_layer(group, name, width, path))
            width = len(layers[-1][1])
        if width != action_width:
            raise DataError(f"{path}: the policy has actions of width {width}, but the environment has {action_width}")
        log_std: tuple[Floats, Floats] | Floats
        if distribution == "tanh_gaussian":
            log_std = _layer(group, "last_fc_log_std", layers[-1][0].shape[1], path)
        else:  # in Adroit's files last_fc_log_std repeats last_fc; the constant spread is with the transitions
            log_std = _constant_log_std(file, path)
    return D4rlPolicy(tuple(layers), log_std, activation, distribution)


def _layer(group: h5py.Group, name: str, width: int, path: Path) -> tuple[Floats, Floats]:
    """Weights (out, in) and biases (out,) of a layer with ``width`` inputs."""
    where = f"{path}, metadata/policy"
    if not isinstance(group.get(name), h5py.Group):
        raise DataError(f"{where} lacks the layer {name}")
    weight, bias = (
        number_array(group[name], key, dimensions=dimensions, where=f"{where}/{name}")[()].astype(np.float32)
        for key, dimensions in (("weight", 2), ("bias", 1))
    )
    if weight.shape != (len(bias), width):
        raise DataError(
            f"{where}/{name}: the weights must have the shape ({len(bias)}, {width}), not {weight.shape}: "
            "the policy is not for this environment"
        )
    return weight, bias


def _constant_log_std(file: h5py.File, path: Path) -> Floats:
    infos = file.get("infos")
    if not isinstance(infos, h5py.Group) or "action_log_std" not in infos:
        raise DataError(f"{path}: a gaussian policy needs infos/action_log_std, its spread")
    return np.asarray(number_array(infos, "action_log_std", dimensions=2, where=str(path))[0], np.float32)


def _text(group: h5py.Group, name: str, path: Path) -> str:
    value = group[name][()] if isinstance(group.get(name), h5py.Dataset) else None
    if not isinstance(value, bytes | str):
        raise DataError(f"{path}: metadata/policy/{name} must be a text")
    return value.decode(errors="replace") if isinstance(value, bytes) else value
