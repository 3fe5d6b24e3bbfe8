"""A trained model as a policy: batched over environments, in raw units, with its own history.

Axes: E environments, C candidates, N = E C rounded up to whole tiles, S state, A action.
"""

from collections.abc import Mapping
from typing import Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from primal_dt.data.normalizer import Normalizer
from primal_dt.model.critic import TwinCritic
from primal_dt.model.transformer import DecisionTransformer
from primal_dt.policy.inference import ALIGNED, InferenceMode, make_inference, require_mode
from primal_dt.policy.tiles import Tiles

__all__ = ["DecisionTransformerPolicy"]

CPU_TILE: Mapping[InferenceMode, int] = {"window": 8, "streaming": 64}
"""Environments per forward pass, by mode: a compromise between one environment and many (docs/evaluation.md)."""
CANDIDATES = (0.5, 0.75, 1.0, 1.25)
"""Factors of the target return, or of the predicted one: critics choose among the actions for these."""


class DecisionTransformerPolicy:
    """Call ``reset(targets)``, then ``act(observations)`` and ``observe(rewards)`` alternately.

    The model sees the last K steps in the form of a training window: standardized states, returns-to-go (the target
    return minus the rewards so far, or the model's own prediction) divided by the return scale, the actions taken, and
    the timesteps. With critics, several targets are followed side by side in each environment, and the action of the
    largest value is taken. Mode ``window`` is exact. Mode ``streaming`` is faster, but a different function once the
    window slides (:class:`~primal_dt.policy.inference.StreamingInference`).

    A difference in the last bit of an action grows into a different episode. So forward passes run in tiles of a fixed
    number of environments, with the last tile filled up (:class:`~primal_dt.policy.tiles.Tiles`). On a CPU an
    environment's actions are then bit-identical for any number of other environments and any number of cores.

    Args:
        model: the trained model; it is put into evaluation mode.
        normalizer: the normalizer that the model was trained with.
        mode: ``window`` or ``streaming``.
        tile: environments per forward pass: a number, or ``all`` for one pass over all environments with all threads,
            without the guarantee above. ``auto`` is a number that suits the mode on a CPU, and ``all`` elsewhere.
        critic: critics that choose among the actions for several targets, if the model was trained with critics.
    """

    def __init__(
        self,
        model: DecisionTransformer,
        normalizer: Normalizer,
        *,
        mode: InferenceMode = "window",
        tile: int | Literal["auto", "all"] = "auto",
        critic: TwinCritic | None = None,
    ) -> None:
        require_mode(mode, model.shape)
        self.model = model.eval()
        self.critic = None if model.shape.conditioning == "none" else critic
        self._candidates = np.ones(1) if self.critic is None else np.array(CANDIDATES)
        self.normalizer = normalizer
        self.mode = mode
        self.device = next(model.parameters()).device
        if tile == "auto":
            tile = CPU_TILE[mode] if self.device.type == "cpu" else "all"
        # One thread per tile where the number of threads would change the rounding: in torch's fused attention, which
        # window mode uses, and in matrix products whose rows do not all start at a cache line.
        is_aligned = model.shape.width // model.shape.num_heads % ALIGNED == 0
        side_by_side = mode == "window" or not is_aligned
        self._tiles = Tiles(None) if tile == "all" else Tiles(tile, side_by_side=side_by_side)
        self.reset(np.zeros(0))

    @property
    def needs_target(self) -> bool:
        """Whether the policy follows a target return."""
        return self.model.shape.conditioning == "return"

    @property
    def predicted_returns(self) -> NDArray[np.float64] | None:
        """(E,), the returns-to-go that the last actions follow; None for a policy that predicts none."""
        if self.model.shape.conditioning != "max-return":
            return None
        followed = self._inference.returns[: self.left.size].view(self.left.shape)  # (E, C)
        chosen = followed.gather(1, self._chosen[:, None])[:, 0]
        return chosen.double().cpu().numpy() * self.normalizer.return_scale

    @torch.inference_mode()
    def reset(self, targets: ArrayLike) -> None:
        """Start an episode in each of E environments.

        Args:
            targets: (E,), the target return of each environment. A policy that needs no target ignores their values.
        """
        wanted = np.asarray(targets, np.float64)
        if not self.needs_target:
            wanted = np.zeros_like(wanted)
        if wanted.ndim != 1 or not np.isfinite(wanted).all():
            raise ValueError(f"targets must be a 1-D array of finite numbers, one per environment, not {wanted}")
        # In double precision: single precision would lose digits over a thousand steps.
        self.left = wanted[:, None] * self._candidates
        """(E, C), the returns-to-go of each environment: its targets minus the rewards so far."""
        self._inference = make_inference(self.mode, self.model, self._tiles.whole(self.left.size))
        self._chosen = torch.zeros(len(self.left), dtype=torch.int64, device=self.device)

    @torch.inference_mode()
    def act(self, observations: NDArray[np.floating]) -> NDArray[np.float32]:
        """Compute the actions of this step: (E, S) -> (E, A)."""
        shape, t, count = self.model.shape, self._inference.timestep, len(self.left)
        if observations.shape != (count, shape.state_width):
            raise ValueError(f"observations must have shape {(count, shape.state_width)}, not {observations.shape}")
        if t >= shape.max_timesteps:
            raise ValueError(f"step {t} must be below max_timesteps ({shape.max_timesteps}): the episode is too long")
        states = self.normalizer.states(observations.astype(np.float32))  # float32, as in data sets
        returns = self.normalizer.returns(self.left)
        if not self.needs_target:  # factors of predictions
            returns = np.broadcast_to(self._candidates, self.left.shape).astype(np.float32)
        rows = self._rows(states.repeat(len(self._candidates), axis=0))  # (N, S)
        actions = self._inference.step(rows, self._rows(returns.reshape(-1, 1)), self._tiles)
        if self.critic is not None:
            actions[: self.left.size] = self._best(rows, actions).repeat_interleave(len(self._candidates), dim=0)
        return actions[: self.left.size : len(self._candidates)].cpu().numpy().copy()

    def _best(self, states: Tensor, actions: Tensor) -> Tensor:
        """The action of the largest value among each environment's candidates: (N, S), (N, A) -> (E, A)."""
        critic, space, values = self.critic, self.model.action_space, actions.new_zeros(len(actions))
        assert critic is not None

        def evaluate(rows: slice) -> None:
            values[rows] = critic.least(states[rows], space.encode(actions[rows]))

        self._tiles.run(evaluate, len(actions))
        self._chosen = values[: self.left.size].view(self.left.shape).argmax(1)  # (E,)
        every = actions[: self.left.size].unflatten(0, self.left.shape)  # (E, C, A)
        return every.gather(1, self._chosen[:, None, None].expand(-1, 1, every.shape[-1]))[:, 0]

    def observe(self, rewards: ArrayLike) -> None:
        """Subtract the rewards (E,) of the last actions from the returns-to-go."""
        self.left -= np.asarray(rewards, np.float64)[:, None]

    @torch.inference_mode()
    def keep(self, rows: NDArray[np.bool_]) -> None:
        """Continue with some of the environments; the others have finished.

        Args:
            rows: (E,) bool, True for environments that continue.
        """
        every = np.repeat(rows, len(self._candidates))
        self.left = self.left[rows]
        self._chosen = self._chosen[torch.from_numpy(np.flatnonzero(rows)).to(self.device)]
        self._inference.keep(torch.from_numpy(np.flatnonzero(every)).to(self.device), self._tiles.whole(self.left.size))

    def _rows(self, values: NDArray[np.float32]) -> Tensor:
        """(E C, ...) -> (N, ...), padded with zeros, on the device, in the model's dtype."""
        padded = np.zeros((self._inference.num_rows, *values.shape[1:]), values.dtype)
        padded[: len(values)] = values
        return torch.from_numpy(padded).to(self.device, self.model.head.weight.dtype)
