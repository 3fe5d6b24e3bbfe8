"""Attention layers: Primal-Attention and the kinds it is compared with. Requires only torch."""

from primal_dt.attention.build import ATTENTION_KINDS, CAUSAL_KINDS, build_attention
from primal_dt.attention.causal import CausalPrimalAttention, PrimalState, PrimalWindow
from primal_dt.attention.flowformer import FlowformerAttention
from primal_dt.attention.ksvd import PenaltyReduction, ksvd_penalty
from primal_dt.attention.layer import AttentionLayer, AttentionOutput, DualAttention, Positions
from primal_dt.attention.linear import CosformerAttention, LinearAttention, PerformerAttention
from primal_dt.attention.linformer import LinformerAttention
from primal_dt.attention.nystromformer import NystromformerAttention
from primal_dt.attention.pooled import ScaledHeadAttention
from primal_dt.attention.primal import PrimalAttention
from primal_dt.attention.reformer import ReformerAttention
from primal_dt.attention.replace import KsvdPenalty, replace_attention
from primal_dt.attention.softmax import BatchNormAttention, SoftmaxAttention
from primal_dt.attention.spectrum import (
    Spectrum,
    head_distance,
    layer_spectrum,
    model_head_distances,
    model_spectra,
    plot_spectra,
)

__all__ = [
    "ATTENTION_KINDS",
    "CAUSAL_KINDS",
    "AttentionLayer",
    "AttentionOutput",
    "BatchNormAttention",
    "CausalPrimalAttention",
    "CosformerAttention",
    "DualAttention",
    "FlowformerAttention",
    "KsvdPenalty",
    "LinearAttention",
    "LinformerAttention",
    "NystromformerAttention",
    "PenaltyReduction",
    "PerformerAttention",
    "Positions",
    "PrimalAttention",
    "PrimalState",
    "PrimalWindow",
    "ReformerAttention",
    "ScaledHeadAttention",
    "SoftmaxAttention",
    "Spectrum",
    "build_attention",
    "head_distance",
    "ksvd_penalty",
    "layer_spectrum",
    "model_head_distances",
    "model_spectra",
    "plot_spectra",
    "replace_attention",
]
