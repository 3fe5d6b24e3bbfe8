"""Attention layers inside models of others: they do what they do alone, and padding stays nothing."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from primal_dt.attention import KsvdPenalty, PrimalAttention, SoftmaxAttention, replace_attention

WIDTH, HEADS, LENGTH = 16, 2, 7


def torch_encoder(*, batch_first: bool = True, norm_first: bool = False, num_layers: int = 3) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, dropout=0.0, batch_first=batch_first, norm_first=norm_first)
    return nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=batch_first and not norm_first)


def padded() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(3, LENGTH, WIDTH), torch.arange(LENGTH) >= torch.tensor([[7], [4], [1]])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_padding_is_nothing_to_a_torch_encoder(training: bool, batch_first: bool, norm_first: bool) -> None:
    encoder = torch_encoder(batch_first=batch_first, norm_first=norm_first)
    replace_attention(encoder, layers=[-1, 0], rank=4, rank_multi=2)
    encoder.train(training)
    x, padding = padded()
    other = x.masked_fill(padding[..., None], 5.0)

    def run(x: Tensor) -> Tensor:
        out = encoder(x if batch_first else x.transpose(0, 1), src_key_padding_mask=padding)
        return out if batch_first else out.transpose(0, 1)

    with torch.set_grad_enabled(training):  # without gradients and in eval mode torch has ways of its own
        torch.testing.assert_close(run(x)[~padding], run(other)[~padding])
        alone = run(x)[1, :4]
    padding, shorter = padding[:1, :4], x[1:2, :4]
    with torch.set_grad_enabled(training):
        torch.testing.assert_close(run(shorter)[0], alone, atol=1e-5, rtol=1e-5)


def test_only_the_chosen_layers_change() -> None:
    encoder = torch_encoder()
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    penalty = replace_attention(encoder, rank=4)
    assert list(penalty.layers) == ["layers.2"]
    assert isinstance(penalty.layers["layers.2"], PrimalAttention)
    kept = {name: value for name, value in encoder.state_dict().items() if "layers.2.self_attn" not in name}
    assert all(torch.equal(before[name], value) for name, value in kept.items())
    assert not before.keys() - kept.keys() - {name for name in before if "layers.2.self_attn" in name}


def test_a_softmax_layer_of_ours_gives_what_torch_gives() -> None:
    """The adapter passes tokens, masks and outputs on as they are."""
    encoder = torch_encoder(num_layers=1)
    x, padding = padded()
    expected = encoder(x, src_key_padding_mask=padding)
    old = encoder.layers[0].self_attn
    assert isinstance(old, nn.MultiheadAttention)
    penalty = replace_attention(encoder, kind="softmax")
    (new,) = penalty.layers.values()
    assert isinstance(new, SoftmaxAttention)
    with torch.no_grad():
        for part, weight, bias in zip(
            (new.query, new.key, new.value), old.in_proj_weight.chunk(3), old.in_proj_bias.chunk(3), strict=True
        ):
            part.weight.copy_(weight)
            part.bias.copy_(bias)
        new.output.load_state_dict(old.out_proj.state_dict())
    actual = encoder(x, src_key_padding_mask=padding)
    torch.testing.assert_close(actual[~padding], expected[~padding])
    assert penalty() == 0  # softmax has no J


def test_a_replaced_layer_takes_both_kinds_of_padding_masks() -> None:
    """Encoders of torch make their masks numbers; who calls the attention itself may give booleans."""
    encoder = torch_encoder().eval()
    replace_attention(encoder, rank=4, rank_multi=2)
    attention = encoder.layers[2].self_attn
    x, padding = padded()
    minus_infinity = torch.zeros(padding.shape).masked_fill(padding, float("-inf"))
    hidden, weights = attention(x, x, x, key_padding_mask=padding)
    torch.testing.assert_close(hidden, attention(x, x, x, key_padding_mask=minus_infinity)[0])
    torch.testing.assert_close(hidden[1, :4], attention(*[x[1:2, :4]] * 3)[0][0])
    assert weights is None


def test_the_penalty_is_the_mean_square_of_the_objectives() -> None:
    encoder = torch_encoder()
    penalty = replace_attention(encoder, layers=range(3), rank=4, rank_multi=2)
    seen: list[tuple[Tensor, Tensor | None]] = []
    for layer in penalty.layers.values():
        layer.register_forward_hook(lambda module, args, out: seen.append(out))
    x, padding = padded()
    encoder(x, src_key_padding_mask=padding).sum().backward(retain_graph=True)
    total = penalty()
    torch.testing.assert_close(total, sum(objective.square().mean() for _, objective in seen if objective is not None))
    encoder.zero_grad()
    total.backward()
    for layer in penalty.layers.values():
        assert isinstance(layer, PrimalAttention)
        assert layer.lam.grad is not None
        assert layer.lam.grad.abs().sum() > 0
    with pytest.raises(RuntimeError, match="no forward pass in training mode, with gradients, since"):
        penalty()
    encoder.eval()(x)
    with pytest.raises(RuntimeError, match="no forward pass in training mode, with gradients, since"):
        penalty()


def test_a_copy_of_a_model_has_a_penalty_of_its_own() -> None:
    encoder = torch_encoder()
    replace_attention(encoder, layers=[1], rank=4, rank_multi=2)
    replace_attention(encoder, layers=[2], rank=4, rank_multi=2)
    x, padding = padded()
    encoder(x, src_key_padding_mask=padding)  # its penalty is not read
    copied = copy.deepcopy(encoder)
    penalty, own = KsvdPenalty.of(encoder), KsvdPenalty.of(copied)
    assert list(own.layers) == ["layers.1", "layers.2"]
    with pytest.raises(RuntimeError, match="no forward pass"):
        own()  # it is the original that has passed
    copied(x, src_key_padding_mask=padding)
    torch.testing.assert_close(own(), penalty())
    with pytest.raises(RuntimeError, match="no layer was replaced"):
        KsvdPenalty.of(torch_encoder())()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_gives_the_same_gradients_or_is_told(use_reentrant: bool) -> None:
    encoder = torch_encoder()
    penalty = replace_attention(encoder, rank=4, rank_multi=2)
    (layer,) = penalty.layers.values()
    x, padding = padded()

    def gradients(hidden: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(hidden[~padding].square().sum() + penalty(), list(layer.parameters())))

    plain = gradients(encoder(x, src_key_padding_mask=padding))
    again = checkpoint(
        lambda x: encoder(x, src_key_padding_mask=padding), x.requires_grad_(), use_reentrant=use_reentrant
    )
    if use_reentrant:  # its first pass is without gradients, and so would be the penalty
        with pytest.raises(RuntimeError, match="with gradients"):
            penalty()
        return
    for one, other in zip(gradients(again), plain, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("layers", "message"),
    [([3], "there is no layer 3: the model has 3, 0 to 2"), ([-4], "there is no layer -4"), ([], "at least one layer")],
)
def test_layers_that_are_not_there_are_told(layers: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace_attention(torch_encoder(), layers=layers)


def test_what_cannot_be_replaced_is_told() -> None:
    with pytest.raises(TypeError, match="Linear has no Transformer layer of a known kind"):
        replace_attention(nn.Linear(2, 2))
    encoder = torch_encoder()
    replace_attention(encoder)
    with pytest.raises(ValueError, match=r"the attention of layers\.2 was replaced before"):
        replace_attention(encoder, layers=[0, 2])
    assert isinstance(encoder.layers[0].self_attn, nn.MultiheadAttention)  # nothing was changed
    with pytest.raises(TypeError, match=r"several numbers, such as \[-1\]"):
        replace_attention(torch_encoder(), layers=-1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="causal cannot be chosen"):
        replace_attention(torch_encoder(), causal=True)
    with pytest.raises(ValueError, match=r"three axes, not one of shape \(7, 16\)"):
        encoder(padded()[0][0])
    with pytest.raises(ValueError, match="no mask of pairs of tokens"):
        encoder(padded()[0], mask=torch.zeros(LENGTH, LENGTH))


transformers = pytest.importorskip("transformers")
SMALL: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 3,
    "num_attention_heads": HEADS,
    "intermediate_size": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def image_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SMALL, image_size=32, patch_size=8, num_labels=5)
    model: nn.Module = getattr(transformers, f"{name}ForImageClassification")(config)
    return model.train()


@pytest.mark.parametrize("name", ["ViT", "DeiT"])
def test_image_models_learn_through_the_new_layer(name: str) -> None:
    model = image_model(name)
    before = sum(parameter.numel() for parameter in model.parameters())
    penalty = replace_attention(model, layers=[-1], rank=4, rank_multi=2)
    (layer,) = penalty.layers.values()
    images = torch.randn(2, 3, 32, 32)
    logits = model(pixel_values=images).logits
    (logits.square().sum() + penalty()).backward()
    assert logits.shape == (2, 5)
    assert all(parameter.grad is not None for parameter in layer.parameters())
    old = 4 * (WIDTH * WIDTH + WIDTH)
    rows, rank, head_width = 8, 4, WIDTH // HEADS
    new = 3 * (WIDTH * WIDTH + WIDTH) + 2 * HEADS * rows * rank + HEADS * rank + 2 * rank * head_width + head_width
    assert sum(parameter.numel() for parameter in model.parameters()) == before - old + new


def test_primal_plus_deit_small_has_the_parameters_and_gradients_that_it_should() -> None:
    """The model of the paper's Table 5: DeiT-Small/16 for 100 classes, its last layer replaced, rank_multi 10."""
    torch.manual_seed(0)
    config = transformers.DeiTConfig(
        hidden_size=384, num_hidden_layers=12, num_attention_heads=6, intermediate_size=1536, num_labels=100
    )
    model = transformers.DeiTForImageClassification(config).train()
    before = sum(parameter.numel() for parameter in model.parameters())
    penalty = replace_attention(model, layers=[-1], rank=32, rank_multi=10, max_rows=198)  # 196 patches, 2 tokens more
    assert list(penalty.layers) == ["deit.layers.11"]
    images, labels = torch.randn(2, 3, 224, 224), torch.tensor([3, 77])
    logits = model(pixel_values=images).logits
    assert logits.shape == (2, 100)
    own_penalty = penalty()
    assert own_penalty > 0
    (nn.functional.cross_entropy(logits, labels) + 0.05 * own_penalty).backward()
    assert not [name for name, parameter in model.named_parameters() if parameter.grad is None]
    for parameter in penalty.layers["deit.layers.11"].parameters():
        assert parameter.grad is not None
        assert parameter.grad.abs().sum() > 0
    rows, rank, heads, head_width = 198, 32, 6, 64
    values = 384 * 384 + 384  # Primal-Attention has no projection of values ...
    directions = (
        2 * heads * rows * rank + heads * rank + 2 * rank * head_width + head_width
    )  # ... but W_e, W_r, lam, merge
    assert sum(parameter.numel() for parameter in model.parameters()) == before - values + directions


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_padding_is_nothing_to_bert(implementation: str) -> None:
    torch.manual_seed(0)
    config = transformers.BertConfig(**SMALL, vocab_size=20, attn_implementation=implementation)
    model = transformers.BertModel(config)
    penalty = replace_attention(model, layers=[0, -1], rank=4, rank_multi=2)
    assert list(penalty.layers) == ["encoder.layer.0", "encoder.layer.2"]
    tokens, mask = torch.randint(20, (2, 6)), torch.tensor([[1] * 6, [1, 1, 1, 0, 0, 0]])
    other = torch.where(mask.bool(), tokens, 19 - tokens)
    for training in (True, False):
        model.train(training)
        first = model(input_ids=tokens, attention_mask=mask).last_hidden_state
        second = model(input_ids=other, attention_mask=mask).last_hidden_state
        torch.testing.assert_close(first[mask.bool()], second[mask.bool()])
        alone = model(input_ids=tokens[1:, :3]).last_hidden_state
        torch.testing.assert_close(first[1, :3], alone[0], atol=1e-5, rtol=1e-5)


