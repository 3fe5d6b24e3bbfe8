"""Primal-Attention agrees with the theory of its paper: Remark 3.3, Theorem 3.2, Lemma 4.2.

From an exact SVD of the kernel matrix, ``K = U S V'``, a KSVD solution has (KKT conditions)
``W_e = sum_j f(X) phi_k(x_j) v_j'``, ``W_r = sum_i f(X) phi_q(x_i) u_i'``, and, for means over n tokens,
``Lambda = n S^-1``.
"""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from primal_dt import CausalPrimalAttention, PrimalAttention

from .slow import slow_primal_features, slow_primal_rows

HEADS, HEAD_WIDTH = 2, 6
SETTINGS = ["cosine", "exponential", "data-dependent", "data-dependent exponential", "causal", "causal exponential"]
SIZES = [(4, 4, 0), (6, 6, 1), (17, 6, 2), (40, 3, 3)]  # length, rank, seed
ALL = [(s, *size, dtype) for s in SETTINGS for size in SIZES for dtype in (torch.float64, torch.float32)]
# Lambda divides by the smallest singular value used. In single precision it must be well above zero.
WELL_CONDITIONED = [case for case in ALL if case[-1] == torch.float64 or case[2] < min(case[1], HEAD_WIDTH)]


class Solution(NamedTuple):
    """A layer whose weights come from the exact SVD of its kernel matrix for the sequence x (L, D)."""

    layer: PrimalAttention
    x: Tensor
    kernel: Tensor  # (H, L, L)
    left: Tensor  # (H, L, R), U
    right: Tensor  # (H, L, R), V
    values: Tensor  # (H, R), S

    @property
    def rounding(self) -> float:
        """The allowed error of single or double precision, relative to the largest singular value."""
        return 100 * torch.finfo(self.x.dtype).eps

    def scores(self) -> tuple[Tensor, Tensor]:
        """The scores e and r (H, L, R) that the layer computes."""
        layer, x = self.layer, self.x[None]
        phi = layer._features(layer._context(x, None), None)
        e, r = layer._scores(phi, layer._weights(x, None))[:, :, 0]
        return e, r

    def objective(self) -> Tensor:
        """J (1,), as the layer computes it."""
        objective: Tensor = self.layer(self.x[None], with_objective=True).objective
        return objective


def solve(
    setting: str, length: int, rank: int, seed: int, dtype: torch.dtype = torch.float64, rank_multi: int = 4
) -> Solution:
    torch.manual_seed(seed)
    options: dict[str, Any] = {"feature_map": "exponential" if "exponential" in setting else "cosine"}
    if "causal" not in setting:
        options |= {"data_dependent": "data-dependent" in setting, "rank_multi": rank_multi}
    kind = CausalPrimalAttention if "causal" in setting else PrimalAttention
    layer = kind(width=HEADS * HEAD_WIDTH, num_heads=HEADS, rank=rank, **options).to(dtype)
    x = torch.randn(length, HEADS * HEAD_WIDTH, dtype=dtype)
    with torch.no_grad():
        phi_q, phi_k = slow_primal_features(layer, x)  # (H, L, P)
        if (rows := slow_primal_rows(layer, x)) is not None:  # (H, N, P)
            phi_q, phi_k = phi_q @ rows.mT, phi_k @ rows.mT  # (H, L, N)
        kernel = phi_q @ phi_k.mT
        left, values, right = torch.linalg.svd(kernel)
        left, values, right = left[..., :rank], values[..., :rank], right.mT[..., :rank]
        n = phi_q.shape[-1]
        layer.e_weight.zero_()[:, :n] = phi_k.mT @ right
        layer.r_weight.zero_()[:, :n] = phi_q.mT @ left
        layer.lam.copy_(length / values)
    return Solution(layer, x, kernel, left, right, values)


@pytest.fixture(params=ALL, ids=str)
def solution(request: pytest.FixtureRequest) -> Solution:
    return solve(*request.param)


def test_the_layer_has_the_kernel_of_the_theory(solution: Solution) -> None:
    torch.testing.assert_close(solution.layer.kernel_matrix(solution.x[None])[0], solution.kernel)


def test_primal_scores_equal_the_dual_sums(solution: Solution) -> None:
    e, r = solution.scores()
    atol = solution.rounding * solution.values.max().item()
    torch.testing.assert_close(e, solution.kernel @ solution.right, atol=atol, rtol=0)  # sum_j h_rj K(x, x_j)
    torch.testing.assert_close(r, solution.kernel.mT @ solution.left, atol=atol, rtol=0)  # sum_i h_ei K(x_i, x)


