"""A report as text: tables for terminals and Markdown, ``report.md``, ``report.csv`` and ``report.json``."""

import csv
import io
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from primal_dt.evaluation.comparison import NOTES as COMPARISON_NOTES
from primal_dt.evaluation.comparison import Comparison, comparison_table
from primal_dt.evaluation.plots import plot_comparison, plot_report
from primal_dt.evaluation.report import FEW_EPISODES, Average, Group, Report, TargetResult
from primal_dt.evaluation.score import TargetSummary, number_text, success_text, target_text
from primal_dt.system.files import atomic_write
from primal_dt.system.table import format_table
from primal_dt.task import TABLE, RunTask

__all__ = ["cells_table", "explain_marks", "results_table", "runs_table", "tasks_table", "write_report"]

COMPARISON_PLOT = "comparison.png"
HEADLINE, FEW, ELSEWHERE, PLAIN = "*", "†", "‡", "§"
MARKS = {
    HEADLINE: "headline target",
    FEW: "fewer than 3 seeds or 10 episodes",
    ELSEWHERE: "the data was recorded in another environment, or in another version",
    PLAIN: "return, not normalized: there are no reference returns",
}
NOTES = f"""\
The normalized return is D4RL's: 0 is the return of the reference's random policy, and 100 is that of its expert.
{PLAIN} marks returns that are not normalized, because the task has no reference returns: they are not scores, and in no
average. The headline target ({HEADLINE}) is fixed before the evaluation, in the task table if nothing else is said.
Results at other targets are shown, but none of them is selected. A run's result is the mean over its episodes. ± is the
sample standard deviation over seeds. IQM is the interquartile mean over seeds; with three or fewer seeds it is the
mean. The square brackets show its 95 % interval, from a stratified bootstrap over seeds. {FEW} marks results with fewer
than 3 seeds or fewer than 10 episodes. {ELSEWHERE} marks policies whose data was recorded in another environment, or in
another version of it."""


def explain_marks(table: str) -> str:
    """The meaning of each mark in a table, one line each."""
    return "\n".join(f"{mark} {meaning}" for mark, meaning in MARKS.items() if mark in table)


def results_table(report: Report) -> str:
    """The main table: the result of each configuration at each target.

    The column of success rates is left out if there are none, that of returns if all results are returns, and that of
    modes if all are exact.
    """
    has_modes = any(group.first.mode not in (None, "window") for group in report.groups)
    has_success, has_scores = _has_success(report), not all(group.is_plain for group in report.groups)
    rows = [
        [
            _dataset(report, group),
            group.label,
            *([group.first.mode or ""] if has_modes else []),
            f"{target_text(result.target, result.predicted_mean)}{HEADLINE if result.is_headline else ''}",
            _value(group, result),
            _interval(group, result),
            *([f"{result.return_mean:.2f}" if group.is_plain else f"{result.return_mean:.0f}"] if has_scores else []),
            f"{result.length_mean:.0f}",
            *([success_text(result.success_rate)] if has_success else []),
            _or_nothing(result.num_seeds),
            str(result.num_episodes),
        ]
        for group in report.groups
        for result in group.results
    ]
    header = [
        "data set",
        "policy",
        *(["mode"] if has_modes else []),
        "target",
        _unit(report),
        "IQM",
        *(["return"] if has_scores else []),
        "length",
        *(["success"] if has_success else []),
        "seeds",
        "episodes",
    ]
    return format_table(header, rows)


def runs_table(report: Report) -> str:
    """One row for each run and target."""
    has_success = _has_success(report)
    rows = [
        [
            _dataset(report, group),
            group.label,
            run.mode or "",
            _or_nothing(run.seed),
            _or_nothing(run.step),
            target_text(summary.target, summary.predicted_mean),
            *(text + (PLAIN if run.is_plain else "") for text in _spread(summary)),
            f"{summary.length_mean:.0f}",
            *([success_text(summary.success_rate)] if has_success else []),
            f"{summary.num_episodes}{FEW if summary.num_episodes < FEW_EPISODES else ''}",
        ]
        for group in report.groups
        for run in group.runs
        for summary in run.summaries()
    ]
    header = ["data set", "policy", "mode", "seed", "step", "target", "mean ± std over episodes", "median", "min"]
    return format_table([*header, "max", "length", *(["success"] if has_success else []), "episodes"], rows)


