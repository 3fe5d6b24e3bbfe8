"""Primal.+DT: a Decision Transformer with Causal Primal-Attention as its top layer, and an attention library."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from primal_dt.attention import CausalPrimalAttention, PrimalAttention, build_attention
    from primal_dt.hub.sources import load_policy

__all__ = ["CausalPrimalAttention", "PrimalAttention", "__version__", "build_attention", "load_policy"]

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Load the attention library, or the policies, when first used: exported policies run without torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "load_policy":
        from primal_dt.hub.sources import load_policy

        return load_policy
    from primal_dt import attention

    return getattr(attention, name)
