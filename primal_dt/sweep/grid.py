"""Sweeps: grids of training runs, some with names. A grid -> jobs."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from envs.datasets.checks import DataError
from envs.datasets.load import load_dataset
from envs.datasets.sources import find_here
from envs.tasks import ENVIRONMENTS, DatasetName, parse_name
from primal_dt.config import PRESETS, Config
from primal_dt.model.transformer import ATTENTION_STACKS
from primal_dt.sweep.job import Job, identity_of
from primal_dt.training.run_folder import dataset_label

__all__ = ["SWEEPS", "Grid", "fingerprint_of", "jobs_of", "must_download", "stand_in"]

TABLE_4_TIERS = ("medium-expert", "medium", "medium-replay")


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


D4RL_TASKS = tuple(
    str(DatasetName("d4rl", environment, tier)) for tier in TABLE_4_TIERS for environment in ENVIRONMENTS
)
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
        datasets=D4RL_TASKS,
        attention=ATTENTION_STACKS,
        seeds=(0, 1, 2, 3, 4),
    ),
    "table7": Grid(
        "The paper's Table 7: Primal.+DT with rank 32, 64 and 96 on the nine D4RL tasks, five seeds.",
        preset="paper",
        datasets=D4RL_TASKS,
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


def fingerprint_of(dataset: str, base: Config) -> str:
    """Of a data set's content. It is fetched or recorded and converted for that, so that no job has to.

    Raises:
        DataError: if it cannot be had.
    """
    return load_dataset(dataset, env_id=base.env_id, mix_versions=base.mix_versions).store.fingerprint


def must_download(dataset: str) -> bool:
    """Whether a part of a data set is neither here nor built in."""
    for name in [dataset] if Path(dataset).exists() else [part.strip() for part in dataset.split("+")]:
        known = parse_name(name)
        if find_here(name) is None and (known is None or known.source != "primal"):
            return True
    return False


def stand_in(dataset: str) -> str:
    """For a trial: the data set, or built-in data of its environment if it would have to be downloaded.

    Raises:
        DataError: if it is of an environment that nothing is known of.
    """
    if not must_download(dataset):
        return dataset
    known = parse_name(dataset.partition("+")[0].strip())
    if known is None:
        raise DataError(f"{dataset} is not here, and there is no built-in data of its kind")
    return str(DatasetName("primal", known.environment, "medium-expert"))


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
        fingerprint: of a data set: :func:`fingerprint_of`. It is asked once for each.
    """
    fingerprints: dict[str, str] = {}
    jobs: dict[str, Job] = {}
    for point in grid.points():
        dataset = _resolved(point["dataset"])
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
    parts = [dataset_label(config.dataset), config.model.attention]
    if config.model.rank != preset.model.rank:
        parts.append(f"rank{config.model.rank}")
    if config.model.eta != preset.model.eta:
        parts.append(f"eta{config.model.eta:g}")
    return "__".join(parts)


def _resolved(dataset: str) -> str:
    """Paths from the root on: jobs do not start where the sweep did."""
    if Path(dataset).exists():
        return str(Path(dataset).resolve())
    parts = (part.strip() for part in dataset.split("+"))
    return "+".join(str(Path(part).resolve()) if Path(part).exists() else part for part in parts)
