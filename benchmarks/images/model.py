"""Vision transformers with any attention stack: DeiT without a distillation token, in all sizes.

Axes: B batch, S side of an image in pixels, L tokens, D width.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.encoder import Encoder, EncoderBlock, EncoderShape

__all__ = ["MODELS", "DropPath", "PatchEmbedding", "Size", "VisionTransformer", "build_model", "num_tokens"]

EPSILON = 1e-6
"""Epsilon of the LayerNorms, as in DeiT."""
NOT_DECAYED = ("positions", "class_token", "lam")


class Size(NamedTuple):
    """Layers, width and heads. The MLP has four times the width."""

    num_layers: int
    width: int
    num_heads: int


MODELS: Mapping[str, Size] = {
    "deit_tiny": Size(12, 192, 3),
    "deit_small": Size(12, 384, 6),
    "deit_base": Size(12, 768, 12),
    "small": Size(4, 96, 3),
}
"""Name -> size: those of DeiT, and one that trains on a CPU in minutes."""


def num_tokens(side: int, patch: int) -> int:
    """Number of tokens of an image: one for each patch, and the class token."""
    return (side // patch) ** 2 + 1


class PatchEmbedding(nn.Module):
    """Images (B, 3, S, S) -> a class token, then a token for each patch: (B, L, D)."""

    def __init__(self, patch: int, width: int) -> None:
        super().__init__()
        self.project = nn.Conv2d(3, width, patch, stride=patch)
        self.class_token = nn.Parameter(torch.empty(1, 1, width))
        nn.init.trunc_normal_(self.class_token, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.project(x).flatten(2).mT  # (B, L - 1, D)
        return torch.cat((self.class_token.expand(len(x), -1, -1).to(patches.dtype), patches), dim=1)


class DropPath(nn.Module):
    """Stochastic depth: in training, leave out a branch for some sequences, and scale up the others."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = 0.0

    def forward(self, branch: Tensor) -> Tensor:
        if not self.training or not self.rate:
            return branch
        kept = torch.rand(len(branch), 1, 1, device=branch.device) >= self.rate
        return branch * kept / (1 - self.rate)


class VisionBlock(EncoderBlock):
    """The pre-norm block, with stochastic depth."""

    def __init__(self, kind: str, shape: EncoderShape) -> None:
        super().__init__(kind, shape)
        self.drop_path = DropPath()

    def forward(self, x: Tensor, valid: Tensor | None, *, with_objective: bool) -> tuple[Tensor, Tensor | None]:
        hidden, objective = self.attention(self.attention_norm(x), valid, with_objective=with_objective)
        x = x + self.drop_path(hidden)
        return x + self.drop_path(self.mlp(self.mlp_norm(x))), objective


class VisionTransformer(Encoder):
    """DeiT without a distillation token: the classifier reads the class token.

    Linear maps, positions and the class token start as a truncated normal(0.02) with zero biases, those of the primal
    layers included; W_e, W_r and Lambda start as the layer does. Stochastic depth rises linearly from 0 to its rate.
    """

    block_type = VisionBlock

    def __init__(self, embed: nn.Module, shape: EncoderShape, *, drop_path: float = 0.0) -> None:
        super().__init__(embed, shape)
        rates = torch.linspace(0, drop_path, shape.num_layers).tolist()
        for block, rate in zip(self.blocks, rates, strict=True):
            assert isinstance(block, VisionBlock)
            block.drop_path.rate = rate
        nn.init.trunc_normal_(self.positions, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.LayerNorm):
                module.eps = EPSILON

    def _classify(self, tokens: Tensor, valid: Tensor | None) -> Tensor:
        return self.head(tokens[:, 0])

    def weight_groups(self, decay: float) -> list[dict[str, Any]]:
        """Groups of weights for an optimizer: matrices decay; biases, norms, positions, class token, Lambda do not."""
        decayed: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, weight in self.named_parameters():
            is_matrix = weight.dim() > 1 and name.rpartition(".")[2] not in NOT_DECAYED
            (decayed if is_matrix else others).append(weight)
        return [{"params": decayed, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]


def build_model(shape: EncoderShape, *, patch: int, drop_path: float = 0.0) -> VisionTransformer:
    """Build a vision transformer with new weights."""
    return VisionTransformer(PatchEmbedding(patch, shape.width), shape, drop_path=drop_path)
