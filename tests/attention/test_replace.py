"""Attention layers replace those of other libraries' models, where padding still has no effect."""

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from primal_dt.attention import KsvdPenalty, PenaltyReduction, PrimalAttention, SoftmaxAttention, replace_attention

WIDTH, HEADS, LENGTH = 16, 2, 7
RANKS: dict[str, Any] = {"rank": 4, "rank_multi": 2}
PADDING = torch.arange(LENGTH) >= torch.tensor([[7], [4], [1]])
X = torch.randn(3, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))


def torch_encoder(*, batch_first: bool = True, norm_first: bool = False, num_layers: int = 3) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, dropout=0.0, batch_first=batch_first, norm_first=norm_first)
    return nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=batch_first and not norm_first)


def replaced_encoder(
    layers: Iterable[int] = (-1,), reduction: PenaltyReduction = "mean"
) -> tuple[nn.TransformerEncoder, KsvdPenalty]:
    encoder = torch_encoder()
    return encoder, replace_attention(encoder, layers=layers, reduction=reduction, **RANKS)


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def added_parameters(*, width: int, heads: int, rows: int, rank: int) -> int:
    """Primal-Attention has W_e, W_r, lam and the merge, but no projection of values."""
    head_width = width // heads
    return 2 * heads * rows * rank + heads * rank + (2 * rank + 1) * head_width - (width * width + width)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_a_torch_encoder_ignores_padding(training: bool, batch_first: bool, norm_first: bool) -> None:
    encoder = torch_encoder(batch_first=batch_first, norm_first=norm_first).train(training)
    replace_attention(encoder, layers=[-1, 0], **RANKS)

    def run(x: Tensor, padding: Tensor) -> Tensor:
        with torch.set_grad_enabled(training):  # in eval mode without gradients torch has fast paths
            out: Tensor = encoder(x if batch_first else x.transpose(0, 1), src_key_padding_mask=padding)
        return out if batch_first else out.transpose(0, 1)

    hidden = run(X, PADDING)
    other = run(X.masked_fill(PADDING[..., None], 5.0), PADDING)
    torch.testing.assert_close(other[~PADDING], hidden[~PADDING])
    alone = run(X[1:2, :4], PADDING[:1, :4])
    torch.testing.assert_close(alone[0], hidden[1, :4], atol=1e-5, rtol=1e-5)


def test_only_the_chosen_layers_change() -> None:
    encoder = torch_encoder()
    before = {name: value.clone() for name, value in encoder.state_dict().items() if "layers.2.self_attn" not in name}
    penalty = replace_attention(encoder, rank=4)
    assert list(penalty.layers) == ["layers.2"]
    assert isinstance(penalty.layers["layers.2"], PrimalAttention)
    after = {name: value for name, value in encoder.state_dict().items() if "layers.2.self_attn" not in name}
    torch.testing.assert_close(after, before, atol=0, rtol=0)


def test_a_softmax_layer_equals_the_torch_layer() -> None:
    """The adapter passes on tokens, masks and outputs unchanged."""
    encoder = torch_encoder(num_layers=1)
    expected = encoder(X, src_key_padding_mask=PADDING)
    old = encoder.layers[0].self_attn
    assert isinstance(old, nn.MultiheadAttention)
    penalty = replace_attention(encoder, kind="softmax")
    (new,) = penalty.layers.values()
    assert isinstance(new, SoftmaxAttention)
    weights, biases = old.in_proj_weight.chunk(3), old.in_proj_bias.chunk(3)
    for part, weight, bias in zip((new.query, new.key, new.value), weights, biases, strict=True):
        part.load_state_dict({"weight": weight, "bias": bias})
    new.output.load_state_dict(old.out_proj.state_dict())
    torch.testing.assert_close(encoder(X, src_key_padding_mask=PADDING)[~PADDING], expected[~PADDING])
    assert penalty() == 0  # softmax has no J


def test_padding_masks_may_be_booleans_or_numbers() -> None:
    """Encoders of torch convert their masks to numbers; direct callers of the attention may pass booleans."""
    attention = replaced_encoder()[0].eval().layers[2].self_attn
    minus_infinity = torch.zeros(PADDING.shape).masked_fill(PADDING, float("-inf"))
    hidden, weights = attention(X, X, X, key_padding_mask=PADDING)
    torch.testing.assert_close(hidden, attention(X, X, X, key_padding_mask=minus_infinity)[0])
    torch.testing.assert_close(hidden[1, :4], attention(*[X[1:2, :4]] * 3)[0][0])
    assert weights is None


