"""The baselines against slow references, and against what their papers say of them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from primal_dt.attention import (
    AttentionLayer,
    BatchNormAttention,
    DualAttention,
    FlowformerAttention,
    LinformerAttention,
    build_attention,
)
from primal_dt.attention.random_features import orthogonal_directions_
from primal_dt.attention.scan import causal_products

from .kinds import BASELINE_VARIANTS, OPTIONS, WIDTH, make_batch, make_layer, pad
from .slow import slow_attention

variants = pytest.mark.parametrize(("name", "causal"), BASELINE_VARIANTS)


@variants
def test_a_layer_equals_its_slow_reference_in_single_precision_and_other_widths(name: str, causal: bool) -> None:
    for num_heads in (1, 2):
        torch.manual_seed(num_heads)
        layer = build_attention(
            name.partition(",")[0], width=10, num_heads=num_heads, causal=causal, **OPTIONS.get(name, {})
        )
        assert isinstance(layer, DualAttention)
        x = torch.randn(2, 13, 10)
        torch.testing.assert_close(layer(x).hidden, slow_attention(layer, x), atol=2e-4, rtol=2e-4)


def compare_with_slow(layer: AttentionLayer, x: Tensor, valid: Tensor | None, tolerance: float = 1e-9) -> None:
    assert isinstance(layer, DualAttention)
    x = x.clone().requires_grad_()
    results = [layer(x, valid).hidden, slow_attention(layer, x, valid)]
    torch.testing.assert_close(*results, atol=tolerance, rtol=tolerance)
    inputs = [x, *layer.parameters()]
    gradients = [torch.autograd.grad(hidden.sin().sum(), inputs) for hidden in results]
    for fast, slow in zip(*gradients, strict=True):
        torch.testing.assert_close(fast, slow, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("seed", "length"), [(0, 1), (1, 2), (2, 9), (3, 21)])
@variants
def test_a_layer_equals_its_slow_reference_in_values_and_gradients(
    name: str, causal: bool, seed: int, length: int
) -> None:
    # One key of Attention-BN has no spread: a true gradient of zero, times 1e5, is what the reference rounds.
    tolerance = 1e-6 if name == "attention_bn" else 1e-9
    layer = make_layer(name, causal, seed=seed)
    compare_with_slow(layer, torch.stack(make_batch((length, length), seed=seed)), None, tolerance)
    x, valid = pad(make_batch((length, 3, 1), seed=seed), length + 5, "scattered")
    compare_with_slow(layer, x, valid, tolerance)


@pytest.mark.parametrize("name", ["linear", "performer", "cosformer", "flowformer"])
def test_a_scan_over_several_chunks_equals_the_slow_reference(name: str) -> None:
    options: dict[str, Any] = {"horizon": 512} if name == "cosformer" else {}
    layer = make_layer(name, True, **options)
    x, valid = pad(make_batch((290, 140)), 300, "scattered")
    compare_with_slow(layer, x, valid)


@pytest.mark.parametrize("chunk", [1, 3, 7, 50])
def test_the_scan_equals_a_masked_product_whatever_the_chunk(chunk: int) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 20, width, dtype=torch.float64) for width in (4, 4, 5))
    torch.testing.assert_close(causal_products(q, k, v, chunk=chunk), (q @ k.mT).tril() @ v)


@pytest.mark.parametrize("options", [{"chunk_size": 1}, {"chunk_size": 3, "num_rounds": 1}, {"num_buckets": 2}])
@pytest.mark.parametrize("causal", [False, True])
def test_reformer_equals_its_slow_reference_with_other_chunks_and_buckets(
    causal: bool, options: dict[str, Any]
) -> None:
    layer = make_layer("reformer", causal, **options)
    x, valid = pad(make_batch((17, 11)), 20, "scattered")
    compare_with_slow(layer, x, valid)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_bn_is_accurate_in_single_precision_for_keys_far_from_zero(causal: bool) -> None:
    layer = make_layer("attention_bn", causal)
    assert isinstance(layer, BatchNormAttention)
    nn.init.constant_(layer.key.bias, 30.0)
    x = torch.stack(make_batch((37, 37)))
    exact = layer(x).hidden.detach()
    torch.testing.assert_close(layer.float()(x.float()).hidden.double(), exact, atol=2e-3, rtol=0)


def same_projections(layer: AttentionLayer, like: AttentionLayer) -> AttentionLayer:
    """A layer with the projections of another."""
    layer.load_state_dict(like.state_dict(), strict=False)
    return layer


@pytest.mark.parametrize("causal", [False, True])
def test_softmax_equals_torch_multihead_attention(causal: bool) -> None:
    layer = make_layer("softmax", causal)
    x, valid = pad(make_batch((10, 6)), 12, "right")
    peer = nn.MultiheadAttention(WIDTH, layer.num_heads, batch_first=True, dtype=torch.float64)
    weights = layer.state_dict()
    parts = ("query", "key", "value")
    peer.load_state_dict(
        {
            "in_proj_weight": torch.cat([weights[f"{part}.weight"] for part in parts]),
            "in_proj_bias": torch.cat([weights[f"{part}.bias"] for part in parts]),
            "out_proj.weight": weights["output.weight"],
            "out_proj.bias": weights["output.bias"],
        }
    )
    mask = torch.ones(12, 12, dtype=torch.bool).triu(1) if causal else None
    expected, _ = peer(x, x, x, key_padding_mask=~valid, attn_mask=mask, need_weights=False)
    torch.testing.assert_close(layer(x, valid).hidden[valid], expected[valid])


@pytest.mark.parametrize("causal", [False, True])
def test_performer_approaches_softmax_with_more_features(causal: bool) -> None:
    exact = make_layer("softmax", causal)
    x = torch.stack(make_batch((15, 15)))
    errors = []
    for num_features in (256, 4096):
        draws = [make_layer("performer", causal, seed=seed, num_features=num_features) for seed in range(8)]
        matrices = [same_projections(layer, exact).kernel_matrix(x) for layer in draws]
        errors.append(sum((m - exact.kernel_matrix(x)).abs().mean().item() for m in matrices) / len(draws))
    assert errors[1] < 3e-3
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.35)  # sixteen times the features, a quarter of the error


def test_orthogonal_directions_are_orthogonal_and_unbiased() -> None:
    torch.manual_seed(0)
    directions = torch.stack([orthogonal_directions_(torch.empty(10, 4)) for _ in range(4000)])  # (draws, F, P)
    gram = directions[0, :4] @ directions[0, :4].T
    assert (gram - gram.diagonal().diag()).abs().max() < 1e-4
    assert directions.mean(0).abs().max() < 5 / 4000**0.5  # each row N(0, I)
    torch.testing.assert_close(directions.square().mean((0, 1)), torch.ones(4), atol=0.05, rtol=0)
    z = torch.full((4,), 0.5)
    estimate = (directions @ (2 * z) - z @ z).exp().mean()
    assert estimate.item() == pytest.approx((z @ z).exp().item(), rel=0.05)


@pytest.mark.parametrize("name", ["softmax", "linear", "performer", "attention_bn", "attention_sh", "reformer"])
@pytest.mark.parametrize("causal", [False, True])
def test_rows_of_the_attention_matrix_are_weights_of_a_mean(name: str, causal: bool) -> None:
    x, valid = pad(make_batch((10, 6)), 12, "both")
    matrix = make_layer(name, causal).kernel_matrix(x, valid)
    assert (matrix >= 0).all()
    torch.testing.assert_close(matrix.sum(-1), valid[:, None].to(matrix.dtype).expand(matrix.shape[:-1]))
    if causal:
        assert matrix.triu(1).abs().max() == 0


def test_cosformer_weighs_near_tokens_more() -> None:
    """Equal tokens: what is left is the cosine of the distance, down to nothing at the horizon."""
    layer = make_layer("cosformer", False, horizon=9)
    x = make_batch((1,))[0].expand(1, 9, WIDTH)
    matrix = layer.kernel_matrix(x)[0]
    weights = matrix[matrix[:, 0, 0] > 0][0]  # a head whose features do not vanish
    expected = torch.cos(torch.pi / 2 * torch.arange(9, dtype=torch.float64) / 9)
    torch.testing.assert_close(weights[0] / weights[0, 0], expected)


def test_flowformer_gives_each_sink_its_share_of_the_flow() -> None:
    """With equal queries all sinks receive alike: each takes one source's worth, sigmoid(1) of the average."""
    layer = make_layer("flowformer", False)
    assert isinstance(layer, FlowformerAttention)
    with torch.no_grad():
        layer.query.weight.zero_()
    x = torch.stack(make_batch((11,)))
    matrix = layer.kernel_matrix(x)
    flow = layer._queries_and_keys(x)[0].sigmoid() @ layer._queries_and_keys(x)[1].sigmoid().mT
    competition = 11 * (11 * flow[..., 0, :] / flow[..., 0, :].sum(-1, keepdim=True)).softmax(-1)
    expected = (
        torch.sigmoid(torch.ones((), dtype=x.dtype))
        * competition
        * flow[..., 0, :]
        / flow[..., 0, :].sum(-1, keepdim=True)
    )
    torch.testing.assert_close(matrix, expected[..., None, :].expand_as(matrix))


