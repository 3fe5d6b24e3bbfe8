"""A job of a sweep: one training run and its evaluation, with its identity, its files and its progress."""

import errno
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

from primal_dt.config import PRESETS, Config, without_earlier_values
from primal_dt.data.names import folder_label, join_names, resolve_paths, split_names
from primal_dt.sweep.grid import Arm, Grid
from primal_dt.system.files import atomic_write, open_regular
from primal_dt.system.records import dump_record, parse_record
from primal_dt.training.checkpoint import CheckpointFolder
from primal_dt.training.metrics_log import read_metrics
from primal_dt.training.run_folder import read_record
from primal_dt.training.scalars import HEADLINE, PLAIN_HEADLINE, score_text

__all__ = ["Job", "JobRecord", "flags_of", "identity_of", "jobs_of"]

State = Literal["queued", "training", "evaluating", "done", "failed", "stopped"]
WHERE_AND_HOW = ("out", "name", "resume", "device", "threads", "save_every_steps", "logger")
"""Fields of ``RunConfig`` that are not part of a job's identity: where it runs and logs, and how often it saves."""


def identity_of(config: Config, *, fingerprint: str, episodes: int) -> str:
    """Return a hash that identifies an experiment, wherever it runs and wherever its data is stored.

    Args:
        config: configuration of the training.
        fingerprint: digest of the data's content.
        episodes: evaluation episodes per target return.
    """
    names = split_names(config.dataset)
    dataset = join_names(Path(name).name if Path(name).is_absolute() else name for name in names)
    content = asdict(config) | {"dataset": dataset}
    content |= {part: without_earlier_values(content[part]) for part in ("model", "optimizer")}
    for name in ("trust_env", "clip_actions", "reference"):  # which earlier versions did not have
        if not content[name]:
            del content[name]
    for name in WHERE_AND_HOW:
        del content["run"][name]
    content |= {"fingerprint": fingerprint, "episodes": episodes}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def flags_of(config: Config, preset: str) -> list[str]:
    """Return the arguments of ``train.py`` that give this configuration: a preset and the differences from it."""
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
    """The saved state of a job: ``jobs/NAME.json`` in the sweep's folder."""

    identity: str
    state: State = "queued"
    is_trained: bool = False
    """Whether the training is finished, so that only the evaluation remains."""
    attempts: int = 0
    """Number of times that the job was started or resumed."""
    errors: tuple[str, ...] = ()
    """Error messages of failed attempts, newest last."""
    score: float | None = None
    """Mean normalized return at the headline target; None until the job is done."""
    is_plain: bool = False
    """Whether the score is a plain return, because the task has no reference returns."""
    node: str | None = None
    """Host name of the node that ran the last attempt."""
    seconds: float = 0.0
    """Total time of all attempts, except those that were killed or superseded."""

    def __post_init__(self) -> None:
        if self.state not in get_args(State):
            raise ValueError(f"state must be one of {', '.join(get_args(State))}, not {self.state!r}")

    @property
    def is_running(self) -> bool:
        """Whether the job was running when it last saved its record."""
        return self.state in ("training", "evaluating")


