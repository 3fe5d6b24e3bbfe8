"""A trained model as a policy: batched over environments, in raw units, with a history of its own.

Axes: E environments, N = E rounded up to whole tiles, S state, A action.
"""

from collections.abc import Mapping
from typing import Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from primal_dt.data.normalizer import Normalizer
from primal_dt.model.transformer import DecisionTransformer
from primal_dt.policy.inference import ALIGNED, InferenceMode, make_inference, require_mode
from primal_dt.policy.tiles import Tiles

__all__ = ["DecisionTransformerPolicy"]

CPU_TILE: Mapping[InferenceMode, int] = {"window": 8, "streaming": 64}
"""Environments of one forward pass, by mode: few enough for one environment, enough for many (docs/evaluation.md)."""


class DecisionTransformerPolicy:
    """``reset(targets)``, then ``act(observations)`` and ``observe(rewards)`` in turns.

    The model sees the last K steps, as a training window would have them: standardized states, what is left of the
    target return divided by the return scale, the actions that were taken, the timesteps. With the mode ``window`` that
    is exact; ``streaming`` is faster, and another function once the window slides
    (:class:`~primal_dt.policy.inference.StreamingInference`).

    A difference in the last bit of an action grows into another episode. So forward passes run in tiles of a fixed
    number of environments, the last one filled up (:class:`~primal_dt.policy.tiles.Tiles`): on a CPU an environment's
    actions are the same bit for bit, however many others there are, and on however many cores.

    Args:
        model: trained; it is put into evaluation mode.
        normalizer: the one that it was trained with.
        mode: ``window`` or ``streaming``.
        tile: environments of a forward pass: a number, or ``all`` of them, with all threads and without the promise
            above. ``auto``: on a CPU a number that suits the mode, elsewhere all.
    """

    def __init__(
        self,
        model: DecisionTransformer,
        normalizer: Normalizer,
        *,
        mode: InferenceMode = "window",
        tile: int | Literal["auto", "all"] = "auto",
    ) -> None:
        require_mode(mode, model.shape)
        self.model = model.eval()
        self.normalizer = normalizer
        self.mode = mode
        self.device = next(model.parameters()).device
        if tile == "auto":
            tile = CPU_TILE[mode] if self.device.type == "cpu" else "all"
        # Torch's fused attention, in window mode, rounds by the thread. So do products of streaming, unless all their
        # rows begin at a cache line.
        is_aligned = model.shape.width // model.shape.num_heads % ALIGNED == 0
        side_by_side = mode == "window" or not is_aligned
        self._tiles = Tiles(None) if tile == "all" else Tiles(tile, side_by_side=side_by_side)
        self.reset(np.zeros(0))

    @torch.inference_mode()
    def reset(self, targets: ArrayLike) -> None:
        """Begin an episode in each of E environments.

        Args:
            targets: (E,), the return to ask for in each.
        """
        wanted = np.asarray(targets, np.float64)
        if wanted.ndim != 1 or not np.isfinite(wanted).all():
            raise ValueError(f"targets must be a vector of finite numbers, one for each environment, not {wanted}")
        # In double precision: single precision would lose digits over a thousand steps.
        self.left = wanted.copy()
        """(E,), what is left of each target."""
        self._inference = make_inference(self.mode, self.model, self._tiles.whole(len(self.left)))

    @torch.inference_mode()
    def act(self, observations: NDArray[np.floating]) -> NDArray[np.float32]:
        """(E, S) -> (E, A), the actions of this step."""
        shape, t, count = self.model.shape, self._inference.timestep, len(self.left)
        if observations.shape != (count, shape.state_width):
            raise ValueError(f"observations must have shape {(count, shape.state_width)}, not {observations.shape}")
        if t >= shape.max_timesteps:
            raise ValueError(f"step {t} is past the model's last, {shape.max_timesteps - 1}: the episode is too long")
        actions = self._inference.step(
            self._rows(self.normalizer.states(observations.astype(np.float32))),  # as data sets have them
            self._rows(self.normalizer.returns(self.left)[:, None]),
            self._tiles,
        )
        return actions[:count].cpu().numpy().copy()

    def observe(self, rewards: ArrayLike) -> None:
        """The rewards (E,) that the actions earned: what is left of the targets drops by them."""
        self.left -= np.asarray(rewards, np.float64)

    @torch.inference_mode()
    def keep(self, rows: NDArray[np.bool_]) -> None:
        """Go on with some of the environments: the others have finished.

        Args:
            rows: (E,), True for those that go on.
        """
        self.left = self.left[rows]
        self._inference.keep(torch.from_numpy(np.flatnonzero(rows)).to(self.device), self._tiles.whole(len(self.left)))

    def _rows(self, values: NDArray[np.float32]) -> Tensor:
        """(E, ...) -> (N, ...), on the device, in the model's dtype."""
        padded = np.zeros((self._inference.num_rows, *values.shape[1:]), values.dtype)
        padded[: len(values)] = values
        return torch.from_numpy(padded).to(self.device, self.model.head.weight.dtype)
