"""Loggers: each point is sent once, a failure never stops a training, and mistakes are errors before the work."""

import json
import os
import shlex
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import train
from primal_dt.config import Config, RunConfig
from primal_dt.training.loggers import LoggedRun, LoggerError, LoggerFeed, find_logger
from primal_dt.training.metrics_log import MetricsLog, read_metrics
from primal_dt.training.trainer import Trainer
from tests.conftest import ON_ONE_CORE, SMALL, run_program, small_data

RUN = [*SMALL, *ON_ONE_CORE, *shlex.split("--steps 40 --log-every-steps 5 --save-every-steps 20 --eval-every-steps 0")]
OWN = """
import json

class Lines:
    def start(self, run):
        self.path = run.folder / "own.jsonl"
        self.write(start=run.name, seed=run.config["run"]["seed"], resumed=run.is_resumed)

    def point(self, step, scalars):
        self.write(step=step, **scalars)

    def end(self, summary):
        self.write(end=summary["train/loss"])

    def write(self, **values):
        with self.path.open("a") as file:
            print(json.dumps(values), file=file)

class Broken(Lines):
    def point(self, step, scalars):
        if step == 15:
            raise OSError("no route to host\\nmore words")
        super().point(step, scalars)

class NotALogger:
    pass
"""


class Service(ModuleType):
    """A stand-in for a module with the interface of W&B. It keeps what it is told."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.inits: list[dict[str, Any]] = []
        self.points: list[tuple[int, dict[str, float]]] = []
        self.summary: dict[str, float] = {}
        self.finished = 0
        self.fails_at: int | None = None

    def init(self, **given: Any) -> Any:
        self.inits.append(given)
        return SimpleNamespace(summary=self.summary)

    def log(self, scalars: dict[str, float], *, step: int) -> None:
        if step == self.fails_at:
            raise ConnectionError("the network is down")
        self.points.append((step, scalars))

    def finish(self) -> None:
        self.finished += 1

    @property
    def steps(self) -> list[int]:
        return [step for step, _ in self.points]


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Service:
    service = Service("wandb")
    monkeypatch.setitem(sys.modules, "wandb", service)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return service


@pytest.fixture
def start(own_folders: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``train.py`` with a small data set; returns its exit code."""
    data = small_data(own_folders / "data.hdf5")

    def run(*arguments: str) -> int:
        new = [] if "--resume" in arguments else ["--dataset", data, *RUN, "--name", "run"]
        return run_program(train, monkeypatch, *new, *arguments)

    monkeypatch.setattr(sys, "path", [*sys.path])  # to which the working folder is added
    monkeypatch.delitem(sys.modules, "own_loggers", raising=False)
    (own_folders / "own_loggers.py").write_text(OWN)
    return run


def scalars_of(folder: Path) -> list[tuple[int, dict[str, float]]]:
    lines = read_metrics(folder)
    return [(line.pop("step"), {name: line[name] for name in line if name != "time"}) for line in lines]


# The feed


