"""Several processes that train together, started by ``torchrun``; or one."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

__all__ = ["Processes", "choose_device", "join_processes"]

PATIENCE = timedelta(hours=2)
"""How long processes wait for one another: the first evaluates while the others wait."""


@dataclass(frozen=True)
class Processes:
    """Which of how many this is, and where it computes."""

    rank: int
    count: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """The one that writes."""
        return self.rank == 0

    def agree(self, ok: bool) -> bool:
        """Wait for the others; whether all of them say yes."""
        if self.count == 1:
            return ok
        refused = torch.tensor(int(not ok), device=self.device)
        dist.all_reduce(refused)
        return not refused


def choose_device(name: str) -> torch.device:
    """``auto`` is the best that is here.

    Raises:
        ValueError: if it is none, or not here.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"the device {name!r} cannot be used: {reason}; auto takes the best that is here") from error
    return device


@contextmanager
def join_processes(device: str) -> Iterator[Processes]:
    """Meet the other processes, if ``torchrun`` started several."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        yield Processes(0, 1, choose_device(device))
        return
    chosen = choose_device(_own_device(device))
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo", timeout=PATIENCE)
    try:
        yield Processes(dist.get_rank(), dist.get_world_size(), chosen)
    finally:
        dist.destroy_process_group()


def _own_device(name: str) -> str:
    """The device of this one of several processes: each has a GPU of its own, if there are any."""
    if name not in ("auto", "cuda") or not torch.cuda.is_available():
        return name
    if "LOCAL_RANK" not in os.environ:
        raise ValueError("WORLD_SIZE is set, but LOCAL_RANK is not: start several processes with torchrun")
    local, available = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if local >= available:
        raise ValueError(f"there are {available} GPUs for more processes: give --nproc-per-node {available}")
    return f"cuda:{local}"
