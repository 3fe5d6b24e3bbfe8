"""Plots of a report. They need matplotlib, from the extra ``plots``."""

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from primal_dt.data.names import short_name
from primal_dt.evaluation.comparison import Comparison
from primal_dt.evaluation.report import BOOTSTRAP_SEED, Group, Report
from primal_dt.evaluation.statistics import performance_profile, profile_band
from primal_dt.system.files import atomic_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot_comparison", "plot_report"]

NUM_THRESHOLDS = 201
WIDTH, HEIGHT = 7.0, 4.0
"""Size of a panel in inches."""
TITLE_LETTERS = 40
"""Letters in a line of a title."""


def plot_report(report: Report, folder: Path) -> list[Path]:
    """Plot results with intervals, target against achieved return, performance profiles and learning curves.

    Normalized returns and plain returns never share axes. A plot without data is skipped.

    Returns the files that were written.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    draws: Mapping[str, Callable[[Figure, Report], bool]] = {
        "scores": _bars,
        "targets": _targets,
        "profiles": _profiles,
        "curves": _curves,
    }
    written = []
    for name, draw in draws.items():
        figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
        if draw(figure, report):
            written.append(_save(figure, folder / f"{name}.png"))
    return written


def plot_comparison(comparison: Comparison, path: Path) -> Path:
    """Plot the difference of two policies on each task, and its mean, with intervals. Returns the path.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    rows = [(short_name(task.dataset), task.difference) for task in comparison.tasks]
    rows.append((f"mean over {len(rows)}" if len(rows) > 1 else "mean", comparison.difference))
    figure = Figure(figsize=(WIDTH, 1.2 + 0.35 * len(rows)), layout="constrained")
    axes = figure.subplots()
    axes.axvline(0, color="gray", lw=1)
    for place, (_, difference) in enumerate(rows):
        is_mean = place == len(rows) - 1
        color = "black" if is_mean else "C0" if difference.mean > 0 else "C1"
        if difference.interval is not None:
            axes.plot(difference.interval, [place, place], color=color, lw=4 if is_mean else 2, alpha=0.7)
        axes.plot(difference.mean, place, "D" if is_mean else "o", color=color)
    axes.axhline(len(rows) - 1.5, color="gray", lw=0.5)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.invert_yaxis()
    axes.set_xlabel("difference of normalized returns, with 95 % intervals")
    axes.set_title(
        f"{comparison.second} is better  \N{LEFTWARDS ARROW}   \N{RIGHTWARDS ARROW}  {comparison.first} is better",
        fontsize=10,
    )
    return _save(figure, path)


def _save(figure: "Figure", path: Path) -> Path:
    with atomic_write(path) as file:
        figure.savefig(file, format="png", dpi=150)
    return path


def _bars(figure: "Figure", report: Report) -> bool:
    """Plot headline results, with intervals for groups of several seeds.

    All normalized returns share a panel. Plain returns have one for each environment.
    """
    figure.set_figheight(max(HEIGHT / 2, 1 + 0.3 * len(report.groups)))

    def title(group: Group) -> str:
        return f"returns in {_environment(group)}" if group.is_plain else ""

    for axes, groups in _panels(figure, report.groups, title):
        for place, group in enumerate(groups):
            result = group.headline
            axes.barh(place, result.iqm, color=_color(place), alpha=0.7)
            if result.interval is not None:
                axes.plot(result.interval, [place, place], color="black", lw=2)
            axes.plot(group.run_scores, [place] * len(group.runs), "k.", ms=4)
        axes.set_yticks(range(len(groups)), [f"{_label(group)}, {_task(group)}" for group in groups])
        axes.invert_yaxis()
        axes.set_xlabel(_unit(groups))
    figure.suptitle("IQM over seeds (bars), 95 % interval (lines), seeds (dots)", fontsize=9)
    return True


def _targets(figure: "Figure", report: Report) -> bool:
    """Plot the achieved return against the target return, with a panel for each environment.

    The margin above a panel shows the returns of the data's episodes.
    """
    several = [group for group in report.groups if len(group.results) > 1]
    for axes, groups in _panels(figure, several):
        for number, group in enumerate(groups):
            targets = sorted(result.target for result in group.results if result.target is not None)
            returns = np.array([[run.returns(t).mean() for run in group.runs] for t in targets])  # (targets, N)
            axes.plot(targets, returns.mean(1), "o-", color=_color(number), label=f"{_label(group)}, {_task(group)}")
            axes.fill_between(targets, returns.min(1), returns.max(1), color=_color(number), alpha=0.2, lw=0)
        ends = axes.get_xlim()
        axes.plot(ends, ends, color="gray", ls=":", label="achieved = target")
        axes.set(xlabel="target return", ylabel="achieved return: mean and range over seeds")
        axes.legend(fontsize=7)
        _margin(axes, groups)
    return bool(several)