class Memory:
    """A logger that keeps what it is told, and fails at a step."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.calls: list[Any] = []
        self.fails_at = fails_at

    def start(self, run: LoggedRun) -> None:
        self.calls.append(run)

    def point(self, step: int, scalars: Mapping[str, float]) -> None:
        if step == self.fails_at:
            raise ConnectionError("down")
        self.calls.append(step)

    def end(self, summary: Mapping[str, float]) -> None:
        self.calls.append(dict(summary))


def test_a_logger_is_told_of_a_run_from_start_to_end(tmp_path: Path) -> None:
    logger = Memory()
    feed = LoggerFeed(logger, folder=tmp_path, config={"seed": 1})
    feed.point(10, {"train/loss": 1.0})
    feed.end({"train/loss": 1.0})
    run, *rest = logger.calls
    assert (run.name, run.config, run.folder, run.is_resumed) == (tmp_path.name, {"seed": 1}, tmp_path, False)
    assert rest == [10, {"train/loss": 1.0}]


def test_no_point_is_sent_twice(tmp_path: Path) -> None:
    """A run that was killed after step 30 resumes from its checkpoint of step 20."""
    log, first = MetricsLog(tmp_path, texts={}), Memory()
    feed = LoggerFeed(first, folder=tmp_path, config={})
    for step in (10, 20, 30):
        log.write(step, {"train/loss": 1.0})
        feed.point(step, {"train/loss": 1.0})
    log.close()
    log, second = MetricsLog(tmp_path, texts={}, until_step=20), Memory()
    log.close()
    feed = LoggerFeed(second, folder=tmp_path, config={}, points=log.lines)
    for step in (30, 40):
        feed.point(step, {"train/loss": 1.0})
    assert second.calls[1:] == [40]
    assert second.calls[0].is_resumed
    assert second.calls[0].id == first.calls[0].id


def test_resume_sends_what_a_failed_logger_missed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = [{"step": step, "time": 1.5, "train/loss": 1.0} for step in (10, 20, 30)]
    first, second = Memory(fails_at=20), Memory()
    feed = LoggerFeed(first, folder=tmp_path, config={}, points=lines)
    feed.end({})
    assert first.calls[1:] == [10]  # neither later points nor the end
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("the logger failed after step 10: ConnectionError: down. Training continues")
    LoggerFeed(second, folder=tmp_path, config={}, points=lines)
    assert second.calls[1:] == [20, 30]


@pytest.mark.parametrize("content", [b"", b"{}", b'{"id": "a", "step": 10}', b"\xff"])
def test_a_damaged_state_starts_another_run(tmp_path: Path, content: bytes) -> None:
    """With all points: it is not known which ones were sent."""
    (tmp_path / "logger.json").write_bytes(content)
    logger = Memory()
    LoggerFeed(logger, folder=tmp_path, config={}, points=[{"step": 10, "time": 1.5}])
    assert not logger.calls[0].is_resumed
    assert logger.calls[1:] == [10]


# Runs


def test_a_service_gets_what_the_metrics_have(start: Any, wandb: Service) -> None:
    assert start("--logger", "wandb") == 0
    (given,) = wandb.inits
    assert (given["project"], given["name"], given["resume"]) == ("primal-dt", "run", "never")
    assert (given["config"]["run"]["name"], given["dir"]) == ("run", "runs/run")
    assert wandb.points == scalars_of(Path("runs/run"))
    assert wandb.summary == wandb.points[-1][1]
    assert wandb.finished == 1
    assert list(Path("runs/run").glob("events.out.tfevents.*"))


@pytest.mark.slow
def test_the_project_can_be_named(start: Any, wandb: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "robots")
    assert start("--logger", "wandb") == 0
    assert wandb.inits[0]["project"] == "robots"


@pytest.mark.slow
def test_a_resumed_run_continues_in_the_service(start: Any, wandb: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is killed at step 32 and computes the points after the checkpoint of step 20 again."""
    update = Trainer.update

    def killed(self: Trainer, batch: Any) -> None:
        update(self, batch)
        if self.step == 32:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "update", killed)
        assert start("--logger", "wandb") == 130
    assert wandb.steps == [5, 10, 15, 20, 25, 30]
    assert start("--resume", "runs/run") == 0
    assert wandb.steps == [5, 10, 15, 20, 25, 30, 35, 40]
    first, second = wandb.inits
    assert (second["id"], second["resume"]) == (first["id"], "allow")
    assert [step for step, _ in scalars_of(Path("runs/run"))] == wandb.steps


@pytest.mark.slow
def test_a_failing_service_does_not_stop_the_training(
    start: Any, wandb: Service, caplog: pytest.LogCaptureFixture
) -> None:
    wandb.fails_at = 15
    assert start("--logger", "wandb") == 0
    assert wandb.steps == [5, 10]
    assert [step for step, _ in scalars_of(Path("runs/run"))] == list(range(5, 41, 5))
    assert len(caplog.messages) == 1
    assert "the logger failed after step 10: ConnectionError: the network is down" in caplog.messages[0]
    wandb.fails_at = None
    assert start("--resume", "runs/run") == 0
    assert wandb.points == scalars_of(Path("runs/run"))


