"""Several environments, stepped in this process or in worker processes.

Axes: E environments, S state, A action.
"""

import math
import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from typing import Any, NamedTuple, Protocol, Self, SupportsFloat

import numpy as np
from numpy.typing import NDArray

__all__ = ["Environment", "EnvironmentFailedError", "Environments"]


class Steps(NamedTuple):
    """The results of one step of n environments."""

    observations: NDArray[np.floating]
    """(n, S)."""
    rewards: NDArray[np.float64]
    """(n,)."""
    ended: NDArray[np.bool_]
    """(n,), whether the episode has ended."""
    success: NDArray[np.float64]
    """(n,), above 0 if the environment reports success in this step; NaN if it says nothing about success."""
    failures: list[str]
    """A message for each environment that failed. The other results of a failed environment are meaningless."""


class Environment(Protocol):
    """The part of ``gymnasium.Env`` that rollouts use."""

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode. Returns its first observation (S,), and an info that is not used."""

    def step(self, action: Any, /) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Returns observation (S,), reward, terminated, truncated, and an info that may have ``success``."""

    def close(self) -> Any:
        """Release its resources."""


class EnvironmentFailedError(RuntimeError):
    """An environment raised an exception, or its worker process died."""


class Environments:
    """E environments, numbered from 0. Use it as a context manager, which closes them.

    Args:
        make_environment: creates an environment. With workers it must be picklable, such as a function of a module.
        count: number of environments, E.
        num_workers: number of processes that share the environments; 0 steps them in this process.
    """

    def __init__(self, make_environment: Callable[[], Environment], count: int, *, num_workers: int = 0) -> None:
        self.count = count
        shares = [range(worker, count, max(1, num_workers)) for worker in range(max(1, num_workers))]
        kind = _Remote if num_workers else _Local
        self._groups: list[_Local | _Remote] = []
        try:
            for share in shares:
                self._groups.append(kind(make_environment, share))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def reset(self, seeds: Sequence[int]) -> NDArray[np.floating]:
        """Begin an episode in the first ``len(seeds)`` environments. Returns observations (len(seeds), S)."""
        every, given = np.arange(len(seeds)), np.asarray(seeds)
        answer = self._ask("reset", every, given)
        if answer.failures:
            raise EnvironmentFailedError(answer.failures[0])
        return answer.observations

    def step(self, numbers: NDArray[np.int_], actions: NDArray[np.floating]) -> Steps:
        """Step the environments with these numbers (n,), with actions (n, A)."""
        return self._ask("step", numbers, actions)

    def close(self) -> None:
        """Close all environments."""
        for group in self._groups:
            group.close()

    def _ask(self, what: str, numbers: NDArray[np.int_], values: NDArray[Any]) -> Steps:
        if len(self._groups) == 1:
            return self._groups[0].ask(what, numbers, values)()
        masks = [numbers % len(self._groups) == worker for worker in range(len(self._groups))]
        asked = [
            (mask, group.ask(what, numbers[mask], values[mask]))
            for mask, group in zip(masks, self._groups, strict=True)
            if mask.any()
        ]
        answers = [(mask, answer()) for mask, answer in asked]
        first = answers[0][1].observations
        observations = np.empty((len(numbers), *first.shape[1:]), first.dtype)
        rewards, ended, failures = np.zeros(len(numbers)), np.zeros(len(numbers), bool), []
        success = np.zeros(len(numbers))
        for mask, answer in answers:
            observations[mask], rewards[mask], ended[mask] = answer.observations, answer.rewards, answer.ended
            success[mask] = answer.success
            failures += answer.failures
        return Steps(observations, rewards, ended, success, failures)