@pytest.mark.parametrize("scale", [0.0, 1e-20, 30.0, 1e4])
@variants
def test_outputs_and_gradients_stay_finite_whatever_comes_in(name: str, causal: bool, scale: float) -> None:
    layer = make_layer(name, causal, dtype=torch.float32)
    x = (scale * torch.stack(make_batch((9, 9), dtype=torch.float32))).requires_grad_()
    hidden = layer(x).hidden
    gradients = torch.autograd.grad(hidden.sin().sum(), [x, *layer.parameters()])
    assert all(t.isfinite().all() for t in (hidden, *gradients))


@pytest.mark.parametrize("causal", [False, True])
def test_linear_attention_does_not_see_the_scale_of_its_features(causal: bool) -> None:
    """Features of exp(-30), all of whose digits elu + 1 would lose: the rows are still weights of a mean."""
    layer = make_layer("linear", causal, dtype=torch.float32)
    assert isinstance(layer, DualAttention)
    nn.init.constant_(layer.query.bias, -30.0)
    nn.init.constant_(layer.key.bias, -30.0)
    matrix = layer.kernel_matrix(torch.stack(make_batch((9, 9), dtype=torch.float32)))
    torch.testing.assert_close(matrix.sum(-1), torch.ones(2, 3, 9), atol=1e-3, rtol=0)


