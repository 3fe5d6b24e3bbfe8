"""Replace the attention layers of existing models by Primal-Attention or another kind.

Axes: B batch, L tokens, D width.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from primal_dt.attention.build import build_attention
from primal_dt.attention.causal import CausalPrimalAttention
from primal_dt.attention.decoders import DECODERS, StateLayer, state_layer, valid_from_causal_mask
from primal_dt.attention.ksvd import PenaltyReduction, ksvd_penalty
from primal_dt.attention.layer import AttentionLayer

__all__ = ["KsvdPenalty", "replace_attention"]

ENCODERS = {"ViTLayer": "attention", "DeiTLayer": "attention", "BertLayer": "attention.self"}
"""Class of an encoder layer of Hugging Face transformers -> path of its self-attention."""
OUTPUT_PROJECTIONS = {"BertLayer": "attention.output.dense"}
"""Class of a layer -> path of an output projection outside its self-attention. It is removed: our layers have one."""


class KsvdPenalty:
    """``penalty()`` returns ``mean_l mean(J_l^2)`` of the last forward pass in training mode.

    Add it to the loss: ``loss + eta * penalty()``. The mean over layers is that of the published code, and
    ``reduction="sum"`` is the paper's equation. They are equal for a single layer.
    """

    def __init__(self, layers: "dict[str, _Replacement]", reduction: PenaltyReduction = "mean") -> None:
        self._layers = layers
        self.reduction = reduction

    @classmethod
    def of(cls, model: nn.Module, reduction: PenaltyReduction = "mean") -> "KsvdPenalty":
        """The penalty of all replaced layers of a model, for a copied model or one replaced in several calls."""
        parts = {name: _replacement_in(layer) for name, layer in _layers_of(model).items()}
        return cls({name: part for name, part in parts.items() if part is not None}, reduction)

    @property
    def layers(self) -> dict[str, AttentionLayer]:
        """Path of the Transformer layer in the model -> its new attention layer."""
        return {name: replacement.layer for name, replacement in self._layers.items()}

    def __call__(self) -> Tensor:
        """Return the penalty of the last forward pass. Call it once per pass; it is zero for kinds without J.

        Raises:
            RuntimeError: if no forward pass in training mode, with gradients, ran since the last call, or if no layer
                was replaced. (Activation checkpointing needs ``use_reentrant=False``: the reentrant variant runs its
                first pass without gradients.)
        """
        if not self._layers:
            raise RuntimeError("no layer was replaced: there is nothing to penalize")
        if not all(replacement.passed for replacement in self._layers.values()):
            raise RuntimeError(
                "no forward pass in training mode, with gradients, since the last call of the penalty: "
                "call it once after each forward pass"
            )
        found = [replacement.objective for replacement in self._layers.values() if replacement.objective is not None]
        for replacement in self._layers.values():
            replacement.objective, replacement.passed = None, False
        weight = next(iter(self.layers.values())).output.weight
        return ksvd_penalty(found, self.reduction, like=weight)


class _Replacement(nn.Module):
    """Adapter that gives our layer another library's interface. Stores J of the last call for the penalty."""

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
        # J belongs to the autograd graph of a pass, which cannot be copied or saved.
        return {**self.__dict__, "objective": None, "passed": False}


class _ForTorch(_Replacement):
    """Replaces ``nn.MultiheadAttention`` in an ``nn.TransformerEncoderLayer``."""

    in_proj_bias = None  # disables torch's fast path, which would bypass this layer

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
        """Compute attention; returns None in place of the attention weights."""
        if key is not query or value is not query:
            raise ValueError("query, key and value must be the same tensor: the layer supports self-attention only")
        if query.dim() != 3:
            raise ValueError(f"query must have 3 axes, a batch of sequences, not shape {tuple(query.shape)}")
        if attn_mask is not None or is_causal:
            raise ValueError(
                "attn_mask and is_causal are not supported: the layer is bidirectional, use src_key_padding_mask"
            )
        x = query if self.batch_first else query.transpose(0, 1)
        hidden = self.attend(x, _valid_from_padding(key_padding_mask))
        return hidden if self.batch_first else hidden.transpose(0, 1), None


