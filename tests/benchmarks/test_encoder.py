"""The encoder of the benchmarks: padding is nothing, the penalty is what it says, and it learns."""

import pytest
import torch
from torch import nn

from benchmarks.classify import LabeledBatch, accuracy, update
from benchmarks.encoder import STACKS, Encoder, EncoderShape, classification_loss
from primal_dt.attention import PrimalAttention

OPTIONS = {
    "primal": {"rank": 4, "rank_multi": 2},
    "linformer": {"num_rows": 4},
    "nystromformer": {"num_landmarks": 4},
    "reformer": {"num_buckets": 2, "chunk_size": 4},
}


def make(attention: str, *, dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> Encoder:
    torch.manual_seed(0)
    shape = EncoderShape(
        num_classes=3,
        max_length=12,
        attention=attention,
        width=16,
        num_heads=2,
        mlp_width=32,
        dropout=dropout,
        options=OPTIONS,
    )
    return Encoder(nn.Linear(5, 16), shape).to(dtype)


@pytest.mark.parametrize("attention", [stack for stack in STACKS if stack not in ("linformer", "reformer")])
def test_a_sequence_is_classified_alike_alone_and_padded(attention: str) -> None:
    """Linformer projects positions by the whole length, Reformer's chunks move with the rest: not these two."""
    encoder = make(attention).eval()
    x = torch.randn(2, 9, 5, dtype=torch.float64)
    valid = torch.arange(9) < torch.tensor([[9], [4]])
    whole = encoder(x, valid, with_objective=True)
    alone = encoder(x[1:, :4], with_objective=True)
    torch.testing.assert_close(whole.logits[1:], alone.logits)
    for padded, own in zip(whole.objectives, alone.objectives, strict=True):
        torch.testing.assert_close(padded[1:], own)
    x[1, 4:] = 9.0
    torch.testing.assert_close(encoder(x, valid).logits, whole.logits)


def test_stacks_have_primal_layers_where_they_say() -> None:
    def kinds(attention: str) -> list[bool]:
        return [isinstance(block.attention, PrimalAttention) for block in make(attention).blocks]

    assert kinds("softmax") == [False, False]
    assert kinds("primal-plus") == [False, True]
    assert kinds("primalformer") == [True, True]
    with pytest.raises(ValueError, match="attention must be one of softmax, primal-plus"):
        make("primal")


def test_the_penalty_is_added_with_its_weight() -> None:
    encoder, x, labels = make("primalformer"), torch.randn(4, 6, 5, dtype=torch.float64), torch.tensor([0, 1, 2, 0])
    output = encoder(x, with_objective=True)
    assert len(output.objectives) == 2
    plain = nn.functional.cross_entropy(output.logits, labels)
    penalty = sum(objective.square().mean() for objective in output.objectives)
    torch.testing.assert_close(classification_loss(output, labels, eta=0.3), plain + 0.3 * penalty)
    assert encoder(x).objectives == []


def test_sequences_longer_than_the_positions_are_told() -> None:
    with pytest.raises(ValueError, match=r"13 tokens, more than max_length \(12\)"):
        make("softmax")(torch.randn(1, 13, 5, dtype=torch.float64))


def signed_sums(number: int, generator: torch.Generator) -> LabeledBatch:
    """Whether the sum of the first channel is positive, each token with the sign of its second channel."""
    x = torch.randn(number, 8, 5, generator=generator)
    return LabeledBatch(x, None, ((x[..., 0] * x[..., 1].sign()).sum(1) > 0).long())


@pytest.mark.parametrize("attention", ["softmax", "primal-plus", "primalformer"])
def test_it_learns_what_the_mean_of_the_tokens_does_not_say(attention: str) -> None:
    generator = torch.Generator().manual_seed(0)
    encoder = make(attention, dtype=torch.float32)
    optimizer = torch.optim.RAdam(encoder.parameters(), lr=1e-2)
    for _ in range(200):
        update(encoder, optimizer, signed_sums(100, generator), eta=0.05)
    assert accuracy(encoder, [signed_sums(500, generator), signed_sums(500, generator)]) > 70  # by chance 50
    assert encoder.training  # as it was
