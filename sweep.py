"""Train and evaluate a grid of runs, on this machine or on a Ray cluster, and report on all of them.

python sweep.py demo runs a small one. Others: table4 and table7 of the paper, and grid, which is what the flags say:
python sweep.py grid --datasets primal/hopper/medium-v0 --attention primal-plus softmax --seeds 0 1 2. Every flag of
train.py that is not varied (python train.py quick --help) can be given besides, and counts for all runs. The same
command again goes on with what is unfinished, and does nothing twice.
"""

if __name__ == "__main__":  # importing takes seconds, in which Ctrl-C shall end the program without a traceback
    import signal

    signal.signal(signal.SIGINT, signal.SIG_DFL)

import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro
from filelock import FileLock, Timeout

from envs.datasets.cache import CACHE_VARIABLE, cache_folder
from envs.datasets.load import load_dataset
from envs.datasets.minari import minari_folder
from envs.datasets.sources import must_download, stand_in
from envs.make import make_arena
from envs.tasks import task_of
from primal_dt.config import Attention
from primal_dt.config import Config as Training
from primal_dt.evaluation.evaluate import EpisodePlan, evaluate_run
from primal_dt.evaluation.report import Evaluation
from primal_dt.evaluation.trained_run import TrainedRun
from primal_dt.sweep.cluster import Resources, connected, require_cluster, require_room, run_jobs
from primal_dt.sweep.estimate import show_plan
from primal_dt.sweep.grid import SWEEPS, Grid, jobs_of
from primal_dt.sweep.job import Job, JobRecord
from primal_dt.sweep.view import SweepView
from primal_dt.sweep.worker import Programs
from primal_dt.system.files import check_writable
from primal_dt.system.terminal import begin_program, explain
from primal_dt.training.arguments import parse_config

EXIT_MISTAKE, EXIT_FAILED_JOBS, EXIT_INTERRUPTED = 1, 4, 130
INSTEAD = {
    "--dataset": "give --datasets",
    "--seed": "give --seeds",
    "--threads": "give --cpus-per-job",
    "--device": "give --gpus-per-job",
    "--name": "each run has a name of its own",
    "--resume": "the same command goes on with what is unfinished",
}
"""Flags of ``train.py`` that a sweep gives to each run by itself -> what a person can do."""


@dataclass(frozen=True)
class Config:
    """What to run, and where."""

    sweep: Annotated[Literal["demo", "table4", "table7", "grid"], tyro.conf.Positional] = "demo"
    """demo: small, minutes; table4, table7: the paper's, for a cluster; grid: what the flags say."""
    preset: Literal["quick", "paper"] | None = None
    """Of train.py. If not given: the sweep's; quick for grid."""
    datasets: tuple[str, ...] | None = None
    """Names or paths, as for train.py. If not given: the sweep's."""
    attention: tuple[Attention, ...] | None = None
    """Attention stacks. If not given: the sweep's."""
    seeds: tuple[int, ...] | None = None
    """Of the trainings. If not given: the sweep's."""
    rank: tuple[int, ...] | None = None
    """Of primal layers. If not given: the sweep's, or the paper's for each task."""
    eta: tuple[float, ...] | None = None
    """Weights of the KSVD penalty. If not given: the preset's."""
    episodes: int | None = None
    """Of the evaluation that follows a training, for each target. If not given: the sweep's."""
    cpus_per_job: float = 1.0
    """Cores that a job is given, and threads that it uses. A fraction shares a core."""
    gpus_per_job: float = 0.0
    """Of a GPU, that a job is given: a fraction shares one, 1 is all of it. Without any it trains on the CPU."""
    memory_per_job: float = 1.5
    """GiB that a job is given. --dry-run measures what its training needs."""
    retries: int = 2
    """How often a job that fails is tried again. One whose machine dies is sent elsewhere, as long as it gets on."""
    address: str | None = None
    """Of a running Ray cluster, such as auto or 10.0.0.1:6379. If not given: this machine."""
    out: Path = Path("runs/sweep")
    """Folder of all runs. On a cluster: on a path that all nodes share, as PRIMAL_DT_CACHE and MINARI_DATASETS_PATH."""
    dry_run: bool = False
    """Show the jobs, what they ask for, and how long they will take by a short trial; download nothing, run nothing."""

    def __post_init__(self) -> None:
        for name in ("datasets", "attention", "seeds", "rank", "eta"):
            if getattr(self, name) == ():
                raise ValueError(f"{name} is empty: give at least one, or leave --{name} out for the sweep's own")
        for name in ("cpus_per_job", "memory_per_job"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} ({getattr(self, name)}) must be above 0")
        if not 0 <= self.gpus_per_job <= 1:
            raise ValueError(f"gpus_per_job ({self.gpus_per_job}) must be from 0 to 1: a run trains on one GPU")
        if self.retries < 0:
            raise ValueError(f"retries ({self.retries}) must not be negative")
        if self.episodes is not None and self.episodes < 1:
            raise ValueError(f"episodes ({self.episodes}) must be at least 1")

    @property
    def grid(self) -> Grid:
        """The sweep, with what the flags change."""
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
        """Of a job."""
        return Resources(self.cpus_per_job, self.gpus_per_job, self.memory_per_job)


def main() -> int:
    """Parse, run, report; and say what went wrong, if anything did."""
    begin_program()
    try:
        config, jobs = parse(sys.argv[1:])
        if config.dry_run:
            show_plan(jobs, config.resources, programs(), address=config.address, stand_in=stand_in, roll_out=roll_out)
            return 0
        return sweep(config, jobs)
    except (ValueError, OSError) as error:
        print(f"error: {explain(error)}", file=sys.stderr)
        return EXIT_MISTAKE
    except KeyboardInterrupt:
        again = shlex.join(["python", *sys.argv])
        print(f"stopped; what was done is kept. To go on: {again}", file=sys.stderr)
        return EXIT_INTERRUPTED


