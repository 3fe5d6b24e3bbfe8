"""Value guidance: two critics that are trained beside the model, and move its actions towards larger values.

After QT (arXiv 2405.17098). The loss of the model gets the term ``-w * mean Q_i(s, a_hat) / mean |Q_j(s, a)|``, where i
and j are the two critics in random order. The critics learn n-step values inside a window: from step t to the window's
last step k, ``sum_{i=t}^{k-1} gamma^{i-t} r_i + gamma^{k-t} min Q'(s_k, a'_k)``, where Q' is the moving average of the
critics and a' the action of the moving average of the model. If the environment ends the episode at step k, the value
at k is its reward.

Departures from the published code: the critics' windows are at least 10 steps long, whatever the model's context; the
denominator has the actions of the data, so that it is known before the model is computed; there is no loss for the
prediction of the next state.

Axes: B batch, H steps of the critics' windows, K context steps, S state, A action.
"""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from primal_dt.data.sampler import RewardBatch
from primal_dt.data.trajectories import Trajectories
from primal_dt.model.critic import TwinCritic
from primal_dt.model.transformer import DecisionTransformer
from primal_dt.schema import require_keys
from primal_dt.training.optimizer_state import load_optimizer

__all__ = ["Guidance", "ValueRange", "value_range", "window_targets"]

DISCOUNT, AVERAGE, CRITIC_RATE = 0.99, 0.005, 3e-4
"""The published discount, average and learning rate of the critics."""
MIN_HORIZON = 10
"""Minimum number of steps in the critics' windows."""
POLICY_VALUE = "critic/policy_value"
WHERE = "training.trainer.guidance"
SCALARS = ("critic/loss", "critic/value", "critic/value_std", "critic/disagreement", POLICY_VALUE)
"""Names of what is logged about the critics. The last one is known only after the model was computed."""


@dataclass(frozen=True)
class ValueRange:
    """The lowest and highest discounted return-to-go of the data."""

    low: float
    high: float

    @property
    def scale(self) -> float:
        """The unit of the critics, so that their values are at most about 1."""
        return max(abs(self.low), abs(self.high)) or 1.0

    def is_beyond(self, value: float) -> bool:
        """Whether a mean value is outside the range by more than a hundredth of its scale: the critics have diverged.

        A mean over states is far inside the range of the data, unless the policy is much better at every state.
        """
        margin = 0.01 * self.scale
        return not self.low - margin <= value <= self.high + margin


def value_range(trajectories: Trajectories, discount: float = DISCOUNT) -> ValueRange:
    """Compute the range of discounted returns-to-go, ``r_t + gamma r_{t+1} + ...``, over all steps of the data."""
    lengths, offsets = trajectories.lengths, trajectories.offsets
    value = np.zeros(len(lengths))
    low, high = np.inf, -np.inf
    for back in range(1, int(lengths.max()) + 1):  # steps before the end, for all episodes at once
        longer = lengths >= back
        value[longer] = trajectories.rewards[offsets[1:][longer] - back] + discount * value[longer]
        low, high = min(low, value[longer].min()), max(high, value[longer].max())
    return ValueRange(float(low), float(high))


def window_targets(batch: RewardBatch, last_values: Tensor, discount: float) -> tuple[Tensor, Tensor]:
    """The n-step values of the steps of each window.

    Args:
        batch: windows with rewards.
        last_values: (B,), the value at the last valid step of each window.
        discount: gamma.

    Returns:
        The values (B, H), and a mask (B, H) of the steps that have one. The last step has one only if the environment
        ended the episode there: otherwise its own value is where the sum ends.
    """
    last = batch.valid.sum(1) - 1  # (B,)
    steps = torch.arange(batch.valid.shape[1], device=last.device)
    is_last = steps == last[:, None]  # (B, H)
    ended = (batch.terminated & is_last).any(1)  # (B,)
    value = torch.zeros_like(last_values)
    columns = []
    for t in reversed(range(batch.valid.shape[1])):
        end = torch.where(ended, batch.rewards[:, t], last_values)
        value = torch.where(is_last[:, t], end, batch.rewards[:, t] + discount * value)
        columns.append(value)
    has_value = batch.valid & (~is_last | ended[:, None])
    return torch.stack(columns[::-1], dim=1).masked_fill(~has_value, 0.0), has_value


