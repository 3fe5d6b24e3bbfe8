"""A policy's step as a function without memory, in raw units: what an exported file computes.

In mode ``window`` it takes the last K steps; in mode ``streaming`` it takes the newest step and what earlier steps left
behind, and returns what later steps need.

Axes: E environments, C candidates, N = E C rows, K context steps, T tokens per step, R = TK places of a ring, D width,
H heads, P = D / H, S state, A action.
"""

from typing import Any

import torch
from torch import Tensor, nn

from primal_dt.data.normalizer import Normalizer
from primal_dt.data.sampler import Batch
from primal_dt.model.critic import TwinCritic
from primal_dt.model.transformer import DecisionTransformer
from primal_dt.policy.folded import FoldedSoftmax
from primal_dt.policy.inference import InferenceMode
from primal_dt.policy.policy import limits_of
from primal_dt.policy.streaming_stack import PrimalMemory, SoftmaxMemory, StreamingStack

__all__ = ["StreamingStep", "WindowStep", "make_step"]


class PolicyStep(nn.Module):
    """What both modes have in common: units, and the choice among candidates.

    Args:
        model: the trained model.
        normalizer: the normalizer that it was trained with.
        critic: critics that choose among the actions for several targets, if there are any.
    """

    state_mean: Tensor
    state_std: Tensor
    candidates: Tensor

    def __init__(self, model: DecisionTransformer, normalizer: Normalizer, critic: TwinCritic | None = None) -> None:
        super().__init__()
        self.model = model.eval()
        self.shape = model.shape
        self.limits = limits_of(model.shape, normalizer, has_critic=critic is not None)
        self.critic = critic if len(self.limits.candidates) > 1 else None
        self.return_scale = normalizer.return_scale
        self.register_buffer("state_mean", torch.from_numpy(normalizer.state_mean))
        self.register_buffer("state_std", torch.from_numpy(normalizer.state_std))
        self.register_buffer("candidates", torch.tensor(self.limits.candidates))

    @property
    def predicts(self) -> bool:
        """Whether the model predicts the returns that its actions follow."""
        return self.shape.conditioning == "max-return"

    def standardized(self, observations: Tensor) -> Tensor:
        """Raw observations (..., S) -> what the model sees (..., S)."""
        return (observations - self.state_mean) / self.state_std

    def scaled(self, returns: Tensor) -> Tensor:
        """Raw returns -> what the model sees."""
        return returns / self.return_scale

    def rows(self, values: Tensor) -> Tensor:
        """One row for each environment (E, ...) -> one for each of its candidates (N, ...)."""
        return values.repeat_interleave(len(self.candidates), dim=0) if len(self.candidates) > 1 else values

    def chosen(self, states: Tensor, actions: Tensor, followed: Tensor) -> tuple[Tensor, ...]:
        """Choose among candidates: states (N, S), actions (N, A), the scaled returns that they follow (N, 1).

        Returns the actions (E, A) and, if the model predicts returns, those that they follow (E,) and those of all
        candidates (E, C), in raw units.
        """
        C = len(self.candidates)
        returns = (followed * self.return_scale).view(-1, C)  # (E, C)
        if self.critic is None:
            return (actions, returns[:, 0], returns) if self.predicts else (actions,)
        values = self.critic.least(states, self.model.action_space.encode(actions)).unflatten(0, (-1, C))  # (E, C)
        best = values.argmax(1, keepdim=True)  # (E, 1)
        every = actions.unflatten(0, (-1, C))  # (E, C, A)
        action = every.gather(1, best[..., None].expand(-1, 1, every.shape[-1]))[:, 0]
        return (action, returns.gather(1, best)[:, 0], returns) if self.predicts else (action,)


class WindowStep(PolicyStep):
    """The last K steps -> the action: the model's own forward pass, padded on the right as in training."""

    def forward(
        self, observations: Tensor, actions: Tensor, returns_to_go: Tensor, timestep: Tensor, num_steps: Tensor
    ) -> tuple[Tensor, ...]:
        """Compute the actions of the newest step.

        Args:
            observations: (E, K, S), those of the last steps first, then padding.
            actions: (E, K, A), the actions taken; that of the newest step is ignored.
            returns_to_go: (E, K, C). If the model predicts returns, that of the newest step is ignored.
            timestep: (), that of the newest step.
            num_steps: (), the number of steps that are not padding.

        Returns:
            Actions (E, A) and, if the model predicts returns, the returns that they follow (E,) and the returns of all
            candidates (E, C).
        """
        K, last = self.shape.context, self.shape.max_timesteps - 1
        steps = torch.arange(K, device=observations.device)
        states = self.rows(self.standardized(observations))  # (N, K, S)
        E, N = observations.shape[0], states.shape[0]
        newest = (num_steps - 1).reshape(1)
        batch = Batch(
            states=states,
            actions=self.rows(actions),
            returns_to_go=self.scaled(returns_to_go).transpose(1, 2).reshape(-1, K, 1),
            timesteps=(timestep - num_steps + 1 + steps).clamp(0, last).expand(N, K),
            valid=(steps < num_steps).expand(N, K),
        )
        followed = batch.returns_to_go.index_select(1, newest)[:, 0]  # (N, 1)
        if self.predicts:  # the prediction does not see the newest return, the action does
            predicted = self.model(batch).best_returns.index_select(1, newest)[:, 0]  # (N, 1)
            cap = self.model.return_cap[timestep.clamp(0, last)]  # the highest of the data
            followed = torch.minimum(predicted * self.candidates.repeat(E)[:, None], cap)
            returns = torch.where((steps == newest)[:, None], followed[:, None], batch.returns_to_go)
            batch = Batch(batch.states, batch.actions, returns, batch.timesteps, batch.valid)
        actions_of_newest = self.model.step_actions(batch).index_select(1, newest)[:, 0]  # (N, A)
        return self.chosen(states.index_select(1, newest)[:, 0], actions_of_newest, followed)

    def example(self, count: int) -> dict[str, Tensor]:
        """Inputs of ``count`` environments, by name."""
        K, shape = self.shape.context, self.shape
        return {
            "observations": torch.zeros(count, K, shape.state_width),
            "actions": torch.zeros(count, K, shape.action_width),
            "returns_to_go": torch.zeros(count, K, len(self.candidates)),
            "timestep": torch.tensor(0),
            "num_steps": torch.tensor(1),
        }


