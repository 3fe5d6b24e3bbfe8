"""The worker's end of the pipe: JSON lines in, JSON lines out. Needs numpy alone.

The first line is what to build. Then ``"step"`` makes one training step with its batch and is answered with its
seconds, ``"memory"`` with the peak above rest, and anything else is for the builder's own extras.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Episodes", "Request", "Step", "read_episodes", "serve"]

Step = Callable[[], object]
Extras = dict[str, Callable[[], Any]]


@dataclass(frozen=True)
class Request:
    """What to build."""

    data: str
    """A file of episodes, as ``write_episodes`` makes it."""
    threads: int
    width: int
    num_heads: int
    num_layers: int
    context: int
    batch_size: int
    dropout: float
    attention: str = ""
    """For ours: the stack."""
    without: str | None = None
    """For ours: what to leave out of what makes it fast."""


@dataclass(frozen=True)
class Episodes:
    """Episodes of one length, in raw units."""

    observations: np.ndarray
    """(E, T, S)."""
    actions: np.ndarray
    """(E, T, A)."""
    rewards: np.ndarray
    """(E, T)."""


def read_episodes(path: str) -> Episodes:
    """From a file of numpy's, without executing anything in it."""
    with np.load(path, allow_pickle=False) as file:
        return Episodes(file["observations"], file["actions"], file["rewards"])


def peak_mib() -> float:
    """The most resident memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def serve(build: Callable[[Request, Episodes], tuple[Step, Extras]]) -> None:
    """Answer until the other end closes."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a library prints is no answer
    request = Request(**json.loads(sys.stdin.readline()))
    episodes = read_episodes(request.data)
    rest = peak_mib()
    step, extras = build(request, episodes)

    def timed_step() -> float:
        begin = time.perf_counter()
        step()
        return time.perf_counter() - begin

    commands: Extras = {"step": timed_step, "memory": lambda: peak_mib() - rest, **extras}
    answers.write("null\n")  # built
    for line in sys.stdin:
        answers.write(json.dumps(commands[json.loads(line)]()) + "\n")