@pytest.mark.parametrize("solution", WELL_CONDITIONED, indirect=True, ids=str)
def test_the_shifted_eigenvalue_problem_holds(solution: Solution) -> None:
    relative = solution.rounding * (solution.values[:, 0] / solution.values[:, -1]).max().item()
    e, r = solution.scores()
    lam = solution.layer.lambda_[:, None] / len(solution.x)  # of the objective with sums
    h_e, h_r = lam * e, lam * r  # KKT: Lambda e_i = h_ei
    atol = relative * solution.values.max().item()
    torch.testing.assert_close(solution.kernel @ h_r, h_e / lam, atol=atol, rtol=0)
    torch.testing.assert_close(solution.kernel.mT @ h_e, h_r / lam, atol=atol, rtol=0)
    identity = torch.eye(h_e.shape[-1], dtype=h_e.dtype).expand(HEADS, -1, -1)
    torch.testing.assert_close(h_e.mT @ h_e, identity, atol=relative, rtol=0)


def test_the_objective_is_zero_at_the_svd(solution: Solution) -> None:
    assert solution.objective().abs().item() < solution.rounding * solution.values.sum().item()
    torch.manual_seed(0)
    solution.layer.reset_parameters()
    assert solution.objective().abs().item() > 1e-3


def test_the_trace_takes_the_raw_weights() -> None:
    """With the data-dependent W_{e|X} in the trace, Lemma 4.2 fails: the SVD would not give J = 0."""
    solution = solve("data-dependent", length=17, rank=4, seed=0, rank_multi=2)
    layer = solution.layer
    projections, used = layer._weights(solution.x[None], None)
    raw = layer._trace(used)[:, 0]
    conditioned = projections.prod(0)[0].sum((-2, -1))
    assert layer.e_weight.shape[1] == 8
    assert (raw - conditioned).abs().min() > 1e-2
    torch.testing.assert_close(raw, solution.values.sum(-1))


def test_short_sequences_use_the_first_rows() -> None:
    """The rows of the weights beyond the number of tokens have no effect."""
    solution = solve("data-dependent", length=5, rank=4, seed=0, rank_multi=3)
    layer, x = solution.layer, solution.x[None]
    assert layer.e_weight.shape[1] == 12
    before = layer(x, with_objective=True)
    with torch.no_grad():
        layer.e_weight[:, 5:] = 7.0
        layer.r_weight[:, 5:] = -3.0
    after = layer(x, with_objective=True)
    assert torch.equal(before.hidden, after.hidden)
    assert torch.equal(before.objective, after.objective)


@pytest.mark.parametrize("setting", ["cosine", "data-dependent"])
def test_the_penalty_alone_drives_the_objective_to_zero(setting: str) -> None:
    """By gradient descent on J^2, with fixed norms of the weights and Lambda of at least 0.1.

    J = 0 is necessary for the decomposition, not sufficient: the scores do not span the top singular vectors.
    """
    solution = solve(setting, length=24, rank=3, seed=0)
    layer = solution.layer
    torch.manual_seed(1)
    layer.reset_parameters()
    norms = {weight: weight.detach().norm(dim=(-2, -1), keepdim=True) for weight in (layer.e_weight, layer.r_weight)}
    optimizer = torch.optim.Adam([layer.e_weight, layer.r_weight, layer.lam], lr=1e-2)
    penalties = []
    for _ in range(200):
        penalty = solution.objective().square().mean()
        penalties.append(penalty.item())
        optimizer.zero_grad()
        penalty.backward()
        optimizer.step()
        with torch.no_grad():
            for weight, norm in norms.items():
                weight.mul_(norm / weight.norm(dim=(-2, -1), keepdim=True))
            layer.lam.clamp_(min=0.1)
    assert penalties[-1] < penalties[0] / 1000
    assert layer.lambda_.min() >= 0.1
    assert layer.e_weight.norm() > 1
    assert layer.r_weight.norm() > 1
    for learned, exact in zip(solution.scores(), (solution.left, solution.right), strict=True):
        cosines = torch.linalg.svdvals(exact.mT @ torch.linalg.qr(learned).Q)
        assert cosines.min() < 0.7
