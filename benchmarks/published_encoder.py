"""The networks of the Primal-Attention paper's published code, for UEA and for the Long-Range Arena.

The attention layers are ours. In the published networks they see other inputs: series are padded to one length, and the
padding takes part in attention (UEA), in data-dependent weights and in J (both).

Axes: B batch, L tokens, D width, H heads.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.encoder import Encoder, EncoderBlock, EncoderOutput, EncoderShape
from primal_dt.attention import PenaltyReduction, PrimalAttention, SoftmaxAttention, ksvd_penalty
from primal_dt.attention.dropout import Dropout
from primal_dt.attention.softmax import softmax_mix

__all__ = ["LraEncoder", "UeaEncoder", "build_encoder"]


def build_encoder(embed: nn.Module, shape: EncoderShape) -> Encoder:
    """Build the network that ``shape.network`` names."""
    networks: dict[str, type[Encoder]] = {"ours": Encoder, "uea": UeaEncoder, "lra": LraEncoder}
    return networks[shape.network](embed, shape)


class UeaBlock(EncoderBlock):
    """``x = norm(x + attention(x))``, then ``norm(x + mlp(x))``: post-norm. Padding is not masked."""

    def forward(self, x: Tensor, valid: Tensor | None, *, with_objective: bool) -> tuple[Tensor, Tensor | None]:
        hidden, objective = self.attention(x, None, with_objective=with_objective)
        x = self.attention_norm(x + hidden)
        return self.mlp_norm(x + self.mlp(x)), objective


class UeaEncoder(Encoder):
    """The published network for time series.

    Inputs are padded with zeros to the longest series of the training split, or cut to its length, projected, and
    multiplied by ``sqrt(D)``. Learned positions start uniform in [-0.02, 0.02]. Blocks are post-norm, followed by one
    more LayerNorm, GELU and dropout. Padding is then set to zero, and one linear layer maps all positions together to
    the class scores.
    """

    block_type = UeaBlock

    def __init__(self, embed: nn.Module, shape: EncoderShape) -> None:
        super().__init__(embed, shape)
        nn.init.uniform_(self.positions, -0.02, 0.02)
        self.final_dropout = Dropout(shape.dropout)

    def _build_head(self) -> nn.Module:
        return nn.Linear(self.shape.max_length * self.shape.width, self.shape.num_classes)

    def forward(self, x: Tensor, valid: Tensor | None = None, *, with_objective: bool = False) -> EncoderOutput:
        missing = self.shape.max_length - x.shape[1]  # negative for a series that must be cut
        valid = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if valid is None else valid
        x = F.pad(x.masked_fill(~valid[..., None], 0.0), (0, 0, 0, missing))  # (B, L, channels)
        return super().forward(x, F.pad(valid, (0, missing)), with_objective=with_objective)

    def _embed(self, x: Tensor) -> Tensor:
        return self.embed(x) * self.shape.width**0.5 + self.positions

    def _classify(self, tokens: Tensor, valid: Tensor | None) -> Tensor:
        assert valid is not None
        tokens = self.final_dropout(F.gelu(tokens)).masked_fill(~valid[..., None], 0.0)  # (B, L, D)
        return self.head(tokens.flatten(1))


class LraBlock(EncoderBlock):
    """``x + attention(norm(x))``, then ``x + mlp(norm(x))``, with padding treated as in the published code.

    Softmax attention masks padding as keys only. Primal-Attention does not mask it, and its heads are set to zero there
    before the output projection. Other kinds mask padding as they do elsewhere.
    """

    def forward(self, x: Tensor, valid: Tensor | None, *, with_objective: bool) -> tuple[Tensor, Tensor | None]:
        hidden, objective = self._attend(self.attention_norm(x), valid, with_objective)
        x = x + hidden
        return x + self.mlp(self.mlp_norm(x)), objective

    def _attend(self, x: Tensor, valid: Tensor | None, with_objective: bool) -> tuple[Tensor, Tensor | None]:
        layer = self.attention
        if valid is not None and isinstance(layer, SoftmaxAttention):
            options: dict[str, Any] = {"causal": False, "fused": layer.fused, "dropout": layer.weight_dropout}
            mixed = softmax_mix(*layer.project(x), valid, None, **options)  # (B, H, L, P)
            return layer.dropout(layer.output(mixed.transpose(1, 2).flatten(-2))), None
        if valid is not None and isinstance(layer, PrimalAttention):
            hidden, objective = layer(x, None, with_objective=with_objective)
            at_padding = layer.dropout(layer.output.bias.expand_as(hidden))  # the output projection of zeros
            return torch.where(valid[..., None], hidden, at_padding), objective
        hidden, objective = layer(x, valid, with_objective=with_objective)
        return hidden, objective


class LraEncoder(Encoder):
    """The published network for the Long-Range Arena.

    Token and position embeddings start as normal(0.02). Sequences are padded to the task's length with the last token
    of the vocabulary, and the mean over that length, with zeros at padding, goes into an MLP with one hidden layer.
    The penalty squares the mean of J over the batch. With ``shape.zero_is_padding``, token 0 counts as padding, as
    black pixels do in the published code, whose padding is token 0.
    """

    block_type = LraBlock

    embed: nn.Embedding

    def __init__(self, embed: nn.Module, shape: EncoderShape) -> None:
        super().__init__(embed, shape)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, x: Tensor, valid: Tensor | None = None, *, with_objective: bool = False) -> EncoderOutput:
        missing = self.shape.max_length - x.shape[1]
        if missing > 0:
            valid = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if valid is None else valid
            x, valid = F.pad(x, (0, missing)), F.pad(valid, (0, missing))
        if self.shape.zero_is_padding:
            valid = x != 0 if valid is None else valid & (x != 0)
        elif valid is not None:
            x = x.masked_fill(~valid, self.embed.num_embeddings - 1)
        return super().forward(x, valid, with_objective=with_objective)

    def penalty(self, output: EncoderOutput, reduction: PenaltyReduction = "mean") -> Tensor:
        """The KSVD penalty: the mean, or the sum, over layers of ``mean(J)^2``."""
        means = [objective.mean()[None] for objective in output.objectives]
        return ksvd_penalty(means, reduction, like=output.logits)

    def _build_head(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(self.features, self.shape.mlp_width),
            nn.ReLU(),
            nn.Linear(self.shape.mlp_width, self.shape.num_classes),
        )

    def _classify(self, tokens: Tensor, valid: Tensor | None) -> Tensor:
        if valid is not None:
            tokens = tokens.masked_fill(~valid[..., None], 0.0)
        return self.head(self._compare(tokens.mean(1)))
