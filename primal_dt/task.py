"""The task of a run, as one frozen value. Standard library only."""

import json
import math
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, Self

from primal_dt.config import check_reference, check_targets
from primal_dt.schema import build, require_keys

__all__ = ["NO_LIMIT", "OWN_WRAPPERS", "TABLE", "Reference", "RunTask", "Specification", "Wrapper"]

NO_LIMIT = -1
"""The episode limit of an environment that has none, as gymnasium writes it."""
OWN_WRAPPERS = "gymnasium.wrappers."
"""Start of the entry points of gymnasium's own wrappers, which are trusted."""
TABLE = "the table of tasks"
"""The source of the targets of an environment that is in that table."""


@dataclass(frozen=True)
class Reference:
    """Reference returns of the normalized return: the random policy's return is 0, the expert's is 100."""

    random_return: float
    expert_return: float

    def __post_init__(self) -> None:
        if self.random_return == self.expert_return:
            raise ValueError(f"the reference returns must differ, but both are {self.random_return:g}")

    def __str__(self) -> str:
        return f"0 at a return of {self.random_return:g}, 100 at {self.expert_return:g}"


@dataclass(frozen=True)
class Wrapper:
    """A wrapper around an environment."""

    name: str
    entry_point: str
    """The class, as ``module:name``."""
    arguments: str = "{}"
    """The arguments, as JSON with sorted keys; ``null`` if they were not recorded, so that it cannot be restored."""

    def __post_init__(self) -> None:
        if not isinstance(json.loads(self.arguments), dict | None):
            raise ValueError(f"the arguments of the wrapper {self.name} must be a JSON object, not {self.arguments}")

    def __str__(self) -> str:
        values = json.loads(self.arguments)
        if values is None:
            return f"{self.name}(unknown arguments)"
        arguments = ", ".join(f"{name} = {value!r}" for name, value in values.items())
        return f"{self.name}({arguments})" if arguments else self.name


@dataclass(frozen=True)
class Specification:
    """What an environment is made of. Equal for environments that behave the same."""

    env_id: str
    """The id, with its version. ``module:id`` if a module must be imported first."""
    arguments: str = "{}"
    """The arguments of the environment, as JSON with sorted keys."""
    max_episode_steps: int | None = None
    """The episode limit; None for that of the registry, and ``NO_LIMIT`` for none."""
    wrappers: tuple[Wrapper, ...] = ()
    """The wrappers, from inside to outside."""
    entry_point: str | None = field(default=None, compare=False)
    """The class that the data names for an id that is not in the registry, as ``module:name``."""
    replaces: bool = False
    """Whether the data names another class for this id than the registry."""

    def __post_init__(self) -> None:
        if not isinstance(json.loads(self.arguments), dict):
            raise ValueError(f"the arguments of {self.env_id} must be a JSON object, not {self.arguments}")

    @property
    def differences(self) -> list[str]:
        """What differs from the plain environment of this id."""
        words = [f"{name} = {value!r}" for name, value in json.loads(self.arguments).items()]
        if self.max_episode_steps is not None:
            has_none = self.max_episode_steps == NO_LIMIT
            words.append("no episode limit" if has_none else f"at most {self.max_episode_steps} steps")
        if self.replaces:
            words.append(f"by {self.entry_point}")
        return words + [str(wrapper) for wrapper in self.wrappers]

    @property
    def imported(self) -> list[str]:
        """The modules of others that creating the environment imports."""
        wrappers = [
            wrapper.entry_point for wrapper in self.wrappers if not wrapper.entry_point.startswith(OWN_WRAPPERS)
        ]
        named = [
            self.env_id.rpartition(":")[0],
            *(each.partition(":")[0] for each in (self.entry_point or "", *wrappers)),
        ]
        return list(dict.fromkeys(module for module in named if module))

    @property
    def identity(self) -> dict[str, Any]:
        """JSON values that are equal for equal specifications, for digests."""
        return {
            item.name: value for item, value in zip(fields(self), asdict(self).values(), strict=True) if item.compare
        } | {"env_id": self.bare_id}

    def __str__(self) -> str:
        return f"{self.bare_id} ({', '.join(self.differences)})" if self.differences else self.bare_id

    @property
    def bare_id(self) -> str:
        """The id without the module that registers it."""
        return self.env_id.rpartition(":")[2]


