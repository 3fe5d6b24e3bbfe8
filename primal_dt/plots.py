"""A report as pictures. Needs matplotlib, from the extra ``plots``."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from primal_dt.files import atomic_write
from primal_dt.report import BOOTSTRAP_SEED, Group, Report
from primal_dt.statistics import performance_profile, profile_band

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_report"]

NUM_THRESHOLDS = 201


def plot_report(report: Report, folder: Path) -> list[Path]:
    """Bars with intervals, target against achieved return, performance profiles and learning curves.

    Returns the files that were written: those that there is something to show in.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    pictures: Mapping[str, Callable[[Axes, Report], bool]] = {
        "scores": _bars,
        "targets": _targets,
        "profiles": _profiles,
        "curves": _curves,
    }
    written = []
    for name, draw in pictures.items():
        figure = Figure(figsize=(7, 4), layout="constrained")
        if not draw(figure.add_subplot(), report):
            continue
        path = folder / f"{name}.png"
        with atomic_write(path) as file:
            figure.savefig(file, format="png", dpi=150)
        written.append(path)
    return written


def _bars(axes: "Axes", report: Report) -> bool:
    """Headline scores, with intervals where there are several seeds."""
    for place, group in enumerate(report.groups):
        result = group.headline
        axes.barh(place, result.iqm, color=f"C{place % 10}", alpha=0.7)
        if result.interval is not None:
            low, high = result.interval
            axes.plot([low, high], [place, place], color="black", lw=2)
        scores = [run.scores(result.target).mean() for run in group.runs]
        axes.plot(scores, [place] * len(scores), "k.", ms=4)
    axes.set_yticks(range(len(report.groups)), [_label(group) for group in report.groups])
    axes.invert_yaxis()
    axes.set_xlabel("normalized return: IQM over seeds (bars), 95 % interval (lines), seeds (dots)")
    return True


def _targets(axes: "Axes", report: Report) -> bool:
    """Whether a policy does what it is asked for."""
    several = [group for group in report.groups if len(group.results) > 1]
    if not several:
        return False
    for number, group in enumerate(several):
        results = sorted(group.results, key=lambda result: result.target)
        targets = [result.target for result in results]
        spread = [[run.scores(target).mean() for run in group.runs] for target in targets]
        own = group.first
        scale = (own.expert_return - own.random_return) / 100
        achieved = np.array([np.mean(scores) for scores in spread]) * scale + own.random_return
        axes.plot(targets, achieved, "o-", color=f"C{number % 10}", label=_label(group))
        low, high = (
            np.array([extreme(scores) for scores in spread]) * scale + own.random_return for extreme in (min, max)
        )
        axes.fill_between(targets, low, high, color=f"C{number % 10}", alpha=0.2, lw=0)
    least, most = axes.get_xlim()
    axes.plot([least, most], [least, most], color="grey", ls=":", label="as asked")
    axes.set(xlabel="target return", ylabel="achieved return: mean, and range over seeds")
    axes.legend(fontsize=8)
    return True


def _profiles(axes: "Axes", report: Report) -> bool:
    """Which share of episodes is better than a score."""
    every = [run.scores(group.headline.target) for group in report.groups for run in group.runs]
    thresholds = np.linspace(min(map(np.min, every)) - 1, max(map(np.max, every)) + 1, NUM_THRESHOLDS)
    for number, group in enumerate(report.groups):
        runs = [run.scores(group.headline.target) for run in group.runs]
        axes.plot(thresholds, performance_profile(runs, thresholds), color=f"C{number % 10}", label=_label(group))
        band = profile_band(runs, thresholds, random=np.random.default_rng(BOOTSTRAP_SEED))
        if band is not None:
            axes.fill_between(thresholds, *band, color=f"C{number % 10}", alpha=0.2, lw=0)
    axes.set(xlabel="normalized return t", ylabel="share of episodes above t")
    axes.legend(fontsize=8)
    return True


def _curves(axes: "Axes", report: Report) -> bool:
    """Scores while training, mean and range over seeds."""
    shown = [group for group in report.groups if any(len(run.curve) > 1 for run in group.runs)]
    seen: set[tuple[Any, ...]] = set()
    for number, group in enumerate(shown):
        key = (group.first.dataset, group.first.policy, group.first.configuration)
        if key in seen:  # another mode of the same runs
            continue
        seen.add(key)
        curves = [dict(run.curve) for run in group.runs if run.curve]
        steps = sorted(set.intersection(*map(set, curves)))
        values = np.array([[curve[step] for step in steps] for curve in curves])  # (N, steps)
        axes.plot(steps, values.mean(0), "o-", ms=3, color=f"C{number % 10}", label=_label(group, mode=False))
        axes.fill_between(steps, values.min(0), values.max(0), color=f"C{number % 10}", alpha=0.2, lw=0)
    axes.set(xlabel="step", ylabel="normalized return while training: mean, and range over seeds")
    if seen:
        axes.legend(fontsize=8)
    return bool(seen)


def _label(group: Group, *, mode: bool = True) -> str:
    run = group.first
    words = [run.policy, Path(run.dataset).name if len(run.dataset) > 30 else run.dataset]
    if mode and run.mode not in (None, "window"):
        words.insert(1, str(run.mode))
    return ", ".join(words)
