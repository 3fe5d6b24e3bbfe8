"""Primal-Attention against the theory of its paper: Remark 3.3, Theorem 3.2, Lemma 4.2.

From an exact SVD of the kernel matrix, ``K = U S V'``, a KSVD solution has (KKT conditions)
``W_e = sum_j f(X) phi_k(x_j) v_j'``, ``W_r = sum_i f(X) phi_q(x_i) u_i'``, and, for means over n tokens,
``Lambda = n S^-1``.
"""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from primal_dt import CausalPrimalAttention, PrimalAttention
from primal_dt.attention.primal import FeatureMapName

HEADS, HEAD_WIDTH = 2, 6
SETTINGS = ["cosine", "exponential", "data-dependent", "data-dependent exponential", "causal", "causal exponential"]


class Solution(NamedTuple):
    layer: PrimalAttention
    x: Tensor
    kernel: Tensor  # (H, L, L)
    left: Tensor  # (H, L, R), U
    right: Tensor  # (H, L, R), V
    values: Tensor  # (H, R), S


def build(setting: str, rank: int, rows: int, dtype: torch.dtype) -> PrimalAttention:
    feature_map: FeatureMapName = "exponential" if "exponential" in setting else "cosine"
    width = HEADS * HEAD_WIDTH
    if "causal" in setting:
        return CausalPrimalAttention(width=width, num_heads=HEADS, rank=rank, feature_map=feature_map).to(dtype)
    return PrimalAttention(
        width=width,
        num_heads=HEADS,
        rank=rank,
        feature_map=feature_map,
        data_dependent="data-dependent" in setting,
        rank_multi=rows,
    ).to(dtype)


def features(layer: PrimalAttention, x: Tensor) -> tuple[Tensor, Tensor]:
    """phi_q, phi_k (H, L, P), written out for one sequence."""
    context = x
    if layer.causal:
        context = torch.stack([x[: i + 1].mean(0) for i in range(len(x))])
    queries_keys = context @ layer.query_key.weight.T + layer.query_key.bias
    q, k = (half.view(len(x), HEADS, HEAD_WIDTH).transpose(0, 1) for half in queries_keys.chunk(2, dim=-1))
    if not hasattr(layer.feature_map, "directions"):
        return q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)
    directions = layer.feature_map.directions
    assert isinstance(directions, Tensor)

    def positive(z: Tensor) -> Tensor:
        z = z * HEAD_WIDTH**-0.25
        return torch.exp(-z.square().sum(-1, keepdim=True) / 2) * torch.exp(z @ directions.T)

    products = positive(q) @ positive(k).mT
    normalizer = (products.tril() if layer.causal else products).sum(-1, keepdim=True)
    return positive(q) * normalizer**-0.5, positive(k) * normalizer**-0.5


