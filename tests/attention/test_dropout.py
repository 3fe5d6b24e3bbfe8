"""Dropout draws what it says, and no more than it must."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from primal_dt.attention.dropout import Dropout, masks_from


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_entries_are_dropped_independently_with_the_probability(p: float) -> None:
    torch.manual_seed(0)
    dropout, n = Dropout(p), 400_000
    kept = (dropout(torch.ones(n)) != 0).double()
    deviation = (p * (1 - p) / n) ** 0.5
    assert abs(kept.mean().item() - (1 - p)) < 4 * deviation
    for distance in (1, 2, 3, 4):  # four entries share a draw
        together = (kept[distance:] * kept[:-distance]).mean().item()
        assert abs(together - (1 - p) ** 2) < 5 * deviation


@pytest.mark.parametrize("p", [0.1, 0.3, 1e-5])
def test_the_expectation_is_the_input_exactly(p: float) -> None:
    """Over all 2^16 numbers that a draw can give, each once."""
    torch.manual_seed(0)
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "random_", lambda self, *bounds, generator: numbers.view(torch.int64).clone())
        out = Dropout(p)(torch.ones(2**16, dtype=torch.float64))
    assert out.mean().item() == pytest.approx(1.0, abs=1e-12)
    assert (out == 0).sum() == round(p * 2**16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 5), (7,), (2, 3, 4), ()])
def test_the_gradient_passes_where_the_value_does(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.ones(shape, dtype=dtype, requires_grad=True)
    out = Dropout(0.4)(x)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert out.dtype == dtype
    assert torch.equal(out, gradient)  # both are the mask, scaled


def test_the_seed_decides() -> None:
    dropout, x = Dropout(0.3), torch.randn(100)
    outs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        outs.append(dropout(x))
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])
    assert not torch.equal(outs[2], dropout(x))


def test_threads_with_generators_of_their_own_do_not_disturb_each_other() -> None:
    dropout, x = Dropout(0.3), torch.ones(1000)
    before = torch.get_rng_state()

    def draw(seed: int) -> torch.Tensor:
        with masks_from(torch.Generator().manual_seed(seed)):
            return torch.stack([dropout(x) for _ in range(50)])

    alone = [draw(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(draw, range(4)))
    for expected, actual in zip(alone, together, strict=True):
        assert torch.equal(expected, actual)
    assert not torch.equal(alone[0], alone[1])
    assert torch.equal(torch.get_rng_state(), before)
    dropout(x)
    assert not torch.equal(torch.get_rng_state(), before)  # outside, torch's own again


@pytest.mark.parametrize(("p", "training"), [(0.0, True), (0.5, False)])
def test_nothing_is_drawn_or_changed_where_nothing_is_dropped(p: float, training: bool) -> None:
    x, before = torch.randn(10), torch.get_rng_state()
    assert torch.equal(Dropout(p).train(training)(x), x)
    assert torch.equal(torch.get_rng_state(), before)
