"""Rollout callbacks: a progress bar, a list of episodes and a check for a stop request."""

import sys
import time
from typing import Any, Self

from tqdm import tqdm

from primal_dt.evaluation.rollout import Episode
from primal_dt.system.process import StopRequest
from primal_dt.system.terminal import SECONDS_BETWEEN_LINES

__all__ = ["Callback", "EpisodeList", "ProgressBar", "StopCheck"]


class Callback:
    """Base class for rollout callbacks; every method does nothing."""

    def begin(self, num_episodes: int, episode_limit: int) -> None:
        """Called first, with the number of episodes and the maximum number of steps of an episode."""

    def step(self, running: int) -> None:
        """Called after each step of the environments, with the number of episodes that are still running."""

    def end_episode(self, episode: Episode) -> None:
        """Called when an episode ends."""


class EpisodeList(Callback):
    """Collects the finished episodes."""

    def __init__(self) -> None:
        self.episodes: list[Episode] = []

    def end_episode(self, episode: Episode) -> None:
        self.episodes.append(episode)


class StopCheck(Callback):
    """Raises StopRequestedError at the first step after a stop request."""

    def __init__(self, request: StopRequest) -> None:
        self._request = request

    def step(self, running: int) -> None:
        self._request.check()


class ProgressBar(Callback):
    """Shows progress: a bar in a terminal, plain lines elsewhere. Use it as a context manager.

    The bar shows an upper bound of the time left, because episodes may end early.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._limit = self._num_episodes = self._ended = self._steps = 0
        self._begin = self._last_line = time.monotonic()
        self._bar: tqdm[Any] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
        if self._num_episodes == 0 and kind is None:
            self._print("no new episodes to run")
        elif self._num_episodes:
            self._print(f"{self._ended} of {self._num_episodes} episodes in {time.monotonic() - self._begin:.1f} s")

    def begin(self, num_episodes: int, episode_limit: int) -> None:
        """Open the bar. Its total counts every episode with the maximum number of steps."""
        self._num_episodes, self._limit = num_episodes, episode_limit
        if sys.stderr.isatty():
            layout = "{l_bar}{bar}| {elapsed}, at most {remaining} left{postfix}"
            self._bar = tqdm(desc=self._name, total=num_episodes * episode_limit, bar_format=layout, leave=False)

    def step(self, running: int) -> None:
        self._steps += running
        now = time.monotonic()
        if self._bar is not None:
            rate = self._steps / (now - self._begin)
            self._bar.set_postfix_str(f"{running} running, {self._ended} ended, {rate:,.0f} steps/s", refresh=False)
            self._bar.update(running)
        elif now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            self._print(f"{self._ended} of {self._num_episodes} episodes ended, {running} running")

    def end_episode(self, episode: Episode) -> None:
        """Advance the bar by the episode's last step, which :meth:`step` does not count, and by its unused steps."""
        self._ended += 1
        self._steps += 1
        if self._bar is not None:
            self._bar.update(self._limit - episode.length + 1)

    def _print(self, text: str) -> None:
        print(f"{self._name}: {text}", file=sys.stderr)
