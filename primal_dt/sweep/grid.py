"""Grids of training runs, and the named sweeps. This module must not import torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any, get_args

from primal_dt.config import Attention

__all__ = ["SWEEPS", "Arm", "Grid"]


@dataclass(frozen=True)
class Arm:
    """A method to compare with others: an attention stack, and changes to the settings."""

    name: str
    """The name in run folders."""
    attention: str = "primal-plus"
    model: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ``ModelConfig`` and their values."""
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ``OptimizerConfig`` and their values."""


@dataclass(frozen=True)
class Grid:
    """Every combination of these settings, each trained with every seed."""

    preset: str
    datasets: tuple[str, ...]
    attention: tuple[str, ...]
    seeds: tuple[int, ...]
    ranks: tuple[int | None, ...] = (None,)
    """Ranks of the primal layers. None: the paper's rank for the task, or 32 if the paper has none."""
    etas: tuple[float | None, ...] = (None,)
    """Weights of the KSVD penalty. None: the preset's."""
    flags: tuple[str, ...] = ()
    """Flags of ``train.py`` for all runs."""
    episodes: int = 100
    """Evaluation episodes per target return, after training."""
    arms: tuple[Arm, ...] = ()
    """Methods to compare, instead of attention stacks."""

    @property
    def arm_flags(self) -> set[str]:
        """Flags of ``train.py`` that arms set, so that they cannot be given for all runs."""
        names = {name for arm in self.arms for name in (*arm.model, *arm.optimizer)}
        return {f"--{name.replace('_', '-')}" for name in names}

    def points(self) -> Iterator[dict[str, Any]]:
        """Yield the combinations. Rank and eta vary only for stacks with a primal layer; the others have neither."""
        arms = self.arms or tuple(Arm("", attention) for attention in self.attention)
        for dataset, arm, seed in product(self.datasets, arms, self.seeds):
            primal = arm.attention in ("primal-plus", "primalformer")
            for rank, eta in product(self.ranks if primal else (None,), self.etas if primal else (None,)):
                yield {"dataset": dataset, "arm": arm, "seed": seed, "rank": rank, "eta": eta}


TABLE_4 = tuple(
    f"{environment}-{tier}-v2"
    for tier in ("medium-expert", "medium", "medium-replay")
    for environment in ("hopper", "halfcheetah", "walker2d")
)
"""The D4RL data sets of the paper's Table 4."""
SWEEPS: Mapping[str, Grid] = {
    # Built-in data, Primal.+DT and the canonical Decision Transformer, small: minutes on two cores.
    "demo": Grid(
        preset="quick",
        datasets=("primal/hopper/medium-expert-v0",),
        attention=("primal-plus", "softmax"),
        seeds=(0, 1, 2),
        flags=("--steps", "1000", "--warmup-steps", "50", "--width", "64", "--eval-every-steps", "500"),
        episodes=20,
    ),
    # The tasks of the paper's Table 4 with every attention stack and five seeds. (The paper: seven, three.)
    "table4": Grid(
        preset="paper",
        datasets=TABLE_4,
        attention=get_args(Attention),
        seeds=(0, 1, 2, 3, 4),
    ),
    # The paper's Table 7: Primal.+DT with rank 32, 64 and 96 on the nine D4RL tasks, five seeds.
    "table7": Grid(
        preset="paper",
        datasets=TABLE_4,
        attention=("primal-plus",),
        seeds=(0, 1, 2, 3, 4),
        ranks=(32, 64, 96),
    ),
    # Ways to make policies from the same data: filtered cloning, the Decision Transformer with softmax and with
    # Primal-Attention, and what goes beyond it.
    "policies": Grid(
        preset="quick",
        datasets=(
            "primal/walker2d/medium-expert-v0",
            "primal/hopper/medium-replay-v0",
            "primal/halfcheetah/medium-v0",
        ),
        attention=(),
        seeds=(0, 1, 2),
        arms=(
            Arm("filtered", model={"conditioning": "none"}, optimizer={"top_fraction": 0.1}),
            Arm("softmax", "softmax"),
            Arm("primal-plus"),
            Arm("max-return", model={"conditioning": "max-return"}),
            Arm("guided", optimizer={"critic_weight": 1.0}),
        ),
    ),
    # The combinations that the flags give.
    "grid": Grid(
        preset="quick",
        datasets=("primal/hopper/medium-expert-v0",),
        attention=("primal-plus", "softmax"),
        seeds=(0, 1, 2),
    ),
}
"""The named sweeps. Flags can change any of their settings."""
