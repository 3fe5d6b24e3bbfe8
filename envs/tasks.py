"""The tasks, as a table: what belongs to an environment or a data set, and where each number comes from.

Sources:
    [d4rl]  reference returns of D4RL, ``d4rl/infos.py``; the same for its data sets v0, v1 and v2.
    [dt]    targets, return scale and episode limit of the Decision Transformer's published code (arXiv 2106.01345).
    [paper] ranks of the Primal-Attention paper's RL experiments (arXiv 2305.19798, Table 7 and appendix).
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from envs.datasets.checks import ActionBox, DataError
from primal_dt.evaluation.score import normalized

__all__ = [
    "ENVIRONMENTS",
    "TIERS",
    "DatasetName",
    "Environment",
    "Reference",
    "Source",
    "Task",
    "Unit",
    "parse_name",
    "require_one_unit",
    "task_named",
    "task_of",
]

Source = Literal["d4rl", "minari", "primal"]

TIERS: Mapping[Source, tuple[str, ...]] = {
    "d4rl": ("random", "medium", "medium-replay", "medium-expert", "expert"),
    "minari": ("simple", "medium", "expert"),
    "primal": ("random", "medium", "medium-replay", "medium-expert", "expert"),
}
"""The data sets of each source. Tiers of one name are not alike across sources: Minari's medium Hopper policy is near
D4RL's expert."""

ENVIRONMENT_VERSION: Mapping[Source, str] = {"d4rl": "v4", "minari": "v5", "primal": "v5"}
"""D4RL v2 was recorded in the -v2 environments, of which -v4 is the closest that is still there."""

NEWEST_VERSION = "v5"

NAME_PATTERNS: Mapping[Source, str] = {
    "d4rl": "{environment}-{tier}-v2",
    "minari": "mujoco/{environment}/{tier}-v0",
    "primal": "primal/{environment}/{tier}-v0",
}


UNIT_BOX = ActionBox(-1.0, 1.0)


@dataclass(frozen=True)
class Reference:
    """The two returns that make a score: 0 and 100."""

    random_return: float
    expert_return: float
    source: str

    def score(self, returns: ArrayLike) -> NDArray[np.float64]:
        """D4RL's normalised score, on the scale of its tables."""
        return normalized(returns, random_return=self.random_return, expert_return=self.expert_return)


@dataclass(frozen=True)
class Environment:
    """An environment, whatever its version."""

    name: str
    """As data sets call it."""
    gymnasium_name: str
    """As gymnasium calls it, without the version."""
    state_width: int
    action_width: int
    reference: Reference
    """[d4rl]."""
    targets: tuple[float, ...]
    """[dt], returns that a policy is asked for. The first is the headline: fixed here, never the best of several."""
    paper_rank: Mapping[str, int]
    """[paper], tier -> rank of the primal layer."""
    return_scale: float = 1000.0
    """[dt], what returns are divided by."""
    episode_limit: int = 1000
    """[dt], steps."""
    action_box: ActionBox = UNIT_BOX
    """What it takes, in each entry of an action."""


def _d4rl(random_return: float, expert_return: float) -> Reference:
    return Reference(random_return, expert_return, "D4RL, d4rl/infos.py")


ENVIRONMENTS: Mapping[str, Environment] = {
    environment.name: environment
    for environment in (
        Environment(
            name="hopper",
            gymnasium_name="Hopper",
            state_width=11,
            action_width=3,
            reference=_d4rl(-20.272305, 3234.3),
            targets=(3600.0, 1800.0),
            paper_rank={"medium-expert": 64, "medium": 96, "medium-replay": 64},
        ),
        Environment(
            name="halfcheetah",
            gymnasium_name="HalfCheetah",
            state_width=17,
            action_width=6,
            reference=_d4rl(-280.178953, 12135.0),
            targets=(12000.0, 6000.0),
            paper_rank={"medium-expert": 96, "medium": 64, "medium-replay": 32},
        ),
        Environment(
            name="walker2d",
            gymnasium_name="Walker2d",
            state_width=17,
            action_width=6,
            reference=_d4rl(1.629008, 4592.3),
            targets=(5000.0, 2500.0),
            paper_rank={"medium-expert": 96, "medium": 96, "medium-replay": 96},
        ),
    )
}


