"""Muon: orthogonal updates, equal to those of torch's Muon up to the rounding of bfloat16."""

import copy

import pytest
import torch

from primal_dt.training import muon
from primal_dt.training.muon import Muon, orthogonal_factor


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 5, 12), (1, 1, 6)])
def test_factor_is_nearly_orthogonal(shape: tuple[int, int, int]) -> None:
    matrices = torch.randn(shape)
    factor = orthogonal_factor(matrices)
    values = torch.linalg.svdvals(factor)
    assert values.min() > 0.6
    assert values.max() < 1.3
    u, _, vh = torch.linalg.svd(matrices, full_matrices=False)
    exact = u @ vh
    overlap = (factor * exact).sum((-2, -1)) / (factor.norm(dim=(-2, -1)) * exact.norm(dim=(-2, -1)))
    assert overlap.min() > 0.97


def test_factor_ignores_scale_and_keeps_zero() -> None:
    matrices = torch.randn(2, 4, 6)
    torch.testing.assert_close(orthogonal_factor(1e4 * matrices), orthogonal_factor(matrices), atol=1e-4, rtol=0)
    assert torch.equal(orthogonal_factor(torch.zeros(1, 3, 3)), torch.zeros(1, 3, 3))


def test_steps_match_torch() -> None:
    """Torch iterates in bfloat16, which has 8 bits."""
    starts = [torch.randn(shape) for shape in ((8, 8), (16, 4), (4, 16), (8, 8))]
    ours, theirs = ([torch.nn.Parameter(start.clone()) for start in starts] for _ in range(2))
    optimizer = Muon(ours, lr=0.02, weight_decay=0.1)
    reference = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(4):
        for one, two in zip(ours, theirs, strict=True):
            one.grad = torch.randn_like(one)
            two.grad = one.grad.clone()
        optimizer.step()
        reference.step()
    for one, two, start in zip(ours, theirs, starts, strict=True):
        assert (one - two).norm() < 0.05 * (two - start).norm()


def test_state_round_trip() -> None:
    one = torch.nn.Parameter(torch.randn(4, 6))
    first = Muon([one], lr=0.1)
    one.grad = torch.randn_like(one)
    first.step()
    two = torch.nn.Parameter(one.detach().clone())
    second = Muon([two], lr=0.1)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    one.grad = torch.randn_like(one)
    two.grad = one.grad.clone()
    first.step()
    second.step()
    assert torch.equal(one, two)


def test_only_matrices_are_supported() -> None:
    with pytest.raises(ValueError, match=r"Muon supports only matrices, not parameters of shape \(3,\)"):
        Muon([torch.nn.Parameter(torch.zeros(3))], lr=0.1)


@pytest.mark.parametrize("smallest", [1.0, 1e-3, 1e-6, 0.0])
def test_wide_matrices_iterate_on_their_gram_matrices(smallest: float) -> None:
    """The result is that of the plain iteration, also for singular values of very different size."""
    torch.manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(3, n, 16)).Q for n in (16, 64))
    values = torch.logspace(0, -1, 16)
    values[8:] *= smallest
    matrices = left @ (values[:, None] * right.mT)
    plain = muon._iterate((matrices / matrices.norm(dim=(-2, -1), keepdim=True)).double())
    torch.testing.assert_close(orthogonal_factor(matrices).double(), plain, atol=2e-4, rtol=0)
