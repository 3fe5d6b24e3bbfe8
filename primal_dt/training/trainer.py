"""Training as an iterator of metrics, independent of environments and loggers.

Axes: B batch.
"""

import math
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, fields
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function

from primal_dt.attention import PrimalAttention
from primal_dt.attention.dropout import masks_from
from primal_dt.config import OptimizerConfig
from primal_dt.data.sampler import Batch, RewardBatch, WindowSampler, prefetch
from primal_dt.model.critic import TwinCritic
from primal_dt.model.loss import LossTerms, Objective, loss_terms
from primal_dt.model.transformer import DecisionTransformer
from primal_dt.schema import require_keys
from primal_dt.training.guidance import SCALARS, Guidance
from primal_dt.training.muon import Muon
from primal_dt.training.optimizer_state import load_optimizer

__all__ = ["BadLossError", "TrainMetrics", "Trainer", "learning_rate", "mixed_seed"]


GPU_STEPS_PER_STOP_CHECK = 20
GRADIENT_NORM = "train/gradient_norm"
MAX_SHARDS = 4
"""Default maximum of shards. Smaller parts spend a larger share of time in Python, which runs one thread at a time."""


class BadLossError(RuntimeError):
    """Raised if the loss, a gradient or a weight is not finite."""

    def __init__(self, step: int) -> None:
        super().__init__(f"the loss, its gradient or a weight is not finite at step {step}")
        self.step = step


@dataclass(frozen=True)
class TrainMetrics:
    """Metrics of a logging point: means over the steps since the previous one."""

    step: int
    """Number of updates so far."""
    scalars: Mapping[str, float]
    """The values by the names under which they are logged (``primal_dt.training.scalars.ABOUT``)."""

    @property
    def loss(self) -> float:
        """The training loss."""
        return self.scalars["train/loss"]

    @property
    def action_mse(self) -> float:
        """The mean squared error of the actions."""
        return self.scalars["train/action_mse"]

    @property
    def steps_per_second(self) -> float:
        """The training speed."""
        return self.scalars["train/steps_per_second"]


def make_optimizers(model: DecisionTransformer, config: OptimizerConfig) -> list[torch.optim.Optimizer]:
    """Create AdamW for all parameters, or Muon for the blocks' weight matrices and AdamW for the rest."""
    matrices: list[Tensor] = []
    if config.optimizer == "muon":
        linears = (module for module in model.blocks.modules() if isinstance(module, nn.Linear))
        matrices = [linear.weight for linear in linears]
    taken = set(map(id, matrices))
    rest = [parameter for parameter in model.parameters() if parameter.requires_grad and id(parameter) not in taken]
    fused = rest[0].device.type in ("cpu", "cuda")
    adamw = torch.optim.AdamW(rest, lr=config.lr, weight_decay=config.weight_decay, fused=fused)
    return [adamw, Muon(matrices, lr=config.lr, weight_decay=config.weight_decay)] if matrices else [adamw]


def learning_rate(step: int, config: OptimizerConfig) -> float:
    """Learning rate of update ``step``, counted from 0: linear warm-up, then constant or a cosine decay to zero."""
    warmup = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    if config.schedule == "constant" or step < config.warmup_steps:
        return config.lr * warmup
    progress = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    return config.lr * 0.5 * (1 + math.cos(math.pi * progress))


