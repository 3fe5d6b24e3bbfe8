"""Episodes that were evaluated, kept beside the run, so that none is run twice and none is lost.

A file for each checkpoint (by its content), environment and mode: a line for each episode, by target and seed. An
episode depends on nothing else.
"""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

from envs.evaluation import Watch
from primal_dt.rollout import Episode

__all__ = ["KeptEpisodes", "digest_of"]


def digest_of(path: Path) -> str:
    """A name for a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


class KeptEpisodes(Watch):
    """What is known of a policy in an environment, and what comes to be known.

    Args:
        path: the file; it need not exist.
        fresh: take no notice of what is known. What is added counts from then on.
    """

    def __init__(self, path: Path, *, fresh: bool = False) -> None:
        self._path = path
        self._known: dict[tuple[float, int], Episode] = {}
        if path.exists() and not fresh:
            for line in path.read_text().splitlines():
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
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(episode)) + "\n")

    def _remember(self, episode: Episode) -> None:
        self._known[episode.target, episode.seed] = episode