def test_cosformer_gives_nothing_where_no_feature_is_positive() -> None:
    layer = make_layer("cosformer", True, dtype=torch.float32)
    assert isinstance(layer, DualAttention)
    nn.init.constant_(layer.key.bias, -100.0)
    x = torch.stack(make_batch((9, 9), dtype=torch.float32)).requires_grad_()
    hidden = layer(x).hidden
    torch.testing.assert_close(hidden, layer.output.bias.expand_as(hidden))
    assert torch.autograd.grad(hidden.sum(), x)[0].isfinite().all()


@pytest.mark.parametrize("side", ["left", "scattered"])
def test_attention_bn_takes_its_origin_from_a_real_token(side: str) -> None:
    layer = make_layer("attention_bn", True)
    x, valid = pad([100 + sequence for sequence in make_batch((20, 30))], 37, side)
    exact = layer(x, valid).hidden.detach()
    torch.testing.assert_close(layer.float()(x.float(), valid).hidden.double(), exact, atol=2e-2, rtol=0)


def test_reformer_with_one_chunk_is_shared_query_softmax_without_oneself() -> None:
    layer = make_layer("reformer", False, chunk_size=64)
    x = torch.stack(make_batch((9, 9)))
    assert isinstance(layer, DualAttention)
    q = layer._split(layer.query(x))
    scores = q @ (q / q.norm(dim=-1, keepdim=True)).mT / 2  # P = 4
    scores = scores.masked_fill(torch.eye(9, dtype=torch.bool), float("-inf"))
    torch.testing.assert_close(layer.kernel_matrix(x), scores.softmax(-1))


