"""Blocks with fewer and larger products, for inference: the same function with other rounding.

Where two linear maps follow one another, their product is computed once: the scale and shift of a LayerNorm go into the
map behind it, and in a primal layer W_e, W_r, the map that merges the scores, and the output projection become one map
from features to outputs. Queries, keys and values of a softmax layer are one product.

Axes: B rows, M new tokens, L tokens, D width, H heads, P = D / H, R rank.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from primal_dt.attention import CausalPrimalAttention, SoftmaxAttention
from primal_dt.attention.feature_maps import CosineMap
from primal_dt.model.transformer import Block, DecisionTransformer

__all__ = ["FoldedBlock", "FoldedEmbedding", "FoldedPrimal", "FoldedSoftmax", "fold_blocks"]

Positions = slice | None


def fold_blocks(blocks: Iterable[nn.Module]) -> "list[Block | FoldedBlock]":
    """Fold the blocks whose layers are softmax or primal ones with the cosine map; leave the others as they are."""
    return [_fold(block) for block in blocks if isinstance(block, Block)]


def _fold(block: Block) -> "Block | FoldedBlock":
    layer = block.attention
    is_primal = isinstance(layer, CausalPrimalAttention) and isinstance(layer.feature_map, CosineMap)
    return FoldedBlock(block) if is_primal or isinstance(layer, SoftmaxAttention) else block


class FoldedSoftmax(nn.Module):
    """A softmax layer behind a LayerNorm without scale and shift."""

    def __init__(self, layer: SoftmaxAttention, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.num_heads, self.head_width = layer.num_heads, layer.head_width
        scale = layer.head_width**-0.5
        weights = (layer.query.weight * scale, layer.key.weight, layer.value.weight)
        biases = [_bias(part) for part in (layer.query, layer.key, layer.value)]
        self.into = _linear(torch.cat(weights), torch.cat((biases[0] * scale, *biases[1:])), norm)
        self.output = _copy(layer.output)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, M, D) -> scaled queries, keys and values, (B, H, M, P) each."""
        q, k, v = self.into(x).unflatten(-1, (3, self.num_heads, self.head_width)).transpose(1, 3).unbind(2)
        return q, k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, seen: None = None) -> Tensor:
        """Causal attention of queries (B, H, M, P), the last M or all, to keys and values (B, H, L, P): (B, M, D)."""
        if q.shape[2] > 1:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)
        else:
            mixed = (q @ k.mT).softmax(-1) @ v
        return self.output(mixed.transpose(1, 2).flatten(2))

    def project_rows(self, x: Tensor, num_new: int) -> tuple[Tensor, Tensor, Tensor]:
        """(B M, D) -> scaled queries, keys and values, (B H, M, P) each."""
        q, k, v = self.into(x).view(-1, num_new, 3 * self.num_heads * self.head_width).chunk(3, dim=2)
        return self._by_head(q), self._by_head(k), self._by_head(v)

    def _by_head(self, x: Tensor) -> Tensor:
        """(B, M, D) -> (B H, M, P)."""
        if self.num_heads == 1:
            return x
        return x.unflatten(2, (self.num_heads, self.head_width)).transpose(1, 2).flatten(0, 1)

    def output_rows(self, mixed: Tensor) -> Tensor:
        """Mixed values (B H, M, P) -> (B M, D)."""
        if self.num_heads > 1:
            mixed = mixed.unflatten(0, (-1, self.num_heads)).transpose(1, 2)
        return self.output(mixed.reshape(-1, self.num_heads * self.head_width))

    def forward(self, x: Tensor, positions: Positions) -> Tensor:
        """(B, L, D) -> (B, M, D) at all positions or the last one."""
        q, k, v = self.project(x)
        return self.attend(q if positions is None else q[:, :, positions], k, v, seen=None)


