"""Time and memory of a training step of an image classifier, by attention stack."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.batches import LabeledBatch
from benchmarks.encoder import EncoderShape
from benchmarks.images.model import build_model
from benchmarks.measure import Timing, peak_memory_mib, run_alone, time_interleaved
from benchmarks.program import save_report
from benchmarks.runs import num_parameters
from benchmarks.step import update
from primal_dt.system.table import format_table

__all__ = ["Step", "report_cost"]

Shapes = Mapping[str, tuple[EncoderShape, float]]
"""Stack -> the shape of its network, and eta."""


@dataclass(frozen=True)
class Step:
    """A training step on random images."""

    model: str
    image_size: int
    patch: int
    batch_size: int
    num_classes: int
    bf16: bool

    def of(self, shape: EncoderShape, eta: float, device: torch.device, *, batch_size: int) -> Callable[[], object]:
        """Make a function that runs a step with AdamW."""
        torch.manual_seed(0)
        model = build_model(shape, patch=self.patch).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        x = torch.randn(batch_size, 3, self.image_size, self.image_size, device=device)
        batch = LabeledBatch(x, None, torch.randint(self.num_classes, (batch_size,), device=device))
        return lambda: update(model, optimizer, batch, eta=eta, bf16=self.bf16)


def memory_of(step: Step, shape: EncoderShape, eta: float, device_name: str) -> float:
    """Measure the MiB of a step above rest. Call it in a fresh process."""
    device = torch.device(device_name)
    warm_up, call = (step.of(shape, eta, device, batch_size=size) for size in (1, step.batch_size))
    return peak_memory_mib(warm_up, call, device)


def seconds_of(step: Step, shapes: Shapes, seconds: float, device: torch.device) -> dict[str, Timing]:
    """Measure the seconds of a step of each stack, timed alternately."""
    calls = {name: step.of(*shape, device, batch_size=step.batch_size) for name, shape in shapes.items()}
    return time_interleaved(calls, seconds=seconds, device=device)


def report_cost(step: Step, shapes: Shapes, *, seconds: float, device: torch.device, out: Path) -> None:
    """Measure, print and save time and memory of each stack."""
    timings = seconds_of(step, shapes, seconds, device)
    memory = {name: run_alone(memory_of, step, *shape, str(device)) for name, shape in shapes.items()}
    parameters = {name: num_parameters(build_model(shape, patch=step.patch)) for name, (shape, _) in shapes.items()}
    rows = [
        [
            name,
            f"{timing.median:.2f}",
            f"{timing.lower_quartile:.2f} to {timing.upper_quartile:.2f}",
            f"{memory[name]:,.0f}",
            f"{parameters[name]:,}",
        ]
        for name, timing in timings.items()
    ]
    pixels = f"{step.model}/{step.patch}, {step.image_size} pixels, {step.batch_size} images"
    report = format_table([pixels, "s per step", "quartiles", "MiB", "parameters"], rows)
    print(report)
    raw = {
        "step": asdict(step),
        "seconds": {name: asdict(timing) for name, timing in timings.items()},
        "memory_mib": memory,
        "parameters": parameters,
    }
    save_report(out / "images_cost.json", report, raw)
    print(f"\nSaved {out / 'images_cost.json'}")
