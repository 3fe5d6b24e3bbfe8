"""Loggers: services that a run's points are sent to, in addition to ``metrics.jsonl`` and TensorBoard's files.

A logger is a class with three methods, see :class:`Logger`. ``--logger`` names one: ``wandb``, ``trackio``, or a user's
own as ``module:Name``. A run never depends on it: :class:`LoggerFeed` sends each point once, also if the run is
resumed, and turns a failure into a warning.
"""

import importlib
import logging
import os
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from primal_dt.config import SERVICES
from primal_dt.system.files import atomic_write, open_regular
from primal_dt.system.modules import import_from_here
from primal_dt.system.records import dump_record, parse_record

__all__ = ["LoggedRun", "Logger", "LoggerError", "LoggerFeed", "ServiceLogger", "find_logger"]

log = logging.getLogger(__name__)

STATE = "logger.json"
PROJECT = "primal-dt"
"""Project of the runs in a service, unless ``WANDB_PROJECT`` or ``TRACKIO_PROJECT`` names another."""


class LoggerError(ValueError):
    """Raised if a logger is unknown, not installed or cannot start."""


@dataclass(frozen=True)
class LoggedRun:
    """What a logger is told about a run."""

    name: str
    """Name of the run folder."""
    id: str
    """A random id, which stays the same when the run is resumed, moved or renamed."""
    config: Mapping[str, Any]
    """The configuration, as plain nested values."""
    folder: Path
    """The run folder. A logger may write files to it."""
    is_resumed: bool
    """Whether the logger was started for this run before. Its points so far are not sent again."""


class Logger(Protocol):
    """Interface of a logger. Methods are called in the main process alone, in this order; any may raise."""

    def start(self, run: LoggedRun) -> None:
        """Begin or continue a run."""

    def point(self, step: int, scalars: Mapping[str, float]) -> None:
        """Log the scalars of a step. Steps rise."""

    def end(self, summary: Mapping[str, float]) -> None:
        """End the run: it is complete, or was stopped. ``summary`` has the last value of every scalar."""


class ServiceLogger:
    """Logger for a module with the interface of Weights & Biases: ``init``, ``log`` and ``finish``.

    Args:
        module: ``wandb``, ``trackio``, or another module with this interface.
    """

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._run: Any = None

    def start(self, run: LoggedRun) -> None:
        """Begin a run, or continue the one of this id (W&B) or name (trackio, whose runs have no id to choose)."""
        name = self._module.__name__
        self._run = self._module.init(
            project=os.environ.get(f"{name.upper()}_PROJECT") or PROJECT,
            name=run.name,
            config=dict(run.config),
            resume="allow" if run.is_resumed else "never",
            **({} if name == "trackio" else {"id": run.id, "dir": str(run.folder)}),
        )

    def point(self, step: int, scalars: Mapping[str, float]) -> None:
        self._module.log(dict(scalars), step=step)

    def end(self, summary: Mapping[str, float]) -> None:
        own = getattr(self._run, "summary", None)  # trackio has none
        if own is not None:
            own.update(dict(summary))
        self._module.finish()


def find_logger(name: str) -> Callable[[], Logger] | None:
    """Return what makes the logger of this name; None for ``tensorboard``, which needs no other.

    Args:
        name: ``tensorboard``, ``wandb``, ``trackio``, or a class without arguments as ``module:Name``. Its module is
            imported, which executes its code.

    Raises:
        LoggerError: if it is not installed, does not exist or lacks a method.
    """
    if name in SERVICES:
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            raise LoggerError(
                f"--logger {name} needs {name}, which cannot be imported ({error}): "
                f"pip install -c constraints.txt -e '.[{name}]'"
            ) from error
        return lambda: ServiceLogger(module)
    return _own_logger(name) if ":" in name else None


def _own_logger(name: str) -> Callable[[], Logger]:
    module_name, _, attribute = name.partition(":")
    try:
        found = getattr(import_from_here(module_name), attribute)
    except Exception as error:  # whatever the user's module raises
        raise LoggerError(
            f"the logger {name} cannot be imported: {type(error).__name__}: {error}. Run from its module's folder, or "
            "install it"
        ) from error
    methods = ("start", "point", "end")
    if missing := [method for method in methods if not callable(getattr(found, method, None))]:
        raise LoggerError(
            f"the logger {name} must be a class with the methods {', '.join(methods)}: it lacks {', '.join(missing)}"
        )
    return found


class LoggerFeed:
    """Sends the points of a run to a logger, each once.

    ``logger.json`` in the run folder has the run's id, and the last step that was sent. When a run is resumed, points
    after that step are sent from ``metrics.jsonl``, such as those that a failed logger missed; points up to it are not,
    although the training computes those after its checkpoint again. The step is written before the point is sent:
    if the process is killed between the two, the service lacks this point, and never has one twice.

    Args:
        logger: the logger.
        folder: run folder.
        config: configuration as plain values.
        points: the points that the run has logged so far.

    Raises:
        LoggerError: if the logger cannot start. Later failures are warnings.
    """

    def __init__(
        self, logger: Logger, *, folder: Path, config: Mapping[str, Any], points: Iterable[Mapping[str, Any]] = ()
    ) -> None:
        self._logger = logger
        self._path = folder / STATE
        self._has_failed = False
        state = _read_state(self._path)
        self._id, self._sent = state or (uuid.uuid4().hex, 0)
        name = folder.resolve().name
        self._write_state()
        try:
            logger.start(LoggedRun(name, self._id, config, folder, is_resumed=state is not None))
        except Exception as error:
            raise LoggerError(f"the logger cannot start: {_words(error)}") from error
        for point in points:
            self.point(point["step"], {name: value for name, value in point.items() if name not in ("step", "time")})

    def point(self, step: int, scalars: Mapping[str, float]) -> None:
        """Send a point, unless it was sent before or the logger has failed."""
        if step <= self._sent or self._has_failed:
            return
        before, self._sent = self._sent, step
        try:
            self._write_state()
            self._logger.point(step, scalars)
        except Exception as error:
            self._sent = before
            self._fail(error)
            with suppress(OSError):  # a full disk
                self._write_state()

    def end(self, summary: Mapping[str, float]) -> None:
        """End the run, unless the logger has failed."""
        if not self._has_failed:
            try:
                self._logger.end(summary)
            except Exception as error:
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._has_failed = True
        log.warning(
            "the logger failed after step %s: %s. Training continues without it; metrics.jsonl and TensorBoard have "
            "every point, and --resume sends those that are missing",
            f"{self._sent:,}",
            _words(error),
        )

    def _write_state(self) -> None:
        with atomic_write(self._path) as file:
            file.write(dump_record({"id": self._id, "step": self._sent}) + b"\n")


def _read_state(path: Path) -> tuple[str, int] | None:
    """The id and the last step that was sent; None if nothing was sent yet or the file is damaged."""
    try:
        with open_regular(path, "rb") as file:
            values = parse_record(file.read(), has_checksum=True)
    except FileNotFoundError:
        return None
    if values is None or type(values.get("id")) is not str or type(values.get("step")) is not int:
        return None
    return values["id"], values["step"]


def _words(error: Exception) -> str:
    """The error's type and the first line of its message."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]
