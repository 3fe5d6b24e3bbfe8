"""How a run shows that it is alive: a bar in a terminal, plain lines elsewhere."""

import sys
import time

from tqdm import tqdm

from primal_dt.trainer import TrainMetrics

__all__ = ["Progress"]

SECONDS_BETWEEN_LINES = 30.0


class Progress:
    """Loss, steps per second, time left and the last score.

    Args:
        steps: of the run.
        done: of these, before now.
        shown: whether to show anything.
    """

    def __init__(self, *, steps: int, done: int = 0, shown: bool = True) -> None:
        self._steps = steps
        self._shown = shown
        self._score = ""
        self._last_line = -SECONDS_BETWEEN_LINES
        in_terminal = shown and sys.stderr.isatty()
        self._bar = tqdm(total=steps, initial=done, unit=" steps", desc="training") if in_terminal else None

    def update(self, metrics: TrainMetrics) -> None:
        """A logging point."""
        text = f"loss {metrics.loss:.4f}{self._score}"
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(metrics.step - self._bar.n)
        elif self._shown and (
            time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES or metrics.step == self._steps
        ):
            self._last_line = time.monotonic()
            left = (self._steps - metrics.step) / metrics.steps_per_second
            self._print(
                f"step {metrics.step:,} of {self._steps:,}  {text}  {metrics.steps_per_second:.1f} steps/s  "
                f"{left / 60:.1f} min left"
            )

    def score(self, value: float) -> None:
        """The newest normalised return."""
        self._score = f"  score {value:.1f}"

    def note(self, text: str) -> None:
        """Something to be told besides."""
        if self._shown:
            self._print(text)

    def close(self) -> None:
        """No more to come."""
        if self._bar is not None:
            self._bar.close()

    def _print(self, text: str) -> None:
        tqdm.write(text, file=sys.stderr)
