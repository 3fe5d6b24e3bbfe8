"""Progress display of a training run: a bar in a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

from primal_dt.system.terminal import SECONDS_BETWEEN_LINES
from primal_dt.training.scalars import score_text
from primal_dt.training.trainer import TrainMetrics

__all__ = ["TrainingProgress"]


class TrainingProgress:
    """Display of the loss, the steps per second, the time left and the last score.

    Args:
        steps: total steps of the run.
        done: steps that were done before a resumed run started.
    """

    def __init__(self, *, steps: int, done: int = 0) -> None:
        self._steps = steps
        self._done = done
        self._score = ""
        self._problem: str | None = None
        self._last_line = -SECONDS_BETWEEN_LINES
        self._bar = tqdm(total=steps, initial=done, unit=" steps", desc="training") if sys.stderr.isatty() else None

    def update(self, metrics: TrainMetrics) -> None:
        """Show a logging point."""
        self._done = metrics.step
        text = f"loss {metrics.loss:.4f}{self._score}"
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(metrics.step - self._bar.n)
        elif time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES or metrics.step == self._steps:
            self._last_line = time.monotonic()
            left = (self._steps - metrics.step) / metrics.steps_per_second
            self._print(
                f"step {metrics.step:,} of {self._steps:,}  {text}  {metrics.steps_per_second:.1f} steps/s  "
                f"{left / 60:.1f} min left"
            )

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Context manager that shows that an evaluation is running. The bar does not advance meanwhile."""
        if self._bar is not None:
            self._bar.set_description("evaluating")
        elif self._done == self._steps:
            self._print("evaluating")
        try:
            yield
        finally:
            if self._bar is not None:
                self._bar.set_description("training")

    def score(self, value: float, *, is_plain: bool = False) -> None:
        """Set the newest headline result, shown from the next logging point on. A plain one is a return."""
        self._score = f"  {score_text(value, is_plain=is_plain)}"

    def warn(self, problem: str | None) -> None:
        """Print a warning, if there is one, unless it is the one that was printed last."""
        if problem is not None and problem != self._problem:
            self._print(f"warning: {problem}")
        self._problem = problem or self._problem

    def close(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.close()

    def _print(self, text: str) -> None:
        tqdm.write(text, file=sys.stderr)
