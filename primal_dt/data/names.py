"""Data set names as users write them: a name, a path, or several joined by ``+``."""

import os
import re
from collections.abc import Iterable
from pathlib import Path

__all__ = ["folder_label", "join_names", "resolve_paths", "short_name", "split_names"]

LABEL_LENGTH = 60


def split_names(dataset: str) -> tuple[str, ...]:
    """Split ``A+B`` into A and B. An existing path is one name, even if it contains a plus sign."""
    return (dataset,) if os.path.exists(dataset) else tuple(name.strip() for name in dataset.split("+"))


def join_names(names: Iterable[str]) -> str:
    """Join names with ``+``. They can be split again unless a path has a plus sign in it."""
    return "+".join(names)


def resolve_paths(dataset: str) -> str:
    """Make paths absolute, for a program that runs in another working folder."""
    return join_names(str(Path(name).resolve()) if Path(name).exists() else name for name in split_names(dataset))


def short_name(dataset: str) -> str:
    """Shorten the paths of HDF5 files to the files' names, without folders and suffix."""
    return join_names(map(_stem, split_names(dataset)))


def folder_label(dataset: str) -> str:
    """Convert to a part of a folder name, without characters that need quoting in a shell."""
    names = (re.sub(r"[^A-Za-z0-9._]+", "-", _stem(name)).strip("-.") for name in split_names(dataset))
    return "-and-".join(name[-LABEL_LENGTH:] for name in names)


def _stem(name: str) -> str:
    return Path(name).stem if name.endswith((".hdf5", ".h5")) else name
