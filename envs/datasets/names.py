"""The names of data sets that are known without looking them up: D4RL's, Minari's and the built-in ones."""

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
"""The data sets of each source. Tiers of one name are not alike across sources: Minari's medium Hopper policy is near
D4RL's expert."""

ENVIRONMENT_VERSION: Mapping[Source, str] = {"d4rl": "v4", "minari": "v5", "primal": "v5"}
"""D4RL v2 was recorded in the -v2 environments, of which -v4 is the closest that is still there."""

NAME_PATTERNS: Mapping[Source, str] = {
    "d4rl": "{environment}-{tier}-v2",
    "minari": "mujoco/{environment}/{tier}-v0",
    "primal": "primal/{environment}/{tier}-v0",
}


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
