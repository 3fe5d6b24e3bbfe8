"""The list of benchmarks: complete, readable in 80 columns, and its commands parse."""

import importlib
import shlex
from pathlib import Path

import pytest
import tyro

import benchmarks
from benchmarks.catalog import CATALOG, Entry, listing

ENTRIES = [entry for entries in CATALOG.values() for entry in entries]


def programs() -> set[str]:
    """Modules and packages that ``python -m`` can run."""
    (folder,) = map(Path, benchmarks.__path__)
    modules = {path.stem for path in folder.glob("*.py") if '__name__ == "__main__"' in path.read_text()}
    return (modules | {path.parent.name for path in folder.glob("*/__main__.py")}) - {"__main__"}


def test_every_program_is_listed_once() -> None:
    names = [entry.name for entry in ENTRIES]
    assert len(set(names)) == len(names)
    assert set(names) == programs()


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_a_listed_command_has_flags_that_exist(entry: Entry) -> None:
    module = importlib.import_module(f"benchmarks.{entry.name}")
    if not hasattr(module, "Config"):
        name = "__main__" if entry.name == "torture" else "run"
        module = importlib.import_module(f"benchmarks.{entry.name}.{name}")
    _, _, _, *flags = shlex.split(entry.command.replace("...", ""))
    tyro.cli(module.Config, args=flags)


def test_the_list_fits_into_80_columns() -> None:
    text = listing(80)
    commands = {f"  {entry.command}" for entry in ENTRIES}
    assert commands <= set(text.splitlines())
    assert max(len(line) for line in text.splitlines()) <= 80