class _ForEncoder(_Replacement):
    """Replaces the self-attention of an encoder layer of Hugging Face transformers."""

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **others: Any
    ) -> tuple[Tensor, None]:
        """Compute attention; returns None in place of the attention weights."""
        if others.get("encoder_hidden_states") is not None or others.get("past_key_values") is not None:
            raise ValueError(
                "encoder_hidden_states and past_key_values are not supported: "
                "the layer supports self-attention over a whole sequence only"
            )
        return self.attend(hidden_states, _valid_from_attention_mask(attention_mask, hidden_states)), None


class _ForDecoder(_Replacement):
    """Replaces the causal self-attention of a decoder layer of Hugging Face transformers.

    The layer sees all earlier tokens. Rotary position embeddings and sliding windows do not apply to it.
    """

    def __init__(self, layer: AttentionLayer, *, kind: str, index: int) -> None:
        super().__init__(layer)
        self.kind = kind
        self.index = index

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """Compute attention and update the cache, if there is one; returns None in place of the attention weights."""
        for name in ("encoder_hidden_states", "cu_seq_lens_q"):
            if others.get(name) is not None:
                raise ValueError(f"{name} is not supported: the layer is self-attention, with one sequence in each row")
        valid = valid_from_causal_mask(attention_mask, hidden_states)
        if past_key_values is None:
            return self.attend(hidden_states, valid), None
        return self._extend(state_layer(past_key_values, self.index), hidden_states, valid), None

    def _extend(self, past: StateLayer, x: Tensor, valid: Tensor | None) -> Tensor:
        """Compute the outputs (B, M, D) of new tokens, and store the state after them."""
        layer, state = self.layer, None
        if not past.num_tokens:  # a prompt, or training, where use_cache is True by default
            hidden = self.attend(x, valid)
            if isinstance(layer, CausalPrimalAttention):
                _, state = layer.advance(x, layer.initial_state(len(x)), valid, positions=slice(0, 0))
        elif isinstance(layer, CausalPrimalAttention) and past.state is not None:
            hidden, state = layer.advance(x, past.state, valid)
            if self.training:
                self.objective, self.passed = None, False  # J is that of whole sequences
        else:
            raise ValueError(
                f"attention kind {self.kind!r} cannot continue from a cache, because it has no state that is updated "
                "token by token: pass use_cache=False"
            )
        past.store(state, x.shape[1])
        return hidden


def _valid_from_padding(mask: Tensor | None) -> Tensor | None:
    """Convert torch's mask, which is True or minus infinity at padding, to ``valid`` (B, L)."""
    if mask is None:
        return None
    return ~mask if mask.dtype == torch.bool else mask == 0


def _valid_from_attention_mask(mask: Tensor | None, x: Tensor) -> Tensor | None:
    """Convert Hugging Face's mask to ``valid`` (B, L).

    The mask is (B, L), 1 at tokens; or (B, 1, L or 1, L), the same for all queries, True (bool) or 0 (float) at tokens.
    """
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dim() not in (2, 4):
        raise ValueError(f"attention_mask must be a tensor with 2 or 4 axes, not {type(mask).__name__}")
    if mask.dim() == 2:
        return mask.bool().expand(x.shape[:2])
    # A mask expanded from one query (stride 0) is the same for all. Otherwise compare, which waits for the device.
    differs = mask.shape[2] > 1 and mask.stride(2) != 0 and bool((mask != mask[:, :, :1]).any())
    if mask.shape[1] > 1 or differs:
        raise ValueError(
            "attention_mask must be the same for all queries and heads: "
            "the layer is bidirectional and cannot mask pairs of tokens"
        )
    may_look = mask[:, 0, 0]
    return (may_look if mask.dtype == torch.bool else may_look == 0).expand(x.shape[:2])


