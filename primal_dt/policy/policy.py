"""A trained model as a policy: batched over environments, in raw units, with its own history.

Axes: E environments, C candidates, N = E C rounded up to whole tiles, S state, A action.
"""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from primal_dt.data.normalizer import LARGEST, Normalizer
from primal_dt.model.critic import TwinCritic
from primal_dt.model.transformer import DecisionTransformer, ModelShape
from primal_dt.policy.folded import fold_blocks
from primal_dt.policy.folded_streaming import FoldedStreaming
from primal_dt.policy.inference import (
    ALIGNED,
    Inference,
    InferenceMode,
    WindowInference,
    make_inference,
    require_mode,
)
from primal_dt.policy.stepwise import OnBad, PastEnd, PolicyLimits, StepwisePolicy
from primal_dt.policy.tiles import Tiles

__all__ = ["DecisionTransformerPolicy", "limits_of"]

CPU_TILE: Mapping[InferenceMode, int] = {"window": 8, "streaming": 64}
"""Environments per forward pass, by mode: a compromise between one environment and many (docs/evaluation.md)."""
CANDIDATES = (0.5, 0.75, 1.0, 1.25)
"""Factors of the target return, or of the predicted one: critics choose among the actions for these."""


def limits_of(shape: ModelShape, normalizer: Normalizer, *, has_critic: bool) -> PolicyLimits:
    """What a policy of this model accepts."""
    low, high = normalizer.state_limits
    return PolicyLimits(
        state_width=shape.state_width,
        action_width=shape.action_width,
        observation_low=tuple(low.tolist()),
        observation_high=tuple(high.tolist()),
        largest_return=normalizer.largest_return,
        largest_action=LARGEST,
        max_timesteps=shape.max_timesteps,
        needs_target=shape.conditioning == "return",
        categories=shape.categories,
        candidates=CANDIDATES if has_critic and shape.conditioning != "none" else (1.0,),
    )


class DecisionTransformerPolicy(StepwisePolicy):
    """A trained model as a policy; :class:`~primal_dt.policy.stepwise.StepwisePolicy` describes its calls.

    The model sees the last K steps in the form of a training window: standardized states, returns-to-go (the target
    return minus the rewards so far, or the model's own prediction) divided by the return scale, the actions taken, and
    the timesteps. With critics, several targets are followed side by side in each environment, and the action of the
    largest value is taken. Mode ``window`` is exact. Mode ``streaming`` is faster, but a different function once the
    window slides (:class:`~primal_dt.policy.inference.StreamingInference`).

    A difference in the last bit of an action grows into a different episode. With ``reproducible=True``, forward passes
    run in tiles of a fixed number of environments, with the last tile filled up
    (:class:`~primal_dt.policy.tiles.Tiles`). On a CPU an environment's actions are then bit-identical for any number of
    other environments and any number of cores. One environment then costs as much as a whole tile.

    Args:
        model: the trained model; it is put into evaluation mode.
        normalizer: the normalizer that the model was trained with.
        mode: ``window`` or ``streaming``.
        reproducible: make actions independent of the number of environments, bit for bit, on a CPU. Otherwise the
            policy computes them in the fastest way for that number, with fewer products
            (:mod:`primal_dt.policy.folded`). An episode then uses the weights that the model has at its reset.
        on_bad: ``error`` or ``hold``, see :class:`~primal_dt.policy.stepwise.StepwisePolicy`.
        past_end: ``clamp`` or ``error``, see there.
        critic: critics that choose among the actions for several targets, if the model was trained with critics.
    """

    def __init__(
        self,
        model: DecisionTransformer,
        normalizer: Normalizer,
        *,
        mode: InferenceMode = "window",
        reproducible: bool = False,
        on_bad: OnBad = "error",
        past_end: PastEnd = "clamp",
        critic: TwinCritic | None = None,
    ) -> None:
        require_mode(mode, model.shape)
        limits = limits_of(model.shape, normalizer, has_critic=critic is not None)
        super().__init__(limits, on_bad=on_bad, past_end=past_end)
        self.model = model.eval()
        self.critic = None if model.shape.conditioning == "none" else critic
        self.normalizer = normalizer
        self.mode = mode
        self.reproducible = reproducible
        self.device = next(model.parameters()).device
        # One thread per tile where the number of threads would change the rounding: in torch's fused attention, which
        # window mode uses, and in matrix products whose rows do not all start at a cache line.
        is_aligned = model.shape.width // model.shape.num_heads % ALIGNED == 0
        self._many = Tiles(CPU_TILE[mode], side_by_side=mode == "window" or not is_aligned)
        self._start(np.zeros(0))

    @property
    def predicted_returns(self) -> NDArray[np.float64] | None:
        """(E,), the returns-to-go that the last actions follow; None for a policy that predicts none."""
        if self.model.shape.conditioning != "max-return":
            return None
        followed = self._inference.returns[: self.left.size].view(self.left.shape)  # (E, C)
        chosen = followed.gather(1, self._chosen[:, None])[:, 0]
        return chosen.double().cpu().numpy() * self.normalizer.return_scale

    @torch.inference_mode()
    def _begin(self) -> None:
        self._tiles = self._choose_tiles(self.left.size)
        self._inference = self._make_inference(self._tiles.whole(self.left.size))
        self._chosen = torch.zeros(len(self.left), dtype=torch.int64, device=self.device)

    def _make_inference(self, num_rows: int) -> Inference:
        if self.reproducible:
            return make_inference(self.mode, self.model, num_rows)
        if self.mode == "streaming" and self.model.shape.context > 1:
            return FoldedStreaming(self.model, num_rows)
        return WindowInference(self.model, num_rows, fold_blocks(self.model.blocks))

    def _choose_tiles(self, num_rows: int) -> Tiles:
        """How to divide this number of rows: into tiles of a fixed size, or not at all."""
        if self.device.type != "cpu":
            return Tiles(None)
        if self.reproducible:
            return self._many
        if num_rows <= CPU_TILE[self.mode]:
            return Tiles(None, most_threads=1)  # products are too small for more
        return self._many if self.mode == "window" else Tiles(None)

    @torch.inference_mode()
    def _choose(self, observations: NDArray[np.float32]) -> NDArray[np.float32]:
        states = self.normalizer.states(observations)
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

    @torch.inference_mode()
    def _replace_actions(self, actions: NDArray[np.float64]) -> None:
        rows = torch.from_numpy(actions.repeat(len(self._candidates), axis=0))
        self._inference.actions[: self.left.size] = rows.to(self._inference.actions)

    @torch.inference_mode()
    def _keep(self, rows: NDArray[np.bool_]) -> None:
        every = np.repeat(rows, len(self._candidates))
        self._chosen = self._chosen[torch.from_numpy(np.flatnonzero(rows)).to(self.device)]
        self._inference.keep(torch.from_numpy(np.flatnonzero(every)).to(self.device), self._tiles.whole(self.left.size))

    def _rows(self, values: NDArray[np.float32]) -> Tensor:
        """(E C, ...) -> (N, ...), padded with zeros, on the device, in the model's dtype."""
        padded = np.zeros((self._inference.num_rows, *values.shape[1:]), values.dtype)
        padded[: len(values)] = values
        return torch.from_numpy(padded).to(self.device, self.model.head.weight.dtype)
