"""A small world to attack: a data set, its cached copy, runs and a report; and what must hold in it afterwards."""

import hashlib
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the optimizer imports it, which takes seconds: once, not in every process

import envs.__main__
import evaluate
import sweep
import train
from benchmarks.torture.process import Outcome, Process, Sabotage, on_calls
from primal_dt.training.checkpoint import load_checkpoint
from primal_dt.training.metrics_log import scan_metrics
from primal_dt.training.trainer import Trainer

__all__ = ["PROGRAMS", "RECORD", "TINY", "InvariantError", "World"]

NAME = "mine/hopper/small-v0"
RUN, HALF, WHOLE, REPORT = "runs/run", "runs/half", "runs/whole", "reports/report"
TINY = shlex.split("""
    --width 16 --context 3 --rank 4 --num-layers 1 --num-heads 1 --batch-size 4 --warmup-steps 2 --steps 8
    --log-every-steps 1 --save-every-steps 2 --eval-every-steps 8 --eval-episodes 1 --spectrum-every-steps 0
    --threads 1 --device cpu
""")
"""Flags of ``train.py`` for a run of less than a second. Later flags override earlier ones."""
RECORD = ["record", NAME, "--policy", "random", "--env-id", "Hopper-v5", "--steps", "60"]
TIMES = ("time", "train/steps_per_second")
OWN = ("runs", "reports", "cache", "minari")
"""The folders that programs may write to."""
MAINS: dict[str, Callable[[], int | None]] = {
    "train.py": train.main,
    "evaluate.py": evaluate.main,
    "sweep.py": sweep.main,
    "python -m envs": envs.__main__.main,
}


class InvariantError(Exception):
    """Raised if something happened that must not."""


@dataclass(frozen=True)
class Program:
    """A command that is attacked, and what it must give."""

    command: tuple[str, ...]
    result: Callable[["World", Outcome], str]
    """The digest of its result, after it succeeded."""
    unused: tuple[str, ...] = ()
    """Files and folders that it is to create, which are removed before it starts."""
    again: tuple[str, ...] = ()
    """The command that resumes it, if that is another."""


def run_result(folder: str) -> Callable[["World", Outcome], str]:
    """Weights, the trainer's state and metrics of a run."""

    def result(world: "World", _: Outcome) -> str:
        checkpoint = load_checkpoint(world.root / folder)
        lines = scan_metrics(world.root / folder)[0]
        metrics = [{key: value for key, value in line.items() if key not in TIMES} for line in lines]
        return _digest(_plain([checkpoint.weights, checkpoint.training["trainer"], metrics]))

    return result


def report_result(world: "World", _: Outcome) -> str:
    """The groups of a report."""
    return _digest(json.loads((world.root / REPORT / "report.json").read_text())["groups"])


def printed_result(_: "World", outcome: Outcome) -> str:
    """What was printed as JSON."""
    return _digest(json.loads(outcome.out))


def recorded_result(world: "World", _: Outcome) -> str:
    """The content of the recorded data set."""
    shutil.rmtree(world.root / "cache", ignore_errors=True)
    outcome = world.run(INFO)
    if outcome.code:
        raise InvariantError(f"the data set cannot be read:\n{outcome}")
    return str(json.loads(outcome.out)["fingerprint"])


INFO = ("python -m envs", "info", NAME, "--json")
START = ("train.py", "--dataset", NAME, *TINY, "--name", "run")
EVALUATE = ("evaluate.py", WHOLE, "--episodes", "2", "--seed", "5", "--workers", "0", "--out", REPORT)
PROGRAMS = {
    "start": Program(START, run_result(RUN), (RUN,), ("train.py", "--resume", RUN)),
    "resume": Program(("train.py", "--resume", HALF), run_result(HALF)),
    "evaluate": Program(EVALUATE, report_result),
    "evaluate from scratch": Program(EVALUATE, report_result, (REPORT, f"{WHOLE}/evaluations")),
    "read data": Program(INFO, printed_result),
    "convert data": Program(INFO, printed_result, ("cache",)),
    "record": Program(("python -m envs", *RECORD, "--seed", "9", "--overwrite"), recorded_result),
}


