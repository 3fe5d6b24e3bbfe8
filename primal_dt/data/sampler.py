"""Batches of windows, drawn from trajectories.

Axes: E episodes, B batch, K context steps, S state, A action.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Literal, Self, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from primal_dt.data.normalizer import Normalizer
from primal_dt.data.trajectories import Trajectories

__all__ = ["Batch", "RewardBatch", "Weighting", "WindowSampler", "prefetch"]

Weighting = Literal["transitions", "length", "return"]


@dataclass(frozen=True)
class Batch:
    """A batch of windows of K steps, normalized, and padded on the right with zeros."""

    states: Tensor
    """Standardized states, (B, K, S)."""
    actions: Tensor
    """Actions, (B, K, A)."""
    returns_to_go: Tensor
    """Scaled returns-to-go, (B, K, 1)."""
    timesteps: Tensor
    """Timesteps, (B, K) int64, counted from the start of the episode."""
    valid: Tensor
    """Mask, (B, K) bool: True for real steps, False for padding."""

    def to(self, device: torch.device | str) -> Self:
        """Move the batch to a device. Copies from pinned memory are asynchronous."""
        return type(self)(
            **{
                f.name: tensor.to(device, non_blocking=tensor.is_pinned())
                for f in fields(self)
                for tensor in (getattr(self, f.name),)
            }
        )

    def at_steps(self, steps: Tensor) -> Self:
        """Shorter windows: the steps (B, k) of each window, by their numbers."""

        def gather(tensor: Tensor) -> Tensor:
            index = steps.view(*steps.shape, *(1,) * (tensor.dim() - 2)).expand(-1, -1, *tensor.shape[2:])
            return tensor.gather(1, index)

        return type(self)(**{f.name: gather(getattr(self, f.name)) for f in fields(self)})

    def pin_memory(self) -> Self:
        """Copy the batch to page-locked memory, from which a GPU copies asynchronously."""
        return type(self)(**{f.name: getattr(self, f.name).pin_memory() for f in fields(self)})


@dataclass(frozen=True)
class RewardBatch(Batch):
    """A batch with what critics learn from."""

    rewards: Tensor
    """Rewards, divided by the return scale, (B, K)."""
    terminated: Tensor
    """Mask, (B, K) bool: True at the last step of an episode that the environment ended, as opposed to a time limit."""


class WindowSampler:
    """Sampler of training windows: batch t of seed s is a pure function of (s, t).

    Resuming therefore needs no sampler state, and each process can compute its own slice of a batch. A window starts
    at a drawn transition and contains up to K - 1 transitions that follow it in the same episode.

    Args:
        trajectories: the data to draw from.
        normalizer: converts raw units to the model's units.
        context: K, steps per window.
        batch_size: B, windows per batch, summed over all processes.
        seed: s, at least 0.
        weighting: where windows start. ``transitions``: at a uniformly drawn transition. ``length``: at a uniform step
            of an episode drawn in proportion to its length, as in the Decision Transformer. (This is the same
            distribution as ``transitions``, with other draws.) ``return``: at a uniform step of an episode drawn in
            proportion to its return minus the lowest return, plus 1% of the range of returns, so that every episode can
            be drawn.
        episodes: indices of the episodes to draw from, in rising order. If None: all.
        is_terminated: (E,) bool, True for episodes that the environment ended. If given, batches are
            :class:`RewardBatch`.
        process: rank of this process.
        num_processes: number of processes that share each batch.
    """

    def __init__(
        self,
        trajectories: Trajectories,
        normalizer: Normalizer,
        *,
        context: int,
        batch_size: int,
        seed: int,
        weighting: Weighting = "transitions",
        episodes: NDArray[np.int64] | None = None,
        is_terminated: NDArray[np.bool_] | None = None,
        process: int = 0,
        num_processes: int = 1,
    ) -> None:
        if context < 1:
            raise ValueError(f"context ({context}) must be at least 1")
        _check_key("seed", seed)
        if weighting not in get_args(Weighting):
            raise ValueError(f"weighting must be one of {', '.join(get_args(Weighting))}, not {weighting!r}")
        if not 0 <= process < num_processes <= batch_size:
            raise ValueError(
                f"process ({process}) must be at least 0 and below num_processes ({num_processes}), "
                f"which must be at most batch_size ({batch_size})"
            )
        self.trajectories = trajectories
        self.normalizer = normalizer
        self.context = context
        self.batch_size = batch_size
        self.seed = seed
        self.episodes = np.arange(len(trajectories.lengths)) if episodes is None else episodes
        """Indices of the episodes that windows are drawn from."""
        if not len(self.episodes):
            raise ValueError("episodes must have at least one index")
        self._is_terminated = is_terminated
        # The slices of all processes differ in size by at most one row and make up the whole batch, in order.
        self._rows = slice(process * batch_size // num_processes, (process + 1) * batch_size // num_processes)
        self._ends: NDArray[np.int64] = np.cumsum(trajectories.lengths[self.episodes])
        self._weights = None if weighting == "transitions" else self._cumulative_weights(weighting)

    def batch(self, step: int) -> Batch:
        """Return this process's rows of batch number ``step``."""
        _check_key("step", step)
        key = np.array([self.seed, step], np.uint64)
        starts = self._draw_starts(np.random.Generator(np.random.Philox(key=key)))
        return self._windows(starts[self._rows])

    def _cumulative_weights(self, weighting: Weighting) -> NDArray[np.float64]:
        """Cumulative weights of the chosen episodes, rising to 1."""
        if weighting == "length":
            weights = self.trajectories.lengths[self.episodes].astype(np.float64)
        else:
            returns = self.trajectories.returns[self.episodes].astype(np.float64)
            spread = np.ptp(returns)
            weights = returns - returns.min() + 0.01 * spread if spread > 0 else np.ones_like(returns)
        total = np.cumsum(weights)
        return total / total[-1]

    def _draw_starts(self, random: np.random.Generator) -> NDArray[np.int64]:
        """Draw the first transition of each window of the whole batch, (B,)."""
        offsets = self.trajectories.offsets
        if self._weights is None:
            drawn = random.integers(self._ends[-1], size=self.batch_size)  # among the chosen episodes, back to back
            place = np.searchsorted(self._ends, drawn, side="right")
            starts: NDArray[np.int64] = offsets[self.episodes[place] + 1] - (self._ends[place] - drawn)
            return starts
        # Draws are below 1, which is the last cumulative weight, so the index is always that of an episode.
        episode = self.episodes[np.searchsorted(self._weights, random.random(self.batch_size), side="right")]
        return offsets[episode] + random.integers(np.diff(offsets)[episode])

    def _windows(self, starts: NDArray[np.int64]) -> Batch:
        data = self.trajectories
        data.check_files()
        episode = np.searchsorted(data.offsets, starts, side="right") - 1  # (B,)
        index = starts[:, None] + np.arange(self.context)  # (B, K)
        valid = index < data.offsets[episode + 1][:, None]  # (B, K)
        index = np.where(valid, index, starts[:, None])  # padding reads the window's first row; masked below
        mask = valid[..., None]  # (B, K, 1)
        arrays = {
            "states": self.normalizer.states(data.observations[index]) * mask,
            "actions": data.actions[index] * mask,
            "returns_to_go": self.normalizer.returns(data.returns_to_go[index])[..., None] * mask,
            "timesteps": (index - data.offsets[episode][:, None]) * valid,
            "valid": valid,
        }
        if self._is_terminated is not None:
            is_last = index == data.offsets[episode + 1][:, None] - 1
            arrays["rewards"] = self.normalizer.returns(data.rewards[index]) * valid
            arrays["terminated"] = is_last & valid & self._is_terminated[episode][:, None]
        kind = Batch if self._is_terminated is None else RewardBatch
        return kind(**{name: torch.from_numpy(array) for name, array in arrays.items()})