class Trainer:
    """Iterator that trains: ``for metrics in trainer`` yields at every logging point and after the last step.

    All randomness of update t (batch and dropout) is a function of (seed, t, process, shard). Resuming therefore needs
    the step but no random state, and code that runs between updates cannot affect the training.

    On a CPU, a batch is divided into shards that are computed in parallel, each on its share of the CPU's cores. They
    wait for each other once per step. (If all cores shared every operation, they would wait at each.) Gradients are
    added in the order of the shards, so the result does not depend on which finishes first.

    Between logging points the host does not wait for the device. A loss or gradient that is not finite is recorded on
    the device, and raises :class:`BadLossError` at the next logging point or when :meth:`check` is called.

    Args:
        model: the model, on its device.
        sampler: sampler of this process's share of the batches.
        config: steps, learning rate and other optimizer settings.
        objective: the weights of the loss.
        seed: seed of dropout.
        log_every_steps: steps between logging points.
        guidance: critics that guide the model. The sampler must then yield rewards.
    """

    def __init__(
        self,
        model: DecisionTransformer,
        sampler: WindowSampler,
        config: OptimizerConfig,
        *,
        objective: Objective,
        seed: int,
        log_every_steps: int,
        guidance: Guidance | None = None,
    ) -> None:
        longest = int(sampler.trajectories.lengths.max())
        if longest > model.shape.max_timesteps:
            raise ValueError(
                f"the longest episode has {longest} steps, more than max_timesteps ({model.shape.max_timesteps})"
            )
        self.model = model
        self.sampler = sampler
        self.config = config
        self.objective = objective
        self.guidance = guidance
        self.seed = seed
        self.log_every_steps = log_every_steps
        self.device = next(model.parameters()).device
        self.step = 0
        self._stopping = False
        self._process = dist.get_rank() if dist.is_initialized() else 0
        self._num_processes = dist.get_world_size() if dist.is_initialized() else 1
        if objective.eta == 0:
            # Only the penalty depends on Lambda. Without a penalty Lambda gets no gradient, for which
            # DistributedDataParallel would wait.
            for layer in model.modules():
                if isinstance(layer, PrimalAttention):
                    layer.lam.requires_grad_(False)
        self._learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._optimizers = make_optimizers(model, config)
        network: nn.Module = model
        if config.compile:
            network = torch.compile(model)  # type: ignore[assignment]
        if self._num_processes > 1:
            network = DistributedDataParallel(network, device_ids=None if self.device.type == "cpu" else [self.device])
        self._network = network
        self._threads: ThreadPoolExecutor | None = None
        self.num_shards = self._choose_shards()
        if self.num_shards > 1:
            each = max(1, torch.get_num_threads() // self.num_shards)
            self._threads = ThreadPoolExecutor(self.num_shards, initializer=torch.set_num_threads, initargs=(each,))
        self._names = self._scalar_names()
        self._sums = torch.zeros(len(self._names), device=self.device)
        self._first_bad = torch.full((), -1, dtype=torch.int64, device=self.device)

    def _scalar_names(self) -> list[str]:
        """Names of the values that are summed between logging points: of the loss's terms, and of the critics."""
        shape = self.model.shape
        names = ["train/loss", "train/action_mse", "train/penalty", GRADIENT_NORM]
        primal = [number for number, kind in enumerate(shape.layer_kinds) if kind == "primal" and self.objective.eta]
        names += [f"train/J/layer_{number}" for number in primal]
        names += ["train/action_nll"] if shape.action_loss == "gaussian" or shape.categories else []
        names += ["train/return_loss"] if shape.conditioning == "max-return" else []
        return names + (["train/guidance", *SCALARS] if self.guidance is not None else [])

    def _choose_shards(self) -> int:
        one = self.device.type != "cpu" or self._num_processes > 1 or self.config.compile
        if self.config.shards is None:
            return 1 if one else min(torch.get_num_threads(), MAX_SHARDS)
        if one and self.config.shards > 1:
            raise ValueError(
                f"shards ({self.config.shards}) must be 1 or omitted on a GPU, with several processes or with compile"
            )
        return self.config.shards

    def __iter__(self) -> Iterator[TrainMetrics]:
        """Train until the last step, or until :meth:`stop`."""
        if self._all_stop():
            return
        self._network.train()
        start, first = time.perf_counter(), self.step
        for batch in prefetch(self.sampler, range(self.step, self.config.steps), self.device):
            self.update(batch)
            if self._is_point():
                self.check()  # waits for the device before the clock is read
                yield self.metrics((self.step - first) / (time.perf_counter() - start))
                self._network.train()
                start, first = time.perf_counter(), self.step
            if self._all_stop():
                return

    def stop(self) -> None:
        """Request a stop: the iterator ends after the current update."""
        self._stopping = True

    def _all_stop(self) -> bool:
        """Return whether any process requested a stop. All stop after the same update, or they would wait forever."""
        if self._num_processes == 1:
            return self._stopping
        if self.device.type != "cpu" and self.step % GPU_STEPS_PER_STOP_CHECK and not self._is_point():
            return False  # asking would make the host wait for the device
        requested = torch.tensor(self._stopping, dtype=torch.int32, device=self.device)
        dist.all_reduce(requested)
        return bool(requested)

    def _is_point(self) -> bool:
        """Return whether the current step is a logging point."""
        return self.step % self.log_every_steps == 0 or self.step == self.config.steps

    def check(self) -> None:
        """Wait for the device, and check that all losses, gradients, weights and optimizer states are finite.

        Raises:
            BadLossError: if one is not.
        """
        state = [
            value for optimizer in self._optimizers for slots in optimizer.state.values() for value in slots.values()
        ]
        critics = [] if self.guidance is None else list(self.guidance.critic.parameters())
        tensors = [*self._learned, *critics, *(value for value in state if isinstance(value, Tensor))]
        finite = torch.stack([tensor.isfinite().all().to(self.device) for tensor in tensors]).all()
        bad = torch.where(finite | (self._first_bad >= 0), self._first_bad, self.step)
        if (step := int(bad)) >= 0:
            raise BadLossError(step)

    @property
    def critic(self) -> TwinCritic | None:
        """The critics that choose among actions, if the model is guided by critics."""
        return None if self.guidance is None else self.guidance.average_critic

    def state_dict(self) -> dict[str, Any]:
        """Return the state that resuming needs, in addition to the model's weights."""
        states = [optimizer.state_dict() for optimizer in self._optimizers]
        state = {"step": self.step, "optimizers": states, "sums": self._sums.clone()}
        return state if self.guidance is None else state | {"guidance": self.guidance.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state from :meth:`state_dict`.

        Raises:
            ValueError: if the state is of another training.
        """
        names = ("step", "optimizers", "sums") + (("guidance",) if self.guidance is not None else ())
        require_keys(state, names, where="training.trainer")
        if not isinstance(state["optimizers"], list) or len(state["optimizers"]) != len(self._optimizers):
            raise ValueError(f"training.trainer.optimizers must be a list of {len(self._optimizers)}")
        if not isinstance(state["sums"], Tensor) or state["sums"].shape != self._sums.shape:
            raise ValueError(f"training.trainer.sums must be a tensor of {len(self._sums)} sums")
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            load_optimizer(optimizer, saved, step=state["step"])
        if self.guidance is not None:
            self.guidance.load_state_dict(state["guidance"], step=state["step"])
        self.step = state["step"]
        self._sums.copy_(state["sums"])
        if self.step:  # a checkpoint that is saved before the next update has the rate of the last one
            self._set_rate(self.step - 1)

    def _set_rate(self, step: int) -> None:
        """Set the learning rate of the update from a step."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, self.config)

    def update(self, batch: Batch) -> None:
        """Perform one training step. Its phases are labeled for torch's profiler."""
        torch.manual_seed(mixed_seed(self.seed, self.step, self._process))
        self._set_rate(self.step)
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
        later: dict[str, Tensor] = {}  # values that are not terms of the loss
        if self.guidance is not None:
            assert isinstance(batch, RewardBatch)
            with record_function("train/critics"):
                later |= self.guidance.update_critics(batch)
            context = min(self.model.shape.context, batch.valid.shape[1])  # the critics' windows may be longer
            batch = batch.at_steps(torch.arange(context, device=self.device).expand(len(batch.valid), -1))
        num_valid = batch.valid.sum()
        if self._num_processes > 1:
            dist.all_reduce(num_valid)
        parts = _parts(batch, self.config.accumulate * self.num_shards)
        terms = self._in_turn(parts, num_valid) if self._threads is None else self._side_by_side(parts, num_valid)
        with record_function("train/optimizer"):
            later[GRADIENT_NORM] = norm = nn.utils.clip_grad_norm_(self._learned, self.config.clip)
            for optimizer in self._optimizers:
                optimizer.step()
            if self.guidance is not None:
                self.guidance.update_averages()
        for name, value in later.items():
            terms[self._names.index(name)] = value
        self._sums += terms
        bad = ~torch.isfinite(terms[0] + norm)
        self.step += 1
        self._first_bad = torch.where(bad & (self._first_bad < 0), self.step, self._first_bad)

    def _in_turn(self, parts: list[Batch], num_valid: Tensor) -> Tensor:
        """Compute the parts one after another: set the gradients of the weights and return the loss terms."""
        terms = torch.zeros_like(self._sums)
        for number, part in enumerate(parts):
            with self._without_sync(number < len(parts) - 1):
                with record_function("train/forward"):
                    loss = self._forward(part, num_valid)
                with record_function("train/backward"):
                    # DistributedDataParallel averages gradients over processes, but the loss is a sum over processes.
                    (loss.total * self._num_processes).backward()
            terms += self._vector(loss)
        if self._num_processes > 1:
            dist.all_reduce(terms)
        return terms

    def _side_by_side(self, parts: list[Batch], num_valid: Tensor) -> Tensor:
        """Compute the parts in parallel threads. Sets and returns the same values as :meth:`_in_turn`."""

        def compute(number: int) -> tuple[Tensor, tuple[Tensor, ...]]:
            generator = torch.Generator().manual_seed(mixed_seed(self.seed, self.step, self._process, number))
            with masks_from(generator), record_function("train/forward"):
                loss = self._forward(parts[number], num_valid)
            with record_function("train/backward"):
                return self._vector(loss), torch.autograd.grad(loss.total, self._learned)

        assert self._threads is not None
        terms, gradients = zip(*self._threads.map(compute, range(len(parts))), strict=True)
        for parameter, shares in zip(self._learned, zip(*gradients, strict=True), strict=True):
            parameter.grad = reduce(torch.add, shares)
        return reduce(torch.add, terms)

    def _forward(self, part: Batch, num_valid: Tensor) -> LossTerms:
        with torch.autocast(self.device.type, torch.bfloat16) if self.config.bf16 else nullcontext():
            output = self._network(part, with_objective=self.objective.eta > 0)
            terms = loss_terms(output, part, self.objective, num_valid=num_valid, num_sequences=self.sampler.batch_size)
            if self.guidance is None:
                return terms
            assert isinstance(part, RewardBatch)
            guidance, value = self.guidance.terms(
                output.actions, part, num_valid, swapped=bool(mixed_seed(self.seed, self.step) & 1)
            )
            return terms._replace(total=terms.total + guidance, guidance=guidance, policy_value=value)

    def _without_sync(self, more_to_come: bool) -> Any:
        """Context manager that exchanges gradients with other processes only for the last part of a batch."""
        if more_to_come and isinstance(self._network, DistributedDataParallel):
            return self._network.no_sync()
        return nullcontext()

    def _vector(self, loss: LossTerms) -> Tensor:
        """The terms of the loss in the order of the names; zero where the update has a value later."""
        scalars = loss.scalars()
        zero = torch.zeros_like(loss.total)
        return torch.stack([scalars.get(name, zero) for name in self._names]).detach()

    def metrics(self, steps_per_second: float) -> TrainMetrics:
        """Return the metrics since the last logging point, and reset the sums."""
        steps = self.step % self.log_every_steps or self.log_every_steps
        scalars = dict(zip(self._names, (self._sums / steps).tolist(), strict=True))
        self._sums.zero_()
        scalars["train/learning_rate"] = learning_rate(self.step - 1, self.config)
        scalars["train/steps_per_second"] = steps_per_second
        return TrainMetrics(self.step, scalars)


def _parts(batch: Batch, number: int) -> list[Batch]:
    """Split a batch into ``number`` parts, or fewer if it has fewer rows."""
    if number == 1:
        return [batch]
    chunks = [getattr(batch, f.name).chunk(number) for f in fields(batch)]
    return [type(batch)(*part) for part in zip(*chunks, strict=True)]


def mixed_seed(*numbers: int) -> int:
    """Mix numbers into one seed for torch's generators (SplitMix64)."""
    value = 0
    for number in numbers:
        value = (value + number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        value ^= value >> 31
    return value
