"""Resolves a name or a path to a file of episodes; downloads or records the data set if it is not available locally."""

import difflib
import os
import re
import socket
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from envs.behavior.recipes import builtin_recipe
from envs.datasets import cache
from envs.datasets.checks import EpisodeSource
from envs.datasets.d4rl import D4rlFile, open_d4rl
from envs.datasets.download import DownloadError, download
from envs.datasets.minari import check_metadata, open_minari
from envs.datasets.minari_folder import (
    dataset_lock,
    datasets_path,
    is_here,
    minari_folder,
    restore_all,
    restore_replaced,
    staged,
)
from envs.datasets.names import BUILTIN_TIERS, KNOWN_NAMES, DatasetName, builtin_name, parse_name
from envs.errors import DataError
from envs.specifications import parse_specification
from envs.tasks import ENVIRONMENTS
from primal_dt.data.names import split_names
from primal_dt.task import Specification

__all__ = ["d4rl_path", "d4rl_url", "find_here", "find_source", "must_download", "stand_in"]


def find_here(name: str) -> EpisodeSource | None:
    """Open a data set by name or path if it is available locally.

    Returns:
        The episodes, or None if they must be downloaded or recorded first.

    Raises:
        DataError: if the path does not exist, or if the name is not valid.
    """
    known = parse_name(name)
    if known is None and _is_path(name):
        path = Path(os.path.expanduser(name))
        if not path.exists() and path.absolute().is_relative_to(minari_folder().absolute()):
            restore_all()
        if not path.exists():
            raise DataError(f"there is no file or folder {path}")
        return open_minari(path) if path.is_dir() else open_d4rl(path)
    if known is None and re.fullmatch(r"[\w/-]{1,200}-v\d{1,9}", name) is None:
        raise DataError(_unknown(name))
    if known is not None and known.source == "d4rl":
        return _open_for(path, known) if (path := d4rl_path(known)).exists() else None
    restore_replaced(name)
    return open_minari(minari_folder(name)) if is_here(name) else None


def find_source(name: str, check: Callable[[Specification], None] = lambda specification: None) -> EpisodeSource:
    """Open a data set by name or path; download or record it if it is not available locally.

    ``check`` is called with the environment of a Minari data set before its download, and may raise.

    Raises:
        DataError: if the data set is unavailable.
    """
    if (source := find_here(name)) is not None:
        return source
    known = parse_name(name)
    if known is not None and known.source == "d4rl":
        return _download_d4rl(known)
    with dataset_lock(name):  # another process may create it while this one waits
        if not is_here(name):
            if known is None or known.source == "minari":
                _download_minari(name, known, check)
            else:
                from envs.behavior.record import record  # imports the environments, which reading does not need

                assert known.task is not None
                record(name, builtin_recipe(known), task=known.task)
    return open_minari(minari_folder(name))


def must_download(dataset: str) -> bool:
    """Whether any part of a data set is neither available locally nor built in."""
    for name in split_names(dataset):
        known = parse_name(name)
        if find_here(name) is None and (known is None or known.source != "primal"):
            return True
    return False


def stand_in(dataset: str) -> str:
    """Substitute built-in medium-expert data of the same environment for a data set that must be downloaded.

    The name of a data set that needs no download is returned unchanged.

    Raises:
        DataError: if the environment is not known.
    """
    if not must_download(dataset):
        return dataset
    known = parse_name(split_names(dataset)[0])
    if known is None or known.environment not in ENVIRONMENTS:
        raise DataError(f"{dataset} is not available locally, and no built-in data set can replace it")
    return builtin_name(known.environment, "medium-expert")


def d4rl_path(name: DatasetName) -> Path:
    """The path of a D4RL file in the cache, whether or not it is downloaded yet."""
    assert name.known is not None
    assert name.known.file_name is not None
    return cache.downloads_folder() / name.known.file_name


def _is_path(name: str) -> bool:
    """Whether the name is a path to a file or folder, which need not exist."""
    path = os.path.expanduser(name)
    return os.path.exists(path) or path.startswith(("/", "./", "../", "~")) or path.endswith((".hdf5", ".h5"))


