"""Evaluate trained policies: normalized returns over seeds, as a table and as a report.

python evaluate.py runs/* groups runs that differ in their seed alone, runs the episodes that have not been run
yet, and writes report.md, report.csv, report.json and plots. The ends of the scale: python evaluate.py --policy random
--task hopper, or --policy hopper/expert.
"""

if __name__ == "__main__":  # importing takes seconds, in which Ctrl-C shall end the program without a traceback
    import signal

    signal.signal(signal.SIGINT, signal.SIG_DFL)

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro

from envs.datasets.checks import DataError
from envs.published import TABLE_4
from envs.tasks import task_named
from envs.video import check_video, record_video
from primal_dt.evaluation.callbacks import Progress
from primal_dt.evaluation.report import Evaluated, Report
from primal_dt.evaluation.report_files import MARKS, results_table, write_report_and_plots
from primal_dt.evaluation.rollout import RolloutError
from primal_dt.evaluation.trained_run import Plan, Trained, evaluate_behaviour, evaluate_trained, open_trained
from primal_dt.policy.inference import InferenceMode
from primal_dt.system.files import check_writable
from primal_dt.system.terminal import begin_program, explain
from primal_dt.training.checkpoint import CheckpointError
from primal_dt.training.distributed import choose_device
from primal_dt.training.run_folder import facts

EXIT_MISTAKE, EXIT_INTERRUPTED = 1, 130


@dataclass(frozen=True)
class Config:
    """What to evaluate, and how."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    """Folders of runs, whose last checkpoints are taken; or files of checkpoints."""
    policy: str | None = None
    """Instead of runs: random, hopper/medium, hopper/expert, ..., or a function of your own as module:name."""
    task: str | None = None
    """Where --policy acts: hopper, halfcheetah, walker2d, or with a version, such as Hopper-v4."""
    episodes: int = 100
    """For each target."""
    targets: tuple[float, ...] = ()
    """Returns to ask for besides the task's headline, which is always evaluated. If not given: the training's."""
    mode: InferenceMode = "window"
    """window is exact; streaming is faster and another function: its score is shown beside that of window."""
    seed: int = 2_000_000
    """Episode i is seeded with this plus i: other episodes than those that are watched in training."""
    envs: int = 64
    """Environments that run at a time. On a CPU the result does not depend on it."""
    workers: int | None = None
    """Processes that step them; 0 for none but this one. If not given: what is fastest for so many environments."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps."""
    env_id: str | None = None
    """Another version of the environment than the one trained for; needs --allow-version-mismatch."""
    allow_version_mismatch: bool = False
    """Evaluate in another version than the one trained for. The report carries a warning."""
    fresh: bool = False
    """Run again what has been run before."""
    video: bool = False
    """Save an episode for each target as mp4, in the report's folder. Needs the extra video."""
    json: bool = False
    """Print the report as JSON instead of the table."""
    out: Path | None = None
    """Folder of the report. If not given: reports/<time>."""

    def __post_init__(self) -> None:
        if bool(self.runs) == (self.policy is not None):
            raise ValueError("give runs to evaluate, such as runs/*; or --policy random --task hopper")
        if self.runs and self.task is not None:
            raise ValueError("--task is for --policy; a run knows its own, and --env-id gives it another version")
        if self.policy is not None and self.task is None and "/" not in self.policy:
            raise ValueError(f"--policy {self.policy} needs --task: hopper, halfcheetah or walker2d")
        for_runs = {"--targets": self.targets, "--env-id": self.env_id, "--fresh": self.fresh, "--video": self.video}
        for_runs |= {"--mode streaming": self.mode != "window", "--device": self.device != "auto"}
        if self.policy is not None and (given := [name for name, value in for_runs.items() if value]):
            raise ValueError(f"{given[0]} is for runs, and does nothing for --policy")
        least = {"episodes": (self.episodes, 1), "envs": (self.envs, 1), "seed": (self.seed, 0)}
        least["workers"] = (self.workers or 0, 0)
        for name, (value, bound) in least.items():
            if value < bound:
                raise ValueError(f"{name} ({value}) must be at least {bound}")

    @property
    def plan(self) -> Plan:
        """The episodes."""
        return Plan(self.targets, self.episodes, self.seed, self.envs, self.workers, self.fresh)

    @property
    def modes(self) -> tuple[InferenceMode, ...]:
        """Streaming is never without window beside it."""
        return ("window",) if self.mode == "window" else ("window", "streaming")


def main() -> int:
    """Parse, evaluate, report; and say what went wrong, if anything did."""
    begin_program()
    try:
        failures = report_on(tyro.cli(Config, description=__doc__))
    except (DataError, CheckpointError, RolloutError, ValueError, OSError) as error:
        print(f"error: {explain(error)}", file=sys.stderr)
        return EXIT_MISTAKE
    except KeyboardInterrupt:
        print("stopped; a run's episodes that had ended are kept", file=sys.stderr)
        return EXIT_INTERRUPTED
    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)
    return EXIT_MISTAKE if failures else 0


