"""Muon: orthogonal updates, as torch's own, only faster where there is no bfloat16."""

import copy

import pytest
import torch

from primal_dt.training.muon import Muon, orthogonal_factor


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 5, 12), (1, 1, 6)])
def test_the_factor_is_about_orthogonal_and_keeps_directions(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    matrices = torch.randn(shape)
    factor = orthogonal_factor(matrices)
    values = torch.linalg.svdvals(factor)
    assert values.min() > 0.6
    assert values.max() < 1.3
    u, _, vh = torch.linalg.svd(matrices, full_matrices=False)
    exact = u @ vh
    overlap = (factor * exact).sum((-2, -1)) / (factor.norm(dim=(-2, -1)) * exact.norm(dim=(-2, -1)))
    assert overlap.min() > 0.97


def test_scale_does_not_matter_and_zero_stays() -> None:
    torch.manual_seed(0)
    matrices = torch.randn(2, 4, 6)
    torch.testing.assert_close(orthogonal_factor(1e4 * matrices), orthogonal_factor(matrices), atol=1e-4, rtol=0)
    assert torch.equal(orthogonal_factor(torch.zeros(1, 3, 3)), torch.zeros(1, 3, 3))


def test_it_makes_the_steps_of_torchs_own() -> None:
    """Which iterates in bfloat16: eight bits."""
    torch.manual_seed(0)
    shapes = [(8, 8), (16, 4), (4, 16), (8, 8)]
    ours = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    theirs = [torch.nn.Parameter(parameter.detach().clone()) for parameter in ours]
    mine = Muon(ours, lr=0.02, weight_decay=0.1)
    reference = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    starts = [parameter.detach().clone() for parameter in ours]
    for _ in range(4):
        for one, two in zip(ours, theirs, strict=True):
            one.grad = torch.randn_like(one)
            two.grad = one.grad.clone()
        mine.step()
        reference.step()
    for one, two, start in zip(ours, theirs, starts, strict=True):
        assert (one - two).norm() < 0.05 * (two - start).norm()


def test_its_state_comes_back() -> None:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(4, 6))
    optimizer = Muon([weight], lr=0.1)
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    other = torch.nn.Parameter(weight.detach().clone())
    again = Muon([other], lr=0.1)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    weight.grad = torch.randn_like(weight)
    other.grad = weight.grad.clone()
    optimizer.step()
    again.step()
    assert torch.equal(weight, other)


def test_only_matrices_are_taken() -> None:
    with pytest.raises(ValueError, match=r"Muon is for matrices, not for parameters of shape \(3,\)"):
        Muon([torch.nn.Parameter(torch.zeros(3))], lr=0.1)
