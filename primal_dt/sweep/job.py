"""A job of a sweep: one training run and its evaluation. What it is, where it writes, how far it has come."""

import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal

from primal_dt.config import PRESETS, Config
from primal_dt.data.names import join_names, split_names
from primal_dt.system.files import atomic_write
from primal_dt.training.checkpoint import CheckpointFolder
from primal_dt.training.metrics_log import read_metrics
from primal_dt.training.run_folder import read_record
from primal_dt.training.scalars import HEADLINE

__all__ = ["Job", "JobRecord", "flags_of", "identity_of"]

State = Literal["queued", "training", "evaluating", "done", "failed", "stopped"]
WHERE_AND_HOW = ("out", "name", "resume", "device", "threads", "save_every_steps")
"""What a configuration says of where it runs and of what it keeps: no part of what is run."""


def identity_of(config: Config, *, fingerprint: str, episodes: int) -> str:
    """The same for two jobs if they are one experiment, wherever they run and wherever the data is.

    Args:
        config: of the training.
        fingerprint: of the data's content.
        episodes: of the evaluation, for each target.
    """
    names = split_names(config.dataset)
    dataset = join_names(Path(name).name if Path(name).is_absolute() else name for name in names)
    content = asdict(config) | {"dataset": dataset}
    for name in WHERE_AND_HOW:
        del content["run"][name]
    content |= {"fingerprint": fingerprint, "episodes": episodes}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def flags_of(config: Config, preset: str) -> list[str]:
    """The arguments of ``train.py`` that give this configuration: a preset, and what differs from it."""
    return [preset, *_differences(config, PRESETS[preset][1])]


def _differences(value: Any, default: Any) -> Iterator[str]:
    for field in fields(value):
        own, other = getattr(value, field.name), getattr(default, field.name)
        flag = field.name.replace("_", "-")
        if is_dataclass(own):
            yield from _differences(own, other)
        elif own == other:
            continue
        elif isinstance(own, bool):
            yield f"--{flag}" if own else f"--no-{flag}"
        elif isinstance(own, tuple):
            yield from (f"--{flag}", *map(str, own))
        else:
            yield from (f"--{flag}", str(own))


@dataclass(frozen=True)
class JobRecord:
    """What is written down about a job, beside its run's folder."""

    identity: str
    state: State = "queued"
    is_trained: bool = False
    """Whether only its evaluation is left."""
    attempts: int = 0
    """How often it was begun or gone on with."""
    errors: tuple[str, ...] = ()
    """What went wrong in the attempts that failed, the newest last."""
    score: float | None = None
    """Mean normalized return at the headline target, once it is done."""
    node: str | None = None
    """Where it ran last."""
    seconds: float = 0.0
    """That it has taken, in all attempts that came to an end."""

    @property
    def is_running(self) -> bool:
        """Whether it was when it last wrote something down."""
        return self.state in ("training", "evaluating")


@dataclass(frozen=True)
class Job:
    """A training run with a folder of its own, and its evaluation."""

    config: Config
    """``run.out`` and ``run.name`` give its folder; the path of the former is absolute."""
    preset: str
    """That the configuration is a variation of."""
    identity: str
    episodes: int
    """Of the evaluation, for each target."""

    @property
    def name(self) -> str:
        """Of its folder."""
        return str(self.config.run.name)

    @property
    def folder(self) -> Path:
        """Of the run."""
        return Path(self.config.run.out, self.name)

    @property
    def log_path(self) -> Path:
        """What its programs print."""
        return Path(self.config.run.out, "jobs", f"{self.name}.log")

    @property
    def _record_path(self) -> Path:
        return self.log_path.with_suffix(".json")

    @property
    def record(self) -> JobRecord:
        """What is known of it. What it has trained counts as long as it is there."""
        try:
            content = json.loads(self._record_path.read_text())
            record = JobRecord(**content | {"errors": tuple(content["errors"])})
        except (FileNotFoundError, json.JSONDecodeError, TypeError, KeyError):
            return JobRecord(self.identity)
        if record.is_trained and not self._last_checkpoint.exists():
            return replace(record, state="queued", is_trained=False, score=None)
        return record

    @property
    def _last_checkpoint(self) -> Path:
        return CheckpointFolder(self.folder / "checkpoints").path(self.config.optimizer.steps)

    @property
    def begun_with(self) -> tuple[int, str] | None:
        """Threads and device of its run, if there is one to go on with."""
        try:
            record = read_record(self.folder)
            return record.threads, record.config.run.device
        except ValueError:  # there is none, or not one that can be read: its programs will say so
            return None

    def write(self, record: JobRecord) -> JobRecord:
        """Write it down, and return it."""
        with atomic_write(self._record_path) as file:
            file.write(json.dumps(asdict(record), indent=1).encode())
        return record

    def note(self, **changes: Any) -> JobRecord:
        """Change what is written down, and return it."""
        return self.write(replace(self.record, **changes))

    def progress(self) -> tuple[int, float | None]:
        """The step of the newest point of its curves, and the newest score among them."""
        metrics = read_metrics(self.folder)
        scores = [line[HEADLINE] for line in metrics if HEADLINE in line]
        return int(metrics[-1]["step"]) if metrics else 0, float(scores[-1]) if scores else None

    def training_command(self, script: Path) -> list[str]:
        """Begin the training, or go on with it."""
        begun = (self.folder / "config.json").exists()
        flags = ["--resume", str(self.folder)] if begun else flags_of(self.config, self.preset)
        return [sys.executable, str(script), *flags]

    def evaluation_command(self, script: Path) -> list[str]:
        """Run the episodes that have not been run, and print the report as JSON.

        On a CPU, wherever it was trained: there an episode does not depend on how many run beside it. In one process,
        which has as many threads as the job has asked for.
        """
        flags = ["--device", "cpu", "--workers", "0", "--out", str(self.folder / "report"), "--json"]
        return [sys.executable, str(script), str(self.folder), "--episodes", str(self.episodes), *flags]

    def environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Of its programs: no more threads than it has asked for, and the data where the sweep has put it."""
        threads = {} if self.config.run.threads is None else {"OMP_NUM_THREADS": str(self.config.run.threads)}
        return {**os.environ, **threads, **variables}
