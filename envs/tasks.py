"""The table of tasks: the constants of each environment, and their sources.

Sources:
    [d4rl]  D4RL's reference returns, ``d4rl/infos.py``; the same for its data sets v0, v1 and v2.
    [dt]    targets, return scale and episode limit in the Decision Transformer's published code (arXiv 2106.01345).
    [paper] ranks in the published script of the Primal-Attention paper's RL experiments (arXiv 2305.19798). They are
            not always the best of its Table 7, where 64 is above 96 on walker2d-medium, and its command for
            hopper-medium names halfcheetah. Ranks above the 60 tokens of a window or the 64 features of a head are
            outside the paper's theory (R <= rank of K).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from envs.errors import DataError
from envs.references import REFERENCES
from envs.spaces import ActionBounds, unit_box
from primal_dt.task import TABLE, Reference, RunTask, Specification

__all__ = [
    "DEFAULT_LIMIT",
    "ENVIRONMENTS",
    "Environment",
    "Spaces",
    "Task",
    "environment_of",
    "task_named",
    "task_of",
    "task_of_run",
]

NEWEST_VERSION = "v5"
DEFAULT_LIMIT = 1000
"""The episode limit of environments that set none: otherwise an episode might never end."""
D4RL = "D4RL, d4rl/infos.py"


class Spaces(NamedTuple):
    """What a model must know of an environment's observations and actions."""

    state_width: int
    """The number of entries of a flattened observation."""
    actions: ActionBounds


@dataclass(frozen=True)
class Environment:
    """An environment, independent of its version: from the table, or described by its data or by itself."""

    name: str
    """The name in data set names, such as ``hopper``."""
    gymnasium_name: str
    """Gymnasium's name without the version, such as ``Hopper``."""
    state_width: int
    actions: ActionBounds
    reference: Reference | None = None
    """The returns for normalization [d4rl]; None if the table has none."""
    targets: tuple[float, ...] = ()
    """The target returns [dt]. The first is the headline target: fixed here, never the best of several. If empty, they
    are taken from the data."""
    paper_rank: Mapping[str, int] = field(default_factory=dict)
    """The published rank of the primal layer for each tier [paper]."""
    return_scale: float | None = None
    """The divisor of returns [dt]. If None, it is taken from the data."""
    reference_source: str = D4RL
    """The source of the reference returns."""
    note: str | None = None
    """What a reader of its scores should know."""

    @property
    def action_width(self) -> int:
        """A, the number of entries of an action."""
        return self.actions.width

    @property
    def spaces(self) -> Spaces:
        """Its observations and actions."""
        return Spaces(self.state_width, self.actions)


ENVIRONMENTS: Mapping[str, Environment] = {
    environment.name: environment
    for environment in (
        Environment(
            name="hopper",
            gymnasium_name="Hopper",
            state_width=11,
            actions=unit_box(3),
            reference=REFERENCES["hopper"],
            targets=(3600.0, 1800.0),
            paper_rank={"medium-expert": 64, "medium": 96, "medium-replay": 64},
            return_scale=1000.0,
        ),
        Environment(
            name="halfcheetah",
            gymnasium_name="HalfCheetah",
            state_width=17,
            actions=unit_box(6),
            reference=REFERENCES["halfcheetah"],
            targets=(12000.0, 6000.0),
            paper_rank={"medium-expert": 96, "medium": 64, "medium-replay": 32},
            return_scale=1000.0,
        ),
        Environment(
            name="walker2d",
            gymnasium_name="Walker2d",
            state_width=17,
            actions=unit_box(6),
            reference=REFERENCES["walker2d"],
            targets=(5000.0, 2500.0),
            paper_rank={"medium-expert": 96, "medium": 96, "medium-replay": 96},
            return_scale=1000.0,
        ),
    )
}


ADROIT = (
    "gymnasium-robotics changed the environment's reward in 1.2.1 without a new version: 1.4.2 adds 0.1 times the "
    "distance from the hand to the object, which D4RL subtracts, so returns are higher than D4RL's"
)
NOTES: Mapping[str, str] = {f"AdroitHand{name}": ADROIT for name in ("Door", "Hammer", "Relocate")}
"""Gymnasium's name without the version -> what a reader of scores should know."""