def _margin(axes: "Axes", groups: Sequence[Group]) -> None:
    """Show the distribution of the data's returns above the axes."""
    data = {group.first.task.dataset: group.first.task.data_returns for group in groups}
    known = [returns for returns in data.values() if returns]
    if not known:
        return
    axes.set_title("")
    margin = axes.inset_axes((0.0, 1.02, 1.0, 0.15), sharex=axes)
    margin.hist(known, bins=40, color=["gray"] * len(known), alpha=0.6, density=True)
    margin.set_title(textwrap.fill(f"{_environment(groups[0])}: returns in the data", 2 * TITLE_LETTERS), fontsize=8)
    margin.tick_params(labelbottom=False, left=False, labelleft=False)


def _profiles(figure: "Figure", report: Report) -> bool:
    """Plot the share of episodes with a result above each threshold."""
    for axes, groups in _panels(figure, report.groups):
        every = np.concatenate([run.scores(group.headline.target) for group in groups for run in group.runs])
        edge = 0.02 * np.ptp(every) or 1.0
        thresholds = np.linspace(every.min() - edge, every.max() + edge, NUM_THRESHOLDS)
        for number, group in enumerate(groups):
            runs = [run.scores(group.headline.target) for run in group.runs]
            shares = performance_profile(runs, thresholds)
            axes.plot(thresholds, shares, color=_color(number), label=f"{_label(group)}, {_task(group)}")
            band = profile_band(runs, thresholds, random=np.random.default_rng(BOOTSTRAP_SEED))
            if band is not None:
                axes.fill_between(thresholds, *band, color=_color(number), alpha=0.2, lw=0)
        axes.set(xlabel=f"{_unit(groups)} t", ylabel="share of episodes above t")
        axes.legend(fontsize=7)
    return True


def _curves(figure: "Figure", report: Report) -> bool:
    """Plot learning curves: mean and range over seeds. Inference modes share them, so each run is shown once."""
    once = {(group.first.configuration, group.label): group for group in reversed(report.groups)}
    shown = [group for group in reversed(once.values()) if any(len(run.curve) > 1 for run in group.runs)]
    for axes, groups in _panels(figure, shown):
        for number, group in enumerate(groups):
            curves = [dict(run.curve) for run in group.runs if run.curve]
            steps = sorted(set.intersection(*map(set, curves)))
            values = np.array([[curve[step] for step in steps] for curve in curves])  # (N, steps)
            axes.plot(steps, values.mean(0), "o-", ms=3, color=_color(number), label=f"{group.label}, {_task(group)}")
            axes.fill_between(steps, values.min(0), values.max(0), color=_color(number), alpha=0.2, lw=0)
        axes.set(xlabel="training step", ylabel=f"{_unit(groups)}: mean and range over seeds")
        axes.legend(fontsize=7)
    return bool(shown)


def _environment(group: Group) -> str:
    """The environment's name without its version, or with what differs from the plain environment."""
    task = group.first.task
    return task.environment_text if task.specification is not None else task.environment or task.env_id


def _unit(groups: Sequence[Group]) -> str:
    """What the results of a panel are."""
    return "return" if groups[0].is_plain else "normalized return"


def _panels(
    figure: "Figure", groups: Sequence[Group], title: Callable[[Group], str] = _environment
) -> Iterator[tuple["Axes", list[Group]]]:
    """Yield the axes and the groups of each title and unit. The panels are side by side."""
    panels: dict[tuple[str, bool], list[Group]] = {}
    for group in groups:
        panels.setdefault((title(group), group.is_plain), []).append(group)
    figure.set_figwidth(WIDTH * max(1, len(panels)))
    for place, ((text, _), members) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(1, len(panels), place)
        axes.set_title(textwrap.fill(text, TITLE_LETTERS), fontsize="large" if len(text) < TITLE_LETTERS else "small")
        yield axes, members


def _color(number: int) -> str:
    return f"C{number % 10}"


def _label(group: Group) -> str:
    return group.label if group.first.mode in (None, "window") else f"{group.label}, {group.first.mode}"


def _task(group: Group) -> str:
    task = group.first.task
    where = "" if task.specification is None else f" in {task.environment_text}"
    return textwrap.fill(f"{short_name(task.dataset)}{where}", TITLE_LETTERS)
