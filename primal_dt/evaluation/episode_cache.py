"""A cache of finished episodes in the run folder, so that no episode is run twice and none is lost.

There is one file for each combination of what an episode depends on: the checkpoint's content, the environment, the
inference mode, the type of device, the versions of torch, MuJoCo, gymnasium, NumPy and the inference code, and on a GPU
the number of environments. A file has one line for each episode, which is identified by its target and seed.
"""

import hashlib
import json
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from primal_dt.evaluation.callbacks import Callback
from primal_dt.evaluation.rollout import Episode
from primal_dt.system.files import check_folder, check_writable, name_errors, open_regular
from primal_dt.system.records import dump_record, parse_record

__all__ = ["EpisodeCache"]

log = logging.getLogger(__name__)


class EpisodeCache(Callback):
    """Stores the episodes of one policy in one environment. As a callback, it adds each episode that ends.

    If the folder is not writable, as in another user's run, episodes are cached for this process only.

    Args:
        folder: the folder of the cache files.
        depends_on: what episodes depend on, apart from target and seed. The file is named by its digest, and its first
            line holds it as JSON.
        fresh: ignore the episodes in the file. New episodes are appended and take precedence over old ones.

    Raises:
        OSError: if the folder is a link, or if its file is not a regular one.
    """

    def __init__(self, folder: Path, depends_on: Mapping[str, Any], *, fresh: bool = False) -> None:
        text = json.dumps(depends_on, sort_keys=True)
        self._path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.jsonl"
        self._first_line = text
        check_folder(folder)
        try:
            check_writable(folder)
            self._is_writable = True
        except OSError as error:
            log.warning("episodes are not cached: %s: %s", error.filename, error.strerror)
            self._is_writable = False
        self._known: dict[tuple[float | None, int], Episode] = {}
        lines: list[bytes] = []
        if os.path.lexists(self._path):
            with open_regular(self._path, "rb") as file:
                lines = file.read().split(b"\n")
        for line in [] if fresh else lines[1:]:
            episode = _episode(line)
            if episode is not None:  # else the line is incomplete or damaged: the episode is run again
                self._remember(episode)

    def get(self, target: float | None, seed: int) -> Episode | None:
        """The cached episode, or None."""
        return self._known.get((target, seed))

    def end_episode(self, episode: Episode) -> None:
        """Add an episode, and write it to the file at once."""
        self._remember(episode)
        if not self._is_writable:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with name_errors(self._path), open_regular(self._path, "a+b") as file:
            if file.tell() == 0:
                file.write(self._first_line.encode() + b"\n")
            else:  # a process that was killed while writing leaves an incomplete line
                file.seek(-1, 2)
                if file.read(1) != b"\n":
                    file.write(b"\n")
            file.write(dump_record(asdict(episode)) + b"\n")

    def _remember(self, episode: Episode) -> None:
        self._known[episode.target, episode.seed] = episode


def _episode(line: bytes) -> Episode | None:
    """The episode in a line, or None if it holds something else."""
    try:
        episode = Episode(**parse_record(line) or {})
    except TypeError:  # not an episode
        return None
    whole = (episode.seed, episode.length)
    optional = (value for value in (episode.target, episode.predicted) if value is not None)
    numbers = (*whole, episode.total_reward, *optional)
    is_valid = (
        all(type(value) is int for value in whole)
        and all(type(value) in (int, float) and abs(value) <= sys.float_info.max for value in numbers)  # also not NaN
        and episode.success in (None, False, True)
    )
    return episode if is_valid else None
