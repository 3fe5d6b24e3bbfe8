"""The past of a causal layer does not depend on its future, in any bit."""

import pytest
import torch
from torch import Tensor

from primal_dt.attention import ReformerAttention

from .kinds import CAUSAL, LONG, SIDES, WIDTH, assert_bit_equal, make_batch, make_layer, make_sequences, pad

causal_kinds = pytest.mark.parametrize("name", CAUSAL)


def make_causal(name: str, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    """A causal layer. Reformer is causal for given chunks only, so it sorts the tokens only once."""
    layer = make_layer(name, True, seed=seed, dtype=dtype, **LONG.get(name, {}))
    if isinstance(layer, ReformerAttention):
        first: list[Tensor] = []
        sort = layer.sort_tokens

        def sort_once(q: Tensor, valid: Tensor | None) -> Tensor:
            first.append(sort(q, valid))
            return first[0]

        layer.sort_tokens = sort_once  # type: ignore[method-assign]
    return layer


def past_of(layer: torch.nn.Module, x: Tensor, valid: Tensor | None, cut: int) -> tuple[Tensor, Tensor]:
    """The outputs before ``cut``, and the gradient of a function of them at the inputs before ``cut``."""
    x = x.clone().requires_grad_()
    hidden = layer(x, valid).hidden[:, :cut]
    weights = torch.linspace(-1, 1, hidden.numel(), dtype=x.dtype).view_as(hidden)
    (gradient,) = torch.autograd.grad((weights * hidden.square()).sum(), x)
    assert (gradient[:, cut:] == 0).all()
    return hidden, gradient[:, :cut]


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "dtype"), [(0, torch.float32), (1, torch.float64)])
@pytest.mark.parametrize("length", [9, 300])  # within one chunk of the scan, and over several
@causal_kinds
def test_the_past_ignores_the_future(name: str, length: int, seed: int, dtype: torch.dtype) -> None:
    layer, x = make_causal(name, seed, dtype), make_batch(2, length, seed=seed, dtype=dtype)
    for cut in {1, length // 3, length // 2 + 1, length - 1}:
        other = torch.cat((x[:, :cut], 5 * torch.randn(2, length - cut, WIDTH, dtype=dtype)), 1)
        assert_bit_equal(past_of(layer, other, None, cut), past_of(layer, x, None, cut))
        assert not torch.equal(layer(x).hidden[:, cut:], layer(other).hidden[:, cut:])


@pytest.mark.parametrize("side", SIDES)
@causal_kinds
def test_the_past_ignores_the_future_with_padding(name: str, side: str) -> None:
    layer = make_causal(name)
    x, valid = pad(make_sequences(12, 7), 16, side)
    other = torch.cat((x[:, :10], torch.randn_like(x[:, 10:])), 1)
    assert_bit_equal(past_of(layer, other, valid, 10), past_of(layer, x, valid, 10))


@causal_kinds
def test_the_last_output_depends_on_the_first_token(name: str) -> None:
    layer, x = make_layer(name, True), make_batch(1, 6)
    other = torch.cat((x[:, :1] + 1, x[:, 1:]), 1)
    assert (layer(x).hidden[:, -1] - layer(other).hidden[:, -1]).abs().max() > 1e-6


def test_reformer_leaks_the_future_through_sorting() -> None:
    """As its docstring says: some futures change which past tokens share a chunk."""
    layer, x = make_layer("reformer", True), make_batch(1, 30)
    past = layer(x).hidden[:, :20]
    futures = [torch.cat((x[:, :20], torch.randn(1, 10, WIDTH, dtype=x.dtype)), 1) for _ in range(20)]
    assert any(not torch.equal(layer(future).hidden[:, :20], past) for future in futures)
