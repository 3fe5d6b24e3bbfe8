"""d3rlpy's Decision Transformer: its buffer samples the batch, and its ``update`` trains on it, as in its ``fit``."""

import numpy as np
import torch
from d3rlpy.algos import DecisionTransformerConfig
from d3rlpy.dataset import Episode, InfiniteBuffer, ReplayBuffer
from d3rlpy.models import VectorEncoderFactory
from d3rlpy.optimizers import AdamWFactory
from serve import Episodes, Extras, Request, Step, serve


def build(request: Request, episodes: Episodes) -> tuple[Step, Extras]:
    """Build a training step, including its batch."""
    torch.set_num_threads(request.threads)
    buffer = ReplayBuffer(
        InfiniteBuffer(),
        episodes=[
            Episode(observations, actions, rewards[:, None].astype(np.float32), terminated=False)
            for observations, actions, rewards in zip(
                episodes.observations, episodes.actions, episodes.rewards, strict=True
            )
        ],
    )
    algorithm = DecisionTransformerConfig(
        batch_size=request.batch_size,
        context_size=request.context,
        max_timestep=episodes.rewards.shape[1] + 1,
        encoder_factory=VectorEncoderFactory([request.width], exclude_last_activation=True),
        optim_factory=AdamWFactory(weight_decay=1e-4, clip_grad_norm=0.25),
        num_heads=request.num_heads,
        num_layers=request.num_layers,
        attn_dropout=request.dropout,
        resid_dropout=request.dropout,
        embed_dropout=request.dropout,
    ).create(device="cpu:0")
    algorithm.build_with_dataset(buffer)

    def step() -> None:
        algorithm.update(buffer.sample_trajectory_batch(request.batch_size, length=request.context))

    return step, {}


serve(build)
