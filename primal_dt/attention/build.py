"""Build any kind of attention layer by name."""

import inspect
from typing import Any

from primal_dt.attention.causal import CausalPrimalAttention
from primal_dt.attention.flowformer import FlowformerAttention
from primal_dt.attention.layer import AttentionLayer
from primal_dt.attention.linear import CosformerAttention, LinearAttention, PerformerAttention
from primal_dt.attention.linformer import LinformerAttention
from primal_dt.attention.nystromformer import NystromformerAttention
from primal_dt.attention.pooled import ScaledHeadAttention
from primal_dt.attention.primal import PrimalAttention
from primal_dt.attention.reformer import ReformerAttention
from primal_dt.attention.softmax import BatchNormAttention, SoftmaxAttention

__all__ = ["ATTENTION_KINDS", "CAUSAL_KINDS", "build_attention"]

ATTENTION_KINDS: dict[str, type[AttentionLayer]] = {
    "primal": PrimalAttention,
    "softmax": SoftmaxAttention,
    "linear": LinearAttention,
    "performer": PerformerAttention,
    "cosformer": CosformerAttention,
    "flowformer": FlowformerAttention,
    "reformer": ReformerAttention,
    "linformer": LinformerAttention,
    "nystromformer": NystromformerAttention,
    "attention_bn": BatchNormAttention,
    "attention_sh": ScaledHeadAttention,
}
"""Kind -> its layer class. Causal ``primal`` layers have another class, :class:`CausalPrimalAttention`."""

CAUSAL_KINDS = tuple(
    kind
    for kind, layer in ATTENTION_KINDS.items()
    if kind == "primal" or "causal" in inspect.signature(layer).parameters
)
"""The kinds that support causal attention."""


def build_attention(
    kind: str, *, width: int, num_heads: int, causal: bool = False, dropout: float = 0.0, **options: Any
) -> AttentionLayer:
    """Build a layer of the given kind: ``layer(x, valid)`` maps (B, L, width) to an :class:`AttentionOutput`.

    Args:
        kind: ``primal``, ``softmax``, ``linear``, ``performer``, ``cosformer``, ``flowformer``, ``reformer``,
            ``linformer``, ``nystromformer``, ``attention_bn`` or ``attention_sh``.
        width: D, the width of the input and the output.
        num_heads: H; must divide the width.
        causal: a token attends only to itself and earlier tokens. Not available for ``linformer`` and
            ``nystromformer``.
        dropout: dropout probability after the output projection.
        options: further arguments of the kind's class, such as ``rank=32`` for ``primal``; an unknown name raises an
            error that lists the valid ones. ``linformer`` needs ``max_length``.
    """
    if kind not in ATTENTION_KINDS:
        raise ValueError(f"unknown attention kind {kind!r}: it must be one of {', '.join(ATTENTION_KINDS)}")
    if causal and kind not in CAUSAL_KINDS:
        raise ValueError(f"attention kind {kind!r} is bidirectional only; causal kinds: {', '.join(CAUSAL_KINDS)}")
    layer = CausalPrimalAttention if kind == "primal" and causal else ATTENTION_KINDS[kind]
    parameters = inspect.signature(layer).parameters
    known = set(parameters) - {"width", "num_heads", "causal", "dropout"}
    if unknown := set(options) - known:
        direction = "causal" if causal else "bidirectional"
        raise TypeError(
            f"{direction} attention kind {kind!r} has no option {', '.join(sorted(unknown))}; "
            f"its options: {', '.join(sorted(known))}"
        )
    if missing := [name for name in known - set(options) if parameters[name].default is inspect.Parameter.empty]:
        raise TypeError(f"attention kind {kind!r} needs the option {', '.join(sorted(missing))}")
    if "causal" in parameters:
        options["causal"] = causal
    return layer(width=width, num_heads=num_heads, dropout=dropout, **options)