@dataclass(frozen=True)
class Unit:
    """What a score is measured in. Scores in different units are different things and must not be compared silently."""

    env_id: str
    """With its version: rewards and physics differ between versions."""
    reference: Reference

    def __str__(self) -> str:
        low, high = self.reference.random_return, self.reference.expert_return
        return f"{self.env_id}, 0 at a return of {low:g}, 100 at {high:g}"


@dataclass(frozen=True)
class Task:
    """An environment in one version, and the tier of the data, if it has one."""

    environment: Environment
    env_id: str
    tier: str | None = None

    @property
    def unit(self) -> Unit:
        """What its scores are measured in."""
        return Unit(self.env_id, self.environment.reference)

    @property
    def paper_rank(self) -> int | None:
        """The paper's rank for it, if the paper has the task."""
        return None if self.tier is None else self.environment.paper_rank.get(self.tier)


@dataclass(frozen=True)
class DatasetName:
    """A name that the table knows."""

    source: Source
    environment: str
    tier: str

    def __str__(self) -> str:
        return NAME_PATTERNS[self.source].format(environment=self.environment, tier=self.tier)

    @property
    def task(self) -> Task:
        """In the version of the environment that the source's data goes with."""
        environment = ENVIRONMENTS[self.environment]
        return Task(environment, f"{environment.gymnasium_name}-{ENVIRONMENT_VERSION[self.source]}", self.tier)


KNOWN_NAMES: Mapping[str, DatasetName] = {
    str(name): name
    for source, tiers in TIERS.items()
    for environment in ENVIRONMENTS
    for tier in tiers
    for name in (DatasetName(source, environment, tier),)
}


def parse_name(name: str) -> DatasetName | None:
    """A data set's name, if the table knows it."""
    return KNOWN_NAMES.get(name)


def task_of(env_id: str, tier: str | None = None, *, where: str | None = None) -> Task:
    """The task of an environment id such as ``Hopper-v5``.

    Args:
        env_id: with its version, from v2 to v5.
        tier: of the data.
        where: who says so, for the error.

    Raises:
        DataError: if the table has no such environment.
    """
    match = re.fullmatch(r"(?P<name>[A-Za-z0-9]+)-v[2-5]", env_id)
    for environment in ENVIRONMENTS.values():
        if match is not None and match["name"] == environment.gymnasium_name:
            return Task(environment, env_id, tier)
    known = ", ".join(f"{environment.gymnasium_name}-v5" for environment in ENVIRONMENTS.values())
    prefix = "" if where is None else f"{where}: "
    raise DataError(f"{prefix}there is no task for the environment {env_id!r}: it must be one such as {known}")


def task_named(name: str) -> Task:
    """The task of ``hopper`` (in the newest version) or ``Hopper-v4``.

    Raises:
        DataError: if the table has no such environment.
    """
    if name in ENVIRONMENTS:
        return task_of(f"{ENVIRONMENTS[name].gymnasium_name}-{NEWEST_VERSION}")
    if "-" not in name:
        raise DataError(f"there is no task {name!r}: it must be one of {', '.join(ENVIRONMENTS)}, or such as Hopper-v4")
    return task_of(name)


def require_one_unit(units: Iterable[Unit]) -> Unit:
    """The unit of scores that are to be averaged or compared.

    Raises:
        ValueError: if there are several, or none.
    """
    distinct = sorted(set(units), key=str)
    if not distinct:
        raise ValueError("there is no score, and so no unit")
    if len(distinct) > 1:
        raise ValueError("scores in different units cannot be compared: " + "; ".join(map(str, distinct)))
    return distinct[0]
