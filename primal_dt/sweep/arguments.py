"""The command line of ``sweep.py``. This module must not import torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from primal_dt.config import Attention, check_range
from primal_dt.sweep.grid import SWEEPS, Grid
from primal_dt.sweep.resources import Resources

__all__ = ["INSTEAD", "SweepConfig", "parse_sweep"]

INSTEAD = {
    "--dataset": "use --datasets",
    "--seed": "use --seeds",
    "--threads": "use --cpus-per-job",
    "--device": "use --gpus-per-job",
    "--name": "leave it out; runs are named automatically",
    "--resume": "leave it out; the same sweep command resumes unfinished jobs",
}
"""Flags of ``train.py`` that a sweep sets for each run, and what the user can do instead."""


@dataclass(frozen=True)
class SweepConfig:
    """The runs of a sweep, and the resources for them."""

    sweep: Annotated[Literal["demo", "table4", "table7", "policies", "grid"], tyro.conf.Positional] = "demo"
    """The sweep to run.
    demo: six small runs, which take minutes on two cores.
    table4, table7: the paper's tables, for a cluster.
    policies: ways to make a policy from the same data, on three tasks.
    grid: every combination of the flags below."""
    preset: Literal["quick", "paper"] | None = None
    """Preset of train.py for all runs.
    If not given: paper for table4 and table7, else quick."""
    datasets: tuple[str, ...] | None = None
    """Data sets to train on: names or paths, as for train.py.
    If not given: the nine D4RL data sets for table4 and table7,
    else primal/hopper/medium-expert-v0."""
    attention: tuple[Attention, ...] | None = None
    """Attention stacks to train.
    If not given: all for table4, primal-plus for table7,
    else primal-plus and softmax."""
    seeds: tuple[int, ...] | None = None
    """Training seeds.
    If not given: 0 to 4 for table4 and table7, else 0 to 2."""
    rank: tuple[int, ...] | None = None
    """Ranks of primal layers. Stacks without a primal layer ignore them.
    If not given: 32 64 96 for table7, else the paper's rank for the
    task, or 32 if the paper has none."""
    eta: tuple[float, ...] | None = None
    """Weights of the KSVD penalty, which only primal layers have.
    If not given: the preset's weight."""
    episodes: int | None = None
    """Evaluation episodes per target return, after training.
    If not given: 20 for demo, else 100."""
    cpus_per_job: float = 1.0
    """CPU cores reserved for a job. A job uses one thread per whole core,
    and at least one. With 0.5, two jobs share a core."""
    gpus_per_job: float = 0.0
    """Share of a GPU reserved for a job, from 0 to 1. With 0.25, four jobs
    share a GPU. With 0, jobs train on the CPU."""
    memory_per_job: float = 1.5
    """Memory reserved for a job, in GiB. --dry-run measures how much the training needs."""
    retries: int = 2
    """Number of times that a failed job is retried. A job whose machine dies
    resumes elsewhere, which does not count as a retry. It fails after
    three such deaths in a row without progress."""
    address: str | None = None
    """Address of a running Ray cluster, such as auto or 10.0.0.1:6379.
    If not given: the jobs run on this machine."""
    out: Path = Path("runs/sweep")
    """Folder for all runs and the report. On a cluster, all nodes must share
    it, and the folders PRIMAL_DT_CACHE and MINARI_DATASETS_PATH."""
    dry_run: bool = False
    """Print the jobs, the resources they request, and an estimate of the
    total time from short trials. Run no job and download nothing."""

    def __post_init__(self) -> None:
        for name in ("datasets", "attention", "seeds", "rank", "eta"):
            if getattr(self, name) == ():
                raise ValueError(f"{name} must have at least one value: leave --{name} out for the sweep's default")
        for name in ("cpus_per_job", "memory_per_job"):
            check_range(name, getattr(self, name), above=True)
        for seed in self.seeds or ():
            check_range("seed", seed)
        for rank in self.rank or ():
            check_range("rank", rank, low=1)
        for eta in self.eta or ():
            check_range("eta", eta)
        check_range("retries", self.retries)
        check_range("episodes", 1 if self.episodes is None else self.episodes, low=1)
        if self.attention is not None and SWEEPS[self.sweep].arms:
            arms = ", ".join(arm.name for arm in SWEEPS[self.sweep].arms)
            raise ValueError(
                f"--attention cannot be given with the sweep {self.sweep}, which compares {arms}: use grid"
            )
        if not 0 <= self.gpus_per_job <= 1:
            raise ValueError(f"gpus_per_job ({self.gpus_per_job}) must be between 0 and 1: a run trains on one GPU")

    @property
    def grid(self) -> Grid:
        """The named sweep, with the changes that the flags make."""
        grid = SWEEPS[self.sweep]
        return replace(
            grid,
            preset=self.preset or grid.preset,
            datasets=self.datasets or grid.datasets,
            attention=self.attention or grid.attention,
            seeds=self.seeds or grid.seeds,
            ranks=self.rank or grid.ranks,
            etas=self.eta or grid.etas,
            episodes=self.episodes or grid.episodes,
        )

    @property
    def resources(self) -> Resources:
        """The resources that each job requests."""
        return Resources(self.cpus_per_job, self.gpus_per_job, self.memory_per_job)


def parse_sweep(arguments: Sequence[str], *, description: str | None = None) -> tuple[SweepConfig, list[str]]:
    """Parse the command line, as in ``sys.argv[1:]``.

    Returns:
        The settings, and the flags that a sweep does not have.
    """
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help")):
        arguments = ["demo", *arguments]
    return tyro.cli(SweepConfig, args=list(arguments), description=description, return_unknown_args=True)