def replace_attention(
    model: nn.Module,
    layers: Iterable[int] = (-1,),
    *,
    kind: str = "primal",
    reduction: PenaltyReduction = "mean",
    **options: Any,
) -> KsvdPenalty:
    """Replace attention layers of a model, in place. The new layers have new weights; all other weights stay.

    Supports ``nn.TransformerEncoder`` and, of Hugging Face transformers, the encoders ViT, DeiT and BERT and the
    decoders GPT-2, Llama, Mistral, Qwen2 and Qwen3, alone or inside a larger model. With the defaults and
    ``layers=[-1]`` this is Primal.+ of the paper; with all layers, PrimalFormer.

    In decoders the new layers are causal, and ``kind="primal"`` is :class:`CausalPrimalAttention`. It sees all earlier
    tokens: rotary position embeddings and sliding windows do not apply to it. Generation with a cache stores a state of
    fixed size instead of keys and values. Other kinds have no such state and generate with ``use_cache=False``.
    Cross-attention beside a replaced layer stays as it is.

    Args:
        model: the model, changed in place.
        layers: indices of the Transformer layers, counted from the first; negative indices count from the last.
        kind: attention kind, as for :func:`build_attention`. The model determines whether it is causal.
        reduction: how the penalties of several layers are combined: ``mean``, as published, or ``sum``.
        options: options of the kind, such as ``rank=32, rank_multi=10``.

    Returns:
        The penalty. After a forward pass in training mode, add it to the loss: ``loss = loss + eta * penalty()``.
    """
    found = _layers_of(model)
    if fixed := {"width", "num_heads", "causal"} & options.keys():
        raise ValueError(f"{', '.join(sorted(fixed))} cannot be set: the model determines width, num_heads and causal")
    if not found:
        known = ", ".join(["nn.TransformerEncoderLayer", *ENCODERS, *DECODERS])
        raise TypeError(f"{type(model).__name__} has no Transformer layer of a supported class: {known}")
    chosen = _choose(list(found), layers)
    if again := [name for name in chosen if _replacement_in(found[name]) is not None]:
        raise ValueError(f"the attention of {', '.join(again)} has already been replaced")
    replaced = {name: _replace_in(found[name], kind, options) for name in chosen}
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = module.enable_nested_tensor = False  # our layers take padded tensors
    return KsvdPenalty(replaced, reduction)


def _layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """The Transformer layers of a model by name, in order."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.TransformerEncoderLayer) or type(module).__name__ in ENCODERS | DECODERS
    }


def _replacement_in(layer: nn.Module) -> _Replacement | None:
    return next((part for part in layer.modules() if isinstance(part, _Replacement)), None)


def _choose(names: list[str], layers: Iterable[int]) -> list[str]:
    """The names of the chosen layers, in order."""
    if isinstance(layers, int):
        raise TypeError(f"layers must be an iterable of integers, such as [{layers}], not {layers}")
    numbers = set()
    for number in layers:
        if not -len(names) <= number < len(names):
            raise ValueError(f"layer {number} does not exist: the model has layers 0 to {len(names) - 1}")
        numbers.add(number % len(names))
    if not numbers:
        raise ValueError("layers must contain at least one layer, such as [-1]")
    return [names[number] for number in sorted(numbers)]


def _replace_in(layer: nn.Module, kind: str, options: dict[str, Any]) -> _Replacement:
    """Put a new attention layer into a Transformer layer, with that layer's device, dtype and training mode."""

    def build(width: int, num_heads: int, **settings: Any) -> AttentionLayer:
        new = build_attention(kind, width=width, num_heads=num_heads, **(settings | options))
        return new.to(next(layer.parameters()))

    name = type(layer).__name__
    replacement: _Replacement
    if isinstance(layer, nn.TransformerEncoderLayer):
        old, place = layer.self_attn, "self_attn"
        new = build(old.embed_dim, old.num_heads, bias=old.in_proj_bias is not None)
        replacement = _ForTorch(new, batch_first=old.batch_first)
    elif name in DECODERS:
        place = DECODERS[name]
        attention: Any = layer.get_submodule(place)
        config = attention.config
        if not getattr(config, "is_causal", True):
            raise ValueError(f"{name} must be causal, but the model's configuration has is_causal=False")
        new = build(config.hidden_size, config.num_attention_heads, causal=True, **_decoder_settings(attention))
        replacement = _ForDecoder(new, kind=kind, index=attention.layer_idx)
    else:
        if getattr(layer, "is_decoder", False):
            raise ValueError(f"this {name} is a decoder layer: only bidirectional layers can be replaced in its class")
        place = ENCODERS[name]
        attention = layer.get_submodule(place)
        replacement = _ForEncoder(build(attention.config.hidden_size, attention.num_attention_heads))
        if name in OUTPUT_PROJECTIONS:
            layer.set_submodule(OUTPUT_PROJECTIONS[name], nn.Identity())
    layer.set_submodule(place, replacement.train(layer.training))
    return replacement


def _decoder_settings(attention: Any) -> dict[str, Any]:
    """Biases as in the query projection of a Llama-like layer; GPT-2 has biases, and a dropout after its projection."""
    if hasattr(attention, "q_proj"):
        return {"bias": attention.q_proj.bias is not None}
    return {"dropout": attention.resid_dropout.p}
