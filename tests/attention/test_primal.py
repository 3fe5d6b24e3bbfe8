"""Primal-Attention against a slow reference, and what its parts promise."""

import copy
import math

import pytest
import torch
from torch import Tensor

from primal_dt import CausalPrimalAttention, PrimalAttention
from primal_dt.attention import AttentionLayer
from primal_dt.attention.feature_maps import ExponentialMap, unit
from primal_dt.attention.ksvd import sum_of_squares

from .kinds import NUM_HEADS, PRIMAL_VARIANTS, WIDTH, make_batch, make_layer, pad

variants = pytest.mark.parametrize(("name", "causal"), PRIMAL_VARIANTS)
HEAD_WIDTH = WIDTH // NUM_HEADS


def slow_primal(layer: AttentionLayer, x: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """One sequence, one head, one token at a time, as the paper writes it: means of queries and keys, then phi."""
    assert isinstance(layer, PrimalAttention)
    outputs = []
    objectives = []
    for tokens, real in zip(x, valid, strict=True):
        sequence = tokens[real]
        n = len(sequence)
        queries, keys = layer.query_key(sequence).chunk(2, dim=-1)
        heads: list[list[Tensor]] = [[] for _ in range(n)]
        objective = x.new_zeros(())
        for h in range(layer.num_heads):
            own = slice(h * HEAD_WIDTH, (h + 1) * HEAD_WIDTH)
            q, k = list(queries[:, own]), list(keys[:, own])
            if layer.causal:
                q = [sum(q[: i + 1], torch.zeros(())) / (i + 1) for i in range(n)]
                k = [sum(k[: i + 1], torch.zeros(())) / (i + 1) for i in range(n)]
            phi_q, phi_k = slow_features(layer, q, k)
            w_e, w_r, trace = slow_weights(layer, h, sequence[:, own])
            e = [w_e.T @ phi for phi in phi_q]
            r = [w_r.T @ phi for phi in phi_k]
            for i in range(n):
                heads[i].append(layer.merge(torch.cat((e[i], r[i]))))
            energy = sum(
                ((layer.lam[h].abs() * (a * a + b * b)).sum() for a, b in zip(e, r, strict=True)), x.new_zeros(())
            )
            objective = objective + (energy / (2 * n) - trace) / layer.num_heads
        hidden = layer.output(torch.stack([torch.cat(parts) for parts in heads]))
        outputs.append(torch.zeros_like(tokens).masked_scatter(real[:, None], hidden))
        objectives.append(objective)
    return torch.stack(outputs), torch.stack(objectives)


def slow_features(layer: PrimalAttention, q: list[Tensor], k: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    if not hasattr(layer.feature_map, "directions"):
        return [z / z.norm() for z in q], [z / z.norm() for z in k]
    directions = layer.feature_map.directions
    assert isinstance(directions, Tensor)

    def positive(z: Tensor) -> Tensor:
        z = z / HEAD_WIDTH**0.25
        return torch.stack([torch.exp(w @ z) for w in directions]) * torch.exp(-z @ z / 2)

    g_q, g_k = [positive(z) for z in q], [positive(z) for z in k]
    totals = [
        sum((g_q[i] @ g for g in (g_k[: i + 1] if layer.causal else g_k)), torch.zeros(())) for i in range(len(q))
    ]
    return (
        [g / total.sqrt() for g, total in zip(g_q, totals, strict=True)],
        [g / total.sqrt() for g, total in zip(g_k, totals, strict=True)],
    )


def slow_weights(layer: PrimalAttention, h: int, sequence: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    w_e, w_r = layer.e_weight[h], layer.r_weight[h]
    if not layer.data_dependent:
        return w_e, w_r, torch.trace(w_e.T @ w_r)
    n = min(len(w_e), len(sequence))
    rows = torch.stack([sequence[i * (len(sequence) - 1) // max(n - 1, 1)] for i in range(n)])
    w_e, w_r = w_e[:n], w_r[:n]
    return rows.T @ w_e, rows.T @ w_r, torch.trace(w_e.T @ w_r)


@pytest.mark.parametrize(("seed", "length"), [(0, 1), (1, 8), (2, 17)])
@variants
def test_the_layer_equals_the_slow_reference_in_values_and_gradients(
    name: str, causal: bool, seed: int, length: int
) -> None:
    layer = make_layer(name, causal, seed=seed)
    x, valid = pad(make_batch((length, length + 3, 1), seed=seed), length + 4, "scattered")
    x.requires_grad_()
    fast = layer(x, valid, with_objective=True)
    hidden, objective = slow_primal(layer, x, valid)
    torch.testing.assert_close(fast.hidden, hidden)
    torch.testing.assert_close(fast.objective, objective)
    assert fast.objective is not None
    wanted = [x, *layer.parameters()]
    fast_gradients = torch.autograd.grad(fast.hidden.sin().sum() + fast.objective.square().sum(), wanted)
    slow_gradients = torch.autograd.grad(hidden.sin().sum() + objective.square().sum(), wanted)
    for fast_gradient, slow_gradient in zip(fast_gradients, slow_gradients, strict=True):
        torch.testing.assert_close(fast_gradient, slow_gradient)


@variants
def test_gradients_pass_gradcheck(name: str, causal: bool) -> None:
    layer = make_layer(name, causal, rank=2)
    x, valid = pad(make_batch((4, 3)), 5, "both")
    names = [parameter for parameter, _ in layer.named_parameters()]

    def call(x: Tensor, *values: Tensor) -> tuple[Tensor, Tensor]:
        parameters = dict(zip(names, values, strict=True))
        hidden, objective = torch.func.functional_call(layer, parameters, (x, valid), {"with_objective": True})
        return hidden, objective

    inputs = [t.detach().clone().requires_grad_() for t in (x, *layer.parameters())]
    assert torch.autograd.gradcheck(call, inputs)


@variants
def test_the_objective_is_left_out_unless_asked_for_and_changes_no_output(name: str, causal: bool) -> None:
    layer = make_layer(name, causal)
    x = torch.stack(make_batch((7, 7)))
    plain, asked = layer(x), layer(x, with_objective=True)
    assert plain.objective is None
    assert asked.objective is not None
    assert asked.objective.shape == (2,)
    torch.testing.assert_close(plain.hidden, asked.hidden)


def test_lambda_is_never_negative_and_leaves_zero() -> None:
    layer = PrimalAttention(width=8, num_heads=2, rank=3, data_dependent=False).double()
    x = torch.stack([torch.randn(5, 8, dtype=torch.float64)])
    with torch.no_grad():
        layer.lam.copy_(torch.tensor([[0.0, -0.5, 0.5], [0.0, -2.0, 2.0]]))
    torch.testing.assert_close(layer.lambda_, torch.tensor([[0.0, 0.5, 0.5], [0.0, 2.0, 2.0]], dtype=torch.float64))
    # At zero the slope is that of a small positive value: dJ / dLambda, not nothing.
    objective = layer(x, with_objective=True).objective
    assert objective is not None
    (at_zero,) = torch.autograd.grad(objective.sum(), layer.lam)
    assert (at_zero[:, 0] > 0).all()
    with torch.no_grad():
        layer.lam[:, 0] = 0.0
    optimizer = torch.optim.SGD([layer.lam], lr=0.1)
    (-layer(x, with_objective=True).objective.sum()).backward()
    optimizer.step()
    assert (layer.lambda_[:, 0] > 0).all()


def test_lambda_starts_as_the_square_of_a_uniform_number() -> None:
    torch.manual_seed(0)
    lam = PrimalAttention(width=8, num_heads=2, rank=4096, data_dependent=False).lambda_
    assert lam.sqrt().mean().item() == pytest.approx(0.5, abs=0.02)
    assert lam.mean().item() == pytest.approx(1 / 3, abs=0.02)


@pytest.mark.parametrize("causal", [False, True])
def test_sums_over_long_sequences_stay_exact_in_half_precision(causal: bool) -> None:
    """A bfloat16 layer against the same weights in float64: only the products are rounded, not the sums."""
    layer = make_layer("primal", causal, dtype=torch.bfloat16)
    exact = copy.deepcopy(layer).double()
    x = 1 + torch.stack(make_batch((2048,))).to(torch.bfloat16)
    half, full = layer(x, with_objective=True), exact(x.double(), with_objective=True)
    assert half.objective is not None
    assert half.objective.dtype == torch.float32
    torch.testing.assert_close(half.objective.double(), full.objective, atol=0.01, rtol=0.02)
    assert (half.hidden.double() - full.hidden).norm() < 0.02 * full.hidden.norm()
    if isinstance(layer, CausalPrimalAttention):
        state = layer.initial_state(1)
        for token in x.unbind(1):
            hidden, state = layer.step(token, state)
        assert (hidden.double() - full.hidden[:, -1]).norm() < 0.02 * full.hidden[:, -1].norm()


def test_each_head_starts_with_orthonormal_columns() -> None:
    layer = PrimalAttention(width=24, num_heads=3, rank=5, data_dependent=False)
    for weight in (layer.e_weight, layer.r_weight):
        torch.testing.assert_close(weight.mT @ weight, torch.eye(5).expand(3, 5, 5))
    wide = PrimalAttention(width=24, num_heads=3, rank=11, data_dependent=False)
    torch.testing.assert_close(wide.e_weight @ wide.e_weight.mT, torch.eye(8).expand(3, 8, 8))


def test_exponential_features_estimate_the_normalized_exponential_kernel() -> None:
    """Over many draws, <g(q), g(k)> is exp(<q, k> / sqrt(P)): the kernel is D^-1/2 exp(.) D^-1/2."""
    torch.manual_seed(0)
    layer = PrimalAttention(width=4, num_heads=1, feature_map="exponential", data_dependent=False, bias=False).double()
    x = 0.5 * torch.randn(1, 5, 4, dtype=torch.float64)
    q, k = layer.query_key(x)[0].chunk(2, dim=-1)
    exact = torch.exp(q @ k.T / math.sqrt(4))
    products = torch.zeros(5, 5, dtype=torch.float64)
    draws = 20_000
    for _ in range(10):
        layer.feature_map.directions = torch.randn(draws, 4, dtype=torch.float64)
        assert isinstance(layer.feature_map, ExponentialMap)
        g_q, g_k = layer.feature_map.log_features(q).exp(), layer.feature_map.log_features(k).exp()
        products += g_q @ g_k.T / (10 * draws)
    torch.testing.assert_close(products, exact, atol=0, rtol=0.02)
    total = exact.sum(-1)
    matrix = layer.kernel_matrix(x)[0, 0]
    torch.testing.assert_close(matrix, exact / (total[:, None] * total[None]).sqrt(), atol=0, rtol=0.05)
    assert (matrix.sum(-1) - 1).abs().max() > 1e-3  # not row-stochastic


@pytest.mark.parametrize("causal", [False, True])
def test_the_exponential_map_stays_finite_whatever_comes_in(causal: bool) -> None:
    layer = make_layer("primal, exponential", causal, dtype=torch.float32)
    for scale in (0.0, 1e-20, 30.0, 1e4):
        x = (scale * torch.stack(make_batch((6, 6), dtype=torch.float32))).requires_grad_()
        hidden, objective = layer(x, with_objective=True)
        assert objective is not None
        gradients = torch.autograd.grad(hidden.sum() + objective.sum(), [x, *layer.parameters()])
        assert all(t.isfinite().all() for t in (hidden, objective, *gradients))


def test_data_dependent_rows_are_the_evenly_spaced_valid_tokens() -> None:
    layer = PrimalAttention(width=4, num_heads=2, rank=1, rank_multi=4)
    x = torch.arange(1.0, 11.0)[None, :, None].expand(1, 10, 4).clone()
    rows, used = layer._rows(x, None)
    assert rows[0, :, 0, 0].tolist() == [1, 4, 7, 10]
    assert used.all()
    valid = torch.tensor([[False, True, False, True, True, True, True, True, True, False]])
    rows, used = layer._rows(x * valid[..., None], valid)
    assert rows[0, :, 0, 0].tolist() == [2, 5, 7, 9]
    valid = torch.tensor([[False] * 6 + [True, True, True, False]])
    rows, used = layer._rows(x * valid[..., None], valid)
    assert rows[0, :, 0, 0].tolist() == [7, 8, 9, 0]
    assert used.tolist() == [[True, True, True, False]]


def test_data_dependent_weights_are_refused_in_the_causal_layer() -> None:
    with pytest.raises(ValueError, match="see the future"):
        CausalPrimalAttention(width=8, num_heads=2, data_dependent=True)


def test_max_rows_caps_the_rows_of_data_dependent_weights() -> None:
    layer = PrimalAttention(width=8, num_heads=2, rank=3, rank_multi=10, max_rows=12)
    assert layer.e_weight.shape == (2, 12, 3)


@pytest.mark.parametrize(
    ("name", "mixes"), [("primal", True), ("primal, exponential", True), ("primal, data-independent", False)]
)
def test_tokens_learn_of_each_other_through_data_dependent_weights(name: str, mixes: bool) -> None:
    """As the docstring says: with data-independent weights and the cosine map, an output is its own token's alone."""
    layer = make_layer(name, False)
    x = torch.stack(make_batch((8,)))
    others = torch.cat((x[:, :1], torch.randn_like(x[:, 1:])), 1)
    assert torch.equal(layer(x).hidden[:, 0], layer(others).hidden[:, 0]) is not mixes


def test_the_exponential_map_learns_from_large_queries_and_keys() -> None:
    """Values and gradients in single precision follow double precision where |q|^2 is in the hundreds."""
    results = []
    for dtype in (torch.float64, torch.float32):
        layer = make_layer("primal, exponential", True, dtype=torch.float64).to(dtype)
        x = (30 * torch.stack(make_batch((9, 9)))).to(dtype).requires_grad_()
        hidden, objective = layer(x, with_objective=True)
        assert objective is not None
        (gradient,) = torch.autograd.grad(hidden.sum(), x)
        results.append((hidden.double(), objective.double(), gradient.double()))
    for exact, single in zip(*results, strict=True):
        assert exact.abs().max() > 0
        assert (single - exact).norm() < 0.01 * exact.norm()


def test_the_exponential_map_ignores_autocast() -> None:
    layer = make_layer("primal, exponential", True, dtype=torch.float32)
    assert isinstance(layer, PrimalAttention)
    assert isinstance(layer.feature_map, ExponentialMap)
    z = torch.randn(2, 5, 2, NUM_HEADS, HEAD_WIDTH)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        features = layer.feature_map.log_features(z)
    assert torch.equal(features, layer.feature_map.log_features(z))


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float16, 2e4), (torch.bfloat16, 1e18), (torch.float32, 1e-9)])
def test_the_cosine_map_has_unit_length_in_every_precision(dtype: torch.dtype, scale: float) -> None:
    """Where the squares of float16, or of small float32 numbers, would leave their range."""
    torch.manual_seed(0)
    direction = unit((scale * torch.randn(7, 64).clamp(-3, 3)).to(dtype))
    assert direction.dtype == dtype
    torch.testing.assert_close(direction.float().norm(dim=-1), torch.ones(7), atol=5e-3, rtol=0)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")  # torch's own
def test_the_cosine_map_keeps_directions_and_stays_finite_at_zero() -> None:
    torch.manual_seed(0)
    z = torch.randn(5, 3, 4, dtype=torch.float64)
    z[0, 0] = 0.0
    z.requires_grad_()
    direction = unit(z)
    torch.testing.assert_close(direction[1:].norm(dim=-1), torch.ones(4, 3, dtype=torch.float64))
    assert (direction[0, 0] == 0).all()
    (gradient,) = torch.autograd.grad(direction.sum(), z)
    assert gradient.isfinite().all()
    assert torch.autograd.gradcheck(unit, z[1:].detach().requires_grad_())
    assert torch.autograd.gradgradcheck(unit, z[1:].detach().requires_grad_())
    torch.testing.assert_close(torch.func.vmap(unit)(z), direction)
    # With a graph of the backward pass, as for second derivatives, the first ones are the same.
    (with_graph,) = torch.autograd.grad(unit(z).sin().sum(), z, create_graph=True)
    torch.testing.assert_close(with_graph, torch.autograd.grad(unit(z).sin().sum(), z)[0])
    # Forward mode agrees with the derivative along a line.
    tangent = torch.randn_like(z)
    slope = torch.func.jvp(unit, (z[1:].detach(),), (tangent[1:],))[1]
    expected = (unit(z + 1e-6 * tangent) - unit(z - 1e-6 * tangent))[1:] / 2e-6
    torch.testing.assert_close(slope, expected, atol=1e-7, rtol=1e-5)
    tiny = torch.full((3,), 1e-22, requires_grad=True)
    (gradient,) = torch.autograd.grad(unit(tiny).sum(), tiny)
    assert gradient.abs().max() <= 1


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")  # torch's own
def test_the_sum_of_squares_has_its_derivatives() -> None:
    torch.manual_seed(0)
    scores = torch.randn(2, 3, 2, 5, 4, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(sum_of_squares(scores), scores.square().sum((0, 3)))
    assert torch.autograd.gradcheck(sum_of_squares, scores, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(sum_of_squares, scores)