class StreamingStep(PolicyStep):
    """The newest step and what layers remember of earlier ones -> the action, and what layers remember of this step.

    The same function as :class:`~primal_dt.policy.inference.StreamingInference`. The caller stores the rings
    (:mod:`primal_dt.policy.streaming_stack`), so that a step neither copies nor moves them.
    """

    def __init__(self, model: DecisionTransformer, normalizer: Normalizer, critic: TwinCritic | None = None) -> None:
        super().__init__(model, normalizer, critic)
        self.stack = StreamingStack(model)

    def forward(
        self,
        observation: Tensor,
        last_action: Tensor,
        return_to_go: Tensor,
        timestep: Tensor,
        memory: list[Tensor],
    ) -> tuple[Tensor | list[Tensor], ...]:
        """Compute the actions of the newest step.

        Args:
            observation: (E, S).
            last_action: (E, A), the actions of the step before; ignored at timestep 0.
            return_to_go: (E, C); ignored if the model predicts returns.
            timestep: (), that of this step.
            memory: two tensors for each layer, zero at timestep 0.
                Of a softmax layer: the rings of its keys and of its values, (N H, R, P) each.
                Of a primal layer: the sum (N, D) that the step before returned, and the tokens (N, T, D) that leave the
                window: from step K on, those in the T places of its ring from T (t modulo K) + 1 on, where the first
                place follows the last; zero before.

        Returns:
            Actions (E, A) and, if the model predicts returns, the returns that they follow (E,) and the returns of all
            candidates (E, C). Then a list of two tensors for each layer: new keys and new values (N H, T, P), or the
            sum (N, D) and new tokens (N, T, D). The caller puts new keys, values and tokens into the T places of their
            rings from T (t modulo K) on.
        """
        E, pairs = observation.shape[0], zip(memory[::2], memory[1::2], strict=True)
        states = self.rows(self.standardized(observation))  # (N, S)
        returns = self.candidates.repeat(E)[:, None] if self.predicts else self.scaled(return_to_go).reshape(-1, 1)
        memories = [
            SoftmaxMemory(layer, first, second)
            if isinstance(layer, FoldedSoftmax)
            else PrimalMemory(layer, first - second.sum(1))
            for layer, (first, second) in zip(self.stack.layers(), pairs, strict=True)
        ]
        newest = {"action": self.rows(last_action), "return": returns, "state": states}  # (N, ...) each
        actions, followed = self.stack(newest, timestep, self.stack.timetable(timestep), memories)
        after = [part for each in memories for part in each.after()]
        return *self.chosen(states, actions, followed), after

    def example(self, count: int) -> dict[str, Any]:
        """Inputs of ``count`` environments at timestep 0, by name."""
        shape, C = self.shape, len(self.candidates)
        N, T, memory = count * C, shape.tokens_per_step, []
        for layer in self.stack.layers():
            if isinstance(layer, FoldedSoftmax):
                ring = (N * shape.num_heads, T * shape.context, layer.head_width)
                memory += [torch.zeros(ring), torch.zeros(ring)]
            else:
                memory += [torch.zeros(N, shape.width), torch.zeros(N, T, shape.width)]
        return {
            "observation": torch.zeros(count, shape.state_width),
            "last_action": torch.zeros(count, shape.action_width),
            "return_to_go": torch.zeros(count, C),
            "timestep": torch.tensor(0),
            "memory": memory,
        }


def make_step(
    model: DecisionTransformer, normalizer: Normalizer, critic: TwinCritic | None, mode: InferenceMode
) -> WindowStep | StreamingStep:
    """Build the function of a mode, in evaluation mode, on the CPU."""
    kinds: dict[str, type[WindowStep | StreamingStep]] = {"window": WindowStep, "streaming": StreamingStep}
    return kinds[mode](model, normalizer, critic).cpu().float().eval()
