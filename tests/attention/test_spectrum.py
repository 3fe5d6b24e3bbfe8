"""Singular values of kernel matrices, and what is said of them."""

import math
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from primal_dt.attention import Spectrum, build_attention, layer_spectrum, model_spectra, plot_spectra

from .kinds import VARIANTS, make_batch, make_layer, pad


def spectrum_of(values: list[float], num_tokens: int | None = None) -> Spectrum:
    """The spectrum of a layer whose kernel matrix is this diagonal."""

    class Diagonal(nn.Module):
        def kernel_matrix(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
            return torch.diag(torch.tensor(values, dtype=torch.float64))[None, None]

    n = len(values)
    valid = None if num_tokens is None else (torch.arange(n) < num_tokens)[None]
    return layer_spectrum(Diagonal(), torch.zeros(1, n, 4), valid)  # type: ignore[arg-type]


def test_equal_values_have_full_rank_and_one_value_has_rank_one() -> None:
    equal = spectrum_of([2.0, 2.0, 2.0, 2.0])
    assert equal.effective_rank.item() == pytest.approx(4)
    assert equal.explained_variance[0, 0].tolist() == pytest.approx([0.25, 0.5, 0.75, 1])
    assert equal.share_for(0.5).item() == pytest.approx(0.5)
    assert equal.share_for(0.51).item() == pytest.approx(0.75)
    assert equal.share_for(1.0).item() == pytest.approx(1)
    single = spectrum_of([0.0, 3.0, 0.0, 0.0])
    assert single.effective_rank.item() == pytest.approx(1)
    assert single.explained_variance[0, 0].tolist() == [1, 1, 1, 1]
    assert single.share_for(0.9).item() == pytest.approx(0.25)


def test_variance_is_of_squares_and_rank_of_values() -> None:
    uneven = spectrum_of([1.0, 3.0])
    assert uneven.explained_variance[0, 0].tolist() == pytest.approx([0.9, 1])
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert uneven.effective_rank.item() == pytest.approx(math.exp(entropy))


def test_padding_counts_as_no_singular_value() -> None:
    padded = spectrum_of([2.0, 2.0, 0.0, 0.0], num_tokens=2)
    assert padded.effective_rank.item() == pytest.approx(2)
    assert padded.share_for(0.9).item() == pytest.approx(1)
    assert spectrum_of([0.0, 0.0]).explained_variance.isfinite().all()
    assert spectrum_of([0.0, 0.0]).effective_rank.item() == 0
    assert spectrum_of([0.0, 0.0], num_tokens=0).share_for(0.9).isfinite().all()
    with pytest.raises(ValueError, match=r"variance \(90\) must be above 0 and at most 1"):
        padded.share_for(90)


@pytest.mark.parametrize(("name", "causal"), VARIANTS)
def test_the_spectrum_is_that_of_the_kernel_matrix(name: str, causal: bool) -> None:
    layer = make_layer(name, causal)
    x, valid = pad(make_batch((8, 5)), 10, "left")
    spectrum = layer_spectrum(layer, x, valid)
    matrix = layer.kernel_matrix(x, valid).detach()
    squares = torch.linalg.eigvalsh(matrix.mT @ matrix).flip(-1).clamp(min=0)
    torch.testing.assert_close(spectrum.singular_values.square(), squares, atol=1e-9, rtol=1e-9)
    assert (spectrum.singular_values[1, :, 5:] < 1e-9).all()
    assert (spectrum.effective_rank <= torch.tensor([[8.0], [5.0]]) + 1e-9).all()
    assert (spectrum.effective_rank >= 1 - 1e-9).all()


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = build_attention("softmax", width=8, num_heads=2, causal=True)
        self.top = build_attention("primal", width=8, num_heads=2, causal=True, rank=3)

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        x = x + self.first(x, valid=valid).hidden
        return self.top(x, valid, positions=slice(-1, None)).hidden


def test_a_model_shows_each_layer_with_the_tokens_that_reach_it() -> None:
    torch.manual_seed(0)
    model, x, valid = Stack(), torch.randn(2, 6, 8), torch.arange(6) < torch.tensor([[6], [4]])
    spectra = model_spectra(model, x, valid=valid)
    assert list(spectra) == ["first", "top"]
    assert spectra["top"].num_tokens.tolist() == [6, 4]
    assert not spectra["top"].singular_values.requires_grad
    with torch.no_grad():
        hidden = x + model.first(x, valid).hidden
    expected = layer_spectrum(model.top, hidden, valid)
    torch.testing.assert_close(spectra["top"].singular_values, expected.singular_values)
    assert not model.first._forward_pre_hooks  # nothing is left behind
    with pytest.raises(TypeError):
        model_spectra(model, x)  # not what the model takes
    assert not model.first._forward_pre_hooks
    # And a layer in half precision, which a decomposition does not take as it is.
    assert layer_spectrum(model.top.bfloat16(), x.bfloat16(), valid).singular_values.dtype == torch.float32


def test_the_plot_shows_each_layer_and_head(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x, valid = Stack(), torch.randn(2, 6, 8), torch.ones(2, 6, dtype=torch.bool)
    spectra = model_spectra(model, x, valid)
    figure = plot_spectra(spectra, tmp_path / "spectra.png")
    assert [panel.get_title() for panel in figure.axes] == ["first", "top"]
    for panel, spectrum in zip(figure.axes, spectra.values(), strict=True):
        for head, line in enumerate(panel.get_lines()):
            drawn = torch.tensor(line.get_ydata(), dtype=torch.float32)
            torch.testing.assert_close(drawn, spectrum.explained_variance.mean(0)[head])
    assert (tmp_path / "spectra.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="no spectrum"):
        plot_spectra({})


def test_without_matplotlib_the_plot_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"primal-dt\[plots\]"):
        plot_spectra({"layer": spectrum_of([1.0, 1.0])})
