"""Padding has no effect: its content changes no bit of a result, and its amount changes only the rounding."""

import pytest
import torch

from primal_dt.attention.padding import spread_rows

from .kinds import SIDES, all_variants, assert_bit_equal, make_batch, make_layer, make_sequences, pad, run


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("side", SIDES)
@all_variants
def test_the_content_of_padding_changes_no_bit(name: str, causal: bool, side: str, dtype: torch.dtype) -> None:
    """In outputs, objective and gradients of a loss that also reads the padded outputs."""
    layer, sequences = make_layer(name, causal, dtype=dtype), make_sequences(9, 5, 1, dtype=dtype)
    x, valid = pad(sequences, 14, side)
    clean = hidden, _, gradient, *_ = run(layer, x, valid)
    assert (hidden[~valid] == 0).all()
    assert (gradient[~valid] == 0).all()
    for fill in (float("nan"), float("inf"), -1e30):
        assert_bit_equal(run(layer, pad(sequences, 14, side, fill)[0], valid), clean)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-11)])
@pytest.mark.parametrize("side", SIDES)
@all_variants
def test_the_amount_of_padding_changes_only_rounding(
    name: str, causal: bool, side: str, dtype: torch.dtype, tolerance: float
) -> None:
    """Each sequence alone and unpadded equals its row in batches with two amounts of padding."""
    layer, sequences = make_layer(name, causal, dtype=dtype), make_sequences(9, 5, 1, dtype=dtype)
    alone = (run(layer, sequence[None]) for sequence in sequences)
    hidden, objective, gradient, *gradients = zip(*alone, strict=True)  # each with a tensor for each sequence
    objectives = None if objective[0] is None else torch.cat(objective)
    for length in (9, 23):
        x, valid = pad(sequences, length, side)
        batch_hidden, batch_objective, batch_gradient, *batch_gradients = run(layer, x, valid)
        torch.testing.assert_close(
            [batch_hidden[valid], batch_objective, batch_gradient[valid]],
            [torch.cat(hidden, 1)[0], objectives, torch.cat(gradient, 1)[0]],
            atol=tolerance,
            rtol=tolerance,
        )
        summed = [sum(parts) for parts in gradients]
        torch.testing.assert_close(batch_gradients, summed, atol=10 * tolerance, rtol=10 * tolerance)


@all_variants
def test_a_mask_of_all_true_equals_no_mask(name: str, causal: bool) -> None:
    layer, x = make_layer(name, causal), make_batch(2, 13)
    masked = layer(x, torch.ones(2, 13, dtype=torch.bool), with_objective=True)
    torch.testing.assert_close(masked, layer(x, with_objective=True))


@all_variants
def test_a_row_of_padding_gives_zeros(name: str, causal: bool) -> None:
    layer, x = make_layer(name, causal), make_batch(2, 6)
    x[1] = float("nan")
    valid = torch.tensor([[True] * 6, [False] * 6])
    hidden, objective, *gradients = run(layer, x, valid)
    assert (hidden[1] == 0).all()
    assert objective is None or objective[1] == 0
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert (gradients[0][1] == 0).all()
    assert hidden[0].abs().max() > 1e-3


@all_variants
def test_kernel_matrices_are_zero_at_padding(name: str, causal: bool) -> None:
    x, valid = pad(make_sequences(6, 4), 9, "both", float("nan"))
    matrix = make_layer(name, causal).kernel_matrix(x, valid)
    assert (matrix.masked_fill(~(valid[:, None, :, None] & valid[:, None, None, :]), 0) == matrix).all()
    assert matrix.abs().sum((-2, -1)).min() > 0


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("positions", [None, slice(1, None, 3)])
def test_right_padded_equals_a_mask_at_real_tokens(positions: slice | None, fused: bool) -> None:
    """A causal layer that is promised right padding ignores the mask, except in its kernel matrix."""
    masked = make_layer("softmax", True, fused=fused)
    plain = make_layer("softmax", True, fused=fused, right_padded=True)
    plain.load_state_dict(masked.state_dict())
    x, valid = pad(make_sequences(9, 5, 1), 14, "right", 3.0)
    x.requires_grad_()
    results = []
    for layer in (masked, plain):
        hidden = layer(x, valid, positions=positions).hidden[valid if positions is None else valid[:, positions]]
        results.append([hidden, *torch.autograd.grad(hidden.sin().sum(), [x, *layer.parameters()])])
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(plain.kernel_matrix(x, valid), masked.kernel_matrix(x, valid))


def test_spread_rows_stay_within_the_sequence() -> None:
    """Also those that are not used: an index past the end would read other memory."""
    for count in range(7):
        index, used = spread_rows(torch.zeros(1, 6, 2), (torch.arange(6) < count)[None], 4)
        assert index.max() < 6
        assert used.sum() == min(count, 4)
