"""Run folders: their names, and ``config.json``, which contains all that is needed to repeat a run."""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from primal_dt.config import Config, check_range, config_from_dict
from primal_dt.data.names import folder_label
from primal_dt.schema import build, require_keys
from primal_dt.system.files import (
    atomic_write,
    check_folder,
    lock_folder,
    make_folder,
    open_regular,
    read_text,
    remove_partial,
)
from primal_dt.system.provenance import provenance
from primal_dt.system.records import CHECKSUM, checksum
from primal_dt.task import RunTask

__all__ = [
    "DataPart",
    "InitialWeights",
    "RunRecord",
    "lock_run",
    "make_run_folder",
    "read_record",
    "require_unchanged",
    "write_record",
]

CONFIG = "config.json"
PROVENANCE = ("command", "commit", "versions")


@dataclass(frozen=True)
class DataPart:
    """One source of a run's data set."""

    name: str
    """Name or path, as the user gave it."""
    path: str
    """File that the data was read from."""


@dataclass(frozen=True)
class InitialWeights:
    """The checkpoint of another run that a run started with."""

    path: str
    """The checkpoint file."""
    digest: str
    """Digest of the file's content."""
    step: int
    """Number of updates of the other run."""


@dataclass(frozen=True)
class RunRecord:
    """Content of ``config.json``, which a run writes when it starts."""

    config: Config
    task: RunTask
    parts: tuple[DataPart, ...]
    threads: int
    device: str
    num_parameters: int
    initial_weights: InitialWeights | None = None
    """Where the weights at step 0 came from; None if they were new."""
    provenance: Mapping[str, Any] = field(default_factory=provenance)


def make_run_folder(parent: Path, name: str | None, *, dataset: str, attention: str, seed: int) -> Path:
    """Create a run folder named ``name``, or ``<dataset>__<attention>__s<seed>__<time>`` if that is None.

    A folder of that name is used if a run that was to start there was killed before it wrote ``config.json``.

    Raises:
        ValueError: if a folder of that name has a run or other files.
    """
    if name is not None:
        folder = parent / name
        with suppress(FileExistsError):
            make_folder(folder)
        _require_unused(folder)
        return folder
    base = f"{folder_label(dataset)}__{attention}__s{seed}__{time.strftime('%Y%m%d-%H%M%S')}"
    for number in range(1, 1000):
        folder = parent / (base if number == 1 else f"{base}-{number}")
        try:
            make_folder(folder, exist_ok=False)
        except FileExistsError:
            continue
        return folder
    raise FileExistsError(f"{parent} already has 999 runs named {base}")


def _require_unused(folder: Path) -> None:
    """Raise ValueError if a folder has files, other than those of a run that was killed before ``config.json``."""
    if not folder.is_dir() or any(path.name != ".lock" and path.suffix != ".partial" for path in folder.iterdir()):
        raise ValueError(f"{folder} already exists: give another --name, or resume it: --resume {folder}")


@contextmanager
def lock_run(folder: Path, *, is_new: bool = False) -> Iterator[None]:
    """Lock a run folder against other processes, and remove partial files that a killed process left in it.

    Args:
        folder: run folder.
        is_new: whether a run starts there. Two processes can choose the same name, but one of them is second.

    Raises:
        ValueError: if another process is training the run, or ``is_new`` and another has started a run there.
        OSError: if a subfolder is a link, through which the run would write elsewhere.
    """
    for name in ("checkpoints", "evaluations", "report"):
        check_folder(folder / name)
    with lock_folder(folder, f"{folder} is being trained by another process"):
        if is_new:
            _require_unused(folder)
        for each in (folder, folder / "checkpoints"):
            remove_partial(each)
        yield


def write_record(folder: Path, record: RunRecord) -> None:
    """Write ``config.json``."""
    content = {
        "config": asdict(record.config),
        "task": record.task.to_dict(),
        "parts": [asdict(part) for part in record.parts],
        "threads": record.threads,
        "device": record.device,
        "num_parameters": record.num_parameters,
        **({} if record.initial_weights is None else {"initial_weights": asdict(record.initial_weights)}),
        **record.provenance,
    }
    with atomic_write(folder / CONFIG) as file:
        file.write(json.dumps({**content, CHECKSUM: checksum(content)}, indent=2).encode() + b"\n")


def read_record(folder: Path) -> RunRecord:
    """Read ``config.json``.

    Raises:
        ValueError: if the folder is not a run, or this version cannot read it.
    """
    path = folder / CONFIG
    if folder.is_file():
        raise ValueError(f"{folder} is a file: give a run folder, such as {folder.parent.parent}")
    try:
        with open_regular(path, "rb") as file:
            return _record(json.loads(file.read()))
    except FileNotFoundError as error:
        raise ValueError(f"{folder} is not a run: {CONFIG} is missing") from error
    except (ValueError, RecursionError) as error:  # JSON that is cut off, not text, too deep, or another's
        raise ValueError(
            f"{path} cannot be read by this version: {error}. Restore it from a copy, or start a new run"
        ) from error


def require_unchanged(folder: Path) -> None:
    """Raise ValueError if ``config.json`` is not as it was written. Those of earlier versions cannot be checked."""
    values = json.loads(read_text(folder / CONFIG))
    stated = values.pop(CHECKSUM, None)
    if stated is not None and stated != checksum(values):
        raise ValueError(
            f"{folder / CONFIG} was changed after the run started (it has another checksum). Undo the changes, or "
            "start a new run"
        )


def _record(content: object) -> RunRecord:
    """Build a record from the content of ``config.json``. Raise ValueError if a value is missing or impossible."""
    names = [item.name for item in fields(RunRecord) if item.name not in ("provenance", "initial_weights")]
    values = require_keys(content, (*names, *PROVENANCE), where=CONFIG)
    own = {name: values[name] for name in names} | {
        "config": config_from_dict(values["config"]),
        "task": RunTask.from_dict(values["task"]),
        "initial_weights": values.get("initial_weights"),
        "provenance": {name: values[name] for name in PROVENANCE},
    }
    record = build(RunRecord, own, where=CONFIG)
    check_range("threads", record.threads, low=1)
    if not record.parts:
        raise ValueError("parts must have at least one part")
    return record
