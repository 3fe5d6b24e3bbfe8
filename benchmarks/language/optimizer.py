"""The published optimizer and schedule of language models."""

import torch
from torch import nn

__all__ = ["make_optimizer", "make_schedule"]

WARMUP_START = 1e-7
"""Learning rate of the first update."""


def make_optimizer(model: nn.Module, lr: float) -> torch.optim.AdamW:
    """Make AdamW with betas 0.9 and 0.98 and weight decay 0.01, on all weights.

    fairseq calls it ``adam``, but decouples the weight decay from the gradient, as AdamW does.
    """
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)


def make_schedule(optimizer: torch.optim.Optimizer, lr: float, warmup_steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """A linear rise from 1e-7 to ``lr`` in the warm-up, then ``lr sqrt(warmup_steps / step)``."""

    def share(step: int) -> float:
        if step < warmup_steps:
            start = WARMUP_START / lr
            return start + (1 - start) * step / warmup_steps
        return float((warmup_steps / step) ** 0.5)

    return torch.optim.lr_scheduler.LambdaLR(optimizer, share)
