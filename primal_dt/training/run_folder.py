"""Run folders: their names, and ``config.json``, which has all that is needed to repeat a run."""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from filelock import FileLock, Timeout

from primal_dt.config import Config
from primal_dt.data.names import folder_label
from primal_dt.system.files import atomic_write, remove_partial
from primal_dt.system.provenance import provenance
from primal_dt.task import RunTask

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = ["DataPart", "RunRecord", "lock_run", "make_run_folder", "read_record", "write_record"]

CONFIG = "config.json"
Value = TypeVar("Value", bound="DataclassInstance")


@dataclass(frozen=True)
class DataPart:
    """One of the sources that a run's data came from."""

    name: str
    """As the user named it."""
    path: str
    """The file that it was read from."""


@dataclass(frozen=True)
class RunRecord:
    """What a run writes down when it begins."""

    config: Config
    task: RunTask
    parts: tuple[DataPart, ...]
    threads: int
    device: str
    num_parameters: int
    provenance: Mapping[str, Any] = field(default_factory=provenance)


def make_run_folder(parent: Path, name: str | None, *, dataset: str, attention: str, seed: int) -> Path:
    """Make a new folder: of that name, or else ``<dataset>__<attention>__s<seed>__<time>``.

    Raises:
        ValueError: if a folder of that name exists.
    """
    parent.mkdir(parents=True, exist_ok=True)
    if name is not None:
        folder = parent / name
        try:
            folder.mkdir()
        except FileExistsError as error:
            raise ValueError(f"{folder} exists: give another --name, or continue it with --resume {folder}") from error
        return folder
    base = f"{folder_label(dataset)}__{attention}__s{seed}__{time.strftime('%Y%m%d-%H%M%S')}"
    for number in range(1, 1000):
        folder = parent / (base if number == 1 else f"{base}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise FileExistsError(f"there are 999 runs named {base} in {parent}")


@contextmanager
def lock_run(folder: Path) -> Iterator[None]:
    """Keep other processes out of a run folder, and remove the partial files that a killed process left in it.

    Raises:
        ValueError: if another process is training the run.
    """
    try:
        with FileLock(folder / ".lock", timeout=0):
            for each in (folder, folder / "checkpoints"):
                remove_partial(each)
            yield
    except Timeout as error:
        raise ValueError(f"{folder} is being trained by another process") from error


def write_record(folder: Path, record: RunRecord) -> None:
    """Write ``config.json``."""
    content = {
        "config": asdict(record.config),
        "task": record.task.to_dict(),
        "parts": [asdict(part) for part in record.parts],
        "threads": record.threads,
        "device": record.device,
        "num_parameters": record.num_parameters,
        **record.provenance,
    }
    with atomic_write(folder / CONFIG) as file:
        file.write(json.dumps(content, indent=2).encode() + b"\n")


def read_record(folder: Path) -> RunRecord:
    """Read ``config.json``.

    Raises:
        ValueError: if there is no run, or this version cannot read it.
    """
    path = folder / CONFIG
    if folder.is_file():
        raise ValueError(f"{folder} is a file: give the folder of a run, such as {folder.parent.parent}")
    try:
        content = json.loads(path.read_text())
        return RunRecord(
            config=_build(Config, content["config"]),
            task=RunTask.from_dict(content["task"]),
            parts=tuple(DataPart(**part) for part in content["parts"]),
            threads=int(content["threads"]),
            device=content["device"],
            num_parameters=int(content["num_parameters"]),
            provenance={name: content[name] for name in ("command", "commit", "versions")},
        )
    except FileNotFoundError as error:
        raise ValueError(f"{folder} is not a run: there is no {CONFIG} in it") from error
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read by this version: {error!r}") from error


def _build(kind: type[Value], values: Mapping[str, Any]) -> Value:
    """A dataclass from what ``asdict`` made of it. A flag that did not exist then has its default."""
    arguments = {}
    for each in fields(kind):
        if each.name not in values and each.default is not MISSING:
            continue
        value = values[each.name]
        if isinstance(each.type, type) and is_dataclass(each.type):
            value = _build(each.type, value)
        arguments[each.name] = tuple(value) if isinstance(value, list) else value
    return kind(**arguments)
