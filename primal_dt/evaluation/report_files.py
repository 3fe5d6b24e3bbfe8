"""A report as text: tables for terminals and Markdown, ``report.md``, ``report.csv`` and ``report.json``."""

import csv
import io
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from primal_dt.evaluation.plots import plot_report
from primal_dt.evaluation.report import FEW_EPISODES, Average, Group, Report, TargetResult
from primal_dt.evaluation.score import target_text
from primal_dt.system.files import atomic_write
from primal_dt.system.table import format_table

__all__ = ["cells_table", "results_table", "runs_table", "tasks_table", "write_report"]

HEADLINE, FEW, ELSEWHERE = "*", "†", "‡"
MARKS = f"""\
{HEADLINE} headline target. {FEW} fewer than 3 seeds or 10 episodes. {ELSEWHERE} the data was recorded in
another version of the environment."""
NOTES = f"""\
The normalized return is D4RL's: 0 is the return of the reference's random policy, and 100 is that of its expert. The
headline target ({HEADLINE}) is fixed in the task table before the evaluation. Results at other targets are shown, but
none of them is selected. A run's score is the mean over its episodes. ± is the sample standard deviation over seeds.
IQM is the interquartile mean over seeds; with three or fewer seeds it is the mean. The square brackets show its 95 %
interval, from a stratified bootstrap over seeds. {FEW} marks results with fewer than 3 seeds or fewer than 10 episodes.
{ELSEWHERE} marks policies whose data was recorded in another version of the environment."""


def results_table(report: Report) -> str:
    """The main table: the result of each configuration at each target."""
    rows = [
        [
            group.first.task.dataset,
            group.label,
            group.first.mode or "",
            f"{target_text(result.target, result.predicted_mean)}{HEADLINE if result.is_headline else ''}",
            f"{_score(result.mean, result.std)}{_marks(group, result)}",
            _interval(result),
            f"{result.return_mean:.0f}",
            f"{result.length_mean:.0f}",
            _or_nothing(result.num_seeds),
            str(result.num_episodes),
        ]
        for group in report.groups
        for result in group.results
    ]
    header = [
        "data set",
        "policy",
        "mode",
        "target",
        "normalized return",
        "IQM",
        "return",
        "length",
        "seeds",
        "episodes",
    ]
    return format_table(header, rows)


def runs_table(report: Report) -> str:
    """One row for each run and target."""
    rows = [
        [
            run.task.dataset,
            group.label,
            run.mode or "",
            _or_nothing(run.seed),
            _or_nothing(run.step),
            target_text(summary.target, summary.predicted_mean),
            f"{summary.normalized_mean:.1f} ± {summary.normalized_std:.1f}",
            f"{summary.normalized_median:.1f}",
            f"{summary.normalized_least:.1f}",
            f"{summary.normalized_most:.1f}",
            f"{summary.length_mean:.0f}",
            f"{summary.num_episodes}{FEW if summary.num_episodes < FEW_EPISODES else ''}",
        ]
        for group in report.groups
        for run in group.runs
        for summary in run.summaries()
    ]
    header = ["data set", "policy", "mode", "seed", "step", "target", "mean ± std over episodes", "median", "min"]
    return format_table([*header, "max", "length", "episodes"], rows)


def tasks_table(report: Report) -> str:
    """Tasks as rows and policies as columns, as in Table 4 of the paper. Published results are in parentheses.

    Tasks with published results come first, in the published order. Every published column is shown.
    """
    here = list(dict.fromkeys(group.first.task.dataset for group in report.groups))
    datasets = [name for name in report.published if name in here] + [n for n in here if n not in report.published]
    columns = list(dict.fromkeys((group.label, group.first.mode) for group in report.groups))
    known = {name for dataset in datasets for name in report.published.get(dataset, {})}
    columns += [(name, "published") for name in sorted(known - {label for label, _ in columns})]
    rows = []
    for dataset in datasets:
        own = [group for group in report.groups if group.first.task.dataset == dataset]
        cells = {(group.label, group.first.mode): _cell(report, group) for group in own}
        for name, published in report.published.get(dataset, {}).items():
            cells[name, "published"] = f"({_score(*published)})"
        rows.append([dataset, *(cells.get(column, "") for column in columns)])
    for version in dict.fromkeys(average.version for average in report.averages()):
        averages = {(each.policy, each.mode): each for each in report.averages() if each.version == version}
        rows.append([f"average, {version}", *(_average(averages, column) for column in columns)])
    return format_table(["data set", *(_heading(*column) for column in columns)], rows)


