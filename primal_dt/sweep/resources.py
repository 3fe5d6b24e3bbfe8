"""CPU cores, GPUs and memory of jobs and nodes. Standard library only."""

from dataclasses import dataclass
from typing import Any

__all__ = ["GIBIBYTE", "Resources"]

GIBIBYTE = 2**30


@dataclass(frozen=True)
class Resources:
    """Resources that a job requests, or that a node has."""

    cpus: float
    gpus: float
    memory_gib: float

    def __str__(self) -> str:
        return f"{self.cpus:g} CPU, {self.gpus:g} GPU, {self.memory_gib:.3g} GiB memory"

    @property
    def threads(self) -> int:
        """Number of threads that a job's programs use."""
        return max(1, int(self.cpus))

    def options(self) -> dict[str, Any]:
        """The same resources as options of a Ray task."""
        return {"num_cpus": self.cpus, "num_gpus": self.gpus, "memory": int(self.memory_gib * GIBIBYTE)}

    def room_for(self, job: "Resources") -> int:
        """Return the number of such jobs that a node with these resources can run at a time."""

        def times(available: float, requested: float) -> int:
            return int(available / requested + 1e-9)

        room = min(times(self.cpus, job.cpus), times(self.memory_gib, job.memory_gib))
        return min(room, int(self.gpus) * times(1, job.gpus)) if job.gpus else room  # a job cannot span two GPUs
