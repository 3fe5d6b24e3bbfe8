"""Imports point one way: scripts -> envs -> primal_dt, and inside primal_dt from room to room.

The rules are read off the syntax tree of every module, so that an import inside a function counts too.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = {path.stem for path in ROOT.glob("*.py")}
PACKAGES = {"primal_dt", "envs", "benchmarks", "tests", *SCRIPTS}

ROOMS = ("attention", "system", "data", "model", "policy", "training", "evaluation", "hub", "sweep")
"""The rooms of ``primal_dt``: each may import itself and those before it."""
FREE = ("config", "schema", "task")
"""Modules of ``primal_dt`` that belong to no room: standard library only, for all but attention."""
ENVIRONMENTS = {"gymnasium", "minari", "mujoco", "h5py", "stable_baselines3"}
"""Packages for environments and data formats, which ``primal_dt`` must not import."""
CLIENT = "huggingface_hub"
"""The client of the hub, which only the room ``hub`` may import."""


def name_of(path: Path) -> str:
    """``primal_dt/data/store.py`` -> ``primal_dt.data.store``."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(source: str, name: str) -> Iterator[str]:
    """The modules that a module imports, inside functions too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(name.split(".")[: -node.level]) if node.level else ""
            module = ".".join(part for part in (base, node.module or "") if part)
            yield from (f"{module}.{alias.name}" for alias in node.names)


def room_of(name: str) -> str:
    """The room of ``primal_dt`` that a module is in, or its own name if it is in none; ``""`` elsewhere."""
    package, _, rest = name.partition(".")
    return rest.partition(".")[0] if package == "primal_dt" else ""


def is_allowed(name: str, target: str) -> bool:
    """Whether a module may import another."""
    package, other = name.partition(".")[0], target.partition(".")[0]
    room, target_room = room_of(name), room_of(target)
    if room in FREE:
        return other in sys.stdlib_module_names or target_room in FREE
    if room == "attention":
        return other in {"torch", "matplotlib"} | sys.stdlib_module_names or target_room == "attention"
    if package == "primal_dt" and other == CLIENT:
        return room == "hub"
    if package == "primal_dt" and (other in ENVIRONMENTS or other in PACKAGES - {"primal_dt"}):
        return False
    if room in ROOMS and target_room in ROOMS:
        return ROOMS.index(target_room) <= ROOMS.index(room)
    if package == "envs":
        return other not in PACKAGES - {"envs", "primal_dt"} and target_room != "sweep"
    if package in SCRIPTS:
        return other not in (SCRIPTS | {"benchmarks", "tests"}) - {package}
    return True


def modules() -> list[Path]:
    found = [path for package in ("primal_dt", "envs") for path in (ROOT / package).rglob("*.py")]
    return sorted([*found, *(ROOT / f"{name}.py" for name in SCRIPTS)])


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_a_module_imports_only_what_it_may(path: Path) -> None:
    name = name_of(path)
    source_name = f"{name}.__init__" if path.name == "__init__.py" else name
    wrong = [target for target in imported(path.read_text(), source_name) if not is_allowed(name, target)]
    assert not wrong, f"{name} must not import {', '.join(wrong)}"


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("primal_dt.evaluation.report", "import envs.published"),
        ("primal_dt.evaluation.report", "def f():\n    from envs import tasks"),
        ("primal_dt.data.store", "import h5py"),
        ("primal_dt.data.store", "from ..model import transformer"),
        ("primal_dt.model.transformer", "from primal_dt.training.trainer import Trainer"),
        ("primal_dt.training.trainer", "from primal_dt.evaluation import rollout"),
        ("primal_dt.evaluation.rollout", "import primal_dt.sweep.job"),
        ("primal_dt.evaluation.trained_run", "from primal_dt.hub.sources import find_policy"),
        ("primal_dt.training.policy_folder", "import huggingface_hub"),
        ("primal_dt.attention.primal", "import numpy"),
        ("primal_dt.attention.primal", "from primal_dt.system.files import atomic_write"),
        ("primal_dt.config", "import torch"),
        ("envs.tasks", "import train"),
        ("envs.tasks", "from primal_dt.sweep.job import Job"),
        ("envs.tasks", "import benchmarks.uea"),
        ("sweep", "import train"),
    ],
)
def test_a_wrong_import_is_noticed(name: str, line: str) -> None:
    assert not all(is_allowed(name, target) for target in imported(line, name))


def test_every_module_of_the_library_is_in_a_room() -> None:
    rooms = {room_of(name_of(path)) for path in (ROOT / "primal_dt").rglob("*.py")}
    assert rooms == {"", *ROOMS, *FREE}


def modules_after(statement: str) -> set[str]:
    """The top-level modules that a statement adds to what importing torch has loaded, in a process of its own."""
    code = f"import torch, sys; before = set(sys.modules); {statement}; print(*(set(sys.modules) - before))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in result.stdout.split()}


@pytest.mark.slow
@pytest.mark.parametrize("statement", ["import primal_dt.attention", "from primal_dt import PrimalAttention"])
def test_the_attention_library_loads_torch_alone(statement: str) -> None:
    added = modules_after(statement)
    assert "primal_dt" in added
    assert not added - {"primal_dt"} - set(sys.stdlib_module_names)
