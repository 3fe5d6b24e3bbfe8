"""Critics: values of actions, ``Q(s, a)``, for value guidance.

Axes: ... any leading axes, S state, F encoded action.
"""

import torch
from torch import Tensor, nn

from primal_dt.model.transformer import ModelShape

__all__ = ["TwinCritic"]

WIDTH, NUM_HIDDEN = 256, 3


class TwinCritic(nn.Module):
    """Two MLPs of the same form, each ``(s, a) -> Q``. The smaller value of the two is less often too large.

    Args:
        shape: the shape of the model that is guided.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        width = shape.state_width + shape.action_space().num_features
        self.critics = nn.ModuleList(_mlp(width) for _ in range(2))

    def forward(self, states: Tensor, actions: Tensor) -> Tensor:
        """Standardized states (..., S), encoded actions (..., F) -> both values, (2, ...)."""
        x = torch.cat((states, actions), dim=-1)
        return torch.stack([critic(x)[..., 0] for critic in self.critics])

    def least(self, states: Tensor, actions: Tensor) -> Tensor:
        """The smaller of the two values, (...)."""
        return self(states, actions).amin(0)


def _mlp(width: int) -> nn.Sequential:
    widths = [width, *([WIDTH] * NUM_HIDDEN)]
    hidden = [part for i in range(NUM_HIDDEN) for part in (nn.Linear(widths[i], widths[i + 1]), nn.Mish())]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, 1))
