"""The table of known data set names: D4RL's, Minari's and the built-in ones."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from envs.tasks import ENVIRONMENTS, Task

__all__ = ["KNOWN_NAMES", "TIERS", "DatasetName", "Source", "parse_name"]

Source = Literal["d4rl", "minari", "primal"]

TIERS: Mapping[Source, tuple[str, ...]] = {
    "d4rl": ("random", "medium", "medium-replay", "medium-expert", "expert"),
    "minari": ("simple", "medium", "expert"),
    "primal": ("random", "medium", "medium-replay", "medium-expert", "expert"),
}
"""The tiers of each source. A tier's quality differs between sources: Minari's medium Hopper policy is close to D4RL's
expert."""

ENVIRONMENT_VERSION: Mapping[Source, str] = {"d4rl": "v4", "minari": "v5", "primal": "v5"}
"""The environment version for each source. D4RL v2 was recorded in the -v2 environments; -v4 is the closest version
that still exists."""

NAME_PATTERNS: Mapping[Source, str] = {
    "d4rl": "{environment}-{tier}-v2",
    "minari": "mujoco/{environment}/{tier}-v0",
    "primal": "primal/{environment}/{tier}-v0",
}


@dataclass(frozen=True)
class DatasetName:
    """A data set name in the table."""

    source: Source
    environment: str
    tier: str

    def __str__(self) -> str:
        return NAME_PATTERNS[self.source].format(environment=self.environment, tier=self.tier)

    @property
    def task(self) -> Task:
        """The task, with the environment version for the source's data."""
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
    """Look up a name in the table; None if it is not in it."""
    return KNOWN_NAMES.get(name)