@pytest.mark.parametrize(("reduction", "divisor"), [("mean", 3), ("sum", 1)])
def test_the_penalty_is_the_mean_square_of_objectives(reduction: PenaltyReduction, divisor: int) -> None:
    (encoder, penalty), seen = replaced_encoder(layers=range(3), reduction=reduction), []
    for layer in penalty.layers.values():
        layer.register_forward_hook(lambda module, args, out: seen.append(out.objective))
    encoder(X, src_key_padding_mask=PADDING).sum().backward(retain_graph=True)
    total = penalty()
    torch.testing.assert_close(total, sum(objective.square().mean() for objective in seen) / divisor)
    gradients = torch.autograd.grad(total, [layer.get_parameter("lam") for layer in penalty.layers.values()])
    assert all(gradient.abs().sum() > 0 for gradient in gradients)


def test_the_penalty_needs_a_new_pass_in_training_mode() -> None:
    encoder, penalty = replaced_encoder()
    encoder(X, src_key_padding_mask=PADDING)
    penalty()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no forward pass in training mode, with gradients, since"):
            penalty()
        encoder.eval()(X)


def test_a_copy_of_a_model_has_its_own_penalty() -> None:
    encoder, _ = replaced_encoder(layers=[1])
    replace_attention(encoder, layers=[2], **RANKS)
    encoder(X, src_key_padding_mask=PADDING)
    copied = copy.deepcopy(encoder)
    penalty, copied_penalty = KsvdPenalty.of(encoder), KsvdPenalty.of(copied)
    assert list(copied_penalty.layers) == ["layers.1", "layers.2"]
    with pytest.raises(RuntimeError, match="no forward pass"):
        copied_penalty()  # only the original ran a forward pass
    copied(X, src_key_padding_mask=PADDING)
    torch.testing.assert_close(copied_penalty(), penalty())
    with pytest.raises(RuntimeError, match="no layer was replaced"):
        KsvdPenalty.of(torch_encoder())()


