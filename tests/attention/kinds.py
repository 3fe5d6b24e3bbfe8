"""The layers under test with small options, and the inputs and comparisons that their tests share."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from primal_dt.attention import ATTENTION_KINDS, CAUSAL_KINDS, AttentionOutput, build_attention

OPTIONS: dict[str, dict[str, Any]] = {
    "primal": {"rank": 3},
    "primal, exponential": {"rank": 3, "feature_map": "exponential"},
    "primal, data-independent": {"rank": 5, "data_dependent": False},
    "primal, e": {"rank": 3, "scores": "e"},
    "primal, r": {"rank": 3, "scores": "r"},
    "softmax, explicit": {"fused": False},
    "performer": {"num_features": 16},
    "cosformer": {"horizon": 64},
    "reformer": {"num_buckets": 4, "num_rounds": 3, "chunk_size": 4},
    "linformer": {"max_length": 64, "num_rows": 8},
    "nystromformer": {"num_landmarks": 5},
    "attention_sh": {"strides": (1, 2, 3)},
}
"""Options with which a short sequence exercises every part: several buckets, chunks, segments and strides."""
LONG: dict[str, dict[str, Any]] = {"cosformer": {"horizon": 512}}
"""Options for sequences of several hundred tokens."""
WIDTH, NUM_HEADS = 12, 3

ONE_SIDED = ["primal, e", "primal, r"]
BIDIRECTIONAL = [*ATTENTION_KINDS, "primal, exponential", "primal, data-independent", *ONE_SIDED, "softmax, explicit"]
CAUSAL = [*CAUSAL_KINDS, "primal, exponential", *ONE_SIDED, "softmax, explicit"]
VARIANTS = [(name, False) for name in BIDIRECTIONAL] + [(name, True) for name in CAUSAL]
PRIMAL_VARIANTS = [variant for variant in VARIANTS if variant[0].startswith("primal")]
BASELINE_VARIANTS = [variant for variant in VARIANTS if variant not in PRIMAL_VARIANTS]
SIDES = ("right", "left", "both", "scattered")

all_variants = pytest.mark.parametrize(("name", "causal"), VARIANTS)
baseline_variants = pytest.mark.parametrize(("name", "causal"), BASELINE_VARIANTS)
primal_variants = pytest.mark.parametrize(("name", "causal"), PRIMAL_VARIANTS)
both_directions = pytest.mark.parametrize("causal", [False, True])


def make_layer(name: str, causal: bool, *, seed: int = 0, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    """Build a layer of a kind. Its type is Any: tests reach for the attributes of many classes."""
    torch.manual_seed(seed)
    kind = name.partition(",")[0]
    defaults = {"width": WIDTH, "num_heads": NUM_HEADS, "causal": causal, **OPTIONS.get(name, {})}
    if kind == "primal" and not causal:
        defaults["rank_multi"] = 4  # some sequences have more tokens than the data-dependent weights have rows
    return build_attention(kind, **(defaults | options)).to(dtype)


def make_sequences(
    *lengths: int, width: int = WIDTH, seed: int = 0, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """Random sequences of these lengths, (n, D) each."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length, width, generator=generator, dtype=dtype) for length in lengths]


def make_batch(count: int, length: int, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random sequences of one length, (B, L, D)."""
    return torch.stack(make_sequences(*[length] * count, seed=seed, dtype=dtype))


def pad(sequences: list[Tensor], length: int, side: str, fill: float = 0.0) -> tuple[Tensor, Tensor]:
    """Put sequences into a (B, length, D) batch with padding on the right, on the left, on both sides or scattered."""
    batch = sequences[0].new_full((len(sequences), length, sequences[0].shape[1]), fill)
    valid = torch.zeros(len(sequences), length, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        n = len(sequence)
        if side == "scattered":
            slots = torch.randperm(length, generator=torch.Generator().manual_seed(row))[:n].sort().values
        else:
            slots = torch.arange(n) + {"right": 0, "left": length - n, "both": (length - n) // 2}[side]
        batch[row, slots] = sequence
        valid[row, slots] = True
    return batch, valid


def with_gradients(output: AttentionOutput, layer: nn.Module, x: Tensor, *, allow_unused: bool = False) -> list[Any]:
    """The output, the objective, and the gradients of a loss of both at ``x`` and at each parameter of ``layer``."""
    hidden, objective = output
    loss = hidden.sin().sum() + (0 if objective is None else objective.square().sum())
    inputs = [x, *layer.parameters()]
    return [*output, *torch.autograd.grad(loss, inputs, allow_unused=allow_unused, materialize_grads=allow_unused)]


def run(layer: nn.Module, x: Tensor, valid: Tensor | None = None) -> list[Any]:
    """Call a layer: its output, objective and gradients, as :func:`with_gradients` returns them."""
    x = x.clone().requires_grad_()
    return with_gradients(layer(x, valid, with_objective=True), layer, x)


def assert_bit_equal(actual: Any, expected: Any) -> None:
    """Compare tensors, or lists of tensors."""
    torch.testing.assert_close(actual, expected, atol=0, rtol=0)
