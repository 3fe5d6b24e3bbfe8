"""What all policies of this package have in common: the calls reset, act and observe, and the checks around them.

This module needs numpy alone, so that exported policies run without torch.

Axes: E environments, C candidates, S state, A action.
"""

import reprlib
import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from primal_dt.policy.readings import Readings, require_range

__all__ = ["BadActionError", "Numbers", "OnBad", "PastEnd", "PolicyLimits", "StepwisePolicy"]

OnBad = Literal["error", "hold"]
PastEnd = Literal["clamp", "error"]


@runtime_checkable
class TensorLike(Protocol):
    """A torch tensor, seen without torch."""

    def detach(self) -> "TensorLike":
        """The same numbers without gradients."""

    def cpu(self) -> "TensorLike":
        """The same numbers in the memory of the host."""

    def is_complex(self) -> bool:
        """Whether the numbers have an imaginary part."""

    def double(self) -> "TensorLike":
        """The same numbers in double precision."""

    def numpy(self) -> NDArray[np.floating]:
        """The same numbers as an array."""


Numbers = ArrayLike | TensorLike
"""Numbers as a list, an array or a torch tensor."""


class BadActionError(ArithmeticError):
    """Raised if the model computes an action that is NaN or infinite.

    Args:
        environment: number of the environment.
        action: the action.
    """

    def __init__(self, environment: int, action: NDArray[np.floating]) -> None:
        super().__init__(
            f"the action of environment {environment} is {action.tolist()}, although all readings were accepted: the "
            "model cannot be used, its weights are damaged or too large"
        )
        self.environment = environment


@dataclass(frozen=True)
class PolicyLimits:
    """What a policy accepts."""

    state_width: int
    """S, the number of observation entries."""
    action_width: int
    """A, the number of action entries."""
    observation_low: tuple[float, ...]
    """(S,), the lowest entries of an observation that are accepted."""
    observation_high: tuple[float, ...]
    """(S,), the highest ones."""
    largest_return: float
    """The largest absolute value of a return-to-go that is accepted."""
    largest_action: float
    """The largest absolute value of an entry of an executed action that is accepted."""
    max_timesteps: int
    """Number of timesteps that the model knows."""
    needs_target: bool
    """Whether the policy follows a target return."""
    categories: tuple[int, ...] = ()
    """(A,), the number of choices of each action entry, if actions are choices."""
    candidates: tuple[float, ...] = (1.0,)
    """(C,), factors of the target return, or of the predicted one, that are followed side by side, in order."""

    def __post_init__(self) -> None:
        for name in ("state_width", "action_width", "max_timesteps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} ({getattr(self, name)}) must be at least 1")
        sizes = {"observation_low": self.state_width, "observation_high": self.state_width}
        if self.categories:
            sizes["categories"] = self.action_width
        for name, size in sizes.items():
            if len(getattr(self, name)) != size:
                raise ValueError(f"{name} must have {size} entries, not {len(getattr(self, name))}")
        if not self.candidates:
            raise ValueError("candidates must have at least 1 entry")


