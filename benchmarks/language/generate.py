"""Text from a language model, word by word.

Axes: B batch, M new tokens, L tokens so far, H heads, D width, P = D / H, V words.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.blocks import CAUSAL_STACKS, Block, layer_kinds
from benchmarks.language.model import LanguageModel
from primal_dt.attention import AttentionLayer, CausalPrimalAttention, PrimalState, SoftmaxAttention

__all__ = ["STREAMING_STACKS", "KeyValues", "LanguageStream", "generate"]

STREAMING_STACKS = tuple(stack for stack in CAUSAL_STACKS if set(layer_kinds(stack, 2)) <= {"softmax", "primal"})
"""The stacks that :class:`LanguageStream` supports."""


class KeyValues(NamedTuple):
    """State of softmax attention after a prefix of L tokens."""

    keys: Tensor
    """(B, H, L, P)."""
    values: Tensor
    """(B, H, L, P)."""


class LanguageStream:
    """A language model that reads a few tokens at a time. Its scores equal those of the model on the whole sequence.

    A primal layer has a state of fixed size, so that a token costs the same however many came before. A softmax layer
    stores the keys and values of all tokens.

    Args:
        model: a model in evaluation mode with softmax and primal layers only.
        batch_size: B, the number of sequences.
    """

    def __init__(self, model: LanguageModel, batch_size: int = 1) -> None:
        self.model = model
        self.num_tokens = 0
        self.blocks = [block for block in model.blocks if isinstance(block, Block)]
        self.states = [initial_state(block.attention, batch_size) for block in self.blocks]

    @torch.inference_mode()
    def __call__(self, x: Tensor) -> Tensor:
        """Read the next tokens (B, M) of each sequence; return the scores of the word after each, (B, M, V)."""
        hidden = self.model.embed_tokens(x, self.num_tokens)  # (B, M, D)
        self.num_tokens += x.shape[1]
        for number, block in enumerate(self.blocks):
            mixed, self.states[number] = advance(block.attention, block.attention_norm(hidden), self.states[number])
            hidden = block.transform(hidden + mixed)
        return self.model.score(self.model.final_norm(hidden))


def initial_state(layer: AttentionLayer, batch_size: int) -> PrimalState | KeyValues:
    """The state of a layer before the first token."""
    if isinstance(layer, CausalPrimalAttention):
        return layer.initial_state(batch_size)
    if isinstance(layer, SoftmaxAttention):
        empty = layer.query.weight.new_zeros(batch_size, layer.num_heads, 0, layer.head_width)
        return KeyValues(empty, empty)
    raise ValueError(
        f"{type(layer).__name__} has no form for single tokens here: the stack must be one of "
        f"{', '.join(STREAMING_STACKS)}"
    )


def advance(layer: AttentionLayer, x: Tensor, state: PrimalState | KeyValues) -> tuple[Tensor, PrimalState | KeyValues]:
    """Process M more tokens x (B, M, D): the layer's output (B, M, D), and its new state."""
    if isinstance(layer, CausalPrimalAttention):
        assert isinstance(state, PrimalState)
        return layer.advance(x, state)
    assert isinstance(layer, SoftmaxAttention)
    assert isinstance(state, KeyValues)
    q, *new = layer.project(x)  # (B, H, M, P) each
    keys, values = (torch.cat(pair, 2) for pair in zip(state, new, strict=True))  # (B, H, L, P)
    M, L = x.shape[1], keys.shape[2]
    seen = torch.ones(M, L, dtype=torch.bool, device=x.device).tril(L - M)
    return layer.attend(q, keys, values, seen=seen), KeyValues(keys, values)


def generate(
    model: LanguageModel, prompt: Sequence[int], number: int, *, temperature: float, generator: torch.Generator
) -> Iterator[int]:
    """Continue a text.

    Args:
        model: the language model, in evaluation mode.
        prompt: the tokens so far, at least one.
        number: how many tokens to generate.
        temperature: words are drawn with probabilities ``softmax(scores / temperature)``; with 0, the word with the
            highest score is taken.
        generator: draws the words, on the CPU.

    Yields:
        The tokens, one by one.
    """
    stream, device = LanguageStream(model), model.embed.weight.device
    x = torch.tensor([list(prompt)], device=device)  # (1, M)
    for _ in range(number):
        scores = stream(x)[0, -1].cpu()  # (V,)
        if temperature == 0:
            token = int(scores.argmax())
        else:
            token = int(torch.multinomial((scores / temperature).softmax(-1), 1, generator=generator))
        yield token
        x = torch.tensor([[token]], device=device)
