"""Attention layers replace those of Hugging Face's decoders, whose generation still equals their parallel forward."""

import copy
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from primal_dt.attention import (
    CAUSAL_KINDS,
    CausalPrimalAttention,
    KsvdPenalty,
    SoftmaxAttention,
    replace_attention,
)

from .kinds import OPTIONS

WIDTH, HEADS, LENGTH = 16, 4, 10
SHARED: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 3,
    "num_attention_heads": HEADS,
    "vocab_size": 20,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.5,  # so that a mistake in one layer is visible in the logits
}
GPT2: dict[str, Any] = {"n_positions": 40, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
LLAMA: dict[str, Any] = {"intermediate_size": 32, "num_key_value_heads": 2, "max_position_embeddings": 40}
MODELS: dict[str, dict[str, Any]] = {
    "GPT2": GPT2,
    "Llama": LLAMA,
    "Mistral": LLAMA | {"sliding_window": 4},
    "Qwen2": LLAMA | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},  # layer 2 has a window
    "Qwen3": LLAMA | {"head_dim": 8},  # the heads' widths do not add up to the width
}
LAYERS = {"last": [-1], "first": [0], "all": range(3)}
TOKENS = torch.randint(1, 20, (3, LENGTH), generator=torch.Generator().manual_seed(1))
LEFT_PADDED = torch.arange(LENGTH) >= torch.tensor([[0], [3], [7]])

all_models = pytest.mark.parametrize("name", MODELS)
two_models = pytest.mark.parametrize("name", ["GPT2", "Llama"])
all_layers = pytest.mark.parametrize("layers", LAYERS.values(), ids=LAYERS.keys())
implementations = pytest.mark.parametrize("implementation", ["sdpa", "eager"])


@pytest.fixture(autouse=True)
def transformers() -> Any:
    """Hugging Face's library; the tests are skipped without it."""
    return pytest.importorskip("transformers")


