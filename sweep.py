"""Train and evaluate a grid of runs, then report on all of them.

The jobs run on this machine or on a Ray cluster. Examples:
  python sweep.py demo
  python sweep.py grid --attention primal-plus softmax --seeds 0 1 2
  python sweep.py grid --datasets primal/hopper/medium-v0 --rank 16 32

Other flags of train.py (python train.py quick --help) apply to all runs.

To resume a sweep, run the same command again: finished jobs are skipped.
"""

if __name__ == "__main__":  # before torch is imported
    from primal_dt.sweep.arguments import parse_sweep
    from primal_dt.system.start import start

    start(lambda arguments: parse_sweep(arguments, description=__doc__))

import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from envs.datasets.cache import CACHE_VARIABLE, cache_folder
from envs.datasets.load import load_dataset
from envs.datasets.minari_folder import minari_folder
from envs.datasets.part_tasks import DataOptions
from envs.datasets.sources import must_download, stand_in
from envs.make import make_arena
from envs.tasks import task_of_run
from primal_dt.config import Config as Training
from primal_dt.evaluation.evaluate import evaluate_run
from primal_dt.evaluation.plan import EpisodePlan
from primal_dt.evaluation.report import Evaluation
from primal_dt.evaluation.trained_run import TrainedRun
from primal_dt.sweep.arguments import INSTEAD, SweepConfig, parse_sweep
from primal_dt.sweep.cluster import connected, require_cluster, require_room, run_jobs
from primal_dt.sweep.estimate import show_plan
from primal_dt.sweep.grid import SWEEPS
from primal_dt.sweep.job import Job, JobRecord, jobs_of
from primal_dt.sweep.view import SweepView
from primal_dt.sweep.worker import Programs
from primal_dt.system.files import check_writable, lock_folder
from primal_dt.system.process import memory_errors
from primal_dt.system.terminal import begin_program, explain
from primal_dt.training.arguments import parse_config

EXIT_MISTAKE, EXIT_FAILED_JOBS, EXIT_INTERRUPTED = 1, 4, 130


def main() -> int:
    """Parse the command line, run the sweep, report; explain a user's mistake without a traceback."""
    begin_program()
    try:
        with memory_errors():
            config, jobs = parse(sys.argv[1:])
            if not config.dry_run:
                return sweep(config, jobs)
            show_plan(jobs, config.resources, programs(), address=config.address, stand_in=stand_in, roll_out=roll_out)
            return 0
    except (ValueError, OSError, MemoryError) as error:
        print(f"error: {explain(error)}", file=sys.stderr)
        return EXIT_MISTAKE
    except KeyboardInterrupt:
        again = shlex.join(["python", *sys.argv])
        print(f"stopped; finished work is saved. To resume: {again}", file=sys.stderr)
        return EXIT_INTERRUPTED


def parse(arguments: list[str]) -> tuple[SweepConfig, list[Job]]:
    """Return the sweep's settings and its jobs. Flags that a sweep does not have go to ``train.py``, for all runs."""
    config, rest = parse_sweep(arguments, description=__doc__)
    if wrong := [word for word in rest if word.partition("=")[0] in INSTEAD]:
        name = wrong[0].partition("=")[0]
        raise ValueError(f"{name} is set by the sweep for each run: {INSTEAD[name]}")
    if wrong := [word for word in rest if word in SWEEPS]:
        raise ValueError(f"the name of the sweep must come first: python sweep.py {wrong[0]} ...")
    if wrong := [word for word in rest if word.partition("=")[0] in config.grid.arm_flags]:
        raise ValueError(f"{wrong[0].partition('=')[0]} is what the sweep {config.sweep} compares: use grid to set it")
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
    """Return the digest of a data set's content. Download or record the data set now, so that no job has to."""
    return load_dataset(dataset, DataOptions.of(base)).store.fingerprint


def fingerprint_if_here(dataset: str, base: Training) -> str:
    """Return the digest for a dry run, or ``""`` if the data set would have to be downloaded."""
    if not must_download(dataset):
        return fingerprint_of(dataset, base)
    print(f"{dataset} is not downloaded yet: the sweep would download it first", file=sys.stderr)
    return ""


def roll_out(run: TrainedRun, plan: EpisodePlan) -> Evaluation:
    """Evaluate a run on the CPU, for the trial of a dry run."""
    return evaluate_run(run, make_arena(task_of_run(run.task)), plan, mode="window", device=torch.device("cpu"))


def programs() -> Programs:
    """Return the scripts in the folder of this one, and the variables that point to the data."""
    here = Path(__file__).resolve().parent
    variables = {
        CACHE_VARIABLE: str(cache_folder().parent.resolve()),
        "MINARI_DATASETS_PATH": str(minari_folder().resolve()),
    }
    return Programs(here / "train.py", here / "evaluate.py", variables)


def sweep(config: SweepConfig, jobs: list[Job]) -> int:
    """Run the unfinished jobs, then report on all finished ones. Returns the exit code."""
    todo = [job for job in jobs if job.record.state != "done"]
    require_same_resources(todo, config.resources.threads)
    print(f"jobs in {config.out}: {len(jobs)}, already done: {len(jobs) - len(todo)}")
    print(f"curves: {shlex.join(['tensorboard', '--logdir', str(config.out)])}", flush=True)
    failed = run(config, jobs, todo) if todo else {}
    done = [job for job in jobs if job.record.state == "done"]
    is_reported = not done or report(done, config.out / "report")
    for name, record in failed.items():
        why = record.errors[-1] if record.errors else f"its state is {record.state!r}"
        print(f"\nerror: {name} failed. Its last error:\n{why}", file=sys.stderr)
    return EXIT_FAILED_JOBS if failed or not is_reported else 0


def report(jobs: Sequence[Job], folder: Path) -> bool:
    """Run ``evaluate.py``, which reports on all runs from their cached episodes. Returns whether it succeeded."""
    flags = ["--episodes", str(jobs[0].episodes), "--device", "cpu", "--out", str(folder), *jobs[0].trust]
    command = [sys.executable, str(programs().evaluate), *(str(job.folder) for job in jobs), *flags]
    return subprocess.run(command, check=False).returncode == 0


def require_same_resources(jobs: Sequence[Job], threads: int) -> None:
    """Check that runs resume with the threads and the device that they were started with, so that results repeat.

    Raises:
        ValueError: if a run was started with another number of threads or on another device.
    """
    for job in jobs:
        requested = (threads, job.config.run.device)
        if (started := job.started_with or requested) != requested:
            raise ValueError(
                f"{job.name} was started with threads={started[0]}, device={started[1]}; resuming it with "
                f"threads={requested[0]}, device={requested[1]} would change its result: give the same --cpus-per-job "
                "and --gpus-per-job, or another --out"
            )


def run(config: SweepConfig, jobs: Sequence[Job], todo: Sequence[Job]) -> dict[str, JobRecord]:
    """Run the jobs in ``todo`` on the cluster, and return the records of those that failed."""
    in_use = f"another sweep is running in {config.out}: wait until it ends, or give another --out"
    with lock_folder(config.out, in_use), connected(config.address):
        for number in (signal.SIGTERM, signal.SIGHUP):  # stop as on Ctrl-C; Ray's own handler would kill the jobs
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
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


if __name__ == "__main__":
    sys.exit(main())
