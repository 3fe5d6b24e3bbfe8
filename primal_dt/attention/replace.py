"""Primal-Attention, or another kind, inside models of others.

Axes: B batch, L tokens, D width.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from primal_dt.attention.build import build_attention
from primal_dt.attention.layer import AttentionLayer

__all__ = ["KsvdPenalty", "replace_attention"]

HUGGING_FACE = {"ViTLayer": "attention", "DeiTLayer": "attention", "BertLayer": "attention.self"}
"""Class of a Transformer layer -> where its self-attention is."""
OUTPUT_PROJECTIONS = {"BertLayer": "attention.output.dense"}
"""Class of a layer -> its output projection, if that is outside its self-attention. Ours have one of their own."""


class KsvdPenalty:
    """``penalty()`` is ``sum_l mean(J_l^2)`` of the last forward pass in training mode: ``loss + eta * penalty()``."""

    def __init__(self, layers: "dict[str, _Replacement]") -> None:
        self._layers = layers

    @classmethod
    def of(cls, model: nn.Module) -> "KsvdPenalty":
        """The penalty of all layers that were replaced in a model, for one that is a copy or was replaced in steps."""
        parts = {name: _replacement_in(layer) for name, layer in _layers_of(model).items()}
        return cls({name: part for name, part in parts.items() if part is not None})

    @property
    def layers(self) -> dict[str, AttentionLayer]:
        """Where in the model -> the new layer."""
        return {name: replacement.layer for name, replacement in self._layers.items()}

    def __call__(self) -> Tensor:
        """Read it once for each forward pass; with kinds that have no J it is zero.

        Raises:
            RuntimeError: if there was no forward pass in training mode, with gradients, since the last time. (With
                activation checkpointing it takes ``use_reentrant=False``: the older way has its first pass without.)
        """
        if not self._layers:
            raise RuntimeError("no layer was replaced: there is nothing to penalize")
        if not all(replacement.passed for replacement in self._layers.values()):
            raise RuntimeError(
                "there was no forward pass in training mode, with gradients, since the penalty was last read"
            )
        total = next(iter(self.layers.values())).output.weight.new_zeros(())
        for replacement in self._layers.values():
            if replacement.objective is not None:
                total = total + replacement.objective.square().mean()
            replacement.objective, replacement.passed = None, False
        return total


class _Replacement(nn.Module):
    """A layer of ours that is called as another's, and keeps J of its last call for the penalty."""

    def __init__(self, layer: AttentionLayer) -> None:
        super().__init__()
        self.layer = layer
        self.objective: Tensor | None = None
        self.passed = False

    def attend(self, x: Tensor, valid: Tensor | None) -> Tensor:
        learns = self.training and torch.is_grad_enabled()
        hidden, objective = self.layer(x, valid, with_objective=learns)
        if self.training:
            self.objective, self.passed = objective, learns
        return hidden

    def __getstate__(self) -> dict[str, Any]:
        # What a copy or a file takes along: J hangs on the graph of a pass, which cannot be copied.
        return {**self.__dict__, "objective": None, "passed": False}


class _ForTorch(_Replacement):
    """In the place of ``nn.MultiheadAttention`` in a ``nn.TransformerEncoderLayer``."""

    in_proj_bias = None  # so that torch does not go past it, straight to its own kernels

    def __init__(self, layer: AttentionLayer, *, batch_first: bool) -> None:
        super().__init__(layer)
        self.batch_first = batch_first
        self.num_heads = layer.num_heads

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """Attend; there is no matrix of weights to return."""
        if key is not query or value is not query:
            raise ValueError("only self-attention was replaced: query, key and value must be one tensor")
        if query.dim() != 3:
            raise ValueError(f"a batch of sequences is wanted, with three axes, not one of shape {tuple(query.shape)}")
        if attn_mask is not None or is_causal:
            raise ValueError(
                "the layer is bidirectional: it takes src_key_padding_mask, and no mask of pairs of tokens"
            )
        x = query if self.batch_first else query.transpose(0, 1)
        hidden = self.attend(x, _valid_from_padding(key_padding_mask))
        return hidden if self.batch_first else hidden.transpose(0, 1), None


class _ForHuggingFace(_Replacement):
    """In the place of the self-attention of a layer of Hugging Face transformers."""

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **others: Any
    ) -> tuple[Tensor, None]:
        """Attend; there is no matrix of weights to return."""
        if others.get("encoder_hidden_states") is not None or others.get("past_key_values") is not None:
            raise ValueError("only self-attention over a whole sequence was replaced")
        return self.attend(hidden_states, _valid_from_attention_mask(attention_mask, hidden_states)), None


def _valid_from_padding(mask: Tensor | None) -> Tensor | None:
    """From torch's mask, True or minus infinity at padding."""
    if mask is None:
        return None
    return ~mask if mask.dtype == torch.bool else mask == 0


