"""How an evaluation shows that it is alive."""

import sys
import time
from typing import Any, Self

from tqdm import tqdm

from primal_dt.evaluation.evaluate import Watch
from primal_dt.evaluation.rollout import Episode
from primal_dt.system.terminal import SECONDS_BETWEEN_LINES

__all__ = ["Progress"]


class Progress(Watch):
    """A bar with the time that is left, at most, in a terminal; plain lines elsewhere."""

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
            self._say("nothing new to run")
        elif self._num_episodes:
            self._say(f"{self._ended} of {self._num_episodes} episodes in {time.monotonic() - self._begin:.1f} s")

    def begin(self, num_episodes: int, episode_limit: int) -> None:
        """In the bar every episode counts as if it had the most steps that it can have."""
        self._num_episodes, self._limit = num_episodes, episode_limit
        if sys.stderr.isatty():
            layout = "{l_bar}{bar}| {elapsed}, at most {remaining} left{postfix}"
            self._bar = tqdm(desc=self._name, total=num_episodes * episode_limit, bar_format=layout, leave=False)

    def step(self, running: int) -> None:
        """A step of all, after which this many still run."""
        self._steps += running
        now = time.monotonic()
        if self._bar is not None:
            rate = self._steps / (now - self._begin)
            self._bar.set_postfix_str(f"{running} run, {self._ended} have ended, {rate:,.0f} steps/s", refresh=False)
            self._bar.update(running)
        elif now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            self._say(f"{self._ended} of {self._num_episodes} episodes have ended, {running} run")

    def end_episode(self, episode: Episode) -> None:
        """The bar is given what it was spared, and its last step."""
        self._ended += 1
        self._steps += 1
        if self._bar is not None:
            self._bar.update(self._limit - episode.length + 1)

    def _say(self, text: str) -> None:
        print(f"{self._name}: {text}", file=sys.stderr)
