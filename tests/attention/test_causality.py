"""A causal layer's past does not know its future: not one bit of it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from primal_dt.attention import AttentionLayer, ReformerAttention

from .kinds import CAUSAL, SIDES, WIDTH, make_batch, make_layer, pad

SEEDS_AND_TYPES = [(0, torch.float32), (1, torch.float64)]


def hold_sorting(layer: AttentionLayer) -> None:
    """Reformer's past is causal given who shares a chunk with whom; hold that to its first answer."""
    if isinstance(layer, ReformerAttention):
        first: list[Tensor] = []
        sort: Callable[[Tensor, Tensor | None], Tensor] = layer.sort_tokens

        def sort_once(q: Tensor, valid: Tensor | None) -> Tensor:
            first.append(sort(q, valid))
            return first[0]

        layer.sort_tokens = sort_once  # type: ignore[method-assign]


def past_of(layer: AttentionLayer, x: Tensor, valid: Tensor | None, cut: int) -> tuple[Tensor, Tensor]:
    """The outputs before ``cut``, and the gradient of a function of them at the inputs before ``cut``."""
    x = x.clone().requires_grad_()
    hidden = layer(x, valid).hidden[:, :cut]
    weights = torch.linspace(-1, 1, hidden.numel(), dtype=x.dtype).view_as(hidden)
    (gradient,) = torch.autograd.grad((weights * hidden.square()).sum(), x)
    assert (gradient[:, cut:] == 0).all()  # nor does it ask anything of it
    return hidden.detach(), gradient[:, :cut]


@pytest.mark.parametrize(("seed", "dtype"), SEEDS_AND_TYPES)
@pytest.mark.parametrize("length", [9, 300])  # within one chunk of the scan, and over several
@pytest.mark.parametrize("name", CAUSAL)
def test_perturbing_the_future_leaves_the_past_bit_equal(name: str, length: int, seed: int, dtype: torch.dtype) -> None:
    options: dict[str, Any] = {"horizon": 512} if name == "cosformer" else {}
    layer = make_layer(name, True, seed=seed, dtype=dtype, **options)
    hold_sorting(layer)
    x = torch.stack(make_batch((length, length), seed=seed, dtype=dtype))
    for cut in {1, length // 3, length // 2 + 1, length - 1}:
        future = x.clone()
        future[:, cut:] = 5 * torch.randn(2, length - cut, WIDTH, dtype=dtype)
        before, after = past_of(layer, x, None, cut), past_of(layer, future, None, cut)
        assert torch.equal(before[0], after[0])
        assert torch.equal(before[1], after[1])
        assert not torch.equal(layer(x).hidden[:, cut:], layer(future).hidden[:, cut:])


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", CAUSAL)
def test_the_past_of_a_padded_sequence_is_bit_equal_too(name: str, side: str) -> None:
    layer = make_layer(name, True)
    hold_sorting(layer)
    x, valid = pad(make_batch((12, 7)), 16, side)
    future = torch.where(torch.arange(16)[:, None] < 10, x, torch.randn_like(x))
    before, after = past_of(layer, x, valid, 10), past_of(layer, future, valid, 10)
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])


@pytest.mark.parametrize("name", CAUSAL)
def test_the_past_is_used(name: str) -> None:
    """The last output of a causal layer changes with its first token: causal, not blind."""
    layer = make_layer(name, True)
    x = torch.stack(make_batch((6,)))
    other = x.clone()
    other[:, 0] += 1
    assert (layer(x).hidden[:, -1] - layer(other).hidden[:, -1]).abs().max() > 1e-6


def test_the_sorting_is_what_reformer_can_leak() -> None:
    """As its docstring says: with the sorting free, some future reaches some past."""
    layer = make_layer("reformer", True)
    x = torch.stack(make_batch((30,)))
    past = layer(x).hidden[:, :20]
    futures = [torch.cat((x[:, :20], torch.randn(1, 10, WIDTH, dtype=x.dtype)), 1) for _ in range(20)]
    assert any(not torch.equal(layer(future).hidden[:, :20], past) for future in futures)