@dataclass(frozen=True)
class Job:
    """A training run, in its own run folder, and its evaluation."""

    config: Config
    """Configuration of the training. ``run.out``, an absolute path, and ``run.name`` give the run folder."""
    preset: str
    """Name of the preset that the configuration is based on."""
    identity: str
    """Hash of the experiment, see :func:`identity_of`."""
    episodes: int
    """Evaluation episodes per target return."""

    @property
    def name(self) -> str:
        """Name of the run folder, which also names the job."""
        return str(self.config.run.name)

    @property
    def folder(self) -> Path:
        """Path of the run folder."""
        return Path(self.config.run.out, self.name)

    @property
    def log_path(self) -> Path:
        """File with the output of the job's programs."""
        return Path(self.config.run.out, "jobs", f"{self.name}.log")

    @property
    def _record_path(self) -> Path:
        return self.log_path.with_suffix(".json")

    @property
    def record(self) -> JobRecord:
        """The saved record, or a new one if none can be read.

        A trained job whose last checkpoint is missing counts as queued again.
        """
        try:
            with open_regular(self._record_path, "rb") as file:
                content = parse_record(file.read()) or {}
            record = JobRecord(**content | {"errors": tuple(content["errors"])})
        except (FileNotFoundError, ValueError, TypeError, KeyError):  # missing, or any other content
            return JobRecord(self.identity)
        if record.is_trained and not self._last_checkpoint.exists():
            return replace(record, state="queued", is_trained=False, score=None)
        return record

    @property
    def _last_checkpoint(self) -> Path:
        return CheckpointFolder(self.folder / "checkpoints").path(self.config.optimizer.steps)

    @property
    def started_with(self) -> tuple[int, str] | None:
        """Threads and device that the run was started with; None if there is no run to resume."""
        try:
            record = read_record(self.folder)
            return record.threads, record.config.run.device
        except ValueError:  # no run, or one that cannot be read: train.py will report that
            return None

    def write(self, record: JobRecord) -> JobRecord:
        """Save a record and return it."""
        with atomic_write(self._record_path) as file:
            file.write(dump_record(asdict(record)))
        return record

    def note(self, **changes: Any) -> JobRecord:
        """Change fields of the saved record and return it."""
        return self.write(replace(self.record, **changes))

    def progress(self) -> tuple[int, str]:
        """Return the last logged step, and the last result logged in training, as text (empty if there is none).

        A job whose metrics cannot be read has made no progress. Errors that may pass are raised.
        """
        try:
            metrics = read_metrics(self.folder)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EACCES):  # it is not a regular file, or may not be read
                raise
            metrics = []
        step = int(metrics[-1]["step"]) if metrics else 0
        for line, name in product(reversed(metrics), (HEADLINE, PLAIN_HEADLINE)):
            if name in line:
                return step, score_text(line[name], is_plain=name == PLAIN_HEADLINE)
        return step, ""

    def training_command(self, script: Path) -> list[str]:
        """Return the command that starts the training, or resumes it if it was started."""
        started = (self.folder / "config.json").exists()
        resume = ["--resume", str(self.folder), *self.trust, "--logger", self.config.run.logger]
        return [sys.executable, str(script), *(resume if started else flags_of(self.config, self.preset))]

    @property
    def trust(self) -> list[str]:
        """The flag that lets programs import the module of the environment, if the user named or trusted it."""
        return ["--trust-env"] if self.config.trust_env or ":" in (self.config.env_id or "") else []

    def evaluation_command(self, script: Path) -> list[str]:
        """Return the command that runs the missing episodes and prints the report as JSON.

        The evaluation runs on the CPU, even after training on a GPU: on a CPU an episode does not depend on how many
        others run at the same time. It uses one process, with the job's number of threads.
        """
        flags = ["--device", "cpu", "--workers", "0", "--out", str(self.folder / "report"), "--json", *self.trust]
        return [sys.executable, str(script), str(self.folder), "--episodes", str(self.episodes), *flags]

    def environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Return the environment variables for the job's programs: the thread limit, and the sweep's ``variables``."""
        threads = {} if self.config.run.threads is None else {"OMP_NUM_THREADS": str(self.config.run.threads)}
        return {**os.environ, **threads, **variables}


def jobs_of(
    grid: Grid, base: Config, *, out: Path, threads: int, device: str, fingerprint: Callable[[str, Config], str]
) -> list[Job]:
    """Return the jobs of a grid, without duplicates.

    Args:
        grid: the settings that vary.
        base: the settings that all jobs share.
        out: the sweep's folder.
        threads: CPU threads of each job.
        device: device of each job's training.
        fingerprint: returns the digest of a data set's content; called once for each data set.
    """
    fingerprints: dict[str, str] = {}
    jobs: dict[str, Job] = {}
    for point in grid.points():
        dataset = resolve_paths(point["dataset"])
        if dataset not in fingerprints:
            fingerprints[dataset] = fingerprint(dataset, base)
        arm: Arm = point["arm"]
        changes: dict[str, Any] = {"attention": arm.attention, **arm.model}
        changes |= {name: point[name] for name in ("rank", "eta") if point[name] is not None}
        if base.model.init_from is not None:
            changes["init_from"] = str(Path(base.model.init_from).resolve())  # jobs run in other folders
        model = replace(base.model, **changes)
        run = replace(base.run, seed=point["seed"], out=str(out.resolve()), threads=threads, device=device)
        optimizer = replace(base.optimizer, **arm.optimizer)
        targets = base.evaluation.targets if model.conditioning == "return" else None
        evaluation = replace(base.evaluation, targets=targets)
        config = replace(base, dataset=dataset, model=model, optimizer=optimizer, evaluation=evaluation, run=run)
        identity = identity_of(config, fingerprint=fingerprints[dataset], episodes=grid.episodes)
        name = f"{_label(config, PRESETS[grid.preset][1], arm)}__s{point['seed']}__{identity}"
        jobs.setdefault(
            identity, Job(replace(config, run=replace(run, name=name)), grid.preset, identity, grid.episodes)
        )
    return list(jobs.values())


def _label(config: Config, preset: Config, arm: Arm) -> str:
    """Return the readable part of a job's name. It depends on the job alone, so a larger grid does not change it."""
    parts = [folder_label(config.dataset), arm.name or config.model.attention]
    if config.model.rank != preset.model.rank:
        parts.append(f"rank{config.model.rank}")
    if config.model.eta != preset.model.eta:
        parts.append(f"eta{config.model.eta:g}")
    return "__".join(parts)
