"""Recipes of the built-in data sets."""

import math
from dataclasses import dataclass

from envs.behavior.policies import read_card
from envs.datasets.names import DatasetName

__all__ = ["STANDARD_STEPS", "Ingredient", "builtin_recipe"]

STANDARD_STEPS = 100_000
"""The steps of each tier; medium-expert has this number of steps from each of its two policies."""


@dataclass(frozen=True)
class Ingredient:
    """A policy and its number of steps."""

    policy: str
    """The policy's name, as in :func:`envs.behavior.policies.load_policy`."""
    steps: int
    """The minimum number of steps; the last episode is not cut off."""


def builtin_recipe(name: DatasetName, steps: int = STANDARD_STEPS) -> list[Ingredient]:
    """The recipe of a built-in data set."""
    if name.tier == "medium-expert":
        return [Ingredient(f"{name.environment}/{tier}", steps) for tier in ("medium", "expert")]
    if name.tier == "medium-replay":
        snapshots = [snapshot["policy"] for snapshot in read_card(name.environment)["replay"]]
        return [Ingredient(policy, math.ceil(steps / len(snapshots))) for policy in snapshots]
    return [Ingredient(f"{name.environment}/{name.tier}", steps)]
