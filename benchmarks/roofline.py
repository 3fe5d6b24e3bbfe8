"""ESTIMATE of the time of a training step on GPUs, from its shapes. Nothing is measured.

The step runs on torch's meta device, where tensors have shapes but no values. Each operation is counted with its
floating-point operations, the bytes that it reads and writes, and the time that the host takes to launch it. The device
runs the operations at the peak of its data sheet, each bound by arithmetic or by memory bandwidth, while the host
launches them. The slower of the two is the estimate. Real kernels reach only a part of the peak, so the estimate is a
lower bound.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from benchmarks.program import run_program
from primal_dt.data.sampler import Batch
from primal_dt.model.loss import Objective, loss_terms
from primal_dt.model.transformer import DecisionTransformer, ModelShape
from primal_dt.system.table import format_table

FLOAT_BYTES = 4
STATE_WIDTH, ACTION_WIDTH = 17, 6


@dataclass(frozen=True)
class Gpu:
    """A GPU's data sheet."""

    name: str
    flops: float
    """Peak float32 FLOP/s."""
    bytes: float
    """Memory bandwidth in bytes per second."""


GPUS = (
    Gpu("NVIDIA T4", 8.1e12, 320e9),
    Gpu("NVIDIA RTX 3090", 35.6e12, 936e9),
    Gpu("NVIDIA A100 40 GB", 19.5e12, 1555e9),
)


@dataclass(frozen=True)
class Config:
    """Settings of the estimate."""

    widths: tuple[int, ...] = (128, 256)
    """Model widths. Width 128 has 1 head and width 256 has 4, as in the papers; other widths have 1."""
    contexts: tuple[int, ...] = (20, 100)
    """Context lengths K in environment steps."""
    batch_size: int = 64
    """Windows per batch."""
    launch_microseconds: float = 5.0
    """Microseconds that the host takes to launch one operation. This is an assumption."""

    def __post_init__(self) -> None:
        if min((self.batch_size, *self.widths, *self.contexts)) < 1 or self.launch_microseconds < 0:
            raise ValueError("widths, contexts and batch_size must be at least 1, and launch_microseconds at least 0")


@dataclass(frozen=True)
class Work:
    """Work of one operation."""

    flops: int
    bytes: int


class Watch(TorchDispatchMode):
    """Records the work of every operation except views, which move no data."""

    formulas: ClassVar[Mapping[Any, Callable[..., int]]] = flop_registry

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work: list[Work] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and record its work."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        known = {_storage(tensor) for tensor in inputs}
        if outputs and (func._schema.is_mutable or any(_storage(tensor) not in known for tensor in outputs)):
            formula = self.formulas.get(func.overloadpacket)
            flops = 0 if formula is None else formula(*args, **kwargs, out_val=out)
            self.work.append(Work(flops, sum(tensor.nbytes for tensor in (*inputs, *outputs))))
        return out


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@dataclass(frozen=True)
class Step:
    """Work and memory of a training step."""

    work: list[Work]
    num_parameters: int
    kept_bytes: int
    """Bytes that the forward pass saves for the backward pass."""

    @property
    def memory_mib(self) -> float:
        """Memory of weights, gradients, AdamW's two moments, and saved tensors."""
        return (4 * FLOAT_BYTES * self.num_parameters + self.kept_bytes) / 2**20

    def device_seconds(self, gpu: Gpu) -> float:
        """Seconds of all operations, each bound by arithmetic or by memory, then of the update.

        The update accesses 10 floats per parameter: gradient clipping (two reads, one write) and AdamW (7).
        """
        update = 10 * FLOAT_BYTES * self.num_parameters / gpu.bytes
        return update + sum(max(work.flops / gpu.flops, work.bytes / gpu.bytes) for work in self.work)


def step_of(shape: ModelShape, batch_size: int) -> Step:
    """Record the work of a forward and backward pass, with a model without values."""
    model = DecisionTransformer(shape).to("meta").train()
    with torch.device("meta"):
        rows = (batch_size, shape.context)
        batch = Batch(
            states=torch.empty(*rows, shape.state_width),
            actions=torch.empty(*rows, shape.action_width),
            returns_to_go=torch.empty(*rows, 1),
            timesteps=torch.empty(rows, dtype=torch.int64),
            valid=torch.empty(rows, dtype=torch.bool),
        )
    saved: dict[int, Tensor] = {}

    def save(tensor: Tensor) -> Tensor:
        saved[_storage(tensor)] = tensor
        return tensor

    with Watch() as watch, saved_tensors_hooks(save, lambda tensor: tensor):
        loss_terms(model(batch, with_objective=True), batch, Objective()).total.backward()
    weights = {_storage(parameter) for parameter in model.parameters()}
    kept_bytes = sum(tensor.untyped_storage().nbytes() for key, tensor in saved.items() if key not in weights)
    return Step(watch.work, model.num_parameters(), kept_bytes)


def main(config: Config) -> None:
    """Count the operations and print the estimates."""
    rows = []
    for context in config.contexts:
        for width in config.widths:
            num_heads = 4 if width == 256 else 1
            actions = ((-1.0,) * ACTION_WIDTH, (1.0,) * ACTION_WIDTH)
            shape = ModelShape(STATE_WIDTH, *actions, width=width, num_heads=num_heads, context=context)
            step = step_of(shape, config.batch_size)
            host = 1e-6 * config.launch_microseconds * len(step.work)
            flops, moved = sum(work.flops for work in step.work), sum(work.bytes for work in step.work)
            estimates = [max(host, step.device_seconds(gpu)) for gpu in GPUS]
            rows.append(
                [
                    f"width {width}, K {context}",
                    f"{flops / 1e9:.1f}",
                    f"{moved / 1e9:.2f}",
                    f"{len(step.work)}",
                    f"{1e3 * host:.1f}",
                    *(f"{1e3 * seconds:.1f}" for seconds in estimates),
                    f"{step.memory_mib:.0f}",
                ]
            )
    header = ["primal-plus", "GFLOP", "GB moved", "operations", "ms to launch", *(f"{gpu.name}, ms" for gpu in GPUS)]
    print("ESTIMATES from shapes and data sheets, float32; nothing is measured.\n")
    print(format_table([*header, "MiB"], rows))


if __name__ == "__main__":
    run_program(main, Config, name="benchmarks.roofline", description=__doc__)
