"""The start of programs: help and mistakes before torch is imported, and threads that wait passively."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WITHOUT_TORCH = """
import runpy, sys
class NoTorch:
    def find_spec(self, name, *_):
        assert name not in ("torch", "numpy"), f"{name} is imported"
sys.meta_path.insert(0, NoTorch())
program = sys.argv[1]
sys.argv = sys.argv[1:]
runpy.run_path(program, run_name="__main__")
"""
SETTINGS = """
import os
from primal_dt.system.start import start
start(print)
print(os.environ["OMP_WAIT_POLICY"], os.environ["GOMP_SPINCOUNT"])
"""


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    others = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_WAIT", "GOMP_SPIN"))}
    command = [sys.executable, "-c", *arguments]
    return subprocess.run(command, cwd=ROOT, env=others | environment, capture_output=True, text=True)


@pytest.mark.parametrize("flags", ["--help", "--nonsense 1"])
@pytest.mark.parametrize("program", ["train.py quick", "train.py", "evaluate.py", "sweep.py grid"])
def test_help_and_mistakes_need_no_torch(program: str, flags: str) -> None:
    if program.startswith("sweep") and flags != "--help":
        flags = "--seeds x"  # other flags are for train.py
    done = run(WITHOUT_TORCH, *program.split(), *flags.split())
    assert done.returncode == (0 if flags == "--help" else 2), done.stderr
    assert "usage: " in done.stdout + done.stderr or flags.split()[0] in done.stderr


def test_settings_out_of_range_are_left_to_the_program() -> None:
    done = run("from primal_dt.system.start import start\nstart(lambda arguments: int('x'))\nprint('imports')")
    assert (done.returncode, done.stdout) == (0, "imports\n"), done.stderr


@pytest.mark.parametrize(
    ("environment", "expected"),
    [({}, "PASSIVE 0"), ({"OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": "9"}, "ACTIVE 9")],
)
def test_threads_wait_passively_unless_set(environment: dict[str, str], expected: str) -> None:
    assert run(SETTINGS, **environment).stdout.split("\n")[1] == expected
