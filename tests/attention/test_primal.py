"""Primal-Attention equals its slow reference, and its parts have their documented properties."""

import copy
import math
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from primal_dt import PrimalAttention
from primal_dt.attention import AttentionOutput
from primal_dt.attention.feature_maps import unit
from primal_dt.attention.ksvd import sum_of_squares
from primal_dt.attention.primal import PrimalInit, ScoreNames

from .kinds import both_directions, make_batch, make_layer, make_sequences, pad, primal_variants, with_gradients
from .slow import slow_primal

ignore_jit_warning = pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")


@pytest.mark.parametrize(("seed", "length"), [(0, 1), (1, 8), (2, 17)])
@primal_variants
def test_the_layer_equals_its_reference(name: str, causal: bool, seed: int, length: int) -> None:
    layer = make_layer(name, causal, seed=seed)
    x, valid = pad(make_sequences(length, length + 3, 1, seed=seed), length + 4, "scattered")
    fast = with_gradients(layer(x.requires_grad_(), valid, with_objective=True), layer, x)
    slow = with_gradients(AttentionOutput(*slow_primal(layer, x, valid)), layer, x)
    torch.testing.assert_close(fast, slow)


@primal_variants
def test_gradients_pass_gradcheck(name: str, causal: bool) -> None:
    layer = make_layer(name, causal, width=4, num_heads=2, rank=2)
    x, valid = pad(make_sequences(4, 3, width=4), 5, "both")
    names = [key for key, _ in layer.named_parameters()]

    def call(x: Tensor, *values: Tensor) -> Any:
        parameters = dict(zip(names, values, strict=True))
        return torch.func.functional_call(layer, parameters, (x, valid), {"with_objective": True})

    inputs = [t.detach().clone().requires_grad_() for t in (x, *layer.parameters())]
    assert torch.autograd.gradcheck(call, inputs)


@primal_variants
def test_the_objective_changes_no_output(name: str, causal: bool) -> None:
    layer, x = make_layer(name, causal), make_batch(2, 7)
    plain, full = layer(x), layer(x, with_objective=True)
    assert plain.objective is None
    assert full.objective.shape == (2,)
    torch.testing.assert_close(plain.hidden, full.hidden)


def test_lambda_is_never_negative_and_can_leave_zero() -> None:
    """At zero its slope is one, as for small positive values."""
    layer = PrimalAttention(width=8, num_heads=2, rank=3, data_dependent=False)
    with torch.no_grad():
        layer.lam.copy_(torch.tensor([[0.0, -0.5, 0.5], [0.0, -2.0, 2.0]]))
    assert layer.lambda_.tolist() == [[0.0, 0.5, 0.5], [0.0, 2.0, 2.0]]
    (gradient,) = torch.autograd.grad(layer(torch.randn(1, 5, 8), with_objective=True).objective.sum(), layer.lam)
    with torch.no_grad():
        layer.lam.add_(0.1 * gradient)
    assert (gradient[:, 0] > 0).all()
    assert (layer.lambda_[:, 0] > 0).all()


def test_lambda_starts_as_a_squared_uniform_number() -> None:
    torch.manual_seed(0)
    lam = PrimalAttention(width=8, num_heads=2, rank=4096, data_dependent=False).lambda_
    assert lam.sqrt().mean().item() == pytest.approx(0.5, abs=0.02)
    assert lam.mean().item() == pytest.approx(1 / 3, abs=0.02)


@both_directions
def test_long_sums_are_exact_in_half_precision(causal: bool) -> None:
    """A bfloat16 layer rounds products but not sums: it stays close to the same weights in float64."""
    layer = make_layer("primal", causal, dtype=torch.bfloat16)
    exact = copy.deepcopy(layer).double()
    x = 1 + make_batch(1, 640).to(torch.bfloat16)
    half, full = layer(x, with_objective=True), exact(x.double(), with_objective=True)
    assert half.objective.dtype == torch.float32
    torch.testing.assert_close(half.objective.double(), full.objective, atol=0.01, rtol=0.02)
    assert (half.hidden.double() - full.hidden).norm() < 0.02 * full.hidden.norm()
    if causal:
        state = layer.initial_state(1)
        for token in x.unbind(1):
            hidden, state = layer.step(token, state)
        assert (hidden.double() - full.hidden[:, -1]).norm() < 0.02 * full.hidden[:, -1].norm()


