"""An autoregressive language model with any causal attention stack.

Axes: B batch, L tokens, D width, V words.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.blocks import CAUSAL_STACKS, PRIMAL_PLUS, Block, build_layer, layer_kinds
from primal_dt.attention.dropout import Dropout

__all__ = ["LanguageModel", "LanguageOutput", "LanguageShape"]


@dataclass(frozen=True)
class LanguageShape:
    """Shape of a language model. The defaults are the published sizes."""

    num_words: int
    """V, the size of the vocabulary."""
    max_length: int = 512
    """Longest sequence in training and evaluation. Only cosformer's attention depends on it."""
    attention: str = PRIMAL_PLUS
    """The attention stack, one of ``CAUSAL_STACKS``."""
    num_layers: int = 6
    width: int = 512
    """D."""
    num_heads: int = 8
    mlp_width: int = 2048
    equal_parameters: bool = False
    """Make the MLP of each block wider or narrower, so that the block has as many parameters as with softmax attention
    (to within half a hidden unit, D + 1 parameters)."""
    dropout: float = 0.1
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Kind of attention -> additional arguments of ``build_attention``."""

    def __post_init__(self) -> None:
        if self.attention not in CAUSAL_STACKS:
            raise ValueError(f"attention must be one of {', '.join(CAUSAL_STACKS)}, not {self.attention!r}")
        if self.width % 2 or self.width % self.num_heads:
            raise ValueError(f"width ({self.width}) must be even, and divisible by num_heads ({self.num_heads})")

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """The kind of attention in each layer, from the bottom."""
        return layer_kinds(self.attention, self.num_layers)

    def block(self, kind: str) -> Block:
        """Build a block."""
        attention = build_layer(
            kind,
            width=self.width,
            num_heads=self.num_heads,
            max_length=self.max_length,
            dropout=self.dropout,
            options=self.options,
            causal=True,
        )
        mlp_width = self.mlp_width
        if self.equal_parameters:
            of_softmax = 4 * (self.width + 1) * self.width  # queries, keys, values and output
            missing = of_softmax - sum(parameter.numel() for parameter in attention.parameters())
            mlp_width = max(1, mlp_width + round(missing / (2 * self.width + 1)))
        return Block(attention, mlp_width=mlp_width, dropout=self.dropout, hidden_dropout=0.0, activation=nn.ReLU)


class LanguageOutput(NamedTuple):
    """Output of the language model for a batch."""

    logits: Tensor
    """Scores of the next word at each token, (B, L, V)."""
    objectives: list[Tensor]
    """J (B,) of each layer that has one; empty if not requested."""


class LanguageModel(nn.Module):
    """``logits = norm(blocks(sqrt(D) E[x] + positions)) E'``: pre-norm blocks with ReLU, and one embedding E (V, D).

    This is fairseq's ``transformer_lm`` with tied embeddings, which the published code of Flowformer and of
    Primal-Attention trains on WikiText-103. E starts as normal(0, 1 / D). Positions are sinusoidal, so that a sequence
    may be of any length. Dropout is applied to the sum of the embeddings, to the output of attention, and to the output
    of the MLP; not to attention weights.

    Differences from fairseq: all linear maps start as torch's do (fairseq starts some of them by Xavier's rule, with
    zero biases), positions count from 0 instead of 2, and computation is in single precision (or bfloat16) instead of
    half precision. The attention layers are this package's: a causal primal layer takes means of its input instead of
    means of its queries and keys, which is equal.
    """

    def __init__(self, shape: LanguageShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.num_words, shape.width)
        nn.init.normal_(self.embed.weight, std=shape.width**-0.5)
        self.dropout = Dropout(shape.dropout)
        self.blocks = nn.ModuleList(shape.block(kind) for kind in shape.layer_kinds)
        self.final_norm = nn.LayerNorm(shape.width)

    def forward(self, x: Tensor, valid: Tensor | None = None, *, with_objective: bool = False) -> LanguageOutput:
        """Score the next word at each token.

        Args:
            x: (B, L), the tokens so far.
            valid: (B, L) bool, True for real tokens; None if all tokens are real.
            with_objective: also return J of the layers that have one.
        """
        features, objectives = self.features(x, valid, with_objective=with_objective)
        return LanguageOutput(self.score(features), objectives)

    def features(
        self, x: Tensor, valid: Tensor | None = None, *, with_objective: bool = False
    ) -> tuple[Tensor, list[Tensor]]:
        """Tokens (B, L) -> features (B, L, D) that :meth:`score` maps to words, and J of the layers that have one."""
        hidden = self.dropout(self.embed_tokens(x))  # (B, L, D)
        objectives: list[Tensor] = []
        for block in self.blocks:
            hidden, objective = block(hidden, valid, with_objective=with_objective)
            if objective is not None:
                objectives.append(objective)
        return self.final_norm(hidden), objectives

    def embed_tokens(self, x: Tensor, first: int = 0) -> Tensor:
        """Embed tokens (B, L) whose positions begin at ``first``: (B, L, D)."""
        embedded = self.embed(x) * self.shape.width**0.5
        places = torch.arange(first, first + x.shape[1], device=x.device)
        return embedded + sinusoids(places, self.shape.width).to(embedded.dtype)

    def score(self, features: Tensor) -> Tensor:
        """Features (..., D) -> scores of the words (..., V)."""
        return F.linear(features, self.embed.weight)


def sinusoids(places: Tensor, width: int) -> Tensor:
    """Embed positions (L,) as sines, then cosines, whose wavelengths go from 2 pi to 20,000 pi: (L, D)."""
    half = width // 2
    rates = torch.exp(torch.arange(half, device=places.device) * (-math.log(10_000) / max(half - 1, 1)))
    angles = places[:, None] * rates  # (L, D / 2)
    return torch.cat((angles.sin(), angles.cos()), -1)