class Guidance:
    """Critics, their moving average and the model's, and the optimizer of the critics.

    Args:
        model: the model to guide, on its device.
        weight: w, the weight of the guidance in the model's loss.
        values: the range of the data's values.
        reward_scale: the divisor of the rewards in batches.
        discount: gamma.
        average: share of the current weights in each update of a moving average.
        lr: learning rate of the critics.
    """

    def __init__(
        self,
        model: DecisionTransformer,
        *,
        weight: float,
        values: ValueRange,
        reward_scale: float,
        discount: float = DISCOUNT,
        average: float = AVERAGE,
        lr: float = CRITIC_RATE,
    ) -> None:
        device = next(model.parameters()).device
        self.weight = weight
        self.discount = discount
        self.average = average
        self.values = values
        self._reward_scale = reward_scale
        self._scale = values.scale
        """The unit of the critics."""
        self._model = model
        self.critic = TwinCritic(model.shape).to(device)
        self.average_critic = copy.deepcopy(self.critic).requires_grad_(False)
        self.average_model = copy.deepcopy(model).requires_grad_(False).eval()
        self._optimizer = torch.optim.Adam(self.critic.parameters(), lr=lr)
        self._size = torch.ones(2, device=device)  # mean |Q_j|, of the last batch
        if dist.is_initialized():  # all processes start from the weights of rank 0
            for part in self._parts().values():
                for tensor in part.state_dict().values():
                    dist.broadcast(tensor, 0)

    def update_critics(self, batch: RewardBatch) -> dict[str, Tensor]:
        """Train the critics on windows of H steps. Returns what is logged, in the units of rewards."""
        with torch.no_grad():
            unit = self._scale / self._reward_scale  # in units of the rewards in batches
            targets, has_value = window_targets(batch, self._last_values(batch) * unit, self.discount)
            targets, count = targets / unit, has_value.sum()
            _sum_over_processes(count)
        self.critic.requires_grad_(True)
        done = self._model.action_space.encode(batch.actions)  # (B, H, F); padding is zero
        values = self.critic(batch.states, done)  # (2, B, H)
        loss = (values - targets).square().masked_fill(~has_value, 0.0).sum() / count
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        with torch.no_grad():
            used = values.masked_fill(~has_value, 0.0)
            self._size = used.abs().sum((1, 2)) / count  # (2,)
            mean = used.mean(0).sum() / count
            square = used.square().mean(0).sum() / count
            apart = (used[0] - used[1]).abs().sum() / count
            numbers = torch.stack([loss.detach(), mean, square, apart, *self._size])
        _sum_over_processes(*(parameter.grad for parameter in self.critic.parameters()), numbers)
        self._optimizer.step()
        self.critic.requires_grad_(False)  # while the model is trained
        loss_value, mean, square, apart, *size = numbers
        self._size = torch.stack(size)
        scale = self._scale
        spread = (square - mean.square()).clamp(min=0).sqrt()
        return dict(zip(SCALARS[:-1], (loss_value, mean * scale, spread * scale, apart * scale), strict=True))

    def _last_values(self, batch: RewardBatch) -> Tensor:
        """Values (B,) at the last valid steps, of the averaged model's actions, in the critics' unit."""
        context = min(self._model.shape.context, batch.valid.shape[1])
        last = batch.valid.sum(1) - 1  # (B,)
        first = (last - context + 1).clamp(min=0)
        ending = batch.at_steps(first[:, None] + torch.arange(context, device=last.device))  # (B, K)
        actions = self.average_model(ending).actions  # (B, K, A)
        place = (last - first)[:, None, None]  # (B, 1, 1)
        at_last = (x.gather(1, place.expand(-1, 1, x.shape[-1]))[:, 0] for x in (ending.states, actions))
        return self.average_critic.least(*at_last)

    def terms(self, actions: Tensor, batch: RewardBatch, num_valid: Tensor, *, swapped: bool) -> tuple[Tensor, Tensor]:
        """``-w * mean Q_i(s, a_hat) / mean |Q_j(s, a)|`` over the valid steps of the whole batch, and the mean value.

        The mean value is in the units of rewards.
        """
        i, j = (1, 0) if swapped else (0, 1)
        values = self.critic.critics[i](torch.cat((batch.states, actions), dim=-1))[..., 0]  # (B, K)
        mean = values.masked_fill(~batch.valid, 0.0).sum() / num_valid
        return -self.weight * mean / self._size[j].clamp(min=1e-6), mean.detach() * self._scale

    @torch.no_grad()
    def update_averages(self) -> None:
        """Move the averages towards the current weights."""
        for average, current in ((self.average_critic, self.critic), (self.average_model, self._model)):
            torch._foreach_lerp_(list(average.parameters()), list(current.parameters()), self.average)

    def problem(self, scalars: Mapping[str, float]) -> str | None:
        """A message if the critics have diverged by what is logged, else None."""
        if not self.values.is_beyond(scalars[POLICY_VALUE]):
            return None
        low, high = self.values.low, self.values.high
        return (
            f"the critics have diverged: their mean value is outside the data's discounted returns, {low:.4g} to "
            f"{high:.4g} (see {POLICY_VALUE}); their guidance is wrong, so use a smaller --critic-weight"
        )

    def state_dict(self) -> dict[str, Any]:
        """The state that resuming needs."""
        parts = {name: part.state_dict() for name, part in self._parts().items()}
        values = {"low": self.values.low, "high": self.values.high, "scale": self._scale}
        return {**parts, "optimizer": self._optimizer.state_dict(), "values": values}

    def load_state_dict(self, state: dict[str, Any], *, step: int) -> None:
        """Restore a state from :meth:`state_dict`. Raise ValueError or RuntimeError if it is of another training."""
        require_keys(state, (*self._parts(), "optimizer"), where=WHERE)
        self.load_weights(state)
        load_optimizer(self._optimizer, state["optimizer"], step=step)

    def load_weights(self, state: Mapping[str, Any]) -> None:
        """Load the critics and the averages of a state from :meth:`state_dict`, in their unit.

        The range of values then includes that of the data that they were trained on. States of earlier versions lack
        the unit: the critics of such a run have the unit of its data, which is also that of this run if it is resumed.
        """
        require_keys(state, tuple(self._parts()), where=WHERE)
        for name, part in self._parts().items():
            part.load_state_dict(require_keys(state[name], (), where=f"{WHERE}.{name}"))
        if "values" in state:
            saved = require_keys(state["values"], ("low", "high", "scale"), where=f"{WHERE}.values")
            numbers = [value for value in saved.values() if type(value) is float and math.isfinite(value)]
            if len(numbers) < len(saved) or saved["scale"] <= 0:
                raise ValueError(f"{WHERE}.values must be finite numbers with a positive scale, not {saved}")
            self._scale = saved["scale"]
            self.values = ValueRange(min(self.values.low, saved["low"]), max(self.values.high, saved["high"]))

    def _parts(self) -> dict[str, nn.Module]:
        return {"critic": self.critic, "average_critic": self.average_critic, "average_model": self.average_model}


def _sum_over_processes(*tensors: Tensor | None) -> None:
    if dist.is_initialized():
        for tensor in tensors:
            if tensor is not None:
                dist.all_reduce(tensor)