@dataclass(frozen=True)
class Task:
    """An environment with its exact specification, and the data set's tier, if it has one."""

    environment: Environment
    specification: Specification | None
    """What the environment is made of; None if there is only data."""
    tier: str | None = None
    trusted: bool = False
    """Whether modules that the specification names may be imported."""

    @property
    def env_id(self) -> str:
        """The environment's id; empty if there is none."""
        return "" if self.specification is None else self.specification.env_id

    @property
    def paper_rank(self) -> int | None:
        """The paper's rank for this task, or None if the paper does not include it."""
        return None if self.tier is None else self.environment.paper_rank.get(self.tier)

    def run_task(self) -> RunTask:
        """The task as reports need it, without data."""
        own = self.specification
        is_plain = own is None or not (own.differences or own.entry_point)
        return RunTask(
            env_id=self.env_id,
            tier=self.tier,
            dataset="no data set",
            data_env_ids=(),
            fingerprint="",
            targets=self.environment.targets,
            reference=self.environment.reference,
            reference_source=self.environment.reference_source,
            target_source=TABLE if self.environment.targets else "nowhere",
            specification=None if is_plain else own,
        )


def environment_of(specification: Specification | None, spaces: Spaces) -> Environment:
    """The table's entry for a plain environment in a version from v2 to v5; else an entry with these spaces."""
    if specification is None:
        return Environment("", "", *spaces)
    name = re.sub(r"-v\d+$", "", specification.bare_id)
    return _in_table(specification) or Environment(name.lower(), name, *spaces, note=NOTES.get(name))


def _in_table(specification: Specification) -> Environment | None:
    match = re.fullmatch(r"(?P<name>[A-Za-z0-9]+)-v[2-5]", specification.env_id)
    if match is None or specification.differences:
        return None
    return next((each for each in ENVIRONMENTS.values() if each.gymnasium_name == match["name"]), None)


def task_of(
    specification: Specification | str,
    tier: str | None = None,
    *,
    spaces: Spaces | None = None,
    trusted: bool = False,
) -> Task:
    """The task of an environment.

    Args:
        specification: the environment, or its id, such as ``Hopper-v5`` or ``my_module:Walk-v0``.
        tier: the data set's tier.
        spaces: its observations and actions, if they are known. If None, and if the environment is not in the table,
            it is created to look at them.
        trusted: whether modules that the specification names may be imported.

    Raises:
        DataError: if the environment cannot be created, or its spaces are not supported.
    """
    if isinstance(specification, str):
        specification = Specification(specification)
    if spaces is None:
        known = _in_table(specification)
        if known is not None:
            return Task(known, specification, tier, trusted)
        from envs.make import spaces_of  # imports the environments, which the table does not need

        spaces = spaces_of(specification, trusted=trusted)
    return Task(environment_of(specification, spaces), specification, tier, trusted)


def task_of_run(task: RunTask, *, trusted: bool = False) -> Task:
    """The task in which a trained run acts.

    Raises:
        DataError: if the run has no environment, or if it cannot be created.
    """
    if not task.env_id:
        raise DataError(
            f"the data set {task.dataset} names no environment, so the policy cannot act: name one with --env-id"
        )
    return task_of(task.specification or task.env_id, task.tier, trusted=trusted)


def task_named(name: str) -> Task:
    """The task of a name such as ``hopper`` (the newest version) or an id such as ``Hopper-v4``: the user's own word.

    Raises:
        DataError: if there is no such environment.
    """
    if name in ENVIRONMENTS:
        return task_of(f"{ENVIRONMENTS[name].gymnasium_name}-{NEWEST_VERSION}")
    if "-" not in name:
        raise DataError(
            f"there is no task {name!r}: it must be one of {', '.join(ENVIRONMENTS)}, or an id such as Hopper-v4"
        )
    return task_of(name, trusted=True)
