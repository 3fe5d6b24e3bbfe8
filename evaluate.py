"""Evaluate trained policies and report their normalized returns over seeds.

To evaluate the last checkpoint of every run:
  python evaluate.py runs/*

To evaluate a policy that comes with the package, or one that somebody shares:
  python evaluate.py --pretrained hopper --video
  python evaluate.py hub:OWNER/NAME

To evaluate a behavior policy, for the low and the high end of the scale:
  python evaluate.py --policy random --task hopper
  python evaluate.py --policy hopper/expert

Runs that differ only in their seed form a group. Cached episodes are reused.

Results are printed and written: report.md, report.csv, report.json and plots.
"""

if __name__ == "__main__":  # before torch is imported
    from primal_dt.evaluation.arguments import parse_evaluation
    from primal_dt.system.start import start

    start(lambda arguments: parse_evaluation(arguments, description=__doc__))

import errno
import importlib.util
import sys
from pathlib import Path

import torch

from envs.behavior.policies import BatchedPolicy, load_policy
from envs.datasets.cache import evaluations_folder
from envs.errors import DataError
from envs.make import make_arena, make_environment, make_raw
from envs.published import TABLE_4
from envs.specifications import same_environment
from envs.tasks import Task, task_named, task_of_run
from envs.video import check_video, record_video
from primal_dt.evaluation.arguments import EvaluateConfig, parse_evaluation
from primal_dt.evaluation.callbacks import ProgressBar
from primal_dt.evaluation.comparison import compare, comparison_table
from primal_dt.evaluation.evaluate import evaluate_policy, evaluate_run
from primal_dt.evaluation.report import Evaluation, Report
from primal_dt.evaluation.report_files import explain_marks, results_table, write_report
from primal_dt.evaluation.rollout import RolloutError
from primal_dt.evaluation.score import target_text
from primal_dt.evaluation.trained_run import TrainedRun, open_run
from primal_dt.hub.sources import find_policy, policy_label
from primal_dt.policy.inference import InferenceMode
from primal_dt.system.files import check_writable
from primal_dt.system.process import memory_errors
from primal_dt.system.provenance import provenance
from primal_dt.system.terminal import begin_program, explain
from primal_dt.task import Specification
from primal_dt.training.checkpoint import CheckpointError
from primal_dt.training.distributed import choose_device

EXIT_MISTAKE, EXIT_INTERRUPTED = 1, 130


def main() -> int:
    """Parse the command line, evaluate and report. A user's mistake ends in a message, not in a traceback."""
    begin_program()
    try:
        config = parse_evaluation(sys.argv[1:], description=__doc__)
        check_writable(config.folder)
        with memory_errors():
            evaluations, failures = evaluate_behavior(config) if config.policy else evaluate_runs(config)
        if evaluations:
            report = Report.of(
                evaluations,
                published={f"{name}-{tier}-v2": row for (name, tier), row in TABLE_4.items()},
                provenance=provenance() | {"device": str(choose_device(config.device))},
                failures=() if config.policy else failures,  # a behavior policy's are its notes
            )
            publish(report, config)
    except (RolloutError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_MISTAKE
    except (OSError, MemoryError) as error:
        print(f"error: {explain(error)}", file=sys.stderr)
        print("finished episodes of runs are cached; to resume, give the same command", file=sys.stderr)
        return EXIT_MISTAKE
    except KeyboardInterrupt:
        print("stopped; finished episodes of runs are cached", file=sys.stderr)
        return EXIT_INTERRUPTED
    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)
    return EXIT_MISTAKE if failures else 0


def evaluate_runs(config: EvaluateConfig) -> tuple[list[Evaluation], list[str]]:
    """Open all runs first, so that mistakes are reported at once; then evaluate them in turn.

    Returns the evaluations and the error messages: whatever is wrong with one run does not stop the others.
    """
    device = choose_device(config.device)
    runs, failures = open_runs(config)
    if config.video and runs:
        check_video(task_of_evaluation(runs[0], config))
    evaluations = []
    for number, run in enumerate(runs, 1):
        for mode in config.modes:
            try:
                arena = make_arena(task_of_evaluation(run, config))
                with memory_errors(), ProgressBar(f"{number}/{len(runs)} {run.name}, {mode}") as bar:
                    evaluation = evaluate_run(run, arena, config.plan, mode=mode, device=device, callbacks=[bar])
                evaluations.append(evaluation)
                if config.video:
                    save_video(run, config, mode=mode, device=device)
            except Exception as error:  # not only expected ones: the other runs must be reported
                if is_shortage(error):
                    raise
                failures.append(f"{run.name}, {mode}: {one_line(error)}")
    return evaluations, failures