@dataclass(frozen=True)
class RunTask:
    """The task of a run, as its policy needs it once the data set is gone. Part of every checkpoint."""

    env_id: str
    """The environment that the policy acts in, with its version. Empty if there is none, only data."""
    tier: str | None
    """The data set's tier, such as ``medium-replay``, or None if it has none."""
    dataset: str
    """The data set's name, as the user gave it."""
    data_env_ids: tuple[str, ...]
    """The environments that the data was recorded in, as :attr:`environment_text` names them."""
    fingerprint: str
    """The digest of the data set's content."""
    targets: tuple[float, ...]
    """Target returns for evaluation, the headline target first. Empty if the policy follows no target."""
    reference: Reference | None
    """The reference returns; None if there are none, and scores are plain returns."""
    data_returns: tuple[float, ...] = ()
    """Percentiles 0, 1, ..., 100 of the returns of the data's episodes. Empty if they are not known."""
    specification: Specification | None = None
    """The environment's arguments, episode limit and wrappers; None for the plain environment of this id."""
    reference_source: str = "D4RL, d4rl/infos.py"
    """Where the reference returns are from."""
    target_source: str = TABLE
    """Where the target returns are from."""
    notes: tuple[str, ...] = ()
    """What a reader of results should know about the environment and the data."""

    @property
    def environment_text(self) -> str:
        """The environment for readers: its id, and what differs from the plain environment."""
        return str(self.specification or Specification(self.env_id))

    @property
    def is_in_table(self) -> bool:
        """Whether its environment is in the table of tasks: plain, with vectors as observations and actions."""
        return bool(self.env_id) and self.target_source == TABLE

    @property
    def imported(self) -> list[str]:
        """The modules of others that creating the environment imports."""
        return (self.specification or Specification(self.env_id)).imported

    @property
    def headline(self) -> float | None:
        """The target return of the headline result: fixed before the evaluation, never the best of several.

        None if the policy follows no target.
        """
        return self.targets[0] if self.targets else None

    def spread_targets(self, count: int = 8) -> tuple[float, ...]:
        """Targets at equal distances, from the data's lowest return to a tenth of the range above its highest.

        Raises:
            ValueError: if the data's returns are not known.
        """
        if not self.data_returns:
            raise ValueError(
                f"the returns of {self.dataset} are not known, because an earlier version trained the run: "
                "give targets as numbers"
            )
        low, high = self.data_returns[0], self.data_returns[-1]
        distance = 1.1 * (high - low) / (count - 1)
        digits = 2 - math.floor(math.log10(distance)) if distance else 6  # a hundredth of the distance
        return tuple(round(low + i * distance, digits) for i in range(count))

    @property
    def environment(self) -> str:
        """The environment's name without its version, in lower case: ``hopper``."""
        return self.env_id.rpartition(":")[2].rpartition("-v")[0].lower()

    @property
    def unit(self) -> str:
        """The unit of scores: environment and references. Only scores of the same unit are comparable."""
        return f"{self.environment_text or 'no environment'}, {self.reference or 'plain returns'}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as ``config.json`` and checkpoints store them, with the reference's two returns among them."""
        values = asdict(self)
        reference = values.pop("reference")
        return values | (reference or {"random_return": None, "expert_return": None})

    @classmethod
    def from_dict(cls, values: object) -> Self:
        """The inverse of :meth:`to_dict`, also for earlier versions, which did not have the fields with defaults.

        Raises:
            ValueError: if a field is missing or unknown, or has a value of another type.
        """
        own = dict(require_keys(values, ("random_return", "expert_return"), where="task"))
        returns = {name: own.pop(name) for name in ("random_return", "expert_return")}
        own["reference"] = None if returns["random_return"] is None else returns
        every = (item for kind in (cls, Specification, Wrapper) for item in fields(kind))
        optional = [item.name for item in every if item.default is not MISSING]
        task = build(cls, own, where="task", optional=optional)
        if task.reference is not None:
            check_reference((task.reference.random_return, task.reference.expert_return))
        check_targets(task.targets)
        return task
