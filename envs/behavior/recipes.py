"""What built-in data sets are made of."""

import math
from dataclasses import dataclass

from envs.behavior.policies import read_card
from envs.datasets.names import DatasetName

__all__ = ["STANDARD_STEPS", "Ingredient", "builtin_recipe"]

STANDARD_STEPS = 100_000
"""Of each tier; medium-expert has as many of either."""


@dataclass(frozen=True)
class Ingredient:
    """A policy, and how many steps of it."""

    policy: str
    """As :func:`envs.behavior.policies.load_policy` takes it."""
    steps: int
    """At least so many: the last episode is not cut off."""


def builtin_recipe(name: DatasetName, steps: int = STANDARD_STEPS) -> list[Ingredient]:
    """What a built-in data set is made of."""
    if name.tier == "medium-expert":
        return [Ingredient(f"{name.environment}/{tier}", steps) for tier in ("medium", "expert")]
    if name.tier == "medium-replay":
        snapshots = [snapshot["policy"] for snapshot in read_card(name.environment)["replay"]]
        return [Ingredient(policy, math.ceil(steps / len(snapshots))) for policy in snapshots]
    return [Ingredient(f"{name.environment}/{name.tier}", steps)]