class StepwisePolicy(ABC):
    """Base class of policies: call ``reset(targets)``, then ``act(observations)`` and ``observe(rewards)`` alternately.

    For one environment, ``reset(3600.0)``, ``act(observation)`` with an observation (S,), and ``observe(reward)`` work
    without a batch axis. Lists, arrays and torch tensors are accepted. A bad reading never enters the history, and no
    action that is not finite is returned.

    Args:
        limits: what the policy accepts.
        on_bad: what happens to a bad observation or reward: NaN, infinite, or so large that the model's arithmetic
            could overflow (see ``limits``). ``error``: it is refused with a
            :class:`~primal_dt.policy.readings.BadReadingError`, and nothing changes, so the call can be repeated with a
            better reading. ``hold``: the last good reading of that entry is used instead, counted in ``held``, with a
            warning after ten steps in a row. The first reading of an episode must be good.
        past_end: what happens after the model's last timestep. ``clamp``: the model continues with its last timestep,
            after a warning. ``error``: a ValueError.
    """

    def __init__(self, limits: PolicyLimits, *, on_bad: OnBad, past_end: PastEnd) -> None:
        if on_bad not in ("error", "hold"):
            raise ValueError(f"on_bad must be error or hold, not {on_bad!r}")
        if past_end not in ("clamp", "error"):
            raise ValueError(f"past_end must be clamp or error, not {past_end!r}")
        self.limits = limits
        self.on_bad = on_bad
        self.past_end = past_end
        self._candidates = np.array(limits.candidates)
        self._low, self._high = np.array(limits.observation_low), np.array(limits.observation_high)
        self._is_ready = False
        self.timestep = 0
        """Number of actions in this episode."""

    @property
    def needs_target(self) -> bool:
        """Whether the policy follows a target return."""
        return self.limits.needs_target

    @property
    def held(self) -> NDArray[np.int64]:
        """(E,), the number of observations and rewards in this episode of which an entry was held."""
        return self._observations.held + self._rewards.held

    def reset(self, targets: Numbers | None = None) -> None:
        """Start an episode in each of E environments.

        Args:
            targets: (E,), the target return of each environment, or one number for one environment. A policy that needs
                no target ignores the values; None is one environment.
        """
        if targets is None:
            if self.needs_target:
                raise ValueError("this policy follows a target return: give one for each environment, reset([3600.0])")
            targets = np.zeros(1)
        if not self.needs_target:  # one value for each environment, even None
            given: Any = targets
            targets = np.zeros(len(given) if np.ndim(given) else 1)
        wanted = np.atleast_1d(as_array(targets))
        if wanted.ndim != 1 or not np.isfinite(wanted).all():
            raise ValueError(f"targets must be a 1-D array of finite numbers, one per environment, not {wanted}")
        largest = self.limits.largest_return / max(1.0, *self.limits.candidates)
        if (np.abs(wanted) > largest).any():
            raise ValueError(f"targets must be from {-largest:g} to {largest:g}, not {wanted}")
        self._start(wanted)
        self._is_ready = True

    def _start(self, targets: NDArray[np.float64]) -> None:
        """Clear the history, for the targets (E,)."""
        # In double precision: single precision would lose digits over a thousand steps.
        self.left: NDArray[np.float64] = targets[:, None] * self._candidates
        """(E, C), the returns-to-go of each environment: its targets minus the rewards so far."""
        self.timestep = 0
        self._observations = Readings("observation", hold=self.on_bad == "hold", count=len(targets))
        self._rewards = Readings("reward", hold=self.on_bad == "hold", count=len(targets))
        self._has_acted = False
        self._begin()

    def act(self, observations: Numbers) -> NDArray[np.float32]:
        """Compute the actions of this step: (E, S) -> (E, A), or (S,) -> (A,) if there is one environment.

        Raises:
            BadReadingError: if an entry is bad, unless the last good reading is held.
            BadActionError: if the model computes an action that is not finite. The policy then needs a reset.
            RuntimeError: if reset was not called, or the rewards of the last actions are missing.
            ValueError: if the shape is wrong, or the episode is too long.
        """
        if not self._is_ready:
            raise RuntimeError("act was called before reset: call reset(targets) at the start of each episode")
        if self._has_acted:
            raise RuntimeError("act was called twice: call observe(rewards) after each act, or reset(targets)")
        seen, wanted = as_array(observations), (len(self.left), self.limits.state_width)
        is_single = seen.ndim == 1 and wanted[0] == 1
        if is_single:
            seen = seen[None]
        if seen.shape != wanted:
            raise ValueError(f"observations must have shape {wanted}, not {seen.shape}")
        self._check_timestep()
        good = self._observations.checked(seen, self._low, self._high)
        actions = self._choose(good.astype(np.float32))  # as in data sets
        if not np.isfinite(actions).all():
            self._is_ready = False  # the history may have values that are not finite
            environment = int(np.isfinite(actions).all(1).argmin())
            raise BadActionError(environment, actions[environment])
        self.timestep += 1
        self._has_acted = True
        return actions[0] if is_single else actions

    def observe(self, rewards: Numbers, actions: Numbers | None = None) -> None:
        """Subtract the rewards of the last actions from the returns-to-go.

        Args:
            rewards: (E,), or one number if there is one environment.
            actions: (E, A), or (A,) if there is one environment: the actions that were executed, if they are not those
                that the policy chose.

        Raises:
            BadReadingError: if a reward is bad, unless the last good one is held, or if an executed action is.
            RuntimeError: if there was no action since the last rewards.
            ValueError: if a shape is wrong, or an action is not among the choices.
        """
        if not self._has_acted:
            raise RuntimeError("observe was called before act: each call of act has one call of observe")
        count, earned = len(self.left), as_array(rewards)
        if earned.ndim == 0 and count == 1:
            earned = earned[None]
        if earned.shape != (count,):
            raise ValueError(f"rewards must have shape {(count,)}, not {earned.shape}")
        executed = None if actions is None else self._executed(as_array(actions))
        largest, ends = self.limits.largest_return, (self.left[:, :1], self.left[:, -1:])  # the extreme candidates
        low, high = np.maximum(*ends) - largest, np.minimum(*ends) + largest  # (E, 1)
        self.left -= self._rewards.checked(earned[:, None], low, high)
        if executed is not None:
            self._replace_actions(executed)
        self._has_acted = False

    def keep(self, rows: NDArray[np.bool_]) -> None:
        """Continue with some of the environments; the others have finished.

        Args:
            rows: (E,) bool, True for environments that continue.
        """
        self.left = self.left[rows]
        self._observations.keep(rows)
        self._rewards.keep(rows)
        self._keep(rows)

    @abstractmethod
    def _begin(self) -> None:
        """Clear the history, for as many environments as ``left`` has."""

    @abstractmethod
    def _choose(self, observations: NDArray[np.float32]) -> NDArray[np.float32]:
        """Finite observations (E, S) -> actions (E, A), which the caller may change."""

    @abstractmethod
    def _replace_actions(self, actions: NDArray[np.float64]) -> None:
        """Replace the last actions in the history by those that were executed, (E, A)."""

    @abstractmethod
    def _keep(self, rows: NDArray[np.bool_]) -> None:
        """Continue with the environments where ``rows`` is True; ``left`` has these only."""

    def _check_timestep(self) -> None:
        t, end = self.timestep, self.limits.max_timesteps
        if t >= end and self.past_end == "error":
            raise ValueError(f"step {t} must be below max_timesteps ({end}): the episode is too long")
        if t == end:
            warnings.warn(
                f"step {t} is past the model's last timestep ({end - 1}), which is used from here on: "
                "the model has not learned from longer episodes",
                stacklevel=3,
            )

    def _executed(self, actions: NDArray[np.float64]) -> NDArray[np.float64]:
        """Check the executed actions: (E, A), or (A,) for one environment -> (E, A)."""
        wanted = (len(self.left), self.limits.action_width)
        if wanted[0] == 1 and actions.size == wanted[1]:
            actions = actions.reshape(wanted)
        if actions.shape != wanted:
            raise ValueError(f"actions must have shape {wanted}, not {actions.shape}")
        advice, largest = (
            "give the action that was executed, or None if it was the chosen one",
            self.limits.largest_action,
        )
        require_range("action", actions, -largest, largest, advice=advice)
        if choices := self.limits.categories:
            known = (actions >= 0) & (actions < choices) & (actions == actions.round())
            if not known.all():
                raise ValueError(f"actions must be whole numbers from 0 to below {choices}, not {actions.tolist()}")
        return actions


def as_array(values: Numbers) -> NDArray[np.float64]:
    """Real numbers in double precision, as an array.

    Raises:
        ValueError: if the values are not real numbers.
    """
    if not isinstance(values, np.ndarray | float | list) and isinstance(values, TensorLike):
        # On the host first: some devices have no double precision, and numpy has no bfloat16.
        values = values.detach().cpu()
        values = (values if values.is_complex() else values.double()).numpy()
    array = np.asarray(values)
    if array.dtype.kind not in "biuf":
        raise ValueError(f"expected real numbers, not {array.dtype} ({reprlib.repr(values)})")
    return array.astype(np.float64, copy=False)
