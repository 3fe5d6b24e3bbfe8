"""How the tests share the cores, what those of a group may take, and what they took."""

import os
from pathlib import Path

import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: as many processes test as there are cores

ROOT = Path(__file__).parent
BUDGETS = {
    "attention": 150,
    "data and environments": 90,
    "training": 330,
    "evaluation": 180,
    "benchmarks": 60,
    "sweeps": 260,
    "README and docs": 260,
}
"""Seconds of all processes together, on two cores with nothing else to do; .ci/run is to stay below 15 minutes."""
TRAINING = ("checkpoint", "distributed", "files", "imports", "logbook", "model", "muon", "objective", "runs", "train")
EVALUATION = ("evaluate", "inference", "policy", "report", "rollout", "statistics")


def group_of(path: Path) -> str:
    """The group of a test file."""
    parts = path.relative_to(ROOT).parts
    name = path.stem.removeprefix("test_")
    if parts[0] in ("attention", "benchmarks"):
        return parts[0]
    if name in ("jobs", "sweep", "sweep_view"):
        return "sweeps"
    if name == "readme":
        return "README and docs"
    if name in (*TRAINING, "trainer"):
        return "training"
    return "evaluation" if name in EVALUATION else "data and environments"


def pytest_xdist_auto_num_workers() -> int:
    """A process for each core, but not so many that importing torch in each would take longer than it saves."""
    return min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, 8)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show the time of each group beside its budget."""
    spent = dict.fromkeys(BUDGETS, 0.0)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                spent[group_of(ROOT.parent / report.location[0])] += report.duration
    terminalreporter.section("seconds of each group, of its budget")
    for group, budget in BUDGETS.items():
        if spent[group]:
            over = "  OVER" if spent[group] > budget else ""
            terminalreporter.write_line(f"{spent[group]:6.0f} of {budget:4d}  {group}{over}")