def remote_metadata(name: str) -> dict[str, Any]:
    """The metadata of a data set on Minari's server."""
    from minari.storage.remotes import get_cloud_storage

    return get_cloud_storage().get_dataset_metadata(name)


def _download_minari(name: str, known: DatasetName | None, check: Callable[[Specification], None]) -> None:
    import minari
    from huggingface_hub import constants
    from minari.storage.remotes import DEFAULT_REMOTE

    remote = os.environ.get("MINARI_REMOTE", DEFAULT_REMOTE)
    host = urllib.parse.urlsplit(constants.ENDPOINT).hostname if remote.startswith("hf:") else remote
    try:
        if remote.startswith("hf:") and not urllib.request.getproxies():
            # Without a network, the Hugging Face client would retry for half a minute, with a warning each time.
            socket.getaddrinfo(host, None)
        metadata = remote_metadata(name)
        check_metadata(metadata, name)
        if (spec := metadata.get("eval_env_spec") or metadata.get("env_spec")) is not None:
            check(parse_specification(spec, name))
        with staged(name) as staging, datasets_path(staging):
            minari.download_dataset(name)
    except DataError:
        raise
    # Minari's storage back ends raise the exceptions of their libraries.
    except Exception as error:
        said = " ".join(str(error).split()) or type(error).__name__
        raise DataError(
            _missing(
                name,
                looked=minari_folder(name),
                tried=f"Minari's download from {host}, which failed: {said}",
                by_hand=f"run minari download {name} where there is a network, and copy the folder to the path above",
                instead="primal/hopper/medium-v0" if known is None else _builtin_like(known),
                alike=difflib.get_close_matches(name, KNOWN_NAMES, n=3) if known is None else [],
            )
        ) from error


def d4rl_url(name: DatasetName) -> str:
    """The address of a D4RL file."""
    assert name.known is not None
    assert name.known.url is not None
    return name.known.url


def _download_d4rl(name: DatasetName) -> D4rlFile:
    path, url = d4rl_path(name), d4rl_url(name)
    try:
        download(url, path, verify=lambda part: _open_for(part, name))
    except DownloadError as error:
        raise DataError(
            _missing(
                str(name),
                looked=path,
                tried=str(error),
                by_hand=f"download {url} and save it as {path}",
                instead=_builtin_like(name),
                alike=[],
            )
        ) from error
    return _open_for(path, name)


def _open_for(path: Path, name: DatasetName) -> D4rlFile:
    """Open a D4RL file and check that its widths are those of the data set."""
    source = open_d4rl(path)
    assert name.known is not None
    widths = (name.known.fit.state_width, name.known.fit.action_width)
    if source.widths != widths:
        raise DataError(
            f"{path} has observations of width {source.widths[0]} and actions of width {source.widths[1]}, "
            f"but {name} has {widths[0]} and {widths[1]}"
        )
    return source


def _builtin_like(name: DatasetName) -> str:
    """The built-in data set that is closest to a data set of another source."""
    environment = name.environment if name.environment in ENVIRONMENTS else "hopper"
    return builtin_name(environment, name.tier if name.tier in BUILTIN_TIERS else "medium")


def _missing(name: str, *, looked: object, tried: str, by_hand: str, instead: str, alike: list[str]) -> str:
    hint = f"\n  did you mean {', '.join(alike)}?" if alike else ""
    return (
        f"the data set {name!r} is not available locally and cannot be downloaded{hint}\n  looked in  {looked}\n"
        f"  tried      {tried}\n  by hand    {by_hand}\n  instead    {instead} is built in and needs no network"
    )


def _unknown(name: str) -> str:
    alike = difflib.get_close_matches(name, KNOWN_NAMES, n=3)
    hint = f"did you mean {', '.join(alike)}? " if alike else ""
    return (
        f"there is no data set {name!r}: it is neither a file or folder nor a name such as primal/hopper/medium-v0, "
        f"mujoco/hopper/medium-v0 or hopper-medium-v2; {hint}(python -m envs list shows all names)"
    )
