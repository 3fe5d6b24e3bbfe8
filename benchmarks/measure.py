"""Time and memory measurements: interleaved timing, and peak memory in separate processes."""

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
    """Statistics of the seconds per call."""

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
    """Time several functions alternately, so that a slow moment of the machine affects all of them.

    Args:
        calls: name -> function.
        seconds: the minimum total time of each function, after one warm-up call. Each is timed at least 3 times.
        device: synchronized before the clock is read.
        on_call: called with a function's name before each of its calls.
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
    """Time a call in seconds, including the work that it queues on the device."""
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
    """Make a function of ``2 * size**3`` floating-point operations: the product of two square matrices.

    Timed among other functions, it gives the machine's rate in the same run.
    """
    a, b = torch.randn(2, size, size, device=device)
    return lambda: a @ b


def peak_memory_mib(warm_up: Callable[[], object], call: Callable[[], object], device: torch.device) -> float:
    """Measure the peak memory of a call, in MiB above the process at rest after a warm-up.

    On a GPU this is memory allocated by torch. Elsewhere it is the resident memory of the process: measure in a fresh
    process (:func:`run_alone`), because memory left over from earlier calls would hide the memory of this one.
    """
    warm_up()
    square = torch.ones(1024, 1024, device=device)
    _ = (
        square @ square,
        square.T @ square,
        square @ square.T,
    )  # libraries allocate their buffers in the first large product
    del square, _
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        rest = torch.cuda.memory_allocated(device)
        call()
        return (torch.cuda.max_memory_allocated(device) - rest) / 2**20
    reset_peak = Path("/proc/self/clear_refs")
    if reset_peak.exists():  # Linux: reset the peak, then read the new one
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
    """Call a function in a fresh process, limited to the memory that is free now.

    Args:
        function: a function defined at the top level of a module.
        arguments: its positional arguments.
        for_memory: make malloc return freed memory at once, so that all resident memory is in use. This costs time:
            turn it off when the function measures time.

    Raises:
        MemoryError: if the function needs more memory than that.
        RuntimeError: if the process ends without a result for another reason.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "tyro", "primal_dt.attention"])  # fresh processes, without import time
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_result, args=(sender, function, arguments, for_memory))
    process.start()
    sender.close()
    try:
        result: Result | BaseException = receiver.recv()
        process.join()
    except EOFError:  # the process died; the system kills a process that takes too much memory
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
    """Make glibc return each large block when it is freed, so that resident memory is memory in use."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        M_MMAP_THRESHOLD = -3  # from malloc.h
        mallopt(M_MMAP_THRESHOLD, 1 << 16)


def _free_bytes() -> int | None:
    """Memory that is available without swapping, in bytes; None if the system does not report it."""
    info = Path("/proc/meminfo")
    if not info.exists():
        return None
    available = next(line for line in info.read_text().splitlines() if line.startswith("MemAvailable"))
    return int(available.split()[1]) * 1024