def spaced_rows(layer: PrimalAttention, x: Tensor) -> Tensor | None:
    """X' (H, N, P), written out for one sequence."""
    if not layer.data_dependent:
        return None
    n = min(layer.e_weight.shape[1], len(x))
    index = [i * (len(x) - 1) // max(n - 1, 1) for i in range(n)]
    return x[index].view(n, HEADS, HEAD_WIDTH).transpose(0, 1)


def solve(setting: str, *, length: int, rank: int, rows: int, seed: int, dtype: torch.dtype) -> Solution:
    """A layer whose weights come from the exact SVD of its kernel matrix for one sequence."""
    torch.manual_seed(seed)
    layer = build(setting, rank, rows, dtype)
    x = torch.randn(length, HEADS * HEAD_WIDTH, dtype=dtype)
    with torch.no_grad():
        phi_q, phi_k = features(layer, x)  # (H, L, P)
        if (f := spaced_rows(layer, x)) is not None:  # (H, N, P)
            phi_q, phi_k = phi_q @ f.mT, phi_k @ f.mT  # (H, L, N)
        kernel = phi_q @ phi_k.mT
        left, values, right = torch.linalg.svd(kernel)
        left, values, right = left[..., :rank], values[..., :rank], right.mT[..., :rank]
        n = phi_q.shape[-1]
        layer.e_weight.zero_()[:, :n] = phi_k.mT @ right
        layer.r_weight.zero_()[:, :n] = phi_q.mT @ left
        layer.lam.copy_(length / values)
    return Solution(layer, x, kernel, left, right, values)


def scores(solution: Solution) -> tuple[Tensor, Tensor]:
    """The layer's own e and r (H, L, R)."""
    layer, x = solution.layer, solution.x[None]
    phi = layer._features(layer._context(x, None), None)
    e, r = layer._scores(phi, layer._weights(x, None))[:, :, 0]
    return e, r


SIZES = [(4, 4, 0), (6, 6, 1), (17, 6, 2), (40, 3, 3)]  # length, rank, seed
DTYPES = [torch.float64, torch.float32]
ALL = [(*size, dtype) for size in SIZES for dtype in DTYPES]
# Lambda divides by the smallest singular value kept; in single precision that must be well away from zero.
WELL_CONDITIONED = [case for case in ALL if case[-1] == torch.float64 or case[1] < min(case[0], HEAD_WIDTH)]
settings = pytest.mark.parametrize("setting", SETTINGS)
all_cases = pytest.mark.parametrize(("length", "rank", "seed", "dtype"), ALL)
well_conditioned_cases = pytest.mark.parametrize(("length", "rank", "seed", "dtype"), WELL_CONDITIONED)


def rounding(solution: Solution) -> float:
    """What single or double precision may lose, relative to the largest singular value."""
    return 100 * torch.finfo(solution.x.dtype).eps


@settings
@all_cases
def test_the_layer_reads_the_kernel_that_the_theory_writes(
    setting: str, length: int, rank: int, seed: int, dtype: torch.dtype
) -> None:
    solution = solve(setting, length=length, rank=rank, rows=4, seed=seed, dtype=dtype)
    kernel = solution.layer.kernel_matrix(solution.x[None])[0]
    torch.testing.assert_close(kernel, solution.kernel)


@settings
@all_cases
def test_primal_scores_equal_the_dual_sums(setting: str, length: int, rank: int, seed: int, dtype: torch.dtype) -> None:
    solution = solve(setting, length=length, rank=rank, rows=4, seed=seed, dtype=dtype)
    e, r = scores(solution)
    atol = rounding(solution) * solution.values.max().item()
    torch.testing.assert_close(e, solution.kernel @ solution.right, atol=atol, rtol=0)  # sum_j h_rj K(x, x_j)
    torch.testing.assert_close(r, solution.kernel.mT @ solution.left, atol=atol, rtol=0)  # sum_i h_ei K(x_i, x)


@settings
@well_conditioned_cases
def test_the_shifted_eigenvalue_problem_holds_with_the_layers_lambda(
    setting: str, length: int, rank: int, seed: int, dtype: torch.dtype
) -> None:
    solution = solve(setting, length=length, rank=rank, rows=4, seed=seed, dtype=dtype)
    relative = rounding(solution) * (solution.values[:, 0] / solution.values[:, -1]).max().item()
    e, r = scores(solution)
    lam = solution.layer.lambda_[:, None] / length  # of the objective with sums
    h_e, h_r = lam * e, lam * r  # KKT: Lambda e_i = h_ei
    atol = relative * solution.values.max().item()
    torch.testing.assert_close(solution.kernel @ h_r, h_e / lam, atol=atol, rtol=0)
    torch.testing.assert_close(solution.kernel.mT @ h_e, h_r / lam, atol=atol, rtol=0)
    identity = torch.eye(rank, dtype=dtype).expand(HEADS, rank, rank)
    torch.testing.assert_close(h_e.mT @ h_e, identity, atol=relative, rtol=0)


@settings
@all_cases
def test_the_objective_is_zero_at_the_svd_and_not_at_random_weights(
    setting: str, length: int, rank: int, seed: int, dtype: torch.dtype
) -> None:
    solution = solve(setting, length=length, rank=rank, rows=4, seed=seed, dtype=dtype)
    scale = solution.values.sum().item()
    objective = solution.layer(solution.x[None], with_objective=True).objective
    assert objective is not None
    assert abs(objective.item()) < rounding(solution) * scale
    torch.manual_seed(seed)
    solution.layer.reset_parameters()
    objective = solution.layer(solution.x[None], with_objective=True).objective
    assert objective is not None
    assert abs(objective.item()) > 1e-3


def test_the_trace_takes_the_raw_weights() -> None:
    """With the data-dependent W_{e|X} in the trace, Lemma 4.2 fails: the SVD would not give J = 0."""
    solution = solve("data-dependent", length=17, rank=4, rows=2, seed=0, dtype=torch.float64)
    layer, x = solution.layer, solution.x[None]
    projections, used = layer._weights(x, None)
    raw = layer._trace(used)[:, 0]
    conditioned = projections.prod(0)[0].sum((-2, -1))
    assert layer.e_weight.shape[1] == 8
    assert (raw - conditioned).abs().min() > 1e-2
    torch.testing.assert_close(raw, solution.values.sum(-1))


def test_a_short_sequence_uses_the_first_rows_in_scores_and_trace_alike() -> None:
    """Whatever stands in the parameter's rows beyond the sequence's tokens changes nothing."""
    solution = solve("data-dependent", length=5, rank=4, rows=3, seed=0, dtype=torch.float64)
    layer, x = solution.layer, solution.x[None]
    assert layer.e_weight.shape[1] == 12
    before = layer(x, with_objective=True)
    with torch.no_grad():
        layer.e_weight[:, 5:] = 7.0
        layer.r_weight[:, 5:] = -3.0
    after = layer(x, with_objective=True)
    assert torch.equal(before.hidden, after.hidden)
    assert before.objective is not None
    assert after.objective is not None
    assert torch.equal(before.objective, after.objective)


@pytest.mark.parametrize("data_dependent", [False, True])
def test_the_penalty_alone_drives_the_objective_to_zero(
    data_dependent: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Gradient descent on J^2, with the weights' norms and the least of Lambda held away from zero."""
    setting = "data-dependent" if data_dependent else "cosine"
    rank = 3
    solution = solve(setting, length=24, rank=rank, rows=4, seed=0, dtype=torch.float64)
    layer, x = solution.layer, solution.x[None]
    torch.manual_seed(1)
    layer.reset_parameters()
    norms = {weight: weight.detach().norm(dim=(-2, -1), keepdim=True) for weight in (layer.e_weight, layer.r_weight)}
    optimizer = torch.optim.Adam([layer.e_weight, layer.r_weight, layer.lam], lr=1e-2)
    history = []
    for _ in range(500):
        objective = layer(x, with_objective=True).objective
        assert objective is not None
        penalty = objective.square().mean()
        history.append(penalty.item())
        optimizer.zero_grad()
        penalty.backward()
        optimizer.step()
        with torch.no_grad():
            for weight, norm in norms.items():
                weight.mul_(norm / weight.norm(dim=(-2, -1), keepdim=True))
            layer.lam.clamp_(min=0.1)
    assert history[-1] < history[0] / 1000
    assert layer.lambda_.min() >= 0.1
    assert layer.e_weight.norm() > 1
    assert layer.r_weight.norm() > 1

    with capsys.disabled():  # for the reader: J = 0 is necessary for the decomposition, not sufficient
        print(f"\n{setting} weights: J^2 {history[0]:.3g} -> {history[-1]:.3g}")
        for side, learned, exact in zip(
            ("left", "right"), scores(solution), (solution.left, solution.right), strict=True
        ):
            cosines = torch.linalg.svdvals(exact.mT @ torch.linalg.qr(learned).Q)
            angles = torch.rad2deg(cosines.clamp(max=1).acos()).mean(0).tolist()
            print(
                f"  angles to the top {rank} {side} singular vectors: "
                + ", ".join(f"{a:.0f}" for a in angles)
                + " degrees"
            )