class World:
    """The files that programs work on. Each attack begins with the same.

    Args:
        folder: an empty folder for the world.
    """

    def __init__(self, folder: Path) -> None:
        self.root, self._template = folder / "world", folder / "template"
        self.root.mkdir()
        variables = {"PRIMAL_DT_CACHE": "cache", "MINARI_DATASETS_PATH": "minari", "HOME": "home"}
        os.environ |= {name: str(self.root / path) for name, path in variables.items()}
        torch.set_num_threads(1)  # threads would not survive a fork
        sys.modules["matplotlib"] = None  # type: ignore[assignment]  # plots take longer than all the rest
        (self.root / "home").mkdir()
        (self.root / "home" / "secret").write_text("secret\n")
        self._succeed(("python -m envs", *RECORD))
        self._succeed((*START[:-1], "whole"))
        self.run((*START[:-1], "half"), stop_half_way)
        self._succeed(EVALUATE)
        shutil.copytree(self.root, self._template)
        self.expected: dict[str, str] = {}
        self.seconds: dict[str, float] = {}
        """How long each program takes undisturbed."""
        self.calls: dict[str, int] = {}
        """How many calls each program makes that can be made to fail."""
        for name, program in PROGRAMS.items():
            self.reset(program)
            start = time.monotonic()
            self._succeed(program.command)
            self.seconds[name] = time.monotonic() - start
            self.reset(program)
            with tempfile.TemporaryFile() as calls:
                count = on_calls(self.root, lambda number, _: os.ftruncate(calls.fileno(), number))
                self.expected[name] = program.result(self, self._succeed(program.command, count))
                self.calls[name] = os.fstat(calls.fileno()).st_size

    def _succeed(self, command: Iterable[str], sabotage: Sabotage | None = None) -> Outcome:
        if (outcome := self.run(command, sabotage)).code:
            raise RuntimeError(f"an undisturbed program failed:\n{outcome}")
        return outcome

    def reset(self, *programs: Program) -> None:
        """Restore all files, with their times, apart from those that programs are to create."""
        shutil.rmtree(self.root)
        shutil.copytree(self._template, self.root, symlinks=True)
        for name in {name for program in programs for name in program.unused}:
            path = self.root / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    def start(self, command: Iterable[str], sabotage: Sabotage | None = None) -> Process:
        """Start a program."""
        name, *arguments = command
        return Process(MAINS[name], [name, *arguments], self.root, sabotage)

    def run(self, command: Iterable[str], sabotage: Sabotage | None = None) -> Outcome:
        """Run a program to its end."""
        return self.start(command, sabotage).outcome()

    def again(self, program: Program) -> tuple[str, ...]:
        """The command that resumes or repeats a program."""
        can_resume = program.again and (self.root / RUN / "config.json").exists()
        return program.again if can_resume else program.command

    def check_result(self, name: str, outcome: Outcome) -> None:
        """Check that a program ended with the result that it has undisturbed, to the last bit."""
        if outcome.code or not outcome.is_clear:
            raise InvariantError(f"{name} did not succeed:\n{outcome}")
        if PROGRAMS[name].result(self, outcome) != self.expected[name]:
            raise InvariantError(f"{name} gave another result:\n{outcome}")

    def check_weights(self, name: str) -> None:
        """Check that a run has the weights that it has undisturbed, whatever became of its points."""
        folders = {"start": RUN, "resume": HALF}
        own, whole = (load_checkpoint(self.root / folder) for folder in (folders[name], WHOLE))
        if _digest(_plain(own.weights)) != _digest(_plain(whole.weights)):
            raise InvariantError(f"{name} gave other weights")


def stop_half_way() -> None:
    """Have a training run stop after step 5, with a checkpoint."""
    update = Trainer.update

    def stopping(self: Trainer, batch: Any) -> None:
        update(self, batch)
        if self.step == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    Trainer.update = stopping  # type: ignore[method-assign]


def _plain(value: Any) -> Any:
    """Nested values with tensors as bytes."""
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), list(value.shape), value.numpy().tobytes().hex()]
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
