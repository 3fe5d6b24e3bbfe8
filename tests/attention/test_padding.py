"""Padding is nothing: what stands in it changes no bit, how much of it there is only rounding."""

import pytest
import torch
from torch import Tensor

from primal_dt.attention import AttentionLayer
from primal_dt.attention.padding import spread_rows

from .kinds import SIDES, VARIANTS, make_batch, make_layer, pad

variants = pytest.mark.parametrize(("name", "causal"), VARIANTS)


def run(layer: AttentionLayer, x: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """Outputs, objective, and the gradients of a function of both at x and at the parameters."""
    x = x.clone().requires_grad_()
    hidden, objective = layer(x, valid, with_objective=True)
    # The loss looks at padded outputs as well: they are zero, and must send nothing back.
    loss = hidden.sin().sum() + (0 if objective is None else objective.square().sum())
    gradients = torch.autograd.grad(loss, [x, *layer.parameters()])
    return hidden.detach(), None if objective is None else objective.detach(), list(gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("side", SIDES)
@variants
def test_what_stands_in_padding_changes_no_bit(name: str, causal: bool, side: str, dtype: torch.dtype) -> None:
    layer = make_layer(name, causal, dtype=dtype)
    sequences = make_batch((9, 5, 1), dtype=dtype)
    clean, valid = pad(sequences, 14, side)
    hidden, objective, gradients = run(layer, clean, valid)
    assert (hidden[~valid] == 0).all()
    assert (gradients[0][~valid] == 0).all()
    for fill in (float("nan"), float("inf"), -1e30):
        dirty, _ = pad(sequences, 14, side, fill)
        dirty_hidden, dirty_objective, dirty_gradients = run(layer, dirty, valid)
        assert torch.equal(hidden, dirty_hidden)
        if objective is not None:
            assert dirty_objective is not None
            assert torch.equal(objective, dirty_objective)
        for gradient, dirty_gradient in zip(gradients, dirty_gradients, strict=True):
            assert torch.equal(gradient, dirty_gradient)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("positions", [None, slice(1, None, 3)])
def test_right_padding_that_is_promised_needs_no_mask(positions: slice | None, fused: bool) -> None:
    """Outputs and gradients of what is real are those of a layer that is told where the padding is."""
    masked = make_layer("softmax", causal=True, fused=fused)
    plain = make_layer("softmax", causal=True, fused=fused, right_padded=True)
    plain.load_state_dict(masked.state_dict())
    x, valid = pad(make_batch((9, 5, 1)), 14, "right", 3.0)
    seen = valid if positions is None else valid[:, positions]
    found = []
    for layer in (masked, plain):
        own = x.clone().requires_grad_()
        out = layer(own, valid, positions=positions).hidden[seen]
        found.append([out, *torch.autograd.grad(out.sin().sum(), [own, *layer.parameters()])])
    for expected, actual in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(plain.kernel_matrix(x, valid), masked.kernel_matrix(x, valid))  # which does look


def test_right_padding_can_be_promised_to_causal_layers_only() -> None:
    with pytest.raises(ValueError, match="right_padded=True is for causal layers"):
        make_layer("softmax", causal=False, right_padded=True)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-11)])
@pytest.mark.parametrize("side", SIDES)
@variants
def test_how_much_padding_there_is_changes_only_rounding(
    name: str, causal: bool, side: str, dtype: torch.dtype, tolerance: float
) -> None:
    """Each sequence alone and unpadded, against a batch of all with two amounts of padding."""
    layer = make_layer(name, causal, dtype=dtype)
    sequences = make_batch((9, 5, 1), dtype=dtype)
    alone = [run(layer, sequence[None], None) for sequence in sequences]
    for length in (9, 23):
        x, valid = pad(sequences, length, side)
        hidden, objective, gradients = run(layer, x, valid)
        for row, (own_hidden, own_objective, own_gradients) in enumerate(alone):
            torch.testing.assert_close(hidden[row, valid[row]], own_hidden[0], atol=tolerance, rtol=tolerance)
            torch.testing.assert_close(
                gradients[0][row, valid[row]], own_gradients[0][0], atol=tolerance, rtol=tolerance
            )
            if objective is not None:
                assert own_objective is not None
                torch.testing.assert_close(objective[row], own_objective[0], atol=tolerance, rtol=tolerance)
        for gradient, *parts in zip(gradients[1:], *(own[2][1:] for own in alone), strict=True):
            torch.testing.assert_close(gradient, sum(parts), atol=10 * tolerance, rtol=10 * tolerance)


@variants
def test_a_mask_of_all_true_equals_no_mask(name: str, causal: bool) -> None:
    layer = make_layer(name, causal)
    x = torch.stack(make_batch((13, 13)))
    masked = layer(x, torch.ones(2, 13, dtype=torch.bool), with_objective=True)
    plain = layer(x, with_objective=True)
    torch.testing.assert_close(masked.hidden, plain.hidden)
    if plain.objective is not None:
        torch.testing.assert_close(masked.objective, plain.objective)


@variants
def test_a_row_of_nothing_but_padding_gives_zeros(name: str, causal: bool) -> None:
    layer = make_layer(name, causal)
    x, valid = pad(make_batch((6, 6)), 6, "right", float("nan"))
    x[1], valid[1] = float("nan"), False
    hidden, objective, gradients = run(layer, x, valid)
    assert (hidden[1] == 0).all()
    assert objective is None or objective[1] == 0
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert (gradients[0][1] == 0).all()
    assert hidden[0].abs().max() > 1e-3


def test_spread_rows_stay_within_the_sequence() -> None:
    """Also those that are not used: an index past the end reads foreign memory."""
    for count in range(7):
        valid = (torch.arange(6) < count)[None]
        index, used = spread_rows(torch.zeros(1, 6, 2), valid, 4)
        assert index.max() < 6
        assert used.sum() == min(count, 4)


@variants
def test_kernel_matrices_are_zero_at_padding(name: str, causal: bool) -> None:
    layer = make_layer(name, causal)
    x, valid = pad(make_batch((6, 4)), 9, "both", float("nan"))
    matrix = layer.kernel_matrix(x, valid)
    assert (matrix.masked_fill(~(valid[:, None, :, None] & valid[:, None, None, :]), 0) == matrix).all()
    assert matrix.abs().sum((-2, -1)).min() > 0
