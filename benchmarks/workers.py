"""Worker processes that train one model each, one step per command, so that models can be timed alternately."""

import json
import os
import statistics
import subprocess
import sys
import venv
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from primal_dt.system.start import PASSIVE

__all__ = [
    "PEERS",
    "Job",
    "Worker",
    "environment_python",
    "ours",
    "quartiles",
    "take_turns",
    "working",
    "write_episodes",
]

FOLDER = Path(__file__).parent / "peers"
PEERS = {"d3rlpy": "d3rlpy==2.8.1", "transformers": "transformers==5.22.2"}
"""Library -> pip requirement. It is installed together with the torch release in use."""
NUM_LAYERS, BATCH_SIZE, DROPOUT = 3, 64, 0.1
STATE_WIDTH, ACTION_WIDTH, EPISODE, NUM_EPISODES = 17, 6, 1000, 100
WARM_UP_STEPS = 3


@dataclass(frozen=True)
class Job:
    """A worker process to start, and the model that it builds."""

    name: str
    python: Path
    program: str
    """File name in the folder ``peers``."""
    options: Mapping[str, Any]
    """For our models: the attention stack, the optimizer, and the optimization to remove."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the process."""


def ours(attention: str, *, name: str | None = None, without: str | None = None) -> Job:
    """Job for a model of this project."""
    options = {"attention": attention, "without": without}
    return Job(name or attention, Path(sys.executable), "with_primal_dt.py", options, PASSIVE)  # as train.py


class Worker:
    """Connection to a worker process, whose side is ``peers/serve.py``."""

    def __init__(self, job: Job, threads: int) -> None:
        self.name = job.name
        self._process = subprocess.Popen(
            [job.python, FOLDER / job.program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            bufsize=1,
            env=os.environ
            | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(FOLDER.parent.parent)}
            | dict(job.environment),
        )

    def ask(self, command: str | dict[str, Any]) -> Any:
        """Send a command and return the answer. The first command describes the model to build.

        Raises:
            ChildProcessError: if the process has ended. The message has the last line of its stderr.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            _, text = self._process.communicate()
            raise ChildProcessError(f"{self.name} has ended: {text.strip().splitlines()[-1] if text.strip() else '?'}")
        return json.loads(line)

    def close(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.communicate()


def environment_python(peer: str, folder: Path) -> Path:
    """Return the Python interpreter of a peer's virtual environment, which is created if it is missing."""
    root = folder / f"{PEERS[peer]}-torch-{torch.__version__.partition('+')[0]}"
    python = root / "bin" / "python"
    done = root / "complete"
    if not done.exists():
        print(f"creating a virtual environment for {peer} in {root}", file=sys.stderr)
        venv.create(root, clear=True, with_pip=True)
        torch_release = f"torch=={torch.__version__.partition('+')[0]}"
        command: list[str | Path] = [python, "-m", "pip", "install", "--quiet", torch_release, PEERS[peer]]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            raise OSError(f"pip could not install {PEERS[peer]}: {result.stderr.strip().splitlines()[-1]}")
        done.touch()
    return python


def write_episodes(path: Path) -> None:
    """Write noise with HalfCheetah's state and action widths: only the speed of training matters here."""
    random = np.random.default_rng(0)
    np.savez(
        path,
        observations=random.normal(size=(NUM_EPISODES, EPISODE, STATE_WIDTH)).astype(np.float32),
        actions=random.uniform(-1, 1, size=(NUM_EPISODES, EPISODE, ACTION_WIDTH)).astype(np.float32),
        rewards=random.normal(size=(NUM_EPISODES, EPISODE)).astype(np.float32),
    )


@contextmanager
def working(
    jobs: Iterable[Job], data: Path, *, threads: int, width: int, num_heads: int, context: int
) -> Iterator[list[Worker]]:
    """Start a worker for each job and build its model; kill the workers on exit."""
    build = {
        "data": str(data),
        "threads": threads,
        "width": width,
        "num_heads": num_heads,
        "num_layers": NUM_LAYERS,
        "context": context,
        "batch_size": BATCH_SIZE,
        "dropout": DROPOUT,
    }
    with ExitStack() as stack:
        workers = []
        for job in jobs:
            worker = Worker(job, threads)
            stack.callback(worker.close)
            worker.ask({**build, **job.options})
            workers.append(worker)
        yield workers


def take_turns(
    workers: list[Worker], steps: int, title: str, *, after_turn: Callable[[], None] = lambda: None
) -> dict[str, list[float]]:
    """Make training steps with all workers in turn.

    Args:
        workers: the workers, with their models built.
        steps: timed steps of each worker, after ``WARM_UP_STEPS`` that are not timed.
        title: the label of the progress bar.
        after_turn: called after each worker has made a step.

    Returns:
        Name of the worker -> seconds of each timed step.
    """
    seconds: dict[str, list[float]] = {worker.name: [] for worker in workers}
    for number in tqdm(range(WARM_UP_STEPS + steps), desc=title, leave=False, disable=None):
        for worker in workers:
            took = worker.ask("step")
            if number >= WARM_UP_STEPS:
                seconds[worker.name].append(took)
        after_turn()
    return seconds


def quartiles(seconds: Iterable[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile."""
    lower, median, upper = statistics.quantiles(seconds, n=4, method="inclusive")
    return lower, median, upper
