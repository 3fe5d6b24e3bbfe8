"""A small bidirectional Transformer that classifies sequences, with any attention stack.

Axes: B batch, L tokens, D width, C classes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.blocks import PRIMAL_PLUS, STACKS, Block, build_layer, layer_kinds
from primal_dt.attention import PenaltyReduction, ksvd_penalty
from primal_dt.attention.dropout import Dropout

__all__ = ["Encoder", "EncoderBlock", "EncoderOutput", "EncoderShape", "Network"]

Network = Literal["ours", "uea", "lra", "vit"]


@dataclass(frozen=True)
class EncoderShape:
    """Shape of the network behind the embedding."""

    num_classes: int
    max_length: int
    """Maximum sequence length. Each position has a learned embedding."""
    attention: str = PRIMAL_PLUS
    """The attention stack, one of ``STACKS``."""
    num_layers: int = 2
    width: int = 512
    """Embedding width D."""
    num_heads: int = 8
    mlp_width: int = 512
    dropout: float = 0.1
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Kind of attention -> additional arguments of ``build_attention``."""
    network: Network = "ours"
    """The network: ``ours`` (:class:`Encoder`), the published one of UEA or LRA (benchmarks.published_encoder), or
    ``vit`` (benchmarks.images)."""
    is_pair: bool = False
    """Whether an input is a pair of sequences to be compared."""
    zero_is_padding: bool = False
    """Whether token 0 counts as padding, in the published LRA network."""

    def __post_init__(self) -> None:
        if self.attention not in STACKS:
            raise ValueError(f"attention must be one of {', '.join(STACKS)}, not {self.attention!r}")

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """The kind of attention in each layer, from the bottom."""
        return layer_kinds(self.attention, self.num_layers)


class EncoderOutput(NamedTuple):
    """Output of the encoder for a batch."""

    logits: Tensor
    """Class scores, (B, C)."""
    objectives: list[Tensor]
    """J (B,) of each layer that has one; empty if not requested."""


class EncoderBlock(Block):
    """A pre-norm block of an encoder, with GELU, and dropout inside the MLP too."""

    def __init__(self, kind: str, shape: EncoderShape) -> None:
        attention = build_layer(
            kind,
            width=shape.width,
            num_heads=shape.num_heads,
            max_length=shape.max_length,
            dropout=shape.dropout,
            options=shape.options,
        )
        super().__init__(attention, mlp_width=shape.mlp_width, dropout=shape.dropout, hidden_dropout=shape.dropout)


class Encoder(nn.Module):
    """Embedding plus learned positions, pre-norm blocks, the mean over real tokens, and a linear layer.

    Args:
        embed: maps the input to (B, L, D): ``nn.Linear`` for time series, ``nn.Embedding`` for symbols.
        shape: the shape of the rest.
    """

    block_type: type[EncoderBlock] = EncoderBlock

    def __init__(self, embed: nn.Module, shape: EncoderShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = embed
        self.positions = nn.Parameter(torch.empty(shape.max_length, shape.width))
        nn.init.normal_(self.positions, std=0.02)
        self.dropout = Dropout(shape.dropout)
        self.blocks = nn.ModuleList(self.block_type(kind, shape) for kind in shape.layer_kinds)
        self.final_norm = nn.LayerNorm(shape.width)
        self.head = self._build_head()

    def forward(self, x: Tensor, valid: Tensor | None = None, *, with_objective: bool = False) -> EncoderOutput:
        """Classify a batch of sequences.

        Args:
            x: input of ``embed``, (B, L, ...). Padding may have any finite values. If the shape says ``is_pair``,
                (2B, L, ...), the first sequence of each pair in the first half.
            valid: (B, L) bool, True for real tokens; None if all tokens are real.
            with_objective: also return J of the layers that have one.
        """
        tokens = self.dropout(self._embed(x))  # (B, L, D)
        objectives: list[Tensor] = []
        for block in self.blocks:
            tokens, objective = block(tokens, valid, with_objective=with_objective)
            if objective is not None:
                objectives.append(objective)
        return EncoderOutput(self._classify(self.final_norm(tokens), valid), objectives)

    def penalty(self, output: EncoderOutput, reduction: PenaltyReduction = "mean") -> Tensor:
        """The KSVD penalty: the mean, or the sum, over layers of ``mean(J^2)``; zero if no layer has a J."""
        return ksvd_penalty(output.objectives, reduction, like=output.logits)

    def _embed(self, x: Tensor) -> Tensor:
        """The input -> tokens with positions, (B, L, D)."""
        tokens: Tensor = self.embed(x)
        if tokens.shape[1] > self.shape.max_length:
            raise ValueError(
                f"the sequence has {tokens.shape[1]} tokens, more than max_length ({self.shape.max_length})"
            )
        return tokens + self.positions[: tokens.shape[1]]

    def _build_head(self) -> nn.Module:
        return nn.Linear(self.features, self.shape.num_classes)

    @property
    def features(self) -> int:
        """Width of what the classifier gets: one sequence's mean, or four combinations of the means of a pair."""
        return (4 if self.shape.is_pair else 1) * self.shape.width

    def _classify(self, tokens: Tensor, valid: Tensor | None) -> Tensor:
        """Normalized tokens (B, L, D) -> class scores (B, C)."""
        return self.head(self._compare(masked_mean(tokens, valid)))

    def _compare(self, pooled: Tensor) -> Tensor:
        """(B, D) as it is; for pairs, (2B, D) -> (B, 4D): both, their product and their difference, as published."""
        if not self.shape.is_pair:
            return pooled
        first, second = pooled.chunk(2)
        return torch.cat((first, second, first * second, first - second), -1)


def masked_mean(x: Tensor, valid: Tensor | None) -> Tensor:
    """Mean over real tokens: (B, L, D) -> (B, D)."""
    if valid is None:
        return x.mean(1)
    total = x.masked_fill(~valid[..., None], 0.0).sum(1)
    return total / valid.sum(1, keepdim=True).clamp(min=1)
