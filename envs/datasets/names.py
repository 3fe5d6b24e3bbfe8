"""Data set names, as one table: the built-in ones, and those of D4RL and Minari."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from envs.datasets.suites import NAMES, KnownName
from envs.spaces import unit_box
from envs.tasks import ENVIRONMENTS, Spaces, Task, environment_of
from primal_dt.task import Specification

__all__ = ["BUILTIN_TIERS", "KNOWN_NAMES", "DatasetName", "Source", "builtin_name", "parse_name"]

Source = Literal["d4rl", "minari", "primal"]
BUILTIN_TIERS = ("random", "medium", "medium-replay", "medium-expert", "expert")


@dataclass(frozen=True)
class DatasetName:
    """A data set name in the table."""

    name: str
    source: Source
    environment: str
    """The environment's name, such as ``hopper``."""
    tier: str | None
    """The tier. Its quality differs between sources: Minari's medium Hopper policy is close to D4RL's expert."""
    known: KnownName | None = None
    """What D4RL and Minari say about it; None if it is built in."""

    def __str__(self) -> str:
        return self.name

    @property
    def specification(self) -> Specification | None:
        """The environment for policies that learn from it; None if there is none today."""
        if self.known is None:
            return Specification(f"{ENVIRONMENTS[self.environment].gymnasium_name}-v5")
        fit = self.known.fit
        if fit.env_id is None:
            return None
        return Specification(fit.env_id, json.dumps(dict(fit.arguments), sort_keys=True), fit.max_episode_steps)

    @property
    def task(self) -> Task | None:
        """The task; None if the widths of the data are not known before it is read."""
        if self.known is None:
            return Task(ENVIRONMENTS[self.environment], self.specification, self.tier)
        fit, in_table = self.known.fit, ENVIRONMENTS.get(self.environment)
        if in_table is not None:
            return Task(in_table, self.specification, self.tier)
        if fit.state_width is None or fit.action_width is None:
            return None
        spaces = Spaces(fit.state_width, unit_box(fit.action_width))  # all of D4RL's actions are in [-1, 1]
        return Task(environment_of(self.specification, spaces), self.specification, self.tier)


KNOWN_NAMES: Mapping[str, DatasetName] = {
    each.name: each
    for each in (
        *(
            DatasetName(f"primal/{environment}/{tier}-v0", "primal", environment, tier)
            for environment in ENVIRONMENTS
            for tier in BUILTIN_TIERS
        ),
        *(DatasetName(known.name, known.source, known.environment, known.tier, known) for known in NAMES.values()),
    )
}


def builtin_name(environment: str, tier: str) -> str:
    """The name of a built-in data set."""
    return f"primal/{environment}/{tier}-v0"


def parse_name(name: str) -> DatasetName | None:
    """Look up a name in the table; None if it is not in it."""
    return KNOWN_NAMES.get(name)