def test_linformer_starts_with_projections_that_keep_the_scale() -> None:
    layer = build_attention("linformer", width=8, num_heads=2, max_length=512, num_rows=64)
    assert isinstance(layer, LinformerAttention)
    assert layer.key_rows.std().item() * 8 == pytest.approx(1, rel=0.02)
    assert layer.value_rows.std().item() * 8 == pytest.approx(1, rel=0.02)


def test_linformer_with_identity_rows_is_softmax() -> None:
    exact = make_layer("softmax", False)
    layer = same_projections(
        build_attention("linformer", width=WIDTH, num_heads=3, max_length=8, num_rows=8).double(), exact
    )
    assert isinstance(layer, LinformerAttention)
    with torch.no_grad():
        layer.key_rows.copy_(torch.eye(8))
        layer.value_rows.copy_(torch.eye(8))
    x = torch.stack(make_batch((8, 8)))
    torch.testing.assert_close(layer(x).hidden, exact(x).hidden)


def test_nystromformer_with_a_landmark_per_token_is_softmax() -> None:
    exact = make_layer("softmax", False)
    layer = same_projections(make_layer("nystromformer", False, num_landmarks=16, pinv_iterations=30), exact)
    x, valid = pad(make_batch((8, 5)), 10, "left")
    torch.testing.assert_close(layer(x, valid).hidden, exact(x, valid).hidden, atol=1e-6, rtol=1e-6)


def test_nystromformer_approaches_its_formula_with_the_exact_pseudo_inverse() -> None:
    layer = make_layer("nystromformer", False, num_landmarks=4, pinv_iterations=30)
    x = torch.stack(make_batch((12, 12)))
    assert isinstance(layer, DualAttention)
    q, k = layer._queries_and_keys(x)
    q_mark, k_mark = (z.unflatten(2, (4, 3)).mean(3) for z in (q, k))
    left, middle, right = ((a @ b.mT / 2).softmax(-1) for a, b in ((q, k_mark), (q_mark, k_mark), (q_mark, k)))
    expected = left @ torch.linalg.pinv(middle) @ right
    torch.testing.assert_close(layer.kernel_matrix(x), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_sh_with_stride_one_is_softmax(causal: bool) -> None:
    exact = make_layer("softmax", causal)
    layer = same_projections(make_layer("attention_sh", causal, strides=(1,)), exact)
    x, valid = pad(make_batch((8, 5)), 10, "left")
    torch.testing.assert_close(layer(x, valid).hidden, exact(x, valid).hidden)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_bn_does_not_see_the_scale_of_the_keys(causal: bool) -> None:
    """Each feature of the keys divided by its deviation: a factor on one feature of q and k alike cancels."""
    layer = make_layer("attention_bn", causal)
    assert isinstance(layer, BatchNormAttention)
    layer.variance_floor = 1e-12
    x = torch.stack(make_batch((12, 12)))
    before = layer.kernel_matrix(x)[:, :, 3:]
    with torch.no_grad():
        for projection in (layer.query, layer.key):
            projection.weight[1] *= 7
            projection.bias[1] *= 7
    torch.testing.assert_close(layer.kernel_matrix(x)[:, :, 3:], before, atol=1e-6, rtol=1e-6)