def tasks_table(report: Report) -> str:
    """Tasks as rows and policies as columns, as in Table 4 of the paper. Published results are in parentheses.

    Tasks with published results come first, in the published order. Every published column is shown. A data set has one
    row for each unit of its results: environment and reference returns.
    """
    by_task: dict[tuple[str, object], list[Group]] = {}
    for group in report.groups:
        by_task.setdefault((group.first.task.dataset, group.first.unit), []).append(group)
    order = list(report.published)
    tasks = sorted(by_task, key=lambda task: order.index(task[0]) if task[0] in order else len(order))
    columns = list(dict.fromkeys((group.label, group.first.mode) for group in report.groups))
    known = {name for group in report.groups for name in report.published_beside(group.first.task)}
    columns += [(name, "published") for name in sorted(known - {label for label, _ in columns})]
    rows = []
    for own in (by_task[task] for task in tasks):
        cells = {(group.label, group.first.mode): _cell(report, group) for group in own}
        for name, published in report.published_beside(own[0].first.task).items():
            cells[name, "published"] = f"({_score(*published)})"
        rows.append([_dataset(report, own[0]), *(cells.get(column, "") for column in columns)])
    for version in dict.fromkeys(average.version for average in report.averages()):
        averages = {(each.policy, each.mode): each for each in report.averages() if each.version == version}
        rows.append([f"average, {version}", *(_average(averages, column) for column in columns)])
    return format_table(["data set", *(_heading(*column) for column in columns)], rows)


def cells_table(report: Report) -> str:
    """The details of each cell of :func:`tasks_table`: seeds, episodes, steps, target, environment."""
    rows = []
    for group in report.groups:
        run, result = group.first, group.headline
        published, reference = report.published_for(run), run.task.reference
        rows.append(
            [
                run.task.dataset,
                _heading(group.label, run.mode),
                _value(group, result),
                "" if published is None else _score(*published),
                ", ".join(_or_nothing(each.seed) for each in group.runs),
                str(result.num_episodes),
                ", ".join(dict.fromkeys(_or_nothing(each.step) for each in group.runs)),
                target_text(result.target, result.predicted_mean),
                run.task.environment_text,
                "none" if reference is None else f"{reference.random_return:g}, {reference.expert_return:g}",
            ]
        )
    header = ["data set", "policy", "ours", "published", "seeds", "episodes", "step", "target", "environment"]
    return format_table([*header, "random and expert return"], rows)


def write_report(report: Report, folder: Path, comparison: Comparison | None = None) -> Path:
    """Write ``report.md``, ``report.csv``, ``report.json`` and, if matplotlib is installed, plots.

    Args:
        report: the report.
        folder: where to write.
        comparison: a comparison of two of its policies, to be included.

    Returns:
        The path of ``report.md``.
    """
    plots: list[Path] = []
    with suppress(ImportError):
        plots = plot_report(report, folder)
        if comparison is not None:
            plot_comparison(comparison, folder / COMPARISON_PLOT)
    content = report.as_json()
    if comparison is not None:
        content["comparison"] = comparison.as_json()
    contents = {
        "report.md": _markdown(report, [plot.name for plot in plots], comparison),
        "report.csv": _csv(report),
        "report.json": json.dumps(content, indent=1, allow_nan=False) + "\n",
    }
    for name, text in contents.items():
        with atomic_write(folder / name) as file:
            file.write(text.encode())
    return folder / "report.md"


def _markdown(report: Report, pictures: Sequence[str], comparison: Comparison | None) -> str:
    parts = ["# Evaluation", results_table(report)]
    if comparison is not None:
        parts += [f"## {comparison.first} and {comparison.second}", comparison_table(comparison)]
        parts += [f"{comparison.sentence}\n\n![difference]({COMPARISON_PLOT})", COMPARISON_NOTES]
        parts += ["\n".join(f"* {warning}" for warning in comparison.warnings)] if comparison.warnings else []
    if report.warnings:
        parts += ["## Warnings", "\n".join(f"* {warning}" for warning in report.warnings)]
    parts.append(NOTES)
    if sources := _sources(report):
        parts.append("\n".join(f"* {source}" for source in sources))
    parts += [f"![{Path(name).stem.replace('_', ' ')}]({name})" for name in pictures]
    parts += ["## Tasks and policies", tasks_table(report)]
    if any(report.published_for(group.first) for group in report.groups):
        parts.append("Published results are in parentheses. They are for D4RL's data in D4RL's environments.")
    for average in report.averages():
        interval = "" if average.interval is None else f" [{average.interval.low:.1f}, {average.interval.high:.1f}]"
        parts.append(
            f"{_heading(average.policy, average.mode)}, {average.version}: mean {average.mean:.1f}, IQM "
            f"{average.iqm:.1f}{interval} over {len(average.datasets)} tasks{FEW if average.is_few else ''}."
        )
    parts += ["## Details of each cell", cells_table(report), "## Runs", runs_table(report)]
    if report.provenance:
        parts += ["## Provenance", "\n".join(f"* {name}: {value}" for name, value in report.provenance.items())]
    return "\n\n".join(parts) + "\n"


