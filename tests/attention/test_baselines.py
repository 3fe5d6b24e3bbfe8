"""The baselines equal their slow references and have the properties that their papers claim."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from primal_dt.attention import AttentionOutput, build_attention
from primal_dt.attention.random_features import orthogonal_directions_
from primal_dt.attention.scan import causal_products

from .kinds import LONG, baseline_variants, both_directions, make_batch, make_layer, make_sequences, pad, with_gradients
from .slow import slow_attention


def compare_with_slow(layer: Any, x: Tensor, valid: Tensor | None = None, tolerance: float = 1e-9) -> None:
    """Compare a layer with its slow reference in outputs and gradients."""
    x.requires_grad_()
    fast = with_gradients(layer(x, valid), layer, x)
    slow = with_gradients(AttentionOutput(slow_attention(layer, x, valid), None), layer, x)
    torch.testing.assert_close(fast, slow, atol=tolerance, rtol=tolerance)


def softmax_and(name: str, causal: bool, **options: Any) -> tuple[Any, Any]:
    """A softmax layer, and a layer of another kind with the same projections."""
    exact, layer = make_layer("softmax", causal), make_layer(name, causal, **options)
    layer.load_state_dict(exact.state_dict(), strict=False)
    return exact, layer


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "length"), [(0, 1), (1, 2), (2, 9), (3, 21)])
@baseline_variants
def test_layers_equal_their_references(name: str, causal: bool, seed: int, length: int) -> None:
    # One key of Attention-BN has no spread: the reference multiplies the rounding of a zero gradient by 1e5.
    tolerance = 1e-6 if name == "attention_bn" else 1e-9
    layer = make_layer(name, causal, seed=seed)
    compare_with_slow(layer, make_batch(2, length, seed=seed), None, tolerance)
    compare_with_slow(layer, *pad(make_sequences(length, 3, 1, seed=seed), length + 5, "scattered"), tolerance)


@pytest.mark.parametrize("num_heads", [1, 2])
@baseline_variants
def test_layers_equal_their_references_in_float32(name: str, causal: bool, num_heads: int) -> None:
    layer = make_layer(name, causal, width=10, num_heads=num_heads, seed=num_heads, dtype=torch.float32)
    x = torch.randn(2, 13, 10)
    torch.testing.assert_close(layer(x).hidden, slow_attention(layer, x), atol=2e-4, rtol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linear", "performer", "cosformer", "flowformer"])
def test_scans_over_chunks_equal_the_reference(name: str) -> None:
    layer = make_layer(name, True, **LONG.get(name, {}))
    compare_with_slow(layer, *pad(make_sequences(260, 140), 270, "scattered"))  # chunks of 128


@pytest.mark.parametrize("chunk", [1, 3, 7, 50])
def test_the_scan_equals_a_masked_product(chunk: int) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 20, width, dtype=torch.float64) for width in (4, 4, 5))
    torch.testing.assert_close(causal_products(q, k, v, chunk=chunk), (q @ k.mT).tril() @ v)


@pytest.mark.parametrize("options", [{"chunk_size": 1}, {"chunk_size": 3, "num_rounds": 1}, {"num_buckets": 2}])
@both_directions
def test_reformer_equals_its_reference_with_any_chunks(causal: bool, options: dict[str, Any]) -> None:
    compare_with_slow(make_layer("reformer", causal, **options), *pad(make_sequences(17, 11), 20, "scattered"))


@both_directions
def test_softmax_equals_torch_multihead_attention(causal: bool) -> None:
    layer = make_layer("softmax", causal)
    x, valid = pad(make_sequences(10, 6), 12, "right")
    peer = nn.MultiheadAttention(layer.width, layer.num_heads, batch_first=True, dtype=torch.float64)
    projections = (layer.query, layer.key, layer.value)
    peer.load_state_dict(
        {
            "in_proj_weight": torch.cat([projection.weight for projection in projections]),
            "in_proj_bias": torch.cat([projection.bias for projection in projections]),
            "out_proj.weight": layer.output.weight,
            "out_proj.bias": layer.output.bias,
        }
    )
    mask = torch.ones(12, 12, dtype=torch.bool).triu(1) if causal else None
    expected, _ = peer(x, x, x, key_padding_mask=~valid, attn_mask=mask, need_weights=False)
    torch.testing.assert_close(layer(x, valid).hidden[valid], expected[valid])


@pytest.mark.parametrize("name", ["softmax", "linear", "performer", "attention_bn", "attention_sh", "reformer"])
@both_directions
def test_attention_rows_are_weights_of_a_mean(name: str, causal: bool) -> None:
    x, valid = pad(make_sequences(10, 6), 12, "both")
    matrix = make_layer(name, causal).kernel_matrix(x, valid)
    assert (matrix >= 0).all()
    torch.testing.assert_close(matrix.sum(-1), valid[:, None].to(matrix.dtype).expand(matrix.shape[:-1]))
    assert not causal or matrix.triu(1).abs().max() == 0


@both_directions
def test_linear_attention_ignores_the_features_scale(causal: bool) -> None:
    """With features of exp(-30), which ``elu + 1`` would round to 0, the rows are still weights of a mean."""
    layer = make_layer("linear", causal, dtype=torch.float32)
    nn.init.constant_(layer.query.bias, -30.0)
    nn.init.constant_(layer.key.bias, -30.0)
    matrix = layer.kernel_matrix(make_batch(2, 9, dtype=torch.float32))
    torch.testing.assert_close(matrix.sum(-1), torch.ones(2, 3, 9), atol=1e-3, rtol=0)


@pytest.mark.slow
@both_directions
def test_performer_approaches_softmax_with_more_features(causal: bool) -> None:
    x, errors = make_batch(2, 15), []
    for num_features in (256, 4096):
        pairs = [softmax_and("performer", causal, seed=seed, num_features=num_features) for seed in range(8)]
        differences = [layer.kernel_matrix(x) - exact.kernel_matrix(x) for exact, layer in pairs]
        errors.append(torch.stack(differences).abs().mean().item())
    assert errors[1] < 3e-3
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.35)  # 16 times the features, a quarter of the error


def test_random_directions_are_orthogonal_and_unbiased() -> None:
    torch.manual_seed(0)
    directions = torch.stack([orthogonal_directions_(torch.empty(10, 4)) for _ in range(4000)])  # (draws, F, P)
    gram = directions[0, :4] @ directions[0, :4].T
    assert (gram - gram.diagonal().diag()).abs().max() < 1e-4
    assert directions.mean(0).abs().max() < 5 / 4000**0.5  # each row is N(0, I)
    torch.testing.assert_close(directions.square().mean((0, 1)), torch.ones(4), atol=0.05, rtol=0)
    z = torch.full((4,), 0.5)
    estimate = (directions @ (2 * z) - z @ z).exp().mean()
    assert estimate.item() == pytest.approx((z @ z).exp().item(), rel=0.05)


def test_cosformer_gives_near_tokens_more_weight() -> None:
    """Between equal tokens the weight is the cosine of the distance, which is 0 at the horizon."""
    layer = make_layer("cosformer", False, horizon=9)
    matrix = layer.kernel_matrix(make_batch(1, 1).expand(1, 9, -1))[0]
    weights = matrix[matrix[:, 0, 0] > 0][0]  # a head whose features are not all zero
    expected = torch.cos(torch.pi / 2 * torch.arange(9, dtype=torch.float64) / 9)
    torch.testing.assert_close(weights[0] / weights[0, 0], expected)


def test_cosformer_returns_zero_without_positive_features() -> None:
    layer = make_layer("cosformer", True, dtype=torch.float32)
    nn.init.constant_(layer.key.bias, -100.0)
    x = make_batch(2, 9, dtype=torch.float32).requires_grad_()
    hidden = layer(x).hidden
    torch.testing.assert_close(hidden, layer.output.bias.expand_as(hidden))
    assert torch.autograd.grad(hidden.sum(), x)[0].isfinite().all()


def test_flowformer_gives_each_sink_its_share() -> None:
    """With equal queries all sinks receive the same: the flow of one source, times sigmoid(1)."""
    layer = make_layer("flowformer", False)
    nn.init.zeros_(layer.query.weight)
    x = make_batch(1, 11)
    matrix = layer.kernel_matrix(x)
    q, k = layer._queries_and_keys(x)
    flow = (q.sigmoid() @ k.sigmoid().mT)[..., :1, :]  # the same for all queries
    share = flow / flow.sum(-1, keepdim=True)
    expected = torch.ones((), dtype=x.dtype).sigmoid() * 11 * (11 * share).softmax(-1) * share
    torch.testing.assert_close(matrix, expected.expand_as(matrix))


def test_reformer_with_one_chunk_is_shared_query_softmax() -> None:
    layer, x = make_layer("reformer", False, chunk_size=64), make_batch(2, 9)
    q = layer._split(layer.query(x))
    scores = q @ (q / q.norm(dim=-1, keepdim=True)).mT / 2  # P = 4
    scores = scores.masked_fill(torch.eye(9, dtype=torch.bool), float("-inf"))
    torch.testing.assert_close(layer.kernel_matrix(x), scores.softmax(-1))


def test_linformer_projections_preserve_the_scale() -> None:
    layer: Any = build_attention("linformer", width=8, num_heads=2, max_length=512, num_rows=64)
    assert layer.key_rows.std().item() * 8 == pytest.approx(1, rel=0.02)
    assert layer.value_rows.std().item() * 8 == pytest.approx(1, rel=0.02)


def test_linformer_with_identity_rows_is_softmax() -> None:
    exact, layer = softmax_and("linformer", False, max_length=8, num_rows=8)
    nn.init.eye_(layer.key_rows)
    nn.init.eye_(layer.value_rows)
    x = make_batch(2, 8)
    torch.testing.assert_close(layer(x).hidden, exact(x).hidden)


def test_nystromformer_with_all_landmarks_is_softmax() -> None:
    exact, layer = softmax_and("nystromformer", False, num_landmarks=16, pinv_iterations=30)
    x, valid = pad(make_sequences(8, 5), 10, "left")
    torch.testing.assert_close(layer(x, valid).hidden, exact(x, valid).hidden, atol=1e-6, rtol=1e-6)


def test_nystromformer_approaches_the_exact_formula() -> None:
    layer, x = make_layer("nystromformer", False, num_landmarks=4, pinv_iterations=30), make_batch(2, 12)
    q, k = layer._queries_and_keys(x)
    q_mark, k_mark = (z.unflatten(2, (4, 3)).mean(3) for z in (q, k))
    left, middle, right = ((a @ b.mT / 2).softmax(-1) for a, b in ((q, k_mark), (q_mark, k_mark), (q_mark, k)))
    expected = left @ torch.linalg.pinv(middle) @ right
    torch.testing.assert_close(layer.kernel_matrix(x), expected, atol=1e-6, rtol=1e-6)


@both_directions
def test_attention_sh_with_stride_one_is_softmax(causal: bool) -> None:
    exact, layer = softmax_and("attention_sh", causal, strides=(1,))
    x, valid = pad(make_sequences(8, 5), 10, "left")
    torch.testing.assert_close(layer(x, valid).hidden, exact(x, valid).hidden)


@both_directions
def test_attention_bn_ignores_the_scale_of_the_keys(causal: bool) -> None:
    """Each feature of the keys is divided by its deviation, so a factor on one feature of q and k cancels."""
    layer, x = make_layer("attention_bn", causal), make_batch(2, 12)
    layer.variance_floor = 1e-12
    before = layer.kernel_matrix(x)[:, :, 3:]
    with torch.no_grad():
        for projection in (layer.query, layer.key):
            projection.weight[1] *= 7
            projection.bias[1] *= 7
    torch.testing.assert_close(layer.kernel_matrix(x)[:, :, 3:], before, atol=1e-6, rtol=1e-6)


@both_directions
def test_attention_bn_is_accurate_far_from_zero(causal: bool) -> None:
    layer, x = make_layer("attention_bn", causal), make_batch(2, 37)
    nn.init.constant_(layer.key.bias, 30.0)
    exact = layer(x).hidden
    torch.testing.assert_close(layer.float()(x.float()).hidden.double(), exact, atol=2e-3, rtol=0)


@pytest.mark.parametrize("side", ["left", "scattered"])
def test_attention_bn_takes_its_origin_from_a_real_token(side: str) -> None:
    layer = make_layer("attention_bn", True)
    x, valid = pad([100 + sequence for sequence in make_sequences(20, 30)], 37, side)
    exact = layer(x, valid).hidden
    torch.testing.assert_close(layer.float()(x.float(), valid).hidden.double(), exact, atol=2e-2, rtol=0)
