"""Evaluate trained policies and report their normalized returns over seeds.

To evaluate the last checkpoint of every run:
  python evaluate.py runs/*

To evaluate a behavior policy, for the low and the high end of the scale:
  python evaluate.py --policy random --task hopper
  python evaluate.py --policy hopper/expert

Runs that differ only in their seed form a group. Cached episodes are reused.

Results are printed and written: report.md, report.csv, report.json and plots.
"""

if __name__ == "__main__":  # imports take seconds, during which Ctrl-C should end the program without a traceback
    import signal

    signal.signal(signal.SIGINT, signal.SIG_DFL)

import importlib.util
import json
import sys
from pathlib import Path

import torch
import tyro

from envs.behavior.policies import BatchedPolicy, load_policy
from envs.errors import DataError
from envs.make import make_arena, make_environment
from envs.published import TABLE_4
from envs.tasks import task_named, task_of
from envs.video import check_video, record_video
from primal_dt.evaluation.arguments import EvaluateConfig
from primal_dt.evaluation.callbacks import ProgressBar
from primal_dt.evaluation.evaluate import evaluate_policy, evaluate_run
from primal_dt.evaluation.report import Evaluation, Report
from primal_dt.evaluation.report_files import MARKS, results_table, write_report
from primal_dt.evaluation.rollout import RolloutError
from primal_dt.evaluation.score import target_text
from primal_dt.evaluation.trained_run import TrainedRun, open_run
from primal_dt.policy.inference import InferenceMode
from primal_dt.system.files import check_writable
from primal_dt.system.provenance import provenance
from primal_dt.system.terminal import begin_program, explain
from primal_dt.training.checkpoint import CheckpointError
from primal_dt.training.distributed import choose_device

EXIT_MISTAKE, EXIT_INTERRUPTED = 1, 130


def main() -> int:
    """Parse the command line, evaluate and report. A user's mistake ends in a message, not in a traceback."""
    begin_program()
    try:
        config = tyro.cli(EvaluateConfig, description=__doc__)
        check_writable(config.folder)
        evaluations, failures = evaluate_behavior(config) if config.policy else evaluate_runs(config)
        if evaluations:
            report = Report.of(
                evaluations,
                published={f"{name}-{tier}-v2": row for (name, tier), row in TABLE_4.items()},
                provenance=provenance() | {"device": str(choose_device(config.device))},
                failures=() if config.policy else failures,  # a behavior policy's are its notes
            )
            publish(report, config)
    except (RolloutError, ValueError, OSError) as error:
        print(f"error: {explain(error)}", file=sys.stderr)
        return EXIT_MISTAKE
    except KeyboardInterrupt:
        print("stopped; finished episodes of runs are cached", file=sys.stderr)
        return EXIT_INTERRUPTED
    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)
    return EXIT_MISTAKE if failures else 0


def evaluate_runs(config: EvaluateConfig) -> tuple[list[Evaluation], list[str]]:
    """Open all runs first, so that mistakes are reported at once; then evaluate them in turn.

    Returns the evaluations and the error messages: a run that fails does not stop the others.
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
            except (RolloutError, ValueError) as error:
                failures.append(f"{run.name}, {mode}: {error}")
                continue
            evaluations.append(evaluation)
            if config.video:
                save_videos(run, evaluation, config, mode=mode, device=device)
    return evaluations, failures


def open_runs(config: EvaluateConfig) -> tuple[list[TrainedRun], list[str]]:
    """Open the runs. Returns those that can be evaluated, and an error message for each of the others.

    If there are several paths, those that are not runs are skipped: runs/* may match files of other programs.
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
        if config.targets not in ((), "auto") and not run.task.targets:
            raise ValueError(f"{run.path} follows no target return, so it cannot be evaluated at given --targets")
        make_environment(task_of(run.task.env_id)).close()
        opened.append(run)
    if not opened:
        raise CheckpointError(failures[0] if failures else "none of the given paths is a run")
    return opened, failures


def is_run(path: Path) -> bool:
    """Whether a path looks like a run folder or a checkpoint file."""
    return path.suffix == ".pt" or (path / "config.json").exists() or (path / "checkpoints").exists()


def check_version(run: TrainedRun, config: EvaluateConfig) -> None:
    """Reject another environment, and another version unless the user allowed it."""
    trained_for, env_id = run.checkpoint.task.env_id, run.task.env_id
    if task_of(env_id).environment != task_of(trained_for).environment:
        raise DataError(f"{run.path} is trained for {trained_for} and cannot act in {env_id}")
    if env_id != trained_for and not config.allow_version_mismatch:
        raise DataError(
            f"{run.path} is trained for {trained_for}, which differs from {env_id} in physics or reward: scores are "
            "not comparable. If intended, add --allow-version-mismatch"
        )


def without_repeats(runs: list[TrainedRun]) -> list[TrainedRun]:
    """Keep the first run of each configuration and seed: copies of one experiment must not count as several."""
    first: dict[tuple[str, int], TrainedRun] = {}
    for run in runs:
        other = first.setdefault((run.configuration, run.seed), run)
        if other is not run:
            print(f"{run.path} is skipped: it has the same settings and seed as {other.path}", file=sys.stderr)
    return list(first.values())


def evaluate_behavior(config: EvaluateConfig) -> tuple[list[Evaluation], list[str]]:
    """Evaluate a behavior policy. Returns its evaluation and the error messages."""
    name = str(config.policy)
    task = task_named(config.task or name.partition("/")[0])
    policy = BatchedPolicy(load_policy(name, task), config.seed)
    with ProgressBar(f"{name} in {task.env_id}") as bar:
        evaluation = evaluate_policy(policy, name, make_arena(task), task.run_task(), config.plan, callbacks=[bar])
    return [evaluation], list(evaluation.notes)


def save_videos(
    run: TrainedRun, evaluation: Evaluation, config: EvaluateConfig, *, mode: InferenceMode, device: torch.device
) -> None:
    """Save a video of the first episode at each target."""
    policy = run.checkpoint.policy(device, mode=mode)
    for target in dict.fromkeys(episode.target for episode in evaluation.episodes):
        path = config.folder / f"{run.name}-{run.digest}-{mode}-target-{target_text(target)}.mp4"
        record_video(policy, task_of(run.task.env_id), path, target=target, seed=config.seed)
        print(f"video: {path}", file=sys.stderr)


def publish(report: Report, config: EvaluateConfig) -> None:
    """Write the report, and print its table or its JSON text."""
    path = write_report(report, config.folder)
    if importlib.util.find_spec("matplotlib") is None:
        print("no plots: matplotlib is not installed; pip install -c constraints.txt -e '.[plots]'", file=sys.stderr)
    if config.json:
        print(json.dumps(report.as_json(), indent=1))
        return
    print(f"\n{results_table(report)}\n\n{MARKS}")
    for warning in report.warnings:
        print(f"warning: {warning}")
    print(f"report: {path}")


if __name__ == "__main__":
    sys.exit(main())