def cells_table(report: Report) -> str:
    """The details of each cell of :func:`tasks_table`: seeds, episodes, steps, target, environment."""
    rows = []
    for group in report.groups:
        run, result = group.first, group.headline
        published = report.published_for(run)
        rows.append(
            [
                run.task.dataset,
                _heading(group.label, run.mode),
                f"{_score(result.mean, result.std)}{_marks(group, result)}",
                "" if published is None else _score(*published),
                ", ".join(_or_nothing(each.seed) for each in group.runs),
                str(result.num_episodes),
                ", ".join(dict.fromkeys(_or_nothing(each.step) for each in group.runs)),
                target_text(result.target, result.predicted_mean),
                run.task.env_id,
                f"{run.task.reference.random_return:g}, {run.task.reference.expert_return:g}",
            ]
        )
    header = ["data set", "policy", "ours", "published", "seeds", "episodes", "step", "target", "environment"]
    return format_table([*header, "random and expert return"], rows)


def write_report(report: Report, folder: Path) -> Path:
    """Write ``report.md``, ``report.csv``, ``report.json`` and, if matplotlib is installed, plots.

    Returns the path of ``report.md``.
    """
    plots: list[Path] = []
    with suppress(ImportError):
        plots = plot_report(report, folder)
    contents = {
        "report.md": _markdown(report, [plot.name for plot in plots]),
        "report.csv": _csv(report),
        "report.json": json.dumps(report.as_json(), indent=1, allow_nan=False) + "\n",
    }
    for name, text in contents.items():
        with atomic_write(folder / name) as file:
            file.write(text.encode())
    return folder / "report.md"


def _markdown(report: Report, pictures: Sequence[str]) -> str:
    parts = ["# Evaluation", results_table(report)]
    if report.warnings:
        parts += ["## Warnings", "\n".join(f"* {warning}" for warning in report.warnings)]
    parts.append(NOTES)
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
    rows = [_csv_row(group, result) for group in report.groups for result in group.results]
    writer = csv.DictWriter(text, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _csv_row(group: Group, result: TargetResult) -> dict[str, object]:
    run = group.first
    low, high = result.interval or ("", "")
    return {
        "dataset": run.task.dataset,
        "policy": group.label,
        "configuration": run.configuration,
        "mode": run.mode,
        "environment": run.task.env_id,
        "data_environments": " ".join(run.task.data_env_ids),
        "steps": " ".join(_or_nothing(each.step) for each in group.runs),
        "seeds": " ".join(_or_nothing(each.seed) for each in group.runs),
        "target": result.target,
        "predicted_return": result.predicted_mean,
        "headline": result.is_headline,
        "episodes": result.num_episodes,
        "normalized_mean": result.mean,
        "normalized_std": result.std,
        "iqm": result.iqm,
        "iqm_low": low,
        "iqm_high": high,
        "return_mean": result.return_mean,
        "length_mean": result.length_mean,
        "few": result.is_few,
        "elsewhere": run.is_elsewhere,
    }


def _heading(policy: str, mode: str | None) -> str:
    return policy if mode in (None, "window") else f"{policy}, {mode}"


def _cell(report: Report, group: Group) -> str:
    result, published = group.headline, report.published_for(group.first)
    beside = "" if published is None else f" ({_score(*published)})"
    return f"{_score(result.mean, result.std)}{_marks(group, result)}{beside}"


def _average(averages: dict[tuple[str, str | None], Average], column: tuple[str, str | None]) -> str:
    own = averages.get(column)
    return "" if own is None else f"{own.mean:.1f}{FEW if own.is_few else ''} (of {len(own.datasets)})"


def _marks(group: Group, result: TargetResult) -> str:
    return (FEW if result.is_few else "") + (ELSEWHERE if group.first.is_elsewhere else "")


def _score(mean: float, spread: float | None) -> str:
    return f"{mean:.1f}" if spread is None else f"{mean:.1f} ± {spread:.1f}"


def _interval(result: TargetResult) -> str:
    if result.interval is None:
        return f"{result.iqm:.1f}"
    return f"{result.iqm:.1f} [{result.interval.low:.1f}, {result.interval.high:.1f}]"


def _or_nothing(value: int | None) -> str:
    return "" if value is None else str(value)
