"""Names of data sets as users write them: a name or a path, or several joined by ``+``."""

import os
import re
from collections.abc import Iterable
from pathlib import Path

__all__ = ["folder_label", "join_names", "resolve_paths", "short_name", "split_names"]

LABEL_LENGTH = 60


def split_names(dataset: str) -> tuple[str, ...]:
    """``A+B`` -> A, B. A path that exists is one name, even with a plus sign in it."""
    return (dataset,) if os.path.exists(dataset) else tuple(name.strip() for name in dataset.split("+"))


def join_names(names: Iterable[str]) -> str:
    """The inverse of :func:`split_names`."""
    return "+".join(names)


def resolve_paths(dataset: str) -> str:
    """The same data set for a program that runs in another folder: paths become absolute."""
    return join_names(str(Path(name).resolve()) if Path(name).exists() else name for name in split_names(dataset))


def short_name(dataset: str) -> str:
    """A file is called by its name, without its folders and its suffix."""
    return join_names(map(_stem, split_names(dataset)))


def folder_label(dataset: str) -> str:
    """The data set in the name of a folder, with no character that a shell would need quoted."""
    names = (re.sub(r"[^A-Za-z0-9._]+", "-", _stem(name)).strip("-.") for name in split_names(dataset))
    return "-and-".join(name[-LABEL_LENGTH:] for name in names)


def _stem(name: str) -> str:
    return Path(name).stem if name.endswith((".hdf5", ".h5")) else name