def test_masks_of_pairs_of_tokens_are_refused() -> None:
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(**SMALL, vocab_size=20))
    replace_attention(model, rank=4, rank_multi=2)
    (block,) = [module for module in model.modules() if type(module).__name__ == "BertLayer"][-1:]
    x = torch.randn(2, 6, WIDTH)
    causal = torch.ones(6, 6, dtype=torch.bool).tril().expand(2, 1, 6, 6)
    with pytest.raises(ValueError, match="none of pairs of them"):
        block(x, attention_mask=causal)
    alike = torch.tensor([True] * 4 + [False] * 2).expand(2, 1, 6, 6)  # the same for all queries
    whole = block(x, attention_mask=alike)
    hidden = whole if isinstance(whole, Tensor) else whole[0]
    shorter = block(x[:, :4])
    alone = shorter if isinstance(shorter, Tensor) else shorter[0]
    torch.testing.assert_close(hidden[:, :4], alone)
    torch.testing.assert_close(block(x, attention_mask=alike.contiguous())[0], whole[0])


def test_decoders_are_refused() -> None:
    model = transformers.BertModel(transformers.BertConfig(**SMALL, vocab_size=20, is_decoder=True))
    with pytest.raises(ValueError, match="only bidirectional layers can be replaced"):
        replace_attention(model)