def _check_key(name: str, value: int) -> None:
    if not isinstance(value, int | np.integer) or not 0 <= value < 2**63:
        raise ValueError(f"{name} ({value}) must be an integer, at least 0 and below 2^63")


def prefetch(
    sampler: WindowSampler, steps: Iterable[int], device: torch.device | str, *, ahead: int = 2
) -> Iterator[Batch]:
    """Yield the batches of these steps on a device, while a thread prepares the next ones.

    This saves time if the device computes asynchronously or if the data is read from disk. The batches are the same as
    those of ``sampler.batch``.

    Args:
        sampler: makes the batches.
        steps: batch numbers, in order.
        device: device of the batches. Copies to a GPU are asynchronous, from page-locked memory.
        ahead: number of batches to prepare in advance.
    """
    pin = torch.device(device).type == "cuda"

    def make(step: int) -> Batch:
        batch = sampler.batch(step)
        return batch.pin_memory() if pin else batch

    with ThreadPoolExecutor(max_workers=1) as thread:
        ready: deque[Future[Batch]] = deque()
        try:
            for step in steps:
                ready.append(thread.submit(make, step))
                if len(ready) > ahead:
                    yield ready.popleft().result().to(device)
            while ready:
                yield ready.popleft().result().to(device)
        finally:
            for future in ready:
                future.cancel()
