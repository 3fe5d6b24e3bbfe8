"""Run folders: their names, and ``config.json``, which contains all that is needed to repeat a run."""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from primal_dt.config import Config, config_from_dict
from primal_dt.data.names import folder_label
from primal_dt.system.files import atomic_write, check_folder, lock_folder, read_text, remove_partial
from primal_dt.system.provenance import provenance
from primal_dt.task import RunTask

__all__ = ["DataPart", "RunRecord", "lock_run", "make_run_folder", "read_record", "write_record"]

CONFIG = "config.json"


@dataclass(frozen=True)
class DataPart:
    """One source of a run's data set."""

    name: str
    """Name or path, as the user gave it."""
    path: str
    """File that the data was read from."""


@dataclass(frozen=True)
class RunRecord:
    """Content of ``config.json``, which a run writes when it starts."""

    config: Config
    task: RunTask
    parts: tuple[DataPart, ...]
    threads: int
    device: str
    num_parameters: int
    provenance: Mapping[str, Any] = field(default_factory=provenance)


def make_run_folder(parent: Path, name: str | None, *, dataset: str, attention: str, seed: int) -> Path:
    """Create a run folder named ``name``, or ``<dataset>__<attention>__s<seed>__<time>`` if that is None.

    Raises:
        ValueError: if a folder of that name exists already.
    """
    parent.mkdir(parents=True, exist_ok=True)
    if name is not None:
        folder = parent / name
        try:
            folder.mkdir()
        except FileExistsError as error:
            raise ValueError(
                f"{folder} already exists: give another --name, or resume it: --resume {folder}"
            ) from error
        return folder
    base = f"{folder_label(dataset)}__{attention}__s{seed}__{time.strftime('%Y%m%d-%H%M%S')}"
    for number in range(1, 1000):
        folder = parent / (base if number == 1 else f"{base}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise FileExistsError(f"{parent} already has 999 runs named {base}")


@contextmanager
def lock_run(folder: Path) -> Iterator[None]:
    """Lock a run folder against other processes, and remove partial files that a killed process left in it.

    Raises:
        ValueError: if another process is training the run.
        OSError: if a subfolder is a link, through which the run would write elsewhere.
    """
    for name in ("checkpoints", "evaluations", "report"):
        check_folder(folder / name)
    with lock_folder(folder, f"{folder} is being trained by another process"):
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
        **record.provenance,
    }
    with atomic_write(folder / CONFIG) as file:
        file.write(json.dumps(content, indent=2).encode() + b"\n")


def read_record(folder: Path) -> RunRecord:
    """Read ``config.json``.

    Raises:
        ValueError: if the folder is not a run, or this version cannot read it.
    """
    path = folder / CONFIG
    if folder.is_file():
        raise ValueError(f"{folder} is a file: give a run folder, such as {folder.parent.parent}")
    try:
        content = json.loads(read_text(path))
        return RunRecord(
            config=config_from_dict(content["config"]),
            task=RunTask.from_dict(content["task"]),
            parts=tuple(DataPart(**part) for part in content["parts"]),
            threads=int(content["threads"]),
            device=content["device"],
            num_parameters=int(content["num_parameters"]),
            provenance={name: content[name] for name in ("command", "commit", "versions")},
        )
    except FileNotFoundError as error:
        raise ValueError(f"{folder} is not a run: {CONFIG} is missing") from error
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read by this version: {error!r}") from error