def open_runs(config: EvaluateConfig) -> tuple[list[TrainedRun], list[str]]:
    """Open the runs. Returns those that can be evaluated, and an error message for each of the others.

    If there are several paths, those that are not runs are skipped: runs/* may match files of other programs. Of each
    configuration and seed the first run is taken: copies of one experiment must not count as several.
    """
    opened: dict[tuple[str, int], TrainedRun] = {}
    failures = []
    for source in config.sources:
        try:
            path = find_policy(source)
            if len(config.sources) > 1 and path.exists() and not is_run(path):
                print(f"{path} is skipped: it is not a run", file=sys.stderr)
                continue
            label, cache = policy_label(source), evaluations_folder()
            run = open_run(path, mode=config.mode, env_id=config.env_id, label=label, cache=cache)
            check_version(run, config)
            if config.targets not in ((), "auto") and not run.task.targets:
                raise ValueError(f"{run.path} follows no target return, so it cannot be evaluated at given --targets")
            make_environment(task_of_evaluation(run, config)).close()
            other = opened.setdefault((run.configuration, run.seed), run)
        except Exception as error:
            message = one_line(error)
            failures.append(message if source in message else f"{source}: {message}")
            continue
        if other is not run:
            print(f"{run.path} is skipped: it has the same settings and seed as {other.path}", file=sys.stderr)
    if not opened and not failures:
        raise CheckpointError("none of the given paths is a run")
    return list(opened.values()), failures


def one_line(error: Exception) -> str:
    """The message of an error, with the error's type if the message alone may not be clear."""
    is_clear = isinstance(error, RolloutError | ValueError | OSError)
    return " ".join((explain(error) if is_clear else repr(error)).split())


def is_shortage(error: Exception) -> bool:
    """Whether memory or disk space ran out, which concerns all runs."""
    codes = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.ENOMEM)
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in codes)


def is_run(path: Path) -> bool:
    """Whether a path looks like a run folder, a checkpoint file or the folder of a shared policy."""
    return path.suffix == ".pt" or (path / "config.json").exists() or (path / "checkpoints").exists()


def task_of_evaluation(run: TrainedRun, config: EvaluateConfig) -> Task:
    """The task that a run acts in. A module is imported only if the user names it or trusts the run."""
    return task_of_run(run.task, trusted=config.trust_env or config.env_id is not None)


def check_version(run: TrainedRun, config: EvaluateConfig) -> None:
    """Reject another environment, and another version or variant unless the user allowed it."""
    trained_for, task, shape = run.checkpoint.task, task_of_evaluation(run, config), run.checkpoint.shape
    width = len(shape.categories or shape.action_low)
    environment = task.environment
    is_other = bool(trained_for.env_id) and run.task.environment != trained_for.environment
    categories = environment.actions.categories
    if is_other or (environment.state_width, environment.action_width, categories) != (
        shape.state_width,
        width,
        shape.categories,
    ):
        raise DataError(
            f"{run.path} is trained for {trained_for.environment_text or trained_for.dataset} and cannot act in "
            f"{task.specification}: its model takes {shape.state_width} observation entries and {width} action entries"
            f"{f' with {shape.categories} choices' if shape.categories else ''}"
        )
    if not trained_for.env_id or config.allow_version_mismatch or task.specification is None:
        return
    if not same_environment(task.specification, trained_for.specification or Specification(trained_for.env_id)):
        raise DataError(
            f"{run.path} is trained for {trained_for.environment_text}, which differs from {task.specification} in "
            "physics or reward: scores are not comparable. If intended, add --allow-version-mismatch"
        )


def evaluate_behavior(config: EvaluateConfig) -> tuple[list[Evaluation], list[str]]:
    """Evaluate a behavior policy. Returns its evaluation and the error messages."""
    name = str(config.policy)
    task = task_named(config.task or name.partition("/")[0])
    policy = BatchedPolicy(load_policy(name, task), config.seed, make_raw(task))
    name = Path(name).name if name.endswith((".hdf5", ".h5")) else name
    with ProgressBar(f"{name} in {task.env_id}") as bar:
        evaluation = evaluate_policy(policy, name, make_arena(task), task.run_task(), config.plan, callbacks=[bar])
    return [evaluation], list(evaluation.notes)


def save_video(run: TrainedRun, config: EvaluateConfig, *, mode: InferenceMode, device: torch.device) -> None:
    """Save a video of the first episode at the headline target. Each takes a software renderer about half a minute."""
    policy = run.checkpoint.policy(device, mode=mode, reproducible=True, past_end="error")
    target = run.task.headline
    path = config.folder / f"{run.name}-{run.digest}-{mode}-target-{target_text(target)}.mp4"
    record_video(policy, task_of_evaluation(run, config), path, target=target, seed=config.seed)
    print(f"video: {path}", file=sys.stderr)


def publish(report: Report, config: EvaluateConfig) -> None:
    """Write the report, and print its tables or its JSON text."""
    comparison, problem = None, ""
    try:
        comparison = None if config.compare is None else compare(report, *config.compare)
    except ValueError as error:  # the report of the policies is written all the same
        problem = str(error)
    path = write_report(report, config.folder, comparison)
    if importlib.util.find_spec("matplotlib") is None:
        print("no plots: matplotlib is not installed; pip install -c constraints.txt -e '.[plots]'", file=sys.stderr)
    if config.json:
        print((config.folder / "report.json").read_text(), end="")
        return
    table = results_table(report)
    print(f"\n{table}\n\n{explain_marks(table)}")
    if comparison is not None:
        print(f"{comparison_table(comparison)}\n\n{comparison.sentence}\n")
    for warning in (*report.warnings, *(comparison.warnings if comparison else ())):
        print(f"warning: {warning}")
    print(f"report: {path}")
    if problem:
        raise ValueError(problem)


if __name__ == "__main__":
    sys.exit(main())
