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

from envs.behavior.policies import BatchedPolicy, load_policy
from envs.errors import DataError
from envs.make import check_environment, make_arena
from envs.published import TABLE_4
from envs.tasks import task_named, task_of
from envs.video import check_video, record_video
from primal_dt.evaluation.callbacks import ProgressBar
from primal_dt.evaluation.evaluate import EpisodePlan, evaluate_policy, evaluate_run
from primal_dt.evaluation.report import Evaluation, Report
from primal_dt.evaluation.report_files import MARKS, results_table, write_report
from primal_dt.evaluation.rollout import RolloutError
from primal_dt.evaluation.trained_run import TrainedRun, open_run
from primal_dt.policy.inference import InferenceMode
from primal_dt.system.files import check_writable
from primal_dt.system.provenance import provenance
from primal_dt.system.terminal import begin_program, explain
from primal_dt.training.checkpoint import CheckpointError
from primal_dt.training.distributed import choose_device

STARTED = time.strftime("%Y%m%d-%H%M%S")
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
    def folder(self) -> Path:
        """The folder of the report."""
        return self.out or Path("reports") / STARTED

    @property
    def plan(self) -> EpisodePlan:
        """Which episodes to run."""
        return EpisodePlan(self.targets, self.episodes, self.seed, self.envs, self.workers, self.fresh)

    @property
    def modes(self) -> tuple[InferenceMode, ...]:
        """Streaming is always shown beside window."""
        return ("window",) if self.mode == "window" else ("window", "streaming")


def main() -> int:
    """Parse the command line, evaluate, report; explain a user's mistake without a traceback."""
    begin_program()
    try:
        config = tyro.cli(Config, description=__doc__)
        check_writable(config.folder)
        evaluations, failures = evaluate_behavior(config) if config.policy else evaluate_runs(config)
        if evaluations:
            report = Report.of(
                evaluations,
                published={f"{name}-{tier}-v2": row for (name, tier), row in TABLE_4.items()},
                provenance=provenance() | {"device": str(choose_device(config.device))},
                failures=failures,
            )
            publish(report, config)
    except (RolloutError, ValueError, OSError) as error:
        print(f"error: {explain(error)}", file=sys.stderr)
        return EXIT_MISTAKE
    except KeyboardInterrupt:
        print("stopped; episodes that had ended are cached", file=sys.stderr)
        return EXIT_INTERRUPTED
    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)
    return EXIT_MISTAKE if failures else 0


def evaluate_runs(config: Config) -> tuple[list[Evaluation], list[str]]:
    """Open all runs first, so that what is wrong is reported at once; then evaluate them in turn.

    Returns the evaluations, and what failed: a run that fails does not stop the others.
    """
    device = choose_device(config.device)
    opened, failures = open_runs(config)
    runs = without_repeats(opened)
    if config.video:
        check_video(task_of(runs[0].task.env_id))
    evaluations = []
    for number, run in enumerate(runs, 1):
        task = task_of(run.task.env_id)
        for mode in config.modes:
            try:
                with ProgressBar(f"{number}/{len(runs)} {run.name}, {mode}") as bar:
                    evaluation = evaluate_run(
                        run, make_arena(task), config.plan, mode=mode, device=device, callbacks=[bar]
                    )
            except (RolloutError, CheckpointError) as error:
                failures.append(f"{run.name}, {mode}: {error}")
                continue
            evaluations.append(evaluation)
            if config.video:
                save_videos(run, evaluation, config, mode=mode, device=device)
    return evaluations, failures


def open_runs(config: Config) -> tuple[list[TrainedRun], list[str]]:
    """The runs that can be evaluated, and what is wrong with the others.

    Paths that are not runs are skipped if there are several: runs/* may match files of other programs.
    """
    opened, failures = [], []
    for path in config.runs:
        if len(config.runs) > 1 and path.exists() and not is_run(path):
            print(f"{path} is skipped: it is not a run", file=sys.stderr)
            continue
        try:
            run = open_run(path, mode=config.mode, env_id=config.env_id)
        except CheckpointError as error:
            failures.append(str(error))
            continue
        check_version(run, config)
        check_environment(task_of(run.task.env_id))
        opened.append(run)
    if not opened:
        raise CheckpointError(failures[0] if failures else "none of these is a run")
    return opened, failures


def is_run(path: Path) -> bool:
    """Whether it looks like a run folder or a checkpoint."""
    return path.suffix == ".pt" or (path / "config.json").exists() or (path / "checkpoints").exists()


def check_version(run: TrainedRun, config: Config) -> None:
    """Refuse another environment, and another version unless the user asked for it."""
    trained_for, env_id = run.checkpoint.task.env_id, run.task.env_id
    if task_of(env_id).environment != task_of(trained_for).environment:
        raise DataError(f"{run.path} is trained for {trained_for} and cannot act in {env_id}")
    if env_id != trained_for and not config.allow_version_mismatch:
        raise DataError(
            f"{run.path} is trained for {trained_for}, which differs from {env_id} in physics or reward: scores are "
            "not comparable. If intended, add --allow-version-mismatch"
        )


def without_repeats(runs: list[TrainedRun]) -> list[TrainedRun]:
    """One run for each configuration and seed: two of them are one experiment, whatever their folders are called."""
    first: dict[tuple[str, int], TrainedRun] = {}
    for run in runs:
        other = first.setdefault((run.configuration, run.seed), run)
        if other is not run:
            print(f"{run.path} is skipped: it has the settings and the seed of {other.path}", file=sys.stderr)
    return list(first.values())


def evaluate_behavior(config: Config) -> tuple[list[Evaluation], list[str]]:
    """A behavior policy: the ends of the scale."""
    name = str(config.policy)
    task = task_named(config.task or name.partition("/")[0])
    policy = BatchedPolicy(load_policy(name, task), config.seed)
    with ProgressBar(f"{name} in {task.env_id}") as bar:
        evaluation = evaluate_policy(policy, name, make_arena(task), task.run_task(), config.plan, callbacks=[bar])
    return [evaluation], list(evaluation.notes)


def save_videos(
    run: TrainedRun, evaluation: Evaluation, config: Config, *, mode: InferenceMode, device: torch.device
) -> None:
    """Save a video of one episode for each target."""
    policy = run.checkpoint.policy(device, mode=mode)
    for target in dict.fromkeys(episode.target for episode in evaluation.episodes):
        path = config.folder / f"{run.name}-{run.digest}-{mode}-target-{target:g}.mp4"
        record_video(policy, task_of(run.task.env_id), path, target=target, seed=config.seed)
        print(f"video: {path}", file=sys.stderr)


def publish(report: Report, config: Config) -> None:
    """Write the report, and print its table or its JSON."""
    path = write_report(report, config.folder)
    if not list(path.parent.glob("*.png")):
        print("no plots: they need matplotlib, pip install -c constraints.txt -e '.[plots]'", file=sys.stderr)
    if config.json:
        print(json.dumps(report.as_json(), indent=1))
        return
    print(f"\n{results_table(report)}\n\n{MARKS}")
    for warning in report.warnings:
        print(f"warning: {warning}")
    print(f"report: {path}")


if __name__ == "__main__":
    sys.exit(main())