def parse(arguments: list[str]) -> tuple[Config, list[Job]]:
    """The sweep and its jobs. Flags that it does not know are those of ``train.py``, for all runs."""
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help")):
        arguments = ["demo", *arguments]
    config, rest = tyro.cli(Config, args=arguments, description=__doc__, return_unknown_args=True)
    if wrong := [word for word in rest if word.partition("=")[0] in INSTEAD]:
        name = wrong[0].partition("=")[0]
        raise ValueError(f"{name} is not for a sweep, which gives it to each run: {INSTEAD[name]}")
    if wrong := [word for word in rest if word in SWEEPS]:
        raise ValueError(f"the sweep's name comes first: python sweep.py {wrong[0]} ...")
    if config.address is not None or not config.dry_run:
        require_cluster(config.address)
    check_writable(config.out)
    grid = config.grid
    base = parse_config([grid.preset, *grid.flags, *rest], program="train.py")
    jobs = jobs_of(
        grid,
        base,
        out=config.out,
        threads=config.resources.threads,
        device="cuda" if config.gpus_per_job else "cpu",
        fingerprint=fingerprint_if_here if config.dry_run else fingerprint_of,
    )
    return config, jobs


def fingerprint_of(dataset: str, base: Training) -> str:
    """The digest of a data set's content. It is downloaded or recorded now, so that no job has to."""
    return load_dataset(dataset, env_id=base.env_id, mix_versions=base.mix_versions).store.fingerprint


def fingerprint_if_here(dataset: str, base: Training) -> str:
    """For a plan: the jobs of data that would have to be downloaded are shown without its digest."""
    if not must_download(dataset):
        return fingerprint_of(dataset, base)
    print(f"{dataset} is not here yet: the sweep would download it first", file=sys.stderr)
    return ""


def roll_out(run: TrainedRun, plan: EpisodePlan) -> Evaluation:
    """Evaluate a run, for a trial."""
    return evaluate_run(run, make_arena(task_of(run.task.env_id)), plan, mode="window", device=torch.device("cpu"))


def programs() -> Programs:
    """The scripts beside this one, and where the data is."""
    here = Path(__file__).resolve().parent
    variables = {
        CACHE_VARIABLE: str(cache_folder().parent.resolve()),
        "MINARI_DATASETS_PATH": str(minari_folder().resolve()),
    }
    return Programs(here / "train.py", here / "evaluate.py", variables)


def sweep(config: Config, jobs: list[Job]) -> int:
    """Run what is not done, then report on all that is."""
    todo = [job for job in jobs if job.record.state != "done"]
    require_as_begun(todo, config.resources.threads)
    print(f"{len(jobs)} jobs in {config.out}, {len(jobs) - len(todo)} of them done before")
    print(f"watch them: {shlex.join(['tensorboard', '--logdir', str(config.out)])}", flush=True)
    failed = run(config, jobs, todo) if todo else {}
    done = [job for job in jobs if job.record.state == "done"]
    is_reported = not done or report(done, config.out / "report")
    for name, record in failed.items():
        why = record.errors[-1] if record.errors else f"it was {record.state}"
        print(f"\nerror: {name} has failed. The last time:\n{why}", file=sys.stderr)
    return EXIT_FAILED_JOBS if failed or not is_reported else 0


def report(jobs: Sequence[Job], folder: Path) -> bool:
    """Report on all runs by ``evaluate.py``, which finds their episodes cached. Returns whether it succeeded."""
    flags = ["--episodes", str(jobs[0].episodes), "--device", "cpu", "--out", str(folder)]
    command = [sys.executable, str(programs().evaluate), *(str(job.folder) for job in jobs), *flags]
    return subprocess.run(command, check=False).returncode == 0


def require_as_begun(jobs: Sequence[Job], threads: int) -> None:
    """Refuse to go on with runs on other threads or another device: they would not end as they would have.

    Raises:
        ValueError: if a run was begun otherwise.
    """
    for job in jobs:
        asked = (threads, job.config.run.device)
        if (begun := job.begun_with or asked) != asked:
            raise ValueError(
                f"{job.name} was begun with {begun[0]} threads on {begun[1]}, and is asked for with {asked[0]} on "
                f"{asked[1]}, which would change its result: give the same --cpus-per-job and --gpus-per-job, or "
                "another --out"
            )


def run(config: Config, jobs: Sequence[Job], todo: Sequence[Job]) -> dict[str, JobRecord]:
    """Run jobs on a cluster. Returns those that failed."""
    with locked(config.out), connected(config.address):
        for number in (signal.SIGTERM, signal.SIGHUP):  # stop as for Ctrl-C: Ray's own handler would kill the jobs
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
                signal.signal(number, signal.default_int_handler)
        require_room(config.resources)
        for job in todo:
            job.note(state="queued")
        view = SweepView(jobs)
        try:
            ended = run_jobs(
                todo,
                programs(),
                config.resources,
                retries=config.retries,
                on_poll=view.poll,
                on_end=view.end,
                on_wait=view.wait,
            )
        finally:
            view.close()
    return {name: record for name, record in ended.items() if record.state != "done"}


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Have a sweep's folder for oneself."""
    try:
        with FileLock(out / ".lock", timeout=0):
            yield
    except Timeout as error:
        raise ValueError(f"another sweep is running in {out}: wait for it, or give another --out") from error


if __name__ == "__main__":
    sys.exit(main())