@pytest.mark.parametrize(("init", "scale"), [("unit", 1.0), ("orthonormal", None)])
@pytest.mark.parametrize("rank", [5, 11])
def test_each_head_starts_with_orthogonal_columns(init: PrimalInit, scale: float | None, rank: int) -> None:
    """The Frobenius norm is 1 with ``unit``, as published. With more columns than rows, the rows are orthogonal."""
    layer = PrimalAttention(width=24, num_heads=3, rank=rank, data_dependent=False, init=init)
    size = min(8, rank)
    for weight in (layer.e_weight, layer.r_weight):
        product = weight.mT @ weight if rank <= 8 else weight @ weight.mT
        square = 1.0 if scale is None else scale / size
        torch.testing.assert_close(product, square * torch.eye(size).expand(3, size, size))
        norm = weight.flatten(1).norm(dim=1)
        torch.testing.assert_close(norm, torch.full((3,), size**0.5 if scale is None else 1.0))


@pytest.mark.parametrize("data_dependent", [False, True])
def test_the_published_start_has_a_small_objective(data_dependent: bool) -> None:
    """J starts of the order of Lambda's mean, whatever the rank, not in proportion to it."""
    torch.manual_seed(0)
    x = torch.randn(4, 30, 64)
    found = {}
    for init in get_args(PrimalInit):
        layer = PrimalAttention(width=64, num_heads=2, rank=20, data_dependent=data_dependent, init=init)
        found[init] = float(layer(x, with_objective=True).objective.detach().square().mean())
    assert found["unit"] < 0.01 * found["orthonormal"]


@pytest.mark.parametrize("scores", get_args(ScoreNames))
@pytest.mark.parametrize("causal", [False, True])
def test_only_lambda_has_no_gradient_without_the_penalty(scores: ScoreNames, causal: bool) -> None:
    """So it alone must be frozen, or DistributedDataParallel would wait for its gradient."""
    layer = make_layer("primal", causal, scores=scores)
    names, weights = zip(*layer.named_parameters(), strict=True)
    loss = layer(make_batch(2, 6)).hidden.square().sum()
    gradients = torch.autograd.grad(loss, weights, allow_unused=True)
    assert [name for name, gradient in zip(names, gradients, strict=True) if gradient is None] == ["lam"]


@pytest.mark.parametrize(
    ("real", "expected"),
    [(range(1, 11), [1, 4, 7, 10]), ([2, 4, 5, 6, 7, 8, 9], [2, 5, 7, 9]), ([7, 8, 9], [7, 8, 9, 0])],
)
def test_data_dependent_rows_are_evenly_spaced(real: list[int], expected: list[int]) -> None:
    """Among the valid tokens; zero and unused where there are too few."""
    layer = PrimalAttention(width=4, num_heads=2, rank=1, rank_multi=4)
    tokens = torch.arange(1, 11)
    valid = torch.isin(tokens, torch.tensor(real))
    x = (tokens * valid).float()[None, :, None].expand(1, 10, 4)
    rows, used = layer._rows(x, None if valid.all() else valid[None])
    assert rows[0, :, 0, 0].tolist() == expected
    assert used.expand(1, 4).tolist() == [[row > 0 for row in expected]]


def test_max_rows_limits_the_data_dependent_weights() -> None:
    layer = PrimalAttention(width=8, num_heads=2, rank=3, rank_multi=10, max_rows=12)
    assert layer.e_weight.shape == (2, 12, 3)


@pytest.mark.parametrize(
    ("name", "mixes"), [("primal", True), ("primal, exponential", True), ("primal, data-independent", False)]
)
def test_data_dependent_weights_connect_tokens(name: str, mixes: bool) -> None:
    """With data-independent weights and the cosine map, an output depends on its own token only."""
    layer, x = make_layer(name, False), make_batch(1, 8)
    others = torch.cat((x[:, :1], torch.randn_like(x[:, 1:])), 1)
    assert torch.equal(layer(x).hidden[:, 0], layer(others).hidden[:, 0]) is not mixes