def _csv(report: Report) -> str:
    text = io.StringIO()
    has_success = _has_success(report)
    rows = [_csv_row(group, result, has_success=has_success) for group in report.groups for result in group.results]
    writer = csv.DictWriter(text, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _csv_row(group: Group, result: TargetResult, *, has_success: bool) -> dict[str, object]:
    """One line. The columns of the interquartile mean are in the unit of the column ``unit``."""
    run = group.first
    low, high = result.interval or ("", "")
    return {
        "dataset": run.task.dataset,
        "policy": group.label,
        "configuration": run.configuration,
        "mode": run.mode,
        "environment": run.task.environment_text,
        "data_environments": "; ".join(run.task.data_env_ids),
        "steps": " ".join(_or_nothing(each.step) for each in group.runs),
        "seeds": " ".join(_or_nothing(each.seed) for each in group.runs),
        "target": result.target,
        "predicted_return": result.predicted_mean,
        "headline": result.is_headline,
        "episodes": result.num_episodes,
        "normalized_mean": None if group.is_plain else result.mean,
        "normalized_std": None if group.is_plain else result.std,
        "unit": "return" if group.is_plain else "normalized return",
        "iqm": result.iqm,
        "iqm_low": low,
        "iqm_high": high,
        "return_mean": result.return_mean,
        "return_std": result.return_std,
        "length_mean": result.length_mean,
        **({"success_rate": result.success_rate} if has_success else {}),
        "few": result.is_few,
        "elsewhere": run.is_elsewhere,
    }


def _dataset(report: Report, group: Group) -> str:
    """The group's data set, with the environment if the report has its results in several units."""
    task = group.first.task
    units = {each.first.unit for each in report.groups if each.first.task.dataset == task.dataset}
    if len(units) == 1:
        return task.dataset
    is_clear = len({environment for environment, _ in units}) == len(units)
    return f"{task.dataset} in {task.environment_text if is_clear else task.unit}"


def _heading(policy: str, mode: str | None) -> str:
    return policy if mode in (None, "window") else f"{policy}, {mode}"


def _cell(report: Report, group: Group) -> str:
    published = report.published_for(group.first)
    return _value(group, group.headline) + ("" if published is None else f" ({_score(*published)})")


def _average(averages: dict[tuple[str, str | None], Average], column: tuple[str, str | None]) -> str:
    own = averages.get(column)
    return "" if own is None else f"{own.mean:.1f}{FEW if own.is_few else ''} (of {len(own.datasets)})"


def _value(group: Group, result: TargetResult) -> str:
    """A group's result with its marks."""
    marks = [
        PLAIN if group.is_plain else "",
        FEW if result.is_few else "",
        ELSEWHERE if group.first.is_elsewhere else "",
    ]
    return _score(result.mean, result.std, is_plain=group.is_plain) + "".join(marks)


def _score(mean: float, spread: float | None, *, is_plain: bool = False) -> str:
    numbers = [mean] if spread is None else [mean, spread]
    return " ± ".join(number_text(number, is_plain=is_plain) for number in numbers)


def _interval(group: Group, result: TargetResult) -> str:
    iqm, *ends = (number_text(n, is_plain=group.is_plain) for n in (result.iqm, *(result.interval or ())))
    return f"{iqm} [{', '.join(ends)}]" if ends else iqm


def _spread(summary: TargetSummary) -> list[str]:
    if summary.normalized is None:
        return summary.returns.texts(is_plain=True)
    return summary.normalized.texts(is_plain=False)


def _unit(report: Report) -> str:
    """What the results of a report are. If they are of both units, plain returns are marked."""
    if all(group.is_plain for group in report.groups):
        return "return"
    mixed = any(group.is_plain for group in report.groups)
    return f"normalized return, or return{PLAIN}" if mixed else "normalized return"


def _has_success(report: Report) -> bool:
    return any(result.success_rate is not None for group in report.groups for result in group.results)


def _sources(report: Report) -> list[str]:
    """Where target returns and reference returns are from, for tasks where it is not the table of tasks and D4RL."""
    found = []
    for task in (group.first.task for group in report.groups):
        name = f"{task.dataset} in {task.environment_text}"
        if task.reference is None:
            found.append(f"{name}: there are no reference returns, so results are plain returns ({PLAIN})")
        elif task.reference_source != RunTask.reference_source:
            found.append(f"{name}: reference returns are from {task.reference_source}")
        if task.targets and task.target_source != TABLE:
            found.append(f"{name}: target returns are from {task.target_source}")
    return list(dict.fromkeys(found))


def _or_nothing(value: int | None) -> str:
    return "" if value is None else str(value)