class FoldedPrimal(nn.Module):
    """A causal primal layer with the cosine map behind a LayerNorm without scale and shift.

    With ``[e; r]`` linear in the features and the output linear in ``[e; r]``, the output is linear in the features.
    """

    def __init__(self, layer: CausalPrimalAttention, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.width, self.num_heads, self.head_width = layer.width, layer.num_heads, layer.head_width
        self.into = _linear(layer.query_key.weight, _bias(layer.query_key), norm)
        outputs = layer.output.weight.unflatten(1, (self.num_heads, self.head_width))  # (D, H, P)
        maps = layer.merge.weight.split(layer.rank, dim=1)  # (P, R) for each of the scores
        used = {"both": (0, 1), "e": (0,), "r": (1,)}[layer.scores]
        parts = [outputs.new_zeros(self.width, self.num_heads, self.head_width) for _ in range(2)]
        for number, merge in zip(used, maps, strict=True):
            weight = (layer.e_weight, layer.r_weight)[number]  # (H, P, R)
            parts[number] = torch.einsum("dhp,pr,hqr->dhq", outputs, merge, weight)
        shift = _bias(layer.output) + torch.einsum("dhp,p->d", outputs, _bias(layer.merge))
        self.output = _linear(torch.stack(parts, 1).flatten(1), shift, None)  # (D, 2 H P) -> D

    def forward(self, x: Tensor, positions: Positions) -> Tensor:
        """(B, L, D) -> (B, M, D) at all positions or the last one."""
        if positions is not None:
            return self._map(x.mean(1, keepdim=True))
        return self._map(x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device)[:, None])

    def _map(self, context: Tensor) -> Tensor:
        """Means of tokens (B, M, D) -> outputs (B, M, D)."""
        return self.map_rows(context.flatten(0, 1)).view_as(context)

    def map_rows(self, context: Tensor) -> Tensor:
        """Means of tokens (B M, D) -> outputs (B M, D)."""
        z = self.into(context).view(-1, 2 * self.num_heads, self.head_width)  # (B M, 2 H, P)
        length = torch.linalg.vector_norm(z, dim=2, keepdim=True).clamp_min(1e-12)
        return self.output((z / length).flatten(1))


class FoldedEmbedding(nn.Module):
    """The embeddings of several kinds of tokens and their LayerNorm, as one product.

    Args:
        model: the model.
        kinds: the kinds of the tokens, in order.
    """

    def __init__(self, model: DecisionTransformer, kinds: Sequence[str]) -> None:
        super().__init__()
        self.kinds = tuple(kinds)
        self.norm = model.embed_norm
        self.action_space = model.action_space
        parts = [getattr(model, f"embed_{kind}") for kind in kinds]
        weight = torch.block_diag(*(part.weight for part in parts))
        self.into = _linear(weight, torch.cat([_bias(part) for part in parts]), None)

    def forward(self, values: Mapping[str, Tensor], time: Tensor) -> Tensor:
        """Values (B, ...) by kind, and the embeddings of the tokens' timesteps (M, D) -> tokens (B M, D)."""
        encoded = [self.action_space.encode(values[kind]) if kind == "action" else values[kind] for kind in self.kinds]
        x = self.into(torch.cat(encoded, 1)).view(-1, *time.shape)  # (B, M, D)
        return self.norm((x + time).view(-1, time.shape[1]))


class FoldedBlock(nn.Module):
    """A block of the transformer, with the calls that inference makes."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        width, layer, norm = block.mlp_norm.normalized_shape, block.attention, block.attention_norm
        self.attention_norm = nn.LayerNorm(width, norm.eps, elementwise_affine=False)
        self.attention: FoldedSoftmax | FoldedPrimal
        if isinstance(layer, SoftmaxAttention):
            self.attention = FoldedSoftmax(layer, norm)
        else:
            assert isinstance(layer, CausalPrimalAttention), type(layer)
            self.attention = FoldedPrimal(layer, norm)
        first, _, second, _ = block.mlp
        assert isinstance(first, nn.Linear)
        assert isinstance(second, nn.Linear)
        self.mlp_norm = nn.LayerNorm(width, block.mlp_norm.eps, elementwise_affine=False)
        self.first, self.second = _linear(first.weight, _bias(first), block.mlp_norm), _copy(second)

    def forward(self, x: Tensor, valid: None, *, positions: Positions = None) -> tuple[Tensor, None]:
        """(B, L, D), all tokens real -> (B, M, D) at all positions or the last one."""
        hidden = self.attention(self.attention_norm(x), positions)
        return self.finish(x if positions is None else x[:, positions], hidden), None

    def finish(self, x: Tensor, hidden: Tensor) -> Tensor:
        """Complete the block after attention: input x and attention output, (B, M, D) each -> (B, M, D)."""
        x = x + hidden
        return x + self.second(self.first(self.mlp_norm(x)).relu())


def _bias(linear: nn.Linear) -> Tensor:
    return linear.weight.new_zeros(len(linear.weight)) if linear.bias is None else linear.bias


def _linear(weight: Tensor, bias: Tensor, norm: nn.LayerNorm | None) -> nn.Linear:
    """A linear map, behind the scale and shift of a LayerNorm if there is one."""
    linear = nn.utils.skip_init(nn.Linear, weight.shape[1], weight.shape[0], device=weight.device, dtype=weight.dtype)
    with torch.no_grad():
        linear.weight.copy_(weight if norm is None else weight * norm.weight)
        linear.bias.copy_(bias if norm is None else bias + weight @ norm.bias)
    return linear


def _copy(linear: nn.Linear) -> nn.Linear:
    return _linear(linear.weight, _bias(linear), None)
