"""A name or a path -> the file that has the episodes, fetched, recorded or converted if need be."""

import difflib
import os
import re
import socket
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from envs.behaviour.recipes import builtin_recipe
from envs.datasets import cache
from envs.datasets.checks import DataError, EpisodeSource, number_array, open_hdf5
from envs.datasets.d4rl import D4rlFile, open_d4rl
from envs.datasets.download import DownloadError, download
from envs.datasets.minari import (
    RecordedEpisode,
    dataset_lock,
    datasets_path,
    is_here,
    minari_folder,
    open_minari,
    staged,
    write_minari,
)
from envs.tasks import KNOWN_NAMES, DatasetName, Task, parse_name

__all__ = ["find_here", "find_source"]

D4RL_URL = "http://rail.eecs.berkeley.edu/datasets/offline_rl/gym_mujoco_v2"
"""D4RL's public location, ``d4rl/infos.py``."""


def find_here(name: str) -> EpisodeSource | None:
    """The episodes behind a name or path, if they are here; None if they would have to be fetched or recorded first.

    Raises:
        DataError: if it is a path to nothing, or can be no name at all.
    """
    known = parse_name(name)
    if known is None and _is_path(name):
        path = Path(os.path.expanduser(name))
        if not path.exists():
            raise DataError(f"there is no file or folder {path}")
        return open_minari(path) if path.is_dir() else open_d4rl(path)
    if known is None and re.fullmatch(r"[\w/-]{1,200}-v\d{1,9}", name) is None:
        raise DataError(_unknown(name))
    local = _local_id(name)
    return open_minari(minari_folder(local)) if is_here(local) else None


def find_source(name: str) -> EpisodeSource:
    """The episodes behind a name or path, wherever they have to come from.

    Raises:
        DataError: if they cannot be had.
    """
    if (source := find_here(name)) is not None:
        return source
    local, known = _local_id(name), parse_name(name)
    with dataset_lock(local):  # another process may be at it, and done when it is our turn
        if not is_here(local):
            if known is None or known.source == "minari":
                _download_minari(name, known)
            elif known.source == "d4rl":
                _convert_d4rl(known, local)
            else:
                from envs.behaviour.record import record  # imports the environments: reading does not need them

                record(name, builtin_recipe(known), task=known.task)
    return open_minari(minari_folder(local))


def _is_path(name: str) -> bool:
    """Whether it means a file or folder, be it there or not."""
    path = os.path.expanduser(name)
    return os.path.exists(path) or path.startswith(("/", "./", "../", "~")) or path.endswith((".hdf5", ".h5"))


def _local_id(name: str) -> str:
    """The Minari data set that a name stands for."""
    known = parse_name(name)
    return f"d4rl/{known.environment}/{known.tier}-v2" if known is not None and known.source == "d4rl" else name


def _download_minari(name: str, known: DatasetName | None) -> None:
    import minari
    from huggingface_hub import constants
    from minari.storage.remotes import DEFAULT_REMOTE

    remote = os.environ.get("MINARI_REMOTE", DEFAULT_REMOTE)
    host = urllib.parse.urlsplit(constants.ENDPOINT).hostname if remote.startswith("hf:") else remote
    try:
        if remote.startswith("hf:") and not urllib.request.getproxies():
            # Without a network its client would try for half a minute, with a warning each time.
            socket.getaddrinfo(host, None)
        with staged(name) as staging, datasets_path(staging):
            minari.download_dataset(name)
    # Its storage back ends raise what their libraries raise.
    except Exception as error:
        said = " ".join(str(error).split()) or type(error).__name__
        raise DataError(
            _missing(
                name,
                looked=minari_folder(name),
                tried=f"Minari's download from {host}, which failed: {said}",
                by_hand=f"minari download {name}, where there is a network, and copy the folder to the above",
                meanwhile="primal/hopper/medium-v0" if known is None else _builtin_like(known),
                alike=difflib.get_close_matches(name, KNOWN_NAMES, n=3) if known is None else [],
            )
        ) from error


