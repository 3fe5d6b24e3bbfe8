"""Episodes that were evaluated, kept beside the run, so that none is run twice and none is lost.

A file for each checkpoint (by its content), environment, mode and whatever else makes an episode what it is: the kind
of device, the versions of torch and MuJoCo, and of the code that acts. A line for each episode, by target and seed.
"""

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from primal_dt.evaluation.callbacks import Callback
from primal_dt.evaluation.rollout import Episode
from primal_dt.system.files import check_writable

__all__ = ["EpisodeCache", "file_digest"]

log = logging.getLogger(__name__)


def file_digest(path: Path) -> str:
    """A name for a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


class EpisodeCache(Callback):
    """What is known of a policy in an environment, and what comes to be known.

    In a run of somebody else's, whose folder cannot be written to, nothing is kept beyond this process.

    Args:
        folder: where.
        facts: what episodes depend on, besides target and seed. Their file is named by it, and begins with it.
        fresh: take no notice of what is known. What is added counts from then on.
    """

    def __init__(self, folder: Path, facts: Mapping[str, Any], *, fresh: bool = False) -> None:
        text = json.dumps(facts, sort_keys=True)
        self._path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.jsonl"
        self._first_line = text
        try:
            check_writable(folder)
            self._is_kept = True
        except OSError as error:
            log.warning("episodes are not kept: %s: %s", error.filename, error.strerror)
            self._is_kept = False
        self._known: dict[tuple[float, int], Episode] = {}
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        for line in [] if fresh else lines[1:]:
            try:
                self._remember(Episode(**json.loads(line)))
            except (json.JSONDecodeError, TypeError):
                continue  # cut off in the middle of a line when the process was killed: that episode is run again

    def get(self, target: float, seed: int) -> Episode | None:
        """An episode, if it is known."""
        return self._known.get((target, seed))

    def end_episode(self, episode: Episode) -> None:
        """Keep it, at once."""
        self._remember(episode)
        if not self._is_kept:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a+b") as file:
            if file.tell() == 0:
                file.write(self._first_line.encode() + b"\n")
            else:  # whoever was killed while writing has left half a line
                file.seek(-1, 2)
                if file.read(1) != b"\n":
                    file.write(b"\n")
            file.write(json.dumps(asdict(episode)).encode() + b"\n")

    def _remember(self, episode: Episode) -> None:
        self._known[episode.target, episode.seed] = episode
