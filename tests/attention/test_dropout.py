"""Dropout drops independent entries with its probability, and draws no more numbers than it needs."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from primal_dt.attention.dropout import Dropout, masks_from


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_entries_are_dropped_independently(p: float) -> None:
    torch.manual_seed(0)
    n = 400_000
    passed = (Dropout(p)(torch.ones(n)) != 0).double()
    deviation = (p * (1 - p) / n) ** 0.5
    assert abs(passed.mean().item() - (1 - p)) < 4 * deviation
    for distance in (1, 2, 3, 4):  # four entries share a draw
        both_passed = (passed[distance:] * passed[:-distance]).mean().item()
        assert abs(both_passed - (1 - p) ** 2) < 5 * deviation


@pytest.mark.parametrize("p", [0.1, 0.3, 1e-5])
def test_the_expectation_is_the_input(p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly, over the 2^16 numbers that a draw can give, each once."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    monkeypatch.setattr(torch.Tensor, "random_", lambda self, *bounds, generator: numbers.view(torch.int64).clone())
    out = Dropout(p)(torch.ones(2**16, dtype=torch.float64))
    assert out.mean().item() == pytest.approx(1.0, abs=1e-12)
    assert (out == 0).sum() == round(p * 2**16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 5), (7,), (2, 3, 4), ()])
def test_the_gradient_has_the_mask_of_the_output(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.ones(shape, dtype=dtype, requires_grad=True)
    out = Dropout(0.4)(x)
    assert out.dtype == dtype
    assert torch.equal(out, torch.autograd.grad(out.sum(), x)[0])  # both are the scaled mask


def test_the_seed_determines_the_mask() -> None:
    dropout, x, outs = Dropout(0.3), torch.randn(100), []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        outs.append(dropout(x))
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])
    assert not torch.equal(outs[2], dropout(x))


def test_threads_with_own_generators_are_independent() -> None:
    dropout, x, before = Dropout(0.3), torch.ones(1000), torch.get_rng_state()

    def draw(seed: int) -> torch.Tensor:
        with masks_from(torch.Generator().manual_seed(seed)):
            return torch.stack([dropout(x) for _ in range(50)])

    alone = [draw(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(draw, range(4)))
    assert all(map(torch.equal, alone, together))
    assert not torch.equal(alone[0], alone[1])
    assert torch.equal(torch.get_rng_state(), before)
    dropout(x)
    assert not torch.equal(torch.get_rng_state(), before)  # outside of masks_from, torch's generator draws


@pytest.mark.parametrize(("p", "training"), [(0.0, True), (0.5, False)])
def test_nothing_is_drawn_without_dropout(p: float, training: bool) -> None:
    x, before = torch.randn(10), torch.get_rng_state()
    assert torch.equal(Dropout(p).train(training)(x), x)
    assert torch.equal(torch.get_rng_state(), before)
