"""Time and memory of a training step of a language model, by attention stack."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from benchmarks.batches import LabeledBatch
from benchmarks.language.model import LanguageModel, LanguageShape
from benchmarks.language.optimizer import make_optimizer
from benchmarks.measure import peak_memory_mib, run_alone, time_interleaved
from benchmarks.published import WIKITEXT_103
from benchmarks.step import update
from benchmarks.trainer import Plan
from primal_dt.system.process import keep_freed_memory
from primal_dt.system.table import format_table

__all__ = ["STEPS", "Cell", "Job", "cost_table", "measure"]

STEPS = 1_000


@dataclass(frozen=True)
class Job:
    """The training step of a stack."""

    shape: LanguageShape
    """Its blocks have ``max_length`` tokens."""
    plan: Plan
    batch_size: int
    """Blocks per update."""
    lr: float
    device: str
    threads: int

    def make_step(self) -> Callable[[], object]:
        """Build the model, and make a function that trains it for one step on random words."""
        torch.set_num_threads(self.threads)
        torch.manual_seed(0)
        device, plan = torch.device(self.device), self.plan
        model = LanguageModel(self.shape).to(device)
        optimizer = make_optimizer(model, self.lr)
        words = torch.randint(self.shape.num_words, (self.batch_size, self.shape.max_length + 1), device=device)
        batch = LabeledBatch(words[:, :-1], None, words[:, 1:])
        network = torch.compile(model) if plan.compile else model
        assert isinstance(network, torch.nn.Module)
        return lambda: update(
            model,
            optimizer,
            batch,
            eta=plan.eta,
            penalty=plan.penalty,
            accumulate=plan.accumulate,
            bf16=plan.bf16,
            network=network,
        )


@dataclass(frozen=True)
class Cell:
    """What a training step of a stack costs."""

    attention: str
    seconds: float
    """Median seconds of a step."""
    memory_mib: float
    """Peak memory of the process above the idle one: weights, gradients, the optimizer's state and activations."""


def memory_of(job: Job) -> float:
    """Measure the MiB of a model and a step. Call it in a fresh process."""
    small = replace(job, shape=replace(job.shape, num_words=64, max_length=16), batch_size=1)
    return peak_memory_mib(lambda: small.make_step()(), lambda: job.make_step()(), torch.device(job.device))


def seconds_of(jobs: Mapping[str, Job], seconds: float, device: str) -> dict[str, float]:
    """Measure stack -> median seconds of a step, timed alternately. Call it in a fresh process."""
    keep_freed_memory()  # as in a training
    steps = {attention: job.make_step() for attention, job in jobs.items()}
    timings = time_interleaved(steps, seconds=seconds, device=torch.device(device))
    return {attention: timing.median for attention, timing in timings.items()}


def measure(jobs: Mapping[str, Job], *, seconds: float, device: str) -> dict[str, Cell]:
    """Measure each stack: memory in a process of its own, time in one process for all.

    Raises:
        MemoryError: if a stack does not fit in memory, or all of them together.
    """
    memory = {attention: run_alone(memory_of, job) for attention, job in jobs.items()}
    took = run_alone(seconds_of, dict(jobs), seconds, device, for_memory=False)
    return {attention: Cell(attention, took[attention], memory[attention]) for attention in jobs}


def cost_table(cells: Mapping[str, Cell]) -> str:
    """Time and memory of each stack, and their ratios to softmax attention, with the published ones in parentheses."""
    softmax, published = cells.get("softmax"), WIKITEXT_103["softmax"]
    rows = []
    for attention, cell in cells.items():
        own = WIKITEXT_103.get(attention)
        ratios = ["", ""]
        if softmax is not None:
            pairs = ((cell.seconds / softmax.seconds, "seconds"), (cell.memory_mib / softmax.memory_mib, "gigabytes"))
            papers = ["" if own is None else f" ({own[name] / published[name]:.2f})" for _, name in pairs]
            ratios = [f"{ratio:.2f}{paper}" for (ratio, _), paper in zip(pairs, papers, strict=True)]
        rows.append([attention, f"{STEPS * cell.seconds:,.0f}", ratios[0], f"{cell.memory_mib:,.0f}", ratios[1]])
    return format_table(["cost", f"s per {STEPS:,} steps", "of softmax", "MiB", "of softmax"], rows)