@pytest.mark.slow
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_gives_the_same_gradients_or_raises(use_reentrant: bool) -> None:
    encoder, penalty = replaced_encoder()
    (layer,) = penalty.layers.values()

    def run(x: Tensor) -> Any:
        return encoder(x, src_key_padding_mask=PADDING)

    def gradients(hidden: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(hidden[~PADDING].square().sum() + penalty(), list(layer.parameters()))

    plain = gradients(run(X))
    again = checkpoint(run, X.clone().requires_grad_(), use_reentrant=use_reentrant)
    if use_reentrant:  # its first pass has no gradients, so the penalty would have none
        with pytest.raises(RuntimeError, match="with gradients"):
            penalty()
    else:
        torch.testing.assert_close(gradients(again), plain)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"layers": [3]}, ValueError, "layer 3 does not exist: the model has layers 0 to 2"),
        ({"layers": [-4]}, ValueError, "layer -4 does"),
        ({"layers": []}, ValueError, "at least one layer"),
        ({"layers": -1}, TypeError, r"iterable of integers, such as \[-1\]"),
        ({"causal": True}, ValueError, "causal cannot be set"),
    ],
)
def test_wrong_arguments_raise(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        replace_attention(torch_encoder(), **options)


def test_a_model_without_attention_raises() -> None:
    with pytest.raises(TypeError, match="Linear has no Transformer layer of a supported class"):
        replace_attention(nn.Linear(2, 2))


def test_a_layer_can_be_replaced_only_once() -> None:
    encoder, _ = replaced_encoder()
    with pytest.raises(ValueError, match=r"the attention of layers\.2 has already been replaced"):
        replace_attention(encoder, layers=[0, 2])
    assert isinstance(encoder.layers[0].self_attn, nn.MultiheadAttention)  # nothing was changed


def test_a_replaced_layer_rejects_other_inputs() -> None:
    encoder, _ = replaced_encoder()
    with pytest.raises(ValueError, match=r"must have 3 axes, .* not shape \(7, 16\)"):
        encoder(X[0])
    with pytest.raises(ValueError, match="attn_mask and is_causal are not supported"):
        encoder(X, mask=torch.zeros(LENGTH, LENGTH))


@pytest.fixture
def transformers() -> Any:
    """Hugging Face's library; tests that need it are skipped without it."""
    torch.manual_seed(0)
    return pytest.importorskip("transformers")


SMALL_MODEL: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 3,
    "num_attention_heads": HEADS,
    "intermediate_size": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
SMALL_BERT = SMALL_MODEL | {"vocab_size": 20}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ViT", "DeiT"])
def test_image_models_learn_through_the_new_layer(transformers: Any, name: str) -> None:
    config = getattr(transformers, f"{name}Config")(**SMALL_MODEL, image_size=32, patch_size=8, num_labels=5)
    model = getattr(transformers, f"{name}ForImageClassification")(config).train()
    before = num_parameters(model)
    penalty = replace_attention(model, layers=[-1], **RANKS)
    (layer,) = penalty.layers.values()
    logits = model(pixel_values=torch.randn(2, 3, 32, 32)).logits
    (logits.square().sum() + penalty()).backward()
    assert logits.shape == (2, 5)
    assert all(parameter.grad is not None for parameter in layer.parameters())
    assert num_parameters(model) - before == added_parameters(width=WIDTH, heads=HEADS, rows=8, rank=4)


@pytest.mark.slow
def test_primal_plus_deit_small_has_the_right_parameters(transformers: Any) -> None:
    """The model of the paper's Table 5: DeiT-Small/16 for 100 classes, its last layer replaced, rank_multi 10."""
    config = transformers.DeiTConfig(
        hidden_size=384, num_hidden_layers=12, num_attention_heads=6, intermediate_size=1536, num_labels=100
    )
    model = transformers.DeiTForImageClassification(config).train()
    before = num_parameters(model)
    penalty = replace_attention(model, layers=[-1], rank=32, rank_multi=10, max_rows=198)  # 196 patches and 2 tokens
    assert list(penalty.layers) == ["deit.layers.11"]
    logits = model(pixel_values=torch.randn(1, 3, 224, 224)).logits
    assert logits.shape == (1, 100)
    value = penalty()
    assert value > 0
    (nn.functional.cross_entropy(logits, torch.tensor([77])) + 0.05 * value).backward()
    assert not [name for name, parameter in model.named_parameters() if parameter.grad is None]
    gradients = [parameter.grad for parameter in penalty.layers["deit.layers.11"].parameters()]
    assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in gradients)
    assert num_parameters(model) - before == added_parameters(width=384, heads=6, rows=198, rank=32)


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_bert_ignores_padding(transformers: Any, implementation: str, training: bool) -> None:
    model = transformers.BertModel(transformers.BertConfig(**SMALL_BERT, attn_implementation=implementation))
    penalty = replace_attention(model, layers=[0, -1], **RANKS)
    assert list(penalty.layers) == ["encoder.layer.0", "encoder.layer.2"]
    model.train(training)
    tokens, valid = torch.randint(20, (2, 6)), torch.tensor([[True] * 6, [True] * 3 + [False] * 3])
    first, second = (
        model(input_ids=ids, attention_mask=valid.long()).last_hidden_state
        for ids in (tokens, torch.where(valid, tokens, 19 - tokens))
    )
    torch.testing.assert_close(first[valid], second[valid])
    alone = model(input_ids=tokens[1:, :3]).last_hidden_state
    torch.testing.assert_close(first[1, :3], alone[0], atol=1e-5, rtol=1e-5)


def test_masks_of_pairs_of_tokens_raise(transformers: Any) -> None:
    model = transformers.BertModel(transformers.BertConfig(**SMALL_BERT))
    replace_attention(model, **RANKS)
    block, x = model.encoder.layer[-1], torch.randn(2, 6, WIDTH)

    def run(x: Tensor, mask: Tensor | None = None) -> Tensor:
        output = block(x, attention_mask=mask)
        return output if isinstance(output, Tensor) else output[0]

    with pytest.raises(ValueError, match="cannot mask pairs of tokens"):
        run(x, torch.ones(6, 6, dtype=torch.bool).tril().expand(2, 1, 6, 6))
    same_for_all_queries = torch.tensor([True] * 4 + [False] * 2).expand(2, 1, 6, 6)
    hidden = run(x, same_for_all_queries)
    torch.testing.assert_close(hidden[:, :4], run(x[:, :4]))
    torch.testing.assert_close(run(x, same_for_all_queries.contiguous()), hidden)


def test_decoders_raise(transformers: Any) -> None:
    model = transformers.BertModel(transformers.BertConfig(**SMALL_BERT, is_decoder=True))
    with pytest.raises(ValueError, match="only bidirectional layers can be replaced"):
        replace_attention(model)
