"""The layers under test, small, and the batches they are tested on."""

from typing import Any

import torch
from torch import Tensor

from primal_dt.attention import ATTENTION_KINDS, CAUSAL_KINDS, AttentionLayer, build_attention

# Options that make a short sequence exercise every part: several buckets, chunks, segments and runs.
OPTIONS: dict[str, dict[str, Any]] = {
    "primal": {"rank": 3},
    "primal, exponential": {"rank": 3, "feature_map": "exponential"},
    "primal, data-independent": {"rank": 5, "data_dependent": False},
    "softmax, explicit": {"fused": False},
    "performer": {"num_features": 16},
    "cosformer": {"horizon": 64},
    "reformer": {"num_buckets": 4, "num_rounds": 3, "chunk_size": 4},
    "linformer": {"max_length": 64, "num_rows": 8},
    "nystromformer": {"num_landmarks": 5},
    "attention_sh": {"strides": (1, 2, 3)},
}

BIDIRECTIONAL = [*ATTENTION_KINDS, "primal, exponential", "primal, data-independent", "softmax, explicit"]
CAUSAL = [*CAUSAL_KINDS, "primal, exponential", "softmax, explicit"]
VARIANTS = [(name, False) for name in BIDIRECTIONAL] + [(name, True) for name in CAUSAL]
PRIMAL_VARIANTS = [variant for variant in VARIANTS if variant[0].startswith("primal")]
BASELINE_VARIANTS = [variant for variant in VARIANTS if not variant[0].startswith("primal")]

WIDTH = 12
NUM_HEADS = 3


def make_layer(
    name: str, causal: bool, *, seed: int = 0, dtype: torch.dtype = torch.float64, **options: Any
) -> AttentionLayer:
    torch.manual_seed(seed)
    kind = name.partition(",")[0]
    own = dict(OPTIONS.get(name, {}))
    if kind == "primal" and not causal:
        own["rank_multi"] = 4  # fewer rows of data-dependent weights than some sequences have tokens, more than others
    layer = build_attention(kind, width=WIDTH, num_heads=NUM_HEADS, causal=causal, **(own | options))
    return layer.to(dtype)


def make_batch(
    lengths: tuple[int, ...] = (11, 11, 11), *, seed: int = 0, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """Sequences of these lengths, (n, D) each."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length, WIDTH, generator=generator, dtype=dtype) for length in lengths]


def pad(sequences: list[Tensor], length: int, side: str, fill: float = 0.0) -> tuple[Tensor, Tensor]:
    """Put sequences into a (B, length, D) batch with padding on the right, left, on both sides or scattered."""
    batch = torch.full((len(sequences), length, WIDTH), fill, dtype=sequences[0].dtype)
    valid = torch.zeros(len(sequences), length, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        n = len(sequence)
        free = length - n
        if side == "scattered":
            slots = torch.randperm(length, generator=torch.Generator().manual_seed(row))[:n].sort().values
        else:
            start = {"right": 0, "left": free, "both": free // 2}[side]
            slots = torch.arange(start, start + n)
        batch[row, slots] = sequence
        valid[row, slots] = True
    return batch, valid


SIDES = ("right", "left", "both", "scattered")
