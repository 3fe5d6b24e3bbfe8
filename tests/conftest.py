"""How the tests share the cores, and what each group of them took."""

import os
from pathlib import Path

import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: as many processes test as there are cores

ROOT = Path(__file__).parent


def group_of(path: Path) -> str:
    """The group of a test file: its folder, or its own name at the top."""
    return path.relative_to(ROOT).parts[0].removeprefix("test_").removesuffix(".py")


def pytest_xdist_auto_num_workers() -> int:
    """A process for each core, but not so many that importing torch in each would take longer than it saves."""
    return min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, 8)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show the time of each group."""
    spent: dict[str, float] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                group = group_of(ROOT.parent / report.location[0])
                spent[group] = spent.get(group, 0.0) + report.duration
    terminalreporter.section("seconds of each group")
    terminalreporter.write_line(", ".join(f"{group} {seconds:.0f}" for group, seconds in sorted(spent.items())))