class _Local:
    """Some of the environments, in this process. ``ask`` returns a function that does the work."""

    def __init__(self, make_environment: Callable[[], Environment], numbers: Sequence[int]) -> None:
        self._environments: dict[int, Environment] = {}
        self._seeds: dict[int, int] = {}
        self._steps = dict.fromkeys(numbers, 0)
        self._last: dict[int, Any] = {}
        try:
            for number in numbers:
                self._environments[number] = make_environment()
        except Exception as error:
            self.close()
            raise EnvironmentFailedError(f"the environment cannot be made: {error}") from error

    def ask(self, what: str, numbers: NDArray[np.int_], values: NDArray[Any]) -> Callable[[], Steps]:
        do = self._reset if what == "reset" else self._step

        def answer() -> Steps:
            failures: list[str] = []
            steps = [do(number, value, failures) for number, value in zip(numbers.tolist(), values, strict=True)]
            observations, rewards, ended, success = zip(*steps, strict=True)
            return Steps(
                np.stack(observations), np.array(rewards), np.array(ended, bool), np.array(success, float), failures
            )

        return answer

    def close(self) -> None:
        for environment in self._environments.values():
            environment.close()
        self._environments = {}

    def _reset(self, number: int, seed: int, failures: list[str]) -> tuple[Any, float, bool, float]:
        self._seeds[number], self._steps[number] = int(seed), 0
        try:
            self._last[number] = self._environments[number].reset(seed=int(seed))[0]
        except Exception as error:
            raise EnvironmentFailedError(self._failure(number, error)) from error
        return self._last[number], 0.0, False, math.nan

    def _step(self, number: int, action: NDArray[np.floating], failures: list[str]) -> tuple[Any, float, bool, float]:
        try:
            observation, reward, terminated, truncated, info = self._environments[number].step(action)
        except Exception as error:  # the other environments still step, so that episodes that end now are not lost
            failures.append(self._failure(number, error))
            return self._last[number], 0.0, False, math.nan
        self._last[number] = observation
        self._steps[number] += 1
        return observation, float(reward), terminated or truncated, _success(info)

    def _failure(self, number: int, error: Exception) -> str:
        return (
            f"the environment of the episode with seed {self._seeds[number]} failed at step {self._steps[number]}: "
            f"{type(error).__name__}: {error}"
        )


def _success(info: Mapping[str, Any]) -> float:
    """What a step's info says about success, as ``success`` or ``is_success``; NaN if nothing, or not by a number."""
    value = info.get("success", info.get("is_success"))
    if value is None:
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


class _Remote:
    """Some of the environments, in a worker process. ``ask`` returns a function that waits for the worker's answer."""

    def __init__(self, make_environment: Callable[[], Environment], numbers: Sequence[int]) -> None:
        context: SpawnContext | ForkServerContext = multiprocessing.get_context("spawn")
        if os.name == "posix":  # this process has threads, so workers are forked from a server that has none
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["__main__", __name__])  # imported once, not by every worker
        self._connection, worker_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(worker_end, make_environment, numbers), daemon=True)
        self._process.start()
        worker_end.close()

    def ask(self, what: str, numbers: NDArray[np.int_], values: NDArray[Any]) -> Callable[[], Steps]:
        try:
            self._connection.send((what, numbers, values))
        except OSError as error:
            raise self._died() from error
        return self._answer

    def close(self) -> None:
        with suppress(OSError):  # the worker may have exited
            self._connection.send(None)
        self._process.join(timeout=5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._connection.close()

    def _answer(self) -> Steps:
        try:
            answer = self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._died() from error
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _died(self) -> EnvironmentFailedError:
        self._process.join(timeout=5)
        return EnvironmentFailedError(f"a worker process died with exit code {self._process.exitcode}")


def _serve(connection: Connection, make_environment: Callable[[], Environment], numbers: Sequence[int]) -> None:
    """Serve requests in a worker process until the request is None or the connection closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process handles Ctrl-C
    group: _Local | None = None
    try:
        while (request := connection.recv()) is not None:
            try:
                group = group or _Local(make_environment, numbers)
                connection.send(group.ask(*request)())
            except Exception as error:
                connection.send(EnvironmentFailedError(str(error)))
    except (EOFError, OSError):
        pass  # the main process has exited
    finally:
        if group is not None:
            group.close()
