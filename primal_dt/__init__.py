"""Primal.+DT: a Decision Transformer with Causal Primal-Attention as its top layer, and an attention library."""

from primal_dt.attention import CausalPrimalAttention, PrimalAttention, build_attention

__all__ = ["CausalPrimalAttention", "PrimalAttention", "__version__", "build_attention"]

__version__ = "0.1.0"