@pytest.mark.slow
def test_a_service_that_cannot_start_ends_the_run(
    start: Any, wandb: Service, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(**given: Any) -> None:
        raise RuntimeError("no API key")

    with monkeypatch.context() as patch:
        patch.setattr(wandb, "init", refuse)
        assert start("--logger", "wandb") == 1
    err = capsys.readouterr().err
    assert "error: the logger cannot start: RuntimeError: no API key" in err
    assert "to resume: python train.py --resume runs/run" in err
    assert start("--resume", "runs/run") == 0
    assert wandb.points == scalars_of(Path("runs/run"))


def test_a_missing_service_is_an_error_before_the_work(
    start: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert start("--logger", "wandb") == 1
    assert "pip install -c constraints.txt -e '.[wandb]'" in capsys.readouterr().err
    assert not Path("runs").exists() or not list(Path("runs").iterdir())


@pytest.mark.parametrize("name", ["mlflow", ":", "a:", ":b", ""])
def test_an_unknown_logger_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="must be tensorboard, wandb, trackio, or your own as module:Name"):
        Config(run=RunConfig(logger=name))


def test_a_logger_of_ones_own_is_used(start: Any) -> None:
    assert start("--logger", "own_loggers:Lines") == 0
    first, *points, last = map(json.loads, Path("runs/run/own.jsonl").read_text().splitlines())
    assert first == {"start": "run", "seed": 0, "resumed": False}
    metrics = scalars_of(Path("runs/run"))
    assert [(point.pop("step"), point) for point in points] == metrics
    assert last == {"end": metrics[-1][1]["train/loss"]}


def test_only_the_first_line_of_a_failure_is_shown(start: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert start("--logger", "own_loggers:Broken") == 0
    (message,) = caplog.messages
    assert "OSError: no route to host. Training continues" in message


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nowhere_at_all:Lines", "ModuleNotFoundError"),
        ("own_loggers:Missing", "AttributeError"),
        ("own_loggers:NotALogger", "it lacks start, point, end"),
    ],
)
def test_an_unusable_logger_is_an_error_before_the_work(start: Any, name: str, words: str) -> None:
    with pytest.raises(LoggerError, match=words):
        find_logger(name)


@pytest.mark.slow
def test_a_run_does_not_import_a_module_unasked(start: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """A run folder may be from elsewhere. Its logger's module is imported if the user names it again."""
    assert start("--logger", "own_loggers:Lines") == 0
    assert start("--resume", "runs/run") == 1
    assert "give --logger own_loggers:Lines again" in capsys.readouterr().err
    assert start("--resume", "runs/run", "--logger", "own_loggers:Lines") == 0
    assert '"resumed": true' in Path("runs/run/own.jsonl").read_text()
    assert start("--resume", "runs/run", "--logger", "tensorboard") == 0


# trackio's local store


@pytest.mark.slow
def test_trackio_stores_the_points(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is stopped and resumed. No connection is made, and no thread or server is left."""
    for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    from trackio.sqlite_storage import SQLiteStorage

    connections: list[Any] = []

    def refuse(*given: Any, **options: Any) -> None:
        connections.append(given)
        raise OSError("no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket.socket, "bind", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    before = set(threading.enumerate())
    with monkeypatch.context() as patch:
        update = Trainer.update

        def stopped(self: Trainer, batch: Any) -> None:
            update(self, batch)
            if self.step == 22:
                os.kill(os.getpid(), signal.SIGINT)

        patch.setattr(Trainer, "update", stopped)
        assert start("--logger", "trackio") == 130
    assert start("--resume", "runs/run") == 0
    (run,) = SQLiteStorage.get_run_records("primal-dt")
    assert run["name"] == "run"
    stored = SQLiteStorage.get_logs("primal-dt", "run")
    metrics = scalars_of(Path("runs/run"))
    assert [point["step"] for point in stored] == [step for step, _ in metrics]
    for point, (_, scalars) in zip(stored, metrics, strict=True):
        assert {name: point[name] for name in scalars} == pytest.approx(scalars)
    config = SQLiteStorage.get_run_config("primal-dt", "run")
    assert config is not None
    assert config["optimizer"]["steps"] == 40
    assert not connections
    assert not [thread.name for thread in set(threading.enumerate()) - before if thread.is_alive()]