def test_exponential_features_estimate_their_kernel() -> None:
    """The mean of <g(q), g(k)> over draws is exp(<q, k> / sqrt(P)); the kernel is D^-1/2 exp(.) D^-1/2."""
    torch.manual_seed(0)
    layer: Any = PrimalAttention(width=4, num_heads=1, feature_map="exponential", data_dependent=False, bias=False)
    x = 0.5 * torch.randn(1, 5, 4, dtype=torch.float64)
    q, k = layer.double().query_key(x)[0].chunk(2, dim=-1)
    exact = torch.exp(q @ k.T / math.sqrt(4))
    products = []
    for _ in range(10):
        layer.feature_map.directions = torch.randn(20_000, 4, dtype=torch.float64)
        g_q, g_k = (layer.feature_map.log_features(z).exp() for z in (q, k))
        products.append(g_q @ g_k.T / 20_000)
    torch.testing.assert_close(torch.stack(products).mean(0), exact, atol=0, rtol=0.02)
    total = exact.sum(-1)
    matrix = layer.kernel_matrix(x)[0, 0]
    torch.testing.assert_close(matrix, exact / (total[:, None] * total[None]).sqrt(), atol=0, rtol=0.05)
    assert (matrix.sum(-1) - 1).abs().max() > 1e-3  # rows do not sum to 1


def test_the_exponential_map_learns_from_large_inputs() -> None:
    """With |q|^2 in the hundreds, float32 values and gradients stay close to float64."""
    results = []
    for dtype in (torch.float64, torch.float32):
        layer = make_layer("primal, exponential", True).to(dtype)
        x = (30 * make_batch(2, 9)).to(dtype).requires_grad_()
        hidden, objective = layer(x, with_objective=True)
        results.append([t.double() for t in (hidden, objective, *torch.autograd.grad(hidden.sum(), x))])
    for exact, single in zip(*results, strict=True):
        assert exact.abs().max() > 0
        assert (single - exact).norm() < 0.01 * exact.norm()


def test_the_exponential_map_ignores_autocast() -> None:
    layer = make_layer("primal, exponential", True, dtype=torch.float32)
    z = torch.randn(2, 5, 2, layer.num_heads, layer.head_width)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        features = layer.feature_map.log_features(z)
    assert torch.equal(features, layer.feature_map.log_features(z))


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float16, 2e4), (torch.bfloat16, 1e18), (torch.float32, 1e-9)])
def test_the_cosine_map_has_unit_length(dtype: torch.dtype, scale: float) -> None:
    """Also where squares of float16 or of small float32 numbers leave their range."""
    torch.manual_seed(0)
    direction = unit((scale * torch.randn(7, 64).clamp(-3, 3)).to(dtype))
    assert direction.dtype == dtype
    torch.testing.assert_close(direction.float().norm(dim=-1), torch.ones(7), atol=5e-3, rtol=0)


@pytest.fixture
def vectors() -> Tensor:
    """(5, 3, 4), of which the first is zero."""
    torch.manual_seed(0)
    z = torch.randn(5, 3, 4, dtype=torch.float64)
    z[0, 0] = 0.0
    return z.requires_grad_()


def test_the_cosine_map_is_finite_at_zero(vectors: Tensor) -> None:
    direction = unit(vectors)
    torch.testing.assert_close(direction[1:].norm(dim=-1), torch.ones(4, 3, dtype=torch.float64))
    assert (direction[0, 0] == 0).all()
    assert torch.autograd.grad(direction.sum(), vectors)[0].isfinite().all()
    tiny = torch.full((3,), 1e-22, requires_grad=True)
    assert torch.autograd.grad(unit(tiny).sum(), tiny)[0].abs().max() <= 1


@ignore_jit_warning
def test_the_cosine_map_has_its_derivatives(vectors: Tensor) -> None:
    """First and second ones, in forward mode, and with a graph of the backward pass."""
    z = vectors[1:].detach().requires_grad_()
    assert torch.autograd.gradcheck(unit, z)
    assert torch.autograd.gradgradcheck(unit, z)
    tangent = torch.randn_like(z)
    slope = torch.func.jvp(unit, (z.detach(),), (tangent,))[1]
    difference = (unit(z + 1e-6 * tangent) - unit(z - 1e-6 * tangent)) / 2e-6
    torch.testing.assert_close(slope, difference, atol=1e-7, rtol=1e-5)
    without, with_graph = (
        torch.autograd.grad(unit(vectors).sin().sum(), vectors, create_graph=graph)[0] for graph in (False, True)
    )
    torch.testing.assert_close(with_graph, without)


def test_the_cosine_map_supports_vmap(vectors: Tensor) -> None:
    torch.testing.assert_close(torch.func.vmap(unit)(vectors), unit(vectors))


@ignore_jit_warning
def test_the_sum_of_squares_has_its_derivatives() -> None:
    torch.manual_seed(0)
    scores = torch.randn(2, 3, 2, 5, 4, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(sum_of_squares(scores), scores.square().sum((0, 3)))
    assert torch.autograd.gradcheck(sum_of_squares, scores, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(sum_of_squares, scores)
