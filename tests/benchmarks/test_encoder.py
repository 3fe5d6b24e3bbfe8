"""The benchmarks' encoder: padding has no effect, the penalty is weighted, and the encoder learns."""

import pytest
import torch
from torch import nn

from benchmarks.batches import LabeledBatch
from benchmarks.blocks import STACKS
from benchmarks.encoder import Encoder, EncoderShape
from benchmarks.step import accuracy, update
from primal_dt.attention import PenaltyReduction, PrimalAttention

OPTIONS = {"primal": {"rank": 4, "rank_multi": 2}, "nystromformer": {"num_landmarks": 4}}


def make(attention: str, dtype: torch.dtype = torch.float64) -> Encoder:
    torch.manual_seed(0)
    shape = EncoderShape(3, 12, attention, width=16, num_heads=2, mlp_width=32, dropout=0.0, options=OPTIONS)
    return Encoder(nn.Linear(5, 16), shape).to(dtype)


@pytest.mark.parametrize("attention", [stack for stack in STACKS if stack not in ("linformer", "reformer")])
def test_padding_does_not_change_the_output(attention: str) -> None:
    """Linformer's projection and Reformer's chunks depend on the padded length, so they are left out."""
    encoder = make(attention).eval()
    x = torch.randn(2, 9, 5, dtype=torch.float64)
    valid = torch.arange(9) < torch.tensor([[9], [4]])
    padded = encoder(x, valid, with_objective=True)
    alone = encoder(x[1:, :4], with_objective=True)
    torch.testing.assert_close(padded.logits[1:], alone.logits)
    torch.testing.assert_close([objective[1:] for objective in padded.objectives], alone.objectives)
    x[1, 4:] = 9.0
    torch.testing.assert_close(encoder(x, valid).logits, padded.logits)


@pytest.mark.parametrize(("attention", "layers"), [("softmax", []), ("primal-plus", [1]), ("primalformer", [0, 1])])
def test_stack_name_sets_the_primal_layers(attention: str, layers: list[int]) -> None:
    blocks = enumerate(make(attention).blocks)
    assert [number for number, block in blocks if isinstance(block.attention, PrimalAttention)] == layers


def test_unknown_stack_is_rejected() -> None:
    with pytest.raises(ValueError, match="attention must be one of softmax, primal-plus"):
        make("primal")


@pytest.mark.parametrize(("reduction", "layers"), [("mean", 2), ("sum", 1)])
def test_penalty_is_added_with_its_weight(reduction: PenaltyReduction, layers: int) -> None:
    encoder, x, labels = make("primalformer"), torch.randn(4, 6, 5, dtype=torch.float64), torch.tensor([0, 1, 2, 0])
    output = encoder(x, with_objective=True)
    assert len(output.objectives) == 2
    penalty = sum(objective.square().mean() for objective in output.objectives) / layers
    expected = nn.functional.cross_entropy(output.logits, labels) + 0.3 * penalty
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.0)
    losses = update(encoder, optimizer, LabeledBatch(x, None, labels), eta=0.3, penalty=reduction)
    torch.testing.assert_close(losses.total, expected.detach())
    assert encoder(x).objectives == []


def test_a_pair_is_one_input_to_the_classifier() -> None:
    torch.manual_seed(0)
    shape = EncoderShape(3, 12, "softmax", width=16, num_heads=2, mlp_width=32, dropout=0.0, is_pair=True)
    encoder = Encoder(nn.Linear(5, 16), shape)
    assert encoder(torch.randn(6, 7, 5)).logits.shape == (3, 3)


def test_too_long_sequence_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"13 tokens, more than max_length \(12\)"):
        make("softmax")(torch.randn(1, 13, 5, dtype=torch.float64))


def signed_sums(number: int, generator: torch.Generator) -> LabeledBatch:
    """Class 1 if the sum of the first channel is positive, each token with the sign of its second channel."""
    x = torch.randn(number, 4, 5, generator=generator)
    return LabeledBatch(x, None, ((x[..., 0] * x[..., 1].sign()).sum(1) > 0).long())


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["softmax", "primal-plus", "primalformer"])
def test_encoder_learns_more_than_the_token_mean(attention: str) -> None:
    generator = torch.Generator().manual_seed(0)
    encoder = make(attention, torch.float32)
    optimizer = torch.optim.Adam(encoder.parameters(), lr=1e-2)
    for _ in range(100):
        update(encoder, optimizer, signed_sums(64, generator), eta=0.05)
    # chance is 50 %; the sign of the product of the two channels' means gives 63 %
    assert accuracy(encoder, [signed_sums(500, generator), signed_sums(500, generator)]) > 75
    assert encoder.training  # accuracy() restores the mode
