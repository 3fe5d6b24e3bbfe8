"""Transformer blocks with any kind of attention, and the stacks of kinds that the benchmarks compare.

Axes: B batch, L tokens, D width.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from primal_dt.attention import ATTENTION_KINDS, CAUSAL_KINDS, AttentionLayer, build_attention
from primal_dt.attention.dropout import Dropout

__all__ = [
    "CAUSAL_STACKS",
    "PENALIZED",
    "PRIMALFORMER",
    "PRIMAL_PLUS",
    "STACKS",
    "Block",
    "build_layer",
    "check_stacks",
    "layer_kinds",
]

PRIMAL_PLUS, PRIMALFORMER = "primal-plus", "primalformer"
PENALIZED = (PRIMAL_PLUS, PRIMALFORMER)
"""Stacks in which at least one layer has a KSVD objective J."""
STACKS = ("softmax", *PENALIZED, *(kind for kind in ATTENTION_KINDS if kind not in ("primal", "softmax")))
"""``softmax``: canonical attention in all layers. ``primal-plus``: Primal-Attention in the last layer, softmax below.
``primalformer``: Primal-Attention in all layers. Any other name: that kind of attention in all layers."""


def layer_kinds(stack: str, num_layers: int) -> tuple[str, ...]:
    """The kind of attention in each layer of a stack, from the bottom."""
    if stack == PRIMAL_PLUS:
        return ("softmax",) * (num_layers - 1) + ("primal",)
    return ("primal" if stack == PRIMALFORMER else stack,) * num_layers


CAUSAL_STACKS = tuple(stack for stack in STACKS if set(layer_kinds(stack, 2)) <= set(CAUSAL_KINDS))
"""The stacks whose layers all have a causal form."""


def check_stacks(attention: Sequence[str], seeds: Sequence[int], known: Sequence[str] = STACKS) -> None:
    """Check the attention stacks and seeds of a benchmark.

    Raises:
        ValueError: if one of the two is empty or has duplicates, or if a stack is not among the known ones.
    """
    if unknown := set(attention) - set(known):
        raise ValueError(f"attention must be among {', '.join(known)}, not {', '.join(sorted(unknown))}")
    for name, values in (("attention", attention), ("seeds", seeds)):
        if not values or len(set(values)) < len(values):
            raise ValueError(f"{name} must have at least one entry and no duplicates, not {list(values)}")


def build_layer(
    kind: str,
    *,
    width: int,
    num_heads: int,
    max_length: int,
    dropout: float,
    options: Mapping[str, Mapping[str, Any]],
    causal: bool = False,
) -> AttentionLayer:
    """Build an attention layer for sequences of at most ``max_length`` tokens.

    Args:
        kind: the kind of attention.
        width: D.
        num_heads: the number of heads.
        max_length: given to the kinds that need the length of the longest sequence.
        dropout: dropout probability after the output projection.
        options: kind of attention -> additional arguments of ``build_attention``.
        causal: whether a token attends only to itself and earlier tokens.
    """
    lengths = {"linformer": "max_length", "cosformer": "horizon"} | ({} if causal else {"primal": "max_rows"})
    own = dict(options.get(kind, {}))
    if kind in lengths:
        own[lengths[kind]] = max_length
    return build_attention(kind, width=width, num_heads=num_heads, causal=causal, dropout=dropout, **own)


class Block(nn.Module):
    """``x + attention(norm(x))``, then ``x + mlp(norm(x))``.

    Args:
        attention: the attention layer.
        mlp_width: width of the MLP's hidden layer.
        dropout: dropout probability of the MLP's output.
        hidden_dropout: dropout probability inside the MLP, after the activation.
        activation: the MLP's activation.
    """

    def __init__(
        self,
        attention: AttentionLayer,
        *,
        mlp_width: int,
        dropout: float,
        hidden_dropout: float,
        activation: type[nn.Module] = nn.GELU,
    ) -> None:
        super().__init__()
        width = attention.width
        self.attention_norm = nn.LayerNorm(width)
        self.attention = attention
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, mlp_width),
            activation(),
            Dropout(hidden_dropout),
            nn.Linear(mlp_width, width),
            Dropout(dropout),
        )

    def forward(self, x: Tensor, valid: Tensor | None, *, with_objective: bool) -> tuple[Tensor, Tensor | None]:
        """Return the output (B, L, D), and J (B,) if the layer has one and it is requested."""
        hidden, objective = self.attention(self.attention_norm(x), valid, with_objective=with_objective)
        return self.transform(x + hidden), objective

    def transform(self, x: Tensor) -> Tensor:
        """Apply the second half, ``x + mlp(norm(x))``."""
        transformed: Tensor = x + self.mlp(self.mlp_norm(x))
        return transformed