def decoder(name: str, **settings: Any) -> Any:
    """A small language model with random weights, in evaluation mode."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**(SHARED | MODELS[name] | settings))
    head = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    return getattr(transformers, name + head)(config).eval()


def replaced(name: str, layers: Iterable[int] = (-1,), *, kind: str = "primal", **settings: Any) -> Any:
    model = decoder(name, **settings)
    options: dict[str, Any] = {"rank": 3, "init": "orthonormal"} if kind == "primal" else OPTIONS.get(kind, {})
    replace_attention(model, layers, kind=kind, **options)
    return model


def positions(valid: Tensor) -> Tensor:
    """The positions that ``generate`` gives to tokens: padding does not count."""
    return (valid.long().cumsum(1) - 1).clamp(min=0)


def logits(model: Any, tokens: Tensor, valid: Tensor | None = None) -> Tensor:
    """The logits (B, L, vocabulary) of the parallel forward pass."""
    padding = {} if valid is None else {"attention_mask": valid.long(), "position_ids": positions(valid)}
    with torch.no_grad():
        return model(input_ids=tokens, use_cache=False, **padding).logits


def in_pieces(
    model: Any, tokens: Tensor, ends: Iterable[int], valid: Tensor | None = None, cache: Any = None, **inputs: Any
) -> tuple[Tensor, Any]:
    """The logits of tokens that are passed piece by piece, and the cache after them."""
    outputs = []
    for start, end in pairwise([0, *ends]):
        if valid is not None:
            inputs |= {"attention_mask": valid[:, :end].long(), "position_ids": positions(valid)[:, start:end]}
        with torch.no_grad():
            output = model(input_ids=tokens[:, start:end], past_key_values=cache, use_cache=True, **inputs)
        outputs.append(output.logits)
        cache = output.past_key_values
    return torch.cat(outputs, 1), cache


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


PIECES = {"tokens": range(1, LENGTH + 1), "a prompt, then tokens": [6, 7, 8, 9, 10], "chunks": [4, 8, 10]}


@pytest.mark.slow
@pytest.mark.parametrize("ends", PIECES.values(), ids=PIECES.keys())
@implementations
@all_layers
@all_models
def test_cached_logits_equal_the_parallel_ones(
    name: str, layers: Iterable[int], implementation: str, ends: Iterable[int]
) -> None:
    model = replaced(name, layers, attn_implementation=implementation)
    assert_equal(in_pieces(model, TOKENS, ends)[0], logits(model, TOKENS))
    padded, expected = in_pieces(model, TOKENS, ends, LEFT_PADDED)[0], logits(model, TOKENS, LEFT_PADDED)
    assert_equal(padded[LEFT_PADDED], expected[LEFT_PADDED])


@two_models
def test_the_exponential_map_has_a_cache_too(name: str) -> None:
    model = decoder(name)
    replace_attention(model, [0, -1], rank=3, feature_map="exponential")
    cached, _ = in_pieces(model, TOKENS, [4, 7, 8, 9, 10], LEFT_PADDED)
    assert_equal(cached[LEFT_PADDED], logits(model, TOKENS, LEFT_PADDED)[LEFT_PADDED])


@two_models
def test_caches_without_a_configuration_work(name: str, transformers: Any) -> None:
    """They add their layers when these are needed."""
    for layers in LAYERS.values():
        model, cache = replaced(name, layers), transformers.DynamicCache()
        assert_equal(in_pieces(model, TOKENS, [4, 8, 9, 10], cache=cache)[0], logits(model, TOKENS))


MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True},
    "beams": {"do_sample": False, "num_beams": 4},
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())
@all_layers
@two_models
def test_generation_equals_that_without_a_cache(name: str, layers: Iterable[int], mode: dict[str, Any]) -> None:
    model, generated = replaced(name, layers), []
    for use_cache in (True, False):
        torch.manual_seed(2)
        inputs = {"input_ids": TOKENS, "attention_mask": LEFT_PADDED.long(), "use_cache": use_cache}
        generated.append(model.generate(**inputs, max_new_tokens=12, **mode))
    assert torch.equal(generated[0], generated[1])
    assert len(generated[0][:, LENGTH:].unique()) > 3  # the models do not repeat one token


def assert_padding_has_no_effect(model: Any, valid: Tensor) -> None:
    first = logits(model, TOKENS, valid)
    other = logits(model, torch.where(valid, TOKENS, 20 - TOKENS), valid)
    assert torch.equal(first[valid], other[valid])
    for row in range(3):
        alone = logits(model, TOKENS[row : row + 1, valid[row]])
        assert_equal(first[row, valid[row]], alone[0])


@implementations
@all_layers
@all_models
def test_padding_has_no_effect(name: str, layers: Iterable[int], implementation: str) -> None:
    model = replaced(name, layers, attn_implementation=implementation)
    assert_padding_has_no_effect(model, LEFT_PADDED)
    assert_padding_has_no_effect(model, LEFT_PADDED.flip(1))


@implementations
@all_layers
@two_models
def test_scattered_padding_has_no_effect(name: str, layers: Iterable[int], implementation: str) -> None:
    """The sliding windows of the other models count padding between tokens."""
    assert_padding_has_no_effect(replaced(name, layers, attn_implementation=implementation), TOKENS % 2 == 0)


# The sorting of causal reformer layers sees the whole sequence.
@pytest.mark.parametrize("kind", [kind for kind in CAUSAL_KINDS if kind != "reformer"])
@two_models
def test_later_tokens_change_no_earlier_logits(name: str, kind: str) -> None:
    model = replaced(name, range(3), kind=kind)
    changed = torch.cat((TOKENS[:, :6], 20 - TOKENS[:, 6:]), 1)
    before, after = logits(model, TOKENS), logits(model, changed)
    assert_equal(after[:, :6], before[:, :6])
    assert not torch.allclose(after[:, 6:], before[:, 6:])


def storage_size(layer: Any) -> int:
    """Bytes that a layer of a cache holds in memory."""
    tensors = (layer.keys, layer.values) if hasattr(layer, "keys") else layer.state
    return sum(part.untyped_storage().nbytes() for part in tensors if part is not None)


@pytest.mark.parametrize("prompt", [1, 8])
@two_models
def test_the_state_does_not_grow(name: str, prompt: int) -> None:
    model, sizes = replaced(name, [0, 2]), []
    for length in (prompt, LENGTH):
        _, cache = in_pieces(model, TOKENS, [*range(prompt, length), length])
        sizes.append([storage_size(layer) for layer in cache.layers])
        assert cache.get_seq_length() == length
    assert sizes[0][0] == sizes[1][0] == sizes[1][2] == 3 * (4 * WIDTH + 8)  # floats, and a count for each sequence
    assert sizes[1][1] > sizes[0][1]  # softmax attention


@all_layers
@two_models
def test_a_cache_follows_its_sequences(name: str, layers: Iterable[int]) -> None:
    """Searches select, repeat and reorder sequences."""
    model = replaced(name, layers)
    _, cache = in_pieces(model, TOKENS, [6])
    cache.batch_select_indices(torch.tensor([2, 0]))
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([1, 3, 0, 2]))
    rows = TOKENS[[2, 0, 2, 0]]
    with torch.no_grad():
        cached = model(input_ids=rows[:, 6:], past_key_values=cache).logits
    assert_equal(cached, logits(model, rows)[:, 6:])
    cache.reset()
    assert_equal(in_pieces(model, TOKENS, [6, 10], cache=cache)[0], logits(model, TOKENS))


def test_a_copied_cache_continues_a_prompt() -> None:
    model = replaced("Llama", [0, 1])
    _, prompt = in_pieces(model, TOKENS[:1], [6])
    for row in range(3):
        rest = TOKENS[row : row + 1, 6:]
        with torch.no_grad():
            cached = model(input_ids=rest, past_key_values=copy.deepcopy(prompt)).logits
        assert_equal(cached, logits(model, torch.cat((TOKENS[:1, :6], rest), 1))[:, 6:])


def test_cross_attention_stays(transformers: Any) -> None:
    model = decoder("GPT2", add_cross_attention=True)
    others = [model.transformer.h[number].crossattention for number in range(3)]
    replace_attention(model, [0, 2], rank=3)
    assert [block.crossattention for block in model.transformer.h] == others
    states = torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = model(input_ids=TOKENS, encoder_hidden_states=states, use_cache=False).logits
    cached, cache = in_pieces(model, TOKENS, [4, 8, 9, 10], encoder_hidden_states=states)
    assert isinstance(cache, transformers.EncoderDecoderCache)
    assert_equal(cached, expected)


@pytest.mark.parametrize("padded", [False, True])
@implementations
def test_a_softmax_layer_equals_that_of_gpt2(implementation: str, padded: bool) -> None:
    """The adapter passes on tokens, masks and outputs unchanged."""
    model = decoder("GPT2", attn_implementation=implementation)
    valid = LEFT_PADDED if padded else torch.ones_like(LEFT_PADDED)
    expected, old = logits(model, TOKENS, valid), model.transformer.h[1].attn
    (new,) = replace_attention(model, [1], kind="softmax").layers.values()
    assert isinstance(new, SoftmaxAttention)
    weights, biases = old.c_attn.weight.T.chunk(3), old.c_attn.bias.chunk(3)
    for part, weight, bias in zip((new.query, new.key, new.value), weights, biases, strict=True):
        part.load_state_dict({"weight": weight, "bias": bias})
    new.output.load_state_dict({"weight": old.c_proj.weight.T, "bias": old.c_proj.bias})
    assert_equal(logits(model, TOKENS, valid)[valid], expected[valid])


@all_models
def test_new_layers_fit_their_model(name: str) -> None:
    dropout = {"resid_pdrop": 0.25} if name == "GPT2" else {}
    model = decoder(name, **dropout).to(torch.float64)
    (layer,) = replace_attention(model, rank=3).layers.values()
    assert isinstance(layer, CausalPrimalAttention)
    assert (layer.width, layer.num_heads, layer.dropout.p) == (WIDTH, HEADS, 0.25 if dropout else 0.0)
    assert (layer.query_key.bias is not None) == (name in ("GPT2", "Qwen2"))  # as in the model's own projections
    assert not layer.training
    assert {parameter.dtype for parameter in layer.parameters()} == {torch.float64}


@all_models
def test_loss_and_penalty_train_the_new_layers(name: str) -> None:
    model = replaced(name, [0, -1]).train()
    penalty = KsvdPenalty.of(model)
    output = model(input_ids=TOKENS, attention_mask=LEFT_PADDED.long(), labels=TOKENS)  # with a cache, by default
    value = penalty()
    assert value > 0
    (output.loss + value).backward()
    for layer in penalty.layers.values():
        for parameter_name, parameter in layer.named_parameters():
            assert parameter.grad is not None, parameter_name
            assert parameter.grad.abs().sum() > 0, parameter_name


@two_models
def test_later_pieces_of_a_sequence_have_no_penalty(name: str) -> None:
    """J is that of whole sequences; the logits and their gradients are right."""
    model = replaced(name, range(3)).train()
    penalty = KsvdPenalty.of(model)
    first = model(input_ids=TOKENS[:, :6])
    second = model(input_ids=TOKENS[:, 6:], past_key_values=first.past_key_values)
    with pytest.raises(RuntimeError, match="no forward pass in training mode"):
        penalty()
    weight = model.get_input_embeddings().weight
    (pieces,) = torch.autograd.grad(torch.cat((first.logits, second.logits), 1).square().sum(), weight)
    (whole,) = torch.autograd.grad(model(input_ids=TOKENS).logits.square().sum(), weight)
    torch.testing.assert_close(pieces, whole, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@two_models
def test_checkpointing_gives_the_same_gradients(name: str) -> None:
    model = replaced(name, [0, -1]).train()
    penalty, gradients = KsvdPenalty.of(model), []
    for checkpoint in (False, True):
        if checkpoint:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        output = model(input_ids=TOKENS, labels=TOKENS, use_cache=False)
        gradients.append(torch.autograd.grad(output.loss + penalty(), list(model.parameters())))
    torch.testing.assert_close(gradients[1], gradients[0])


@two_models
def test_copies_and_saved_weights_give_the_same_logits(name: str) -> None:
    model, other = replaced(name, range(3)), replaced(name, range(3))
    expected = logits(model, TOKENS)
    torch.testing.assert_close(logits(copy.deepcopy(model), TOKENS), expected, atol=0, rtol=0)
    for parameter in other.parameters():
        nn.init.ones_(parameter)
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(logits(other, TOKENS), expected, atol=0, rtol=0)


def attention_of(model: Any) -> Any:
    """The replaced attention of the last layer of a Llama model."""
    return model.model.layers[-1].self_attn


@pytest.mark.parametrize("kind", [kind for kind in CAUSAL_KINDS if kind != "primal"])
def test_other_kinds_need_use_cache_false(kind: str) -> None:
    model = replaced("Llama", kind=kind)
    generate = {"input_ids": TOKENS, "max_new_tokens": 3, "do_sample": False}
    with pytest.raises(ValueError, match=f"attention kind '{kind}' cannot continue .*: pass use_cache=False"):
        model.generate(**generate)
    assert model.generate(**generate, use_cache=False).shape == (3, LENGTH + 3)


@pytest.mark.parametrize(
    ("implementation", "name"), [("static", "StaticCache"), ("offloaded", "offloaded DynamicCache")]
)
def test_other_caches_raise(implementation: str, name: str) -> None:
    with pytest.raises(ValueError, match=rf"the cache \({name}\) must be a DynamicCache that is not offloaded"):
        replaced("Llama", [0]).generate(TOKENS, max_new_tokens=3, cache_implementation=implementation)


def test_a_cache_from_before_the_replacement_raises() -> None:
    model = decoder("Llama")
    _, cache = in_pieces(model, TOKENS, [6])
    replace_attention(model, rank=3)
    with pytest.raises(
        ValueError, match="has keys and values of 6 tokens in layer 2, whose attention has been replaced"
    ):
        in_pieces(model, TOKENS, [1], cache=cache)


def test_removing_tokens_from_a_cache_raises() -> None:
    model = replaced("Llama")
    _, cache = in_pieces(model, TOKENS, [6])
    cache.crop(0)
    with pytest.raises(ValueError, match=r"crop\(-2\) is not supported"):
        cache.crop(-2)
    with pytest.raises(ValueError, match="neither is assisted generation"):
        model.generate(TOKENS[:1].repeat(1, 2), max_new_tokens=9, do_sample=False, prompt_lookup_num_tokens=3)


def test_packed_sequences_raise() -> None:
    in_one_row = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1, 2]])
    with pytest.raises(ValueError, match="supports neither packed sequences nor other masks"):
        replaced("Llama")(input_ids=TOKENS[:1], position_ids=in_one_row, use_cache=False)


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        ({"encoder_hidden_states": torch.zeros(1, 5, WIDTH)}, ValueError, "encoder_hidden_states is not supported"),
        ({"cu_seq_lens_q": torch.tensor([0, 2, 4])}, ValueError, "cu_seq_lens_q is not supported"),
        ({"attention_mask": torch.zeros(1, 1, 4, 4)}, ValueError, "must be a causal mask"),
        ({"attention_mask": torch.ones(4, 4).bool()[None, None]}, ValueError, "must be a causal mask"),
        ({"attention_mask": torch.ones(1, 2, 4, 4)}, ValueError, r"not \(1, 2, 4, 4\)"),
        ({"attention_mask": torch.ones(1, 3)}, ValueError, r"not \(1, 3\)"),
        ({"attention_mask": "a BlockMask"}, TypeError, "attention_mask must be a tensor, .*, not str"),
    ],
)
def test_a_replaced_layer_rejects_other_inputs(inputs: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        attention_of(replaced("Llama"))(torch.zeros(1, 4, WIDTH), **inputs)


def test_masks_of_all_forms_mean_the_same() -> None:
    """Those of flash attention, which needs a GPU, are (B, L), over past and new tokens."""
    attention, x, valid = attention_of(replaced("Llama")), torch.randn(3, LENGTH, WIDTH), LEFT_PADDED.flip(1)
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril() & valid[:, None, None]
    expected, _ = attention(x, attention_mask=causal)
    padding_sees_nothing = causal & valid[:, None, :, None]
    numbers = torch.zeros(causal.shape).masked_fill(~causal, float("-inf"))
    with_past = nn.functional.pad(valid, (4, 0)).long()
    for mask in (padding_sees_nothing, numbers, valid, with_past):
        assert torch.equal(attention(x, attention_mask=mask)[0], expected)


@pytest.mark.parametrize(
    ("name", "settings", "options", "error", "message"),
    [
        ("Llama", {}, {"causal": True}, ValueError, "causal cannot be set: the model determines"),
        ("Llama", {}, {"rank_multi": 10}, TypeError, "causal attention kind 'primal' has no option rank_multi"),
        ("Llama", {}, {"kind": "linformer"}, ValueError, "'linformer' is bidirectional only"),
        (
            "Qwen3",
            {"num_attention_heads": 3, "num_key_value_heads": 3},
            {},
            ValueError,
            r"width \(16\) must be divisible",
        ),
        ("GPT2", {"is_causal": False}, {}, ValueError, "GPT2Block must be causal, but .* has is_causal=False"),
    ],
)
def test_unsuitable_replacements_raise(
    name: str, settings: dict[str, Any], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    model = decoder(name, **settings)
    with pytest.raises(error, match=message):
        replace_attention(model, **options)