def _convert_d4rl(name: DatasetName, local: str) -> None:
    """Fetch a D4RL file, if it is not there, and make it a local Minari data set."""
    file_name = f"{name.environment}_{name.tier.replace('-', '_')}-v2.hdf5"
    path, url = cache.downloads_folder() / file_name, f"{D4RL_URL}/{file_name}"
    if not path.exists():
        try:
            download(url, path, verify=lambda part: _open_for(part, name.task))
        except DownloadError as error:
            raise DataError(
                _missing(
                    str(name),
                    looked=f"{minari_folder(local)} and {path}",
                    tried=str(error),
                    by_hand=f"fetch {url} and put it there as {path}",
                    meanwhile=_builtin_like(name),
                    alike=[],
                )
            ) from error
    try:
        write_minari(
            local,
            _whole_episodes(path, name.task),
            task=name.task,
            algorithm="SAC",
            description=f"D4RL's {name}, converted. Where the file lacks an episode's last observation, the one "
            "before it stands twice.",
            facts={"converted_from": url},
        )
    except DataError as error:
        raise DataError(f"{error}. Delete {path} to have it fetched again") from error


def _open_for(path: Path, task: Task) -> D4rlFile:
    """A D4RL file that fits a task."""
    source, environment = open_d4rl(path), task.environment
    if (source.state_width, source.action_width) != (environment.state_width, environment.action_width):
        raise DataError(
            f"{path} has observations of width {source.state_width} and actions of width {source.action_width}, "
            f"but {task.env_id} has {environment.state_width} and {environment.action_width}"
        )
    return source


def _whole_episodes(path: Path, task: Task) -> Iterator[RecordedEpisode]:
    """A D4RL file's episodes, checked, each with the observation after its last step."""
    source = _open_for(path, task)
    with open_hdf5(path) as file:
        terminals = np.asarray(file["terminals"][:], bool)
        after = None
        if "next_observations" in file:
            after = number_array(file, "next_observations", dimensions=2, where=str(path))
            if after.shape != file["observations"].shape:
                raise DataError(f"{path}: next_observations must have the shape of observations, not {after.shape}")
        for number, episode in enumerate(source.episodes(task.environment.action_box)):
            end = source.offsets[number + 1] - 1
            last = episode.observations[-1] if after is None else np.asarray(after[end], np.float32)
            if not np.isfinite(last).all():
                raise DataError(f"{path}, episode {number}: next_observations must be finite")
            yield RecordedEpisode(
                # Minari keeps the environment's double precision.
                observations=np.vstack([episode.observations, last]).astype(np.float64),
                actions=episode.actions,
                rewards=episode.rewards.astype(np.float64),
                terminated=bool(terminals[end]),
                truncated=episode.is_complete and not terminals[end],
            )


def _builtin_like(name: DatasetName) -> str:
    """The built-in data set that is nearest to another source's."""
    return str(DatasetName("primal", name.environment, "medium" if name.tier == "simple" else name.tier))


def _missing(name: str, *, looked: object, tried: str, by_hand: str, meanwhile: str, alike: list[str]) -> str:
    hint = f"\n  did you mean {', '.join(alike)}?" if alike else ""
    return (
        f"the data set {name!r} is not here and cannot be fetched{hint}\n  looked in  {looked}\n  tried      {tried}\n"
        f"  by hand    {by_hand}\n  meanwhile  {meanwhile} is built in and needs no network"
    )


def _unknown(name: str) -> str:
    alike = difflib.get_close_matches(name, KNOWN_NAMES, n=3)
    hint = f"did you mean {', '.join(alike)}? " if alike else ""
    return (
        f"there is no data set {name!r}: it is neither a file or folder nor a name such as primal/hopper/medium-v0, "
        f"mujoco/hopper/medium-v0 or hopper-medium-v2; {hint}(python -m envs list shows all)"
    )
