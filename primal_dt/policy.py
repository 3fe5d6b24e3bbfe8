"""A trained model as a policy: batched over environments, in raw units, with a history of its own.

Axes: E environments, T steps of the longest episode, K context steps, S state, A action.
"""

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from primal_dt.data import Batch
from primal_dt.model import DecisionTransformer
from primal_dt.normalizer import Normalizer

__all__ = ["DecisionTransformerPolicy"]


class DecisionTransformerPolicy:
    """``reset(targets)``, then ``act(observations)`` and ``observe(rewards)`` in turns.

    The model sees the last K steps, as a training window would have them: standardised states, what is left of the
    target return divided by the return scale, the actions that were taken, the timesteps. The action of the current
    step is a placeholder that no prediction of it can see.

    Args:
        model: trained; it is put into evaluation mode.
        normalizer: the one that it was trained with.
    """

    def __init__(self, model: DecisionTransformer, normalizer: Normalizer) -> None:
        self.model = model.eval()
        self.normalizer = normalizer
        self.device = next(model.parameters()).device
        self.reset(np.zeros(0))

    def reset(self, targets: ArrayLike) -> None:
        """Begin an episode in each of E environments.

        Args:
            targets: (E,), the return to ask for in each.
        """
        wanted = np.asarray(targets, np.float64)
        if wanted.ndim != 1:
            raise ValueError(f"targets must be a vector, one for each environment, not of shape {wanted.shape}")
        shape, count = self.model.shape, len(wanted)

        def empty(*entries: int) -> Tensor:
            return torch.zeros(count, shape.max_timesteps, *entries, device=self.device)

        self._states, self._actions, self._returns = empty(shape.state_width), empty(shape.action_width), empty(1)
        # What is left of each target, in double precision: single precision would lose digits over a thousand steps.
        self._left = wanted.copy()
        self._step = 0

    @torch.inference_mode()
    def act(self, observations: NDArray[np.floating]) -> NDArray[np.float32]:
        """(E, S) -> (E, A), the actions of this step."""
        shape, t = self.model.shape, self._step
        if observations.shape != (len(self._left), shape.state_width):
            raise ValueError(
                f"observations must have shape {(len(self._left), shape.state_width)}, not {observations.shape}"
            )
        if t >= shape.max_timesteps:
            raise ValueError(f"step {t} is past the model's last, {shape.max_timesteps - 1}: the episode is too long")
        self._states[:, t] = torch.from_numpy(self.normalizer.states(observations)).to(self.device)
        self._returns[:, t, 0] = torch.from_numpy(self.normalizer.returns(self._left)).to(self.device)
        output = self.model(self.window())
        self._actions[:, t] = output.actions[:, -1]
        return self._actions[:, t].cpu().numpy()

    def observe(self, rewards: ArrayLike) -> None:
        """The rewards (E,) that the actions earned: what is left of the targets drops by them."""
        self._left -= np.asarray(rewards, np.float64)
        self._step += 1

    def keep(self, rows: NDArray[np.bool_]) -> None:
        """Go on with some of the environments: the others have finished.

        Args:
            rows: (E,), True for those that go on.
        """
        kept = torch.from_numpy(rows).to(self.device)
        self._states, self._actions, self._returns = self._states[kept], self._actions[kept], self._returns[kept]
        self._left = self._left[rows]

    def window(self) -> Batch:
        """What the model is shown at this step: the last K steps, all of them real."""
        first, end = max(0, self._step + 1 - self.model.shape.context), self._step + 1
        count = len(self._left)
        return Batch(
            states=self._states[:, first:end],
            actions=self._actions[:, first:end],
            returns_to_go=self._returns[:, first:end],
            timesteps=torch.arange(first, end, device=self.device).expand(count, -1),
            valid=torch.ones(count, end - first, dtype=torch.bool, device=self.device),
        )
