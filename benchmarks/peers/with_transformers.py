"""Hugging Face transformers' Decision Transformer, with a Python loop over the windows of a batch.

Users of transformers write this loop themselves. This one is faster than most: it sums returns-to-go once, not for each
window.
"""

import numpy as np
import torch
from serve import Episodes, Extras, Request, Step, serve
from transformers import DecisionTransformerConfig, DecisionTransformerModel

RETURN_SCALE = 1000.0


def build(request: Request, episodes: Episodes) -> tuple[Step, Extras]:
    """Build a training step, including its batch."""
    torch.set_num_threads(request.threads)
    num_episodes, length, state_width = episodes.observations.shape
    mean, std = episodes.observations.mean((0, 1)), episodes.observations.std((0, 1)) + 1e-6
    returns = np.cumsum(episodes.rewards[:, ::-1], axis=1)[:, ::-1].astype(np.float32)
    random = np.random.default_rng(0)
    model = DecisionTransformerModel(
        DecisionTransformerConfig(
            state_dim=state_width,
            act_dim=episodes.actions.shape[-1],
            max_ep_len=length,
            hidden_size=request.width,
            n_layer=request.num_layers,
            n_head=request.num_heads,
            activation_function="relu",
            resid_pdrop=request.dropout,
            embd_pdrop=request.dropout,
            attn_pdrop=request.dropout,
        )
    ).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=1e-4)

    def batch() -> tuple[torch.Tensor, ...]:
        columns: tuple[list[np.ndarray], ...] = ([], [], [], [], [], [])
        for _ in range(request.batch_size):
            episode, begin = random.integers(num_episodes), random.integers(length)
            window = slice(begin, begin + request.context)
            states = (episodes.observations[episode, window] - mean) / std
            pad = request.context - len(states)
            parts = (
                states,
                episodes.actions[episode, window],
                episodes.rewards[episode, window, None],
                returns[episode, window, None] / RETURN_SCALE,
                np.arange(begin, begin + len(states)),
                np.ones(len(states), np.int64),
            )
            for column, part in zip(columns, parts, strict=True):
                column.append(np.concatenate([np.zeros((pad, *part.shape[1:]), part.dtype), part]))
        return tuple(torch.from_numpy(np.stack(column)) for column in columns)

    def step() -> None:
        states, actions, rewards, returns_to_go, timesteps, mask = batch()
        output = model(
            states=states.float(),
            actions=actions.float(),
            rewards=rewards.float(),
            returns_to_go=returns_to_go.float(),
            timesteps=timesteps,
            attention_mask=mask,
        )
        seen = mask.bool()
        loss = (output.action_preds[seen] - actions[seen]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        loss.item()

    return step, {}


serve(build)
