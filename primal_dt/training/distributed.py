"""Data-parallel training in several processes started by ``torchrun``, or in one process."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

__all__ = ["Processes", "choose_device", "join_processes"]

DEVICES = ("cpu", "cuda", "mps", "xpu")
PATIENCE = timedelta(hours=2)
"""Timeout for waiting on other processes: all other ranks wait while rank 0 evaluates."""


@dataclass(frozen=True)
class Processes:
    """The rank of this process, the number of processes, and this process's device."""

    rank: int
    count: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes all files."""
        return self.rank == 0

    def agree(self, ok: bool) -> bool:
        """Wait for all processes, and return whether ``ok`` is true in every one."""
        if self.count == 1:
            return ok
        refused = torch.tensor(int(not ok), device=self.device)
        dist.all_reduce(refused)
        return not refused


def choose_device(name: str) -> torch.device:
    """Return a device by name. ``auto`` is CUDA if available, else MPS, else the CPU.

    Raises:
        ValueError: if there is no such device, or it is unavailable.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        if name.partition(":")[0] not in DEVICES:
            raise RuntimeError("it is not one that models can be trained on")
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"the device {name!r} cannot be used: {reason}; it must be {', '.join(DEVICES)}, with a number such as "
            "cuda:1, or auto, which selects the best available device"
        ) from error
    return device


@contextmanager
def join_processes(device: str) -> Iterator[Processes]:
    """Join the process group, if ``torchrun`` started several processes."""
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
    """Return the device of this process, one of several: each process has its own GPU, if there are GPUs."""
    if name not in ("auto", "cuda") or not torch.cuda.is_available():
        return name
    if "LOCAL_RANK" not in os.environ:
        raise ValueError("WORLD_SIZE is set, but LOCAL_RANK is not: start several processes with torchrun")
    local, available = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if local >= available:
        raise ValueError(f"there are more processes than GPUs ({available}): use --nproc-per-node {available}")
    return f"cuda:{local}"
