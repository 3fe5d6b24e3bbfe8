"""The worker's side of the pipe: JSON lines in, JSON lines out. Needs only numpy.

The first line describes the model to build. After that, ``"step"`` makes one training step, including its batch, and
returns its seconds; ``"memory"`` returns the peak memory above rest in MiB; other commands are those of the builder.
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
    """Description of the model to build."""

    data: str
    """File of episodes, written by ``write_episodes``."""
    threads: int
    width: int
    num_heads: int
    num_layers: int
    context: int
    batch_size: int
    dropout: float
    attention: str = ""
    """Attention stack, for our models."""
    optimizer: str = "adamw"
    """Optimizer, for our models."""
    without: str | None = None
    """Optimization to remove, for our models."""


@dataclass(frozen=True)
class Episodes:
    """Episodes of equal length, in raw units. Axes: E episodes, T steps, S state, A action."""

    observations: np.ndarray
    """(E, T, S)."""
    actions: np.ndarray
    """(E, T, A)."""
    rewards: np.ndarray
    """(E, T)."""


def read_episodes(path: str) -> Episodes:
    """Read a .npz file. Pickled objects are refused, so that no code in the file can run."""
    with np.load(path, allow_pickle=False) as file:
        return Episodes(file["observations"], file["actions"], file["rewards"])


def peak_mib() -> float:
    """Peak resident memory of this process in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def serve(build: Callable[[Request, Episodes], tuple[Step, Extras]]) -> None:
    """Build the model, then answer commands until stdin is closed."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # keeps the output of libraries out of the answers
    request = Request(**json.loads(sys.stdin.readline()))
    episodes = read_episodes(request.data)
    rest = peak_mib()
    step, extras = build(request, episodes)

    def timed_step() -> float:
        begin = time.perf_counter()
        step()
        return time.perf_counter() - begin

    commands: Extras = {"step": timed_step, "memory": lambda: peak_mib() - rest, **extras}
    answers.write("null\n")  # the model is built
    for line in sys.stdin:
        answers.write(json.dumps(commands[json.loads(line)]()) + "\n")
