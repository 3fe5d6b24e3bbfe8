"""What a training step would take on a GPU, ESTIMATED from its shapes: nothing here is measured.

The step runs on torch's meta device, where tensors have shapes and no values. Every operation counts with its
floating-point operations, with the bytes that it reads and writes, and with the time that the host takes to launch it.
The device works through them at the peak of its data sheet, each bound by arithmetic or by memory, while the host
launches; the slower of the two is the estimate. Real kernels reach a part of the peak, so take it as the least.
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
from primal_dt.model.objective import loss_terms
from primal_dt.model.transformer import DecisionTransformer, ModelShape
from primal_dt.system.table import format_table

FLOAT_BYTES = 4
STATE_WIDTH, ACTION_WIDTH = 17, 6


@dataclass(frozen=True)
class Gpu:
    """From a data sheet."""

    name: str
    flops: float
    """Floating-point operations in a second, float32."""
    bytes: float
    """Of memory, in a second."""


GPUS = (
    Gpu("NVIDIA T4", 8.1e12, 320e9),
    Gpu("NVIDIA RTX 3090", 35.6e12, 936e9),
    Gpu("NVIDIA A100 40 GB", 19.5e12, 1555e9),
)


@dataclass(frozen=True)
class Config:
    """What to estimate."""

    widths: tuple[int, ...] = (128, 256)
    """Widths of the models: 128 with 1 head, 256 with 4, as in the papers; others with 1."""
    contexts: tuple[int, ...] = (20, 100)
    """Steps of a window."""
    batch_size: int = 64
    """Windows of a batch."""
    launch_microseconds: float = 5.0
    """What the host takes for one operation: an assumption."""

    def __post_init__(self) -> None:
        if min((self.batch_size, *self.widths, *self.contexts)) < 1 or self.launch_microseconds < 0:
            raise ValueError("widths, contexts and batch_size must be at least 1, launch_microseconds not negative")


@dataclass(frozen=True)
class Work:
    """Of one operation."""

    flops: int
    bytes: int


class Watch(TorchDispatchMode):
    """Notes the work of every operation but views, which move nothing."""

    formulas: ClassVar[Mapping[Any, Callable[..., int]]] = flop_registry

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work: list[Work] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run it, and note it."""
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
    """What a training step asks of a device."""

    work: list[Work]
    num_parameters: int
    kept_bytes: int
    """What the forward pass keeps for the backward pass."""

    @property
    def memory_mib(self) -> float:
        """Weights, gradients, two moments, and what is kept."""
        return (4 * FLOAT_BYTES * self.num_parameters + self.kept_bytes) / 2**20

    def device_seconds(self, gpu: Gpu) -> float:
        """All operations, each bound by arithmetic or by memory; then the clipping (read twice, written) and AdamW."""
        update = 10 * FLOAT_BYTES * self.num_parameters / gpu.bytes
        return update + sum(max(work.flops / gpu.flops, work.bytes / gpu.bytes) for work in self.work)


def step_of(shape: ModelShape, batch_size: int) -> Step:
    """A forward and a backward pass of a model without values."""
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
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[_storage(tensor)] = tensor
        return tensor

    with Watch() as watch, saved_tensors_hooks(keep, lambda tensor: tensor):
        loss_terms(model(batch, with_objective=True), batch, eta=0.05).total.backward()
    weights = {_storage(parameter) for parameter in model.parameters()}
    kept_bytes = sum(tensor.untyped_storage().nbytes() for key, tensor in kept.items() if key not in weights)
    return Step(watch.work, model.num_parameters(), kept_bytes)


def main(config: Config) -> None:
    """Count and print."""
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
