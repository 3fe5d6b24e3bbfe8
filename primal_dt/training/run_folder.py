"""Run folders: their names, and what is needed to make a run again."""

import json
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, asdict, fields, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from filelock import FileLock, Timeout

from primal_dt.config import Config
from primal_dt.system.files import atomic_write, remove_partial

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = [
    "dataset_label",
    "facts",
    "lock_run",
    "named_run_folder",
    "new_run_folder",
    "read_config",
    "write_config",
]

PACKAGES = ("torch", "numpy", "gymnasium", "mujoco", "minari")
Value = TypeVar("Value", bound="DataclassInstance")


def dataset_label(dataset: str) -> str:
    """What a data set is called in the names of folders."""
    # A file is called by its name, without its folders; a plus sign, a space and the like would need quoting.
    parts = [part.strip() for part in dataset.split("+")]
    parts = [Path(part).stem if part.endswith((".hdf5", ".h5")) else part for part in parts]
    return "-and-".join(re.sub(r"[^A-Za-z0-9._]+", "-", part).strip("-.")[-60:] for part in parts)


def new_run_folder(parent: Path, *, dataset: str, attention: str, seed: int) -> Path:
    """``<dataset>__<attention>__s<seed>__<time>``, a folder that was not there before."""
    base = f"{dataset_label(dataset)}__{attention}__s{seed}__{time.strftime('%Y%m%d-%H%M%S')}"
    parent.mkdir(parents=True, exist_ok=True)
    for number in range(1, 1000):
        folder = parent / (base if number == 1 else f"{base}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise FileExistsError(f"there are 999 runs named {base} in {parent}")


def named_run_folder(parent: Path, name: str) -> Path:
    """A folder of this name, which was not there before.

    Raises:
        ValueError: if it was.
    """
    folder = parent / name
    try:
        folder.mkdir(parents=True)
    except FileExistsError as error:
        raise ValueError(f"{folder} is there already: give another --name, or go on with --resume {folder}") from error
    return folder


@contextmanager
def lock_run(folder: Path) -> Iterator[None]:
    """Have a run for oneself, without what a process that was killed left half written in it.

    Raises:
        ValueError: if another process is training it.
    """
    try:
        with FileLock(folder / ".lock", timeout=0):
            for each in (folder, folder / "checkpoints"):
                remove_partial(each)
            yield
    except Timeout as error:
        raise ValueError(f"{folder} is being trained by another process") from error


def write_config(folder: Path, config: Config, content: Mapping[str, Any]) -> None:
    """``config.json``: the configuration, and what else it takes to make the run again."""
    content = {"config": asdict(config), **content, **facts()}
    with atomic_write(folder / "config.json") as file:
        file.write(json.dumps(content, indent=2).encode() + b"\n")


def read_config(folder: Path) -> tuple[Config, dict[str, Any]]:
    """What :func:`write_config` wrote.

    Raises:
        ValueError: if there is no run, or not one that this version can read.
    """
    path = folder / "config.json"
    if folder.is_file():
        raise ValueError(f"{folder} is a file: give the folder of a run, such as {folder.parent.parent}")
    try:
        content = json.loads(path.read_text())
        return _build(Config, content["config"]), content
    except FileNotFoundError as error:
        raise ValueError(f"{folder} is not a run: there is no config.json in it") from error
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read by this version: {error!r}") from error


def _build(kind: type[Value], values: Mapping[str, Any]) -> Value:
    """A dataclass from what ``asdict`` made of it; a flag that is not there was not known then, and has its default."""
    arguments = {}
    for field in fields(kind):
        if field.name not in values and field.default is not MISSING:
            continue
        value = values[field.name]
        if isinstance(field.type, type) and is_dataclass(field.type):
            value = _build(field.type, value)
        arguments[field.name] = tuple(value) if isinstance(value, list) else value
    return kind(**arguments)


def facts() -> dict[str, Any]:
    """How something was made: the command, the commit, the versions."""
    return {"command": sys.argv, "commit": commit(), "versions": versions()}


def versions() -> dict[str, str]:
    """Of Python and of the packages that make a difference."""
    found = {"python": platform.python_version()}
    for package in ("primal-dt", *PACKAGES):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def commit() -> str | None:
    """The git commit of this code, with a plus sign if files differ from it; None outside a repository."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
