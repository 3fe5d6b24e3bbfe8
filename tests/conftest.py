"""What tests share: small configurations and data, folders of their own, and how they use the cores."""

import os
import shlex
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: as many processes test as there are cores

import numpy as np

from primal_dt.model.transformer import ModelShape
from tests.envs.files import d4rl_arrays, write_d4rl

ROOT = Path(__file__).parent
SHAPE = ModelShape(3, (-1.0, -1.0), (1.0, 1.0), width=16, context=4, rank=4, dropout=0.1, max_timesteps=20)
"""A small model."""
SMALL = shlex.split("""
    --width 16 --context 4 --rank 4 --num-layers 2 --batch-size 8 --warmup-steps 5 --steps 20 --log-every-steps 10
    --save-every-steps 20 --eval-every-steps 10 --eval-episodes 1 --spectrum-every-steps 0
""")
"""Flags of ``train.py`` for a run of about a second. Later flags override earlier ones."""
ON_ONE_CORE = ["--threads", "1", "--device", "cpu"]


def data_variables(root: Path) -> dict[str, str]:
    """Environment variables that put the cache and Minari's data sets below a folder."""
    return {"PRIMAL_DT_CACHE": str(root / "cache"), "MINARI_DATASETS_PATH": str(root / "minari")}


OWN_ROOT = Path(tempfile.mkdtemp(prefix="primal-dt-tests-"))
os.environ |= data_variables(OWN_ROOT) | {"TRACKIO_DIR": str(OWN_ROOT / "trackio")}  # never the user's own


def small_data(path: Path) -> str:
    """A D4RL file of 20 episodes of 30 steps in Hopper-v5, whose actions are a function of the states."""
    arrays = d4rl_arrays((30,) * 20)
    arrays["actions"] = np.tanh(arrays["observations"][:, :3])
    return str(write_d4rl(path, arrays, env_id="Hopper-v5"))


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """Make writes beyond this size of a file fail, as on a full disk."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def run_program(program: ModuleType, patch: pytest.MonkeyPatch, *arguments: Any) -> int:
    """Call a script's main function with arguments. Returns its exit code."""
    patch.setattr(sys, "argv", [Path(str(program.__file__)).name, *map(str, arguments)])
    return int(program.main())


@pytest.fixture
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, with a cache and a Minari folder of its own."""
    for name, value in data_variables(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def group_of(path: Path) -> str:
    """The group of a test file: its folder, or its own name at the top."""
    return path.relative_to(ROOT).parts[0].removeprefix("test_").removesuffix(".py")


def num_processes() -> int:
    """One for each core, but not so many that importing torch in each would take longer than it saves."""
    return min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, 8)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Test whole folders on all cores, unless ``-n`` says otherwise. Single files run in this process."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    options = config.option
    are_folders = all(Path(name.partition("::")[0]).is_dir() for name in config.args)
    if are_folders and getattr(options, "numprocesses", 0) is None and not options.usepdb and not options.collectonly:
        options.numprocesses, options.dist = num_processes(), "loadgroup"


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
