"""Sweeps: grids of training runs, some with names. A grid -> jobs."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from primal_dt.config import PRESETS, Config
from primal_dt.data.names import folder_label, resolve_paths
from primal_dt.model.transformer import ATTENTION_STACKS
from primal_dt.sweep.job import Job, identity_of

__all__ = ["SWEEPS", "Grid", "jobs_of"]


@dataclass(frozen=True)
class Grid:
    """Every combination of these, each trained with every seed."""

    about: str
    preset: str
    datasets: tuple[str, ...]
    attention: tuple[str, ...]
    seeds: tuple[int, ...]
    ranks: tuple[int | None, ...] = (None,)
    """None for the paper's, or 32."""
    etas: tuple[float | None, ...] = (None,)
    """None for the preset's."""
    flags: tuple[str, ...] = ()
    """Of ``train.py``, for all."""
    episodes: int = 100
    """Of the evaluation, for each target."""

    def points(self) -> Iterator[dict[str, Any]]:
        """The combinations. Rank and eta vary for stacks with a primal layer only: others have none."""
        for dataset, attention, seed in product(self.datasets, self.attention, self.seeds):
            primal = attention in ("primal-plus", "primalformer")
            for rank, eta in product(self.ranks if primal else (None,), self.etas if primal else (None,)):
                yield {"dataset": dataset, "attention": attention, "seed": seed, "rank": rank, "eta": eta}


TABLE_4 = tuple(
    f"{environment}-{tier}-v2"
    for tier in ("medium-expert", "medium", "medium-replay")
    for environment in ("hopper", "halfcheetah", "walker2d")
)
"""The D4RL data sets of the paper's Table 4."""
SWEEPS: Mapping[str, Grid] = {
    "demo": Grid(
        "Built-in data, Primal.+DT and the canonical Decision Transformer, small: minutes on two cores.",
        preset="quick",
        datasets=("primal/hopper/medium-expert-v0",),
        attention=("primal-plus", "softmax"),
        seeds=(0, 1, 2),
        flags=("--steps", "1000", "--warmup-steps", "50", "--width", "64", "--eval-every-steps", "500"),
        episodes=20,
    ),
    "table4": Grid(
        "The paper's Table 4: nine D4RL tasks, every attention stack, five seeds.",
        preset="paper",
        datasets=TABLE_4,
        attention=ATTENTION_STACKS,
        seeds=(0, 1, 2, 3, 4),
    ),
    "table7": Grid(
        "The paper's Table 7: Primal.+DT with rank 32, 64 and 96 on the nine D4RL tasks, five seeds.",
        preset="paper",
        datasets=TABLE_4,
        attention=("primal-plus",),
        seeds=(0, 1, 2, 3, 4),
        ranks=(32, 64, 96),
    ),
    "grid": Grid(
        "What the flags say.",
        preset="quick",
        datasets=("primal/hopper/medium-expert-v0",),
        attention=("primal-plus", "softmax"),
        seeds=(0, 1, 2),
    ),
}
"""Name -> the sweep, which flags can change."""


def jobs_of(
    grid: Grid, base: Config, *, out: Path, threads: int, device: str, fingerprint: Callable[[str, Config], str]
) -> list[Job]:
    """The jobs of a grid.

    Args:
        grid: what to vary.
        base: what all have in common.
        out: the sweep's folder.
        threads: of a job.
        device: of a job.
        fingerprint: the digest of a data set's content, by its name; asked once for each.
    """
    fingerprints: dict[str, str] = {}
    jobs: dict[str, Job] = {}
    for point in grid.points():
        dataset = resolve_paths(point["dataset"])
        if dataset not in fingerprints:
            fingerprints[dataset] = fingerprint(dataset, base)
        model = replace(
            base.model,
            attention=point["attention"],
            rank=base.model.rank if point["rank"] is None else point["rank"],
            eta=base.model.eta if point["eta"] is None else point["eta"],
        )
        run = replace(base.run, seed=point["seed"], out=str(out.resolve()), threads=threads, device=device)
        config = replace(base, dataset=dataset, model=model, run=run)
        identity = identity_of(config, fingerprint=fingerprints[dataset], episodes=grid.episodes)
        name = f"{_label(config, PRESETS[grid.preset][1])}__s{point['seed']}__{identity}"
        jobs.setdefault(
            identity, Job(replace(config, run=replace(run, name=name)), grid.preset, identity, grid.episodes)
        )
    return list(jobs.values())


def _label(config: Config, preset: Config) -> str:
    """For people. It depends on the job alone: in a larger grid the same job has the same name."""
    parts = [folder_label(config.dataset), config.model.attention]
    if config.model.rank != preset.model.rank:
        parts.append(f"rank{config.model.rank}")
    if config.model.eta != preset.model.eta:
        parts.append(f"eta{config.model.eta:g}")
    return "__".join(parts)
