"""Small models and batches, for the tests of the model and of the policy."""

from dataclasses import replace

import torch

from primal_dt.data.sampler import Batch
from primal_dt.model.transformer import DecisionTransformer, ModelShape
from tests.conftest import SHAPE as SMALL_SHAPE

BATCH, STEPS = 3, 6
LOW, HIGH = (-1.0, -2.0), (1.0, 4.0)
SHAPE = replace(
    SMALL_SHAPE, action_low=LOW, action_high=HIGH, num_heads=2, context=STEPS, dropout=0.0, max_timesteps=50
)


def random_model(shape: ModelShape, noise: float, dtype: torch.dtype = torch.float32) -> DecisionTransformer:
    """A model in evaluation mode with noise added to its weights, so that every part affects the result."""
    torch.manual_seed(0)
    model = DecisionTransformer(shape).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    return model


def make_model(attention: str = "primal-plus") -> DecisionTransformer:
    return random_model(replace(SHAPE, attention=attention), 0.3, torch.float64)


def make_batch(*lengths: int) -> Batch:
    """A random batch of windows with these numbers of valid steps; without lengths, three full windows."""
    random = torch.Generator().manual_seed(0)
    counts = torch.tensor(lengths or (STEPS,) * BATCH)[:, None]
    states, actions, returns_to_go = (
        torch.randn(len(counts), STEPS, width, generator=random, dtype=torch.float64)
        for width in (SHAPE.state_width, SHAPE.action_width, 1)
    )
    steps = torch.arange(STEPS)
    timesteps = torch.randint(0, 40, (len(counts), 1), generator=random) + steps
    return Batch(states, actions, returns_to_go, timesteps, valid=steps < counts)


def part_of(batch: Batch, *index: slice) -> Batch:
    """Some of the rows, or of the rows and steps, of a batch."""
    return Batch(*(tensor[index] for tensor in vars(batch).values()))
