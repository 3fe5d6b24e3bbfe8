"""Measuring side by side: interleaved times, and peak memory in processes of their own."""

import ctypes
import gc
import multiprocessing
import resource
import signal
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

import torch

__all__ = ["Timing", "clocked", "large_matrix_product", "peak_memory_mib", "run_alone", "time_interleaved"]


Result = TypeVar("Result")


@dataclass(frozen=True)
class Timing:
    """Seconds per call."""

    median: float
    lower_quartile: float
    upper_quartile: float
    calls: int


def time_interleaved(
    calls: Mapping[str, Callable[[], object]],
    *,
    seconds: float,
    device: torch.device,
    on_call: Callable[[str], None] = lambda name: None,
) -> dict[str, Timing]:
    """Time several functions in turns, so that a slow moment of the machine strikes all of them.

    Args:
        calls: name -> function.
        seconds: how long each is called for in all, after one call to warm up. At least 3 calls each.
        device: waited for before the clock is read.
        on_call: told the name before each call.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for name, call in calls.items():
        on_call(name)
        clocked(call, device)
    while waiting := [name for name, seen in times.items() if len(seen) < 3 or sum(seen) < seconds]:
        for name in waiting:
            on_call(name)
            times[name].append(clocked(calls[name], device))
    return {name: _summary(seen) for name, seen in times.items()}


def clocked(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call, until the device is done with it."""
    _wait(device)
    start = time.perf_counter()
    call()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _summary(seen: list[float]) -> Timing:
    lower, median, upper = statistics.quantiles(seen, n=4, method="inclusive")
    return Timing(median, lower, upper, len(seen))


def large_matrix_product(device: torch.device, *, size: int = 1024) -> Callable[[], object]:
    """A call worth ``2 * size**3`` floating-point operations, to time among the others."""
    a, b = torch.randn(2, size, size, device=device)
    return lambda: a @ b


def peak_memory_mib(warm_up: Callable[[], object], call: Callable[[], object], device: torch.device) -> float:
    """The most memory that a call holds above what the process holds at rest, after warming up, in MiB.

    On a GPU, what torch allocates. Elsewhere, the resident memory of the process: run it in a process of its
    own (:func:`run_alone`), since what earlier calls left behind would hide what this one takes.
    """
    warm_up()
    square = torch.ones(1024, 1024, device=device)
    _ = (
        square @ square,
        square.T @ square,
        square @ square.T,
    )  # libraries set up their buffers at the first large product
    del square, _
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        rest = torch.cuda.memory_allocated(device)
        call()
        return (torch.cuda.max_memory_allocated(device) - rest) / 2**20
    reset_peak = Path("/proc/self/clear_refs")
    if reset_peak.exists():  # Linux: forget the peak so far, then read the new one
        reset_peak.write_text("5")
        rest = _status_kib("VmRSS")
        call()
        return (_status_kib("VmHWM") - rest) / 2**10
    rest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    call()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - rest) / 2**20


def _status_kib(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {field}")


def run_alone(function: Callable[..., Result], *arguments: object, for_memory: bool = True) -> Result:
    """Call a function of a module in a fresh process, which may take the memory that is free now and no more.

    Args:
        function: what to call.
        arguments: what with.
        for_memory: give memory back at once, so that what is resident is in use. It costs time: not for clocks.

    Raises:
        MemoryError: if that was not enough.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "tyro", "primal_dt.attention"])  # fresh, yet without their start-up time
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_result, args=(sender, function, arguments, for_memory))
    process.start()
    sender.close()
    try:
        result: Result | BaseException = receiver.recv()
        process.join()
    except EOFError:  # it died without an answer; the system kills what takes too much memory
        process.join()
        kind = MemoryError if process.exitcode == -signal.SIGKILL else RuntimeError
        result = kind(f"the process ended with code {process.exitcode}")
    if isinstance(result, BaseException):
        raise result
    return result


def _send_result(
    sender: Connection, function: Callable[..., object], arguments: tuple[object, ...], for_memory: bool
) -> None:
    limit = _free_bytes()
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    if for_memory:
        _return_memory_at_once()
    try:
        sender.send(function(*arguments))
    except RuntimeError as error:  # torch: "can't allocate memory", "out of memory"
        sender.send(MemoryError(str(error)) if "memory" in str(error) else error)
    except BaseException as error:
        sender.send(error)


def _return_memory_at_once() -> None:
    """Have glibc give each large block back when it is freed, so that resident memory is memory in use."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        M_MMAP_THRESHOLD = -3  # from malloc.h
        mallopt(M_MMAP_THRESHOLD, 1 << 16)


def _free_bytes() -> int | None:
    """Memory that can be had without swapping, where the system says."""
    info = Path("/proc/meminfo")
    if not info.exists():
        return None
    available = next(line for line in info.read_text().splitlines() if line.startswith("MemAvailable"))
    return int(available.split()[1]) * 1024
