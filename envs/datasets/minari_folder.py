"""Minari's folder on this machine: names and locks of data sets, and how they are created and replaced.

A data set is written to a staging folder beside the others, and moved to its place when it is complete. The data set
that it replaces lies in staging meanwhile, and is restored if the process is killed.
"""

import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from envs.errors import DataError
from primal_dt.system.files import check_folder, make_folder, move

__all__ = [
    "check_name",
    "dataset_lock",
    "datasets_path",
    "is_here",
    "minari_folder",
    "restore_all",
    "restore_replaced",
    "staged",
]

STAGING = ".partial-"
REPLACED = ".replaced"
"""The folder in staging of a data set that is being replaced. No name of a data set begins like this."""
log = logging.getLogger(__name__)


def minari_folder(dataset_id: str = "") -> Path:
    """The folder of a Minari data set, or of all: in ``$MINARI_DATASETS_PATH``, by default ``~/.minari/datasets``."""
    root = os.environ.get("MINARI_DATASETS_PATH")
    return Path(root if root is not None else Path.home() / ".minari" / "datasets", dataset_id)


def is_here(dataset_id: str) -> bool:
    """Whether a local data set has this name."""
    return os.path.exists(minari_folder(dataset_id) / "data" / "metadata.json")


def check_name(dataset_id: str) -> None:
    """Check that a name follows Minari's rules and does not conflict with existing files.

    Raises:
        DataError: if the name cannot be used.
    """
    if re.fullmatch(r"(\w[\w-]+/)*[\w-]+-v\d+", dataset_id) is None:
        raise DataError(
            f"{dataset_id!r} is not a valid data set name: it must look like mine/hopper/walk-v0, with a version at "
            "the end and at least two letters in each part"
        )
    parts = dataset_id.split("/")
    outer = next((name for n in range(1, len(parts)) if is_here(name := "/".join(parts[:n]))), None)
    if outer is not None:
        raise DataError(f"{dataset_id!r} would be inside the data set {outer!r}: choose another name")
    if os.path.exists(minari_folder(dataset_id)) and not is_here(dataset_id):
        raise DataError(f"{minari_folder(dataset_id)} exists but is not a data set: choose another name, or remove it")


@contextmanager
def dataset_lock(dataset_id: str) -> Iterator[None]:
    """Lock a data set while it is created. Other processes wait."""
    folder = minari_folder() / ".locks"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / f"{_one_word(dataset_id)}.lock", is_singleton=True):
        yield


@contextmanager
def staged(dataset_id: str, *, replace: bool = False) -> Iterator[Path]:
    """Create a data set in a temporary folder and move it to its final place if the block succeeds.

    If the block fails, nothing is moved. If a process was killed while it replaced the data set, the old one is
    restored first.

    Raises:
        DataError: if the name is invalid, or if it exists and ``replace`` is False.
    """
    check_name(dataset_id)
    root = minari_folder()
    staging = _staging(dataset_id)
    with dataset_lock(dataset_id):
        _clear(staging, dataset_id)  # left by a process that was killed
        if is_here(dataset_id) and not replace:
            raise DataError(
                f"the data set {dataset_id!r} already exists in {root / dataset_id}: choose another name, or replace "
                "it (--overwrite)"
            )
        make_folder(staging)
        try:
            yield staging
            _take_place(staging, root, dataset_id)
        finally:
            _clear(staging, dataset_id)


def restore_replaced(dataset_id: str) -> None:
    """Restore a data set if a process was killed while it replaced it."""
    if (_staging(dataset_id) / REPLACED).exists():
        with dataset_lock(dataset_id):
            _clear(_staging(dataset_id), dataset_id)


def restore_all() -> None:
    """Restore all data sets that processes were replacing when they were killed."""
    for path in minari_folder().glob(f"{STAGING}*/{REPLACED}"):
        restore_replaced(path.parent.name.removeprefix(STAGING).replace("+", "/"))


def _one_word(dataset_id: str) -> str:
    """A data set's name as the name of a file. No data set has a plus sign in its name."""
    return dataset_id.replace("/", "+")


def _staging(dataset_id: str) -> Path:
    return minari_folder() / (STAGING + _one_word(dataset_id))  # Minari skips hidden folders


def _clear(staging: Path, dataset_id: str) -> None:
    """Delete the staging folder. A replaced data set in it is restored first, unless the new one is in place.

    Raises:
        OSError: if it cannot be restored, or if staging is a link. Nothing is deleted then.
    """
    check_folder(staging)
    old, target = staging / REPLACED, minari_folder(dataset_id)
    if os.path.lexists(old) and not os.path.lexists(target):
        move(old, target)
        log.warning("%s is restored: its replacement was interrupted", dataset_id)
    shutil.rmtree(staging, ignore_errors=True)


def _take_place(staging: Path, root: Path, dataset_id: str) -> None:
    target = root / dataset_id
    make_folder(target.parent)
    for file in staging.rglob("namespace_metadata.json"):
        if not (there := root / file.relative_to(staging)).exists():
            move(file, there)
    if target.exists():
        move(target, staging / REPLACED)
    move(staging / dataset_id, target)  # if it fails, the old one is restored from staging


@contextmanager
def datasets_path(folder: Path) -> Iterator[None]:
    """Set the folder that Minari writes to. Minari takes it only from an environment variable."""
    before = os.environ.get("MINARI_DATASETS_PATH")
    os.environ["MINARI_DATASETS_PATH"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["MINARI_DATASETS_PATH"]
        else:
            os.environ["MINARI_DATASETS_PATH"] = before
