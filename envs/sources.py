"""A name or a path -> the file that has the episodes, fetched, recorded or converted if need be."""

import difflib
import os
import re
import socket
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np

from envs import cache
from envs.d4rl import open_d4rl
from envs.download import DownloadError, download
from envs.episodes import DataError, EpisodeSource
from envs.minari_data import MinariData, RecordedEpisode, minari_folder, open_minari, staged, write_minari
from envs.tasks import KNOWN_NAMES, DatasetName, Task, parse_name

__all__ = ["find_source"]

D4RL_URL = "http://rail.eecs.berkeley.edu/datasets/offline_rl/gym_mujoco_v2"
"""D4RL's public location, ``d4rl/infos.py``."""


def find_source(name: str) -> EpisodeSource:
    """The episodes behind a name or path.

    Raises:
        DataError: if they are not here and cannot be had.
    """
    if _is_path(name):
        path = Path(name).expanduser()
        if not path.exists():
            raise DataError(f"there is no file or folder {path}")
        return open_minari(path) if path.is_dir() else open_d4rl(path)
    known = parse_name(name)
    if known is None:
        return _minari(name, meanwhile="primal/hopper/medium-v0")
    if known.source == "d4rl":
        return _d4rl(known)
    if known.source == "minari":
        return _minari(name, meanwhile=_builtin_like(known))
    return _builtin(known)


def _is_path(name: str) -> bool:
    """Whether it means a file or folder, be it there or not."""
    path = os.path.expanduser(name)
    return os.path.exists(path) or path.startswith(("/", "./", "../")) or path.endswith((".hdf5", ".h5"))


def _builtin(name: DatasetName) -> MinariData:
    folder = minari_folder(str(name))
    if not folder.exists():
        from envs.record import builtin_recipe, record  # imports the environments, which reading does not need

        record(str(name), builtin_recipe(name), task=name.task)
    return open_minari(folder)


def _minari(name: str, *, meanwhile: str) -> MinariData:
    folder = minari_folder(name)
    if not (folder / "data").exists():
        if re.fullmatch(r"[\w/-]+-v\d+", name) is None:
            raise DataError(_unknown(name))
        try:
            _download_with_minari(name)
        # Its storage back ends raise what their libraries raise.
        except Exception as error:
            raise DataError(
                _missing(
                    name,
                    looked=folder,
                    tried=f"Minari's download, which failed: {' '.join(str(error).split()) or type(error).__name__}",
                    by_hand=f"minari download {name}, where there is a network, and copy the folder to the above",
                    meanwhile=meanwhile,
                    alike=[] if name in KNOWN_NAMES else difflib.get_close_matches(name, KNOWN_NAMES, n=3),
                )
            ) from error
    return open_minari(folder)


def _download_with_minari(name: str) -> None:
    import minari
    from huggingface_hub import constants
    from minari.storage.remotes import DEFAULT_REMOTE

    remote = os.environ.get("MINARI_REMOTE", DEFAULT_REMOTE)
    if remote.startswith("hf:") and not urllib.request.getproxies():
        # Without a network its client would try for half a minute, with a warning each time.
        socket.getaddrinfo(urllib.parse.urlsplit(constants.ENDPOINT).hostname, None)
    with staged(name):
        minari.download_dataset(name)


def _d4rl(name: DatasetName) -> MinariData:
    """The local Minari data set that a D4RL file was converted into, or is now."""
    dataset_id = f"d4rl/{name.environment}/{name.tier}-v2"
    folder = minari_folder(dataset_id)
    if not folder.exists():
        file_name = f"{name.environment}_{name.tier.replace('-', '_')}-v2.hdf5"
        path, url = cache.downloads_folder() / file_name, f"{D4RL_URL}/{file_name}"
        if not path.exists():
            try:
                download(url, path, verify=open_d4rl)
            except DownloadError as error:
                raise DataError(
                    _missing(
                        str(name),
                        looked=f"{folder} and {path}",
                        tried=str(error),
                        by_hand=f"fetch {url} and put it there as {path}",
                        meanwhile=_builtin_like(name),
                        alike=[],
                    )
                ) from error
        write_minari(
            dataset_id,
            _whole_episodes(path, name.task),
            task=name.task,
            algorithm="SAC",
            description=f"D4RL's {name}, converted. Where the file lacks an episode's last observation, the one "
            "before it stands twice.",
            facts={"converted_from": url},
        )
    return open_minari(folder)


def _whole_episodes(path: Path, task: Task) -> Iterator[RecordedEpisode]:
    """A D4RL file's episodes, checked, each with the observation after its last step."""
    source = open_d4rl(path)
    with h5py.File(path, "r") as file:
        terminals = np.asarray(file["terminals"][:], bool)
        after = file.get("next_observations")
        ends = source.offsets[1:] - 1
        for end, episode in zip(ends, source.episodes(task.environment.action_box), strict=True):
            last = episode.observations[-1] if after is None else after[end]
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