def report_on(config: Config) -> list[str]:
    """Evaluate what has not been evaluated, and publish the report. Returns what could not be evaluated, and why."""
    check_writable(folder_of(config))
    evaluated, failures = evaluate_policy(config) if config.policy is not None else evaluate_runs(config)
    if evaluated:
        device = str(choose_device(config.device))
        table = {f"{name}-{tier}-v2": row for (name, tier), row in TABLE_4.items()}
        publish(Report.of(evaluated, published=table, facts=facts() | {"device": device}, failures=failures), config)
    return failures


def evaluate_runs(config: Config) -> tuple[list[Evaluated], list[str]]:
    """Open all checkpoints, so that what is wrong is told at once; then run them one after the other.

    A run that fails does not stop the others: what was evaluated, and what went wrong.
    """
    device = choose_device(config.device)
    opened, failures = open_all(config)
    every = distinct(opened)
    if config.video:
        check_video(every[0].task)
    evaluated = []
    for number, trained in enumerate(every, 1):
        for mode in config.modes:
            try:
                with Progress(f"{number}/{len(every)} {trained.name}, {mode}") as bar:
                    evaluated.append(evaluate_trained(trained, config.plan, mode=mode, device=device, watches=[bar]))
            except (RolloutError, CheckpointError) as error:
                failures.append(f"{trained.name}, {mode}: {error}")
                continue
            if config.video:
                film(trained, evaluated[-1], config, mode=mode, device=device)
    return evaluated, failures


def open_all(config: Config) -> tuple[list[Trained], list[str]]:
    """Checkpoints that can act as they shall, and what is wrong with the others.

    What is no run is left out, if there are several: runs/* may find what other programs have put there.
    """
    opened, failures = [], []
    for path in config.runs:
        if len(config.runs) > 1 and path.exists() and not is_run(path):
            print(f"{path} is left out: it is no run", file=sys.stderr)
            continue
        try:
            opened.append(
                open_trained(
                    path, env_id=config.env_id, allow_version_mismatch=config.allow_version_mismatch, mode=config.mode
                )
            )
        except CheckpointError as error:
            failures.append(str(error))
    if not opened:
        raise CheckpointError(failures[0] if failures else "none of these is a run")
    return opened, failures


def is_run(path: Path) -> bool:
    """Whether it looks like a run's folder, or a checkpoint."""
    return path.suffix == ".pt" or (path / "config.json").exists() or (path / "checkpoints").exists()


def distinct(every: list[Trained]) -> list[Trained]:
    """Without runs of one configuration and one seed: they are one experiment, whatever their folders are called."""
    kept: dict[tuple[str, int], Trained] = {}
    for trained in every:
        first = kept.setdefault((trained.configuration, trained.seed), trained)
        if first is not trained:
            print(f"{trained.path} is left out: it has the settings and the seed of {first.path}", file=sys.stderr)
    return list(kept.values())


def evaluate_policy(config: Config) -> tuple[list[Evaluated], list[str]]:
    """A behaviour policy."""
    name = str(config.policy)
    task = task_named(config.task or name.partition("/")[0])
    with Progress(f"{name} in {task.env_id}") as bar:
        evaluated = evaluate_behaviour(name, task, config.plan, watches=[bar])
    return [evaluated], list(evaluated.notes)


def film(trained: Trained, evaluated: Evaluated, config: Config, *, mode: InferenceMode, device: torch.device) -> None:
    """An episode for each target."""
    policy = trained.policy(mode, device)
    for target in dict.fromkeys(episode.target for episode in evaluated.episodes):
        path = folder_of(config) / f"{trained.name}-{trained.digest}-{mode}-target-{target:g}.mp4"
        record_video(policy, trained.task, path, target=target, seed=config.seed)
        print(f"video: {path}", file=sys.stderr)


def publish(report: Report, config: Config) -> None:
    """Print the table, write the files."""
    path = write_report_and_plots(report, folder_of(config))
    if not list(path.parent.glob("*.png")):
        print("no plots: they need matplotlib, pip install -c constraints.txt -e '.[plots]'", file=sys.stderr)
    if config.json:
        print(json.dumps(report.as_json(), indent=1))
        return
    print(f"\n{results_table(report)}\n\n{MARKS}")
    for warning in report.warnings:
        print(f"warning: {warning}")
    print(f"report: {path}")


def folder_of(config: Config) -> Path:
    """Where the report goes."""
    return config.out or Path("reports") / STARTED


STARTED = time.strftime("%Y%m%d-%H%M%S")

if __name__ == "__main__":
    sys.exit(main())