def _valid_from_attention_mask(mask: Tensor | None, x: Tensor) -> Tensor | None:
    """From Hugging Face's: (B, L), 1 at tokens; or (B, 1, L or 1, L), alike for all queries, bool or 0 at tokens."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dim() not in (2, 4):
        raise ValueError(f"an attention_mask of tokens is wanted, not {type(mask).__name__}")
    if mask.dim() == 2:
        return mask.bool().expand(x.shape[:2])
    # What was expanded from one query is alike for all; otherwise one has to look, which waits for the device.
    differs = mask.shape[2] > 1 and mask.stride(2) != 0 and bool((mask != mask[:, :, :1]).any())
    if mask.shape[1] > 1 or differs:
        raise ValueError("the layer is bidirectional: it takes an attention_mask of tokens, and none of pairs of them")
    may_look = mask[:, 0, 0]
    return (may_look if mask.dtype == torch.bool else may_look == 0).expand(x.shape[:2])


def replace_attention(
    model: nn.Module, layers: Iterable[int] = (-1,), *, kind: str = "primal", **options: Any
) -> KsvdPenalty:
    """Put new attention layers into a model, in place. Their weights are new; all others stay.

    For ``nn.TransformerEncoder``, and for ViT, DeiT and BERT encoders of Hugging Face transformers, alone or within a
    larger model. With the defaults and ``layers=[-1]`` this is Primal.+ of the paper; with all layers, PrimalFormer.

    Args:
        model: is changed.
        layers: which Transformer layers, counted from the first; negative from the last.
        kind: as for :func:`build_attention`, bidirectional.
        options: of the kind, such as ``rank=32, rank_multi=10``.

    Returns:
        The penalty: ``loss = loss + eta * penalty()`` after a forward pass in training mode.
    """
    found = _layers_of(model)
    if fixed := {"width", "num_heads", "causal"} & options.keys():
        raise ValueError(f"{', '.join(sorted(fixed))} cannot be chosen: the model says what it is")
    if not found:
        known = ", ".join(["nn.TransformerEncoderLayer", *HUGGING_FACE])
        raise TypeError(f"{type(model).__name__} has no Transformer layer of a known kind: {known}")
    chosen = _choose(list(found), layers)
    if again := [name for name in chosen if _replacement_in(found[name]) is not None]:
        raise ValueError(f"the attention of {', '.join(again)} was replaced before")
    replaced = {name: _replace_in(found[name], kind, options) for name in chosen}
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = module.enable_nested_tensor = False  # ours take padded tensors
    return KsvdPenalty(replaced)


def _layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """The Transformer layers of a model, by name, from the first."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.TransformerEncoderLayer) or type(module).__name__ in HUGGING_FACE
    }


def _replacement_in(layer: nn.Module) -> _Replacement | None:
    return next((part for part in layer.modules() if isinstance(part, _Replacement)), None)


def _choose(names: list[str], layers: Iterable[int]) -> list[str]:
    """The names of the chosen layers, from the first to the last."""
    if isinstance(layers, int):
        raise TypeError(f"layers must be several numbers, such as [{layers}], not {layers}")
    numbers = set()
    for number in layers:
        if not -len(names) <= number < len(names):
            raise ValueError(f"there is no layer {number}: the model has {len(names)}, 0 to {len(names) - 1}")
        numbers.add(number % len(names))
    if not numbers:
        raise ValueError("layers must name at least one layer, such as [-1]")
    return [names[number] for number in sorted(numbers)]


def _replace_in(layer: nn.Module, kind: str, options: dict[str, Any]) -> _Replacement:
    """Put a new attention layer into a Transformer layer, on its device, in its dtype and mode."""

    def build(width: int, num_heads: int, *, bias: bool = True) -> AttentionLayer:
        told = {"bias": bias, **options}
        return build_attention(kind, width=width, num_heads=num_heads, **told).to(next(layer.parameters()))

    replacement: _Replacement
    if isinstance(layer, nn.TransformerEncoderLayer):
        old, place = layer.self_attn, "self_attn"
        new = build(old.embed_dim, old.num_heads, bias=old.in_proj_bias is not None)
        replacement = _ForTorch(new, batch_first=old.batch_first)
    else:
        name = type(layer).__name__
        if getattr(layer, "is_decoder", False):
            raise ValueError(f"{name} is a decoder's: only bidirectional layers can be replaced")
        place = HUGGING_FACE[name]
        attention: Any = layer.get_submodule(place)
        replacement = _ForHuggingFace(build(attention.config.hidden_size, attention.num_attention_heads))
        if name in OUTPUT_PROJECTIONS:
            layer.set_submodule(OUTPUT_PROJECTIONS[name], nn.Identity())
    layer.set_submodule(place, replacement.train(layer.training))
    return replacement
