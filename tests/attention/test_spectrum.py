"""Spectra have the singular values of kernel matrices; head distances are those of the definition."""

import itertools
import math
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from primal_dt.attention import (
    Spectrum,
    build_attention,
    head_distance,
    layer_spectrum,
    model_head_distances,
    model_spectra,
    plot_spectra,
)

from .kinds import SIDES, all_variants, make_layer, make_sequences, pad


class Fixed(nn.Module):
    """A layer with a given kernel matrix (B, H, L, L)."""

    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        self.matrix = matrix

    def kernel_matrix(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        return self.matrix


def spectrum_of(*values: float, num_tokens: int | None = None) -> Spectrum:
    """The spectrum of a layer with this diagonal as its kernel matrix."""
    n = len(values)
    matrix = torch.diag(torch.tensor(values, dtype=torch.float64))[None, None]
    valid = None if num_tokens is None else (torch.arange(n) < num_tokens)[None]
    return layer_spectrum(Fixed(matrix), torch.zeros(1, n, 4), valid)  # type: ignore[arg-type]


def distance_of(matrix: Tensor) -> Tensor:
    """The head distance of a layer with this kernel matrix (B, H, L, L)."""
    return head_distance(Fixed(matrix), torch.zeros(len(matrix), matrix.shape[-1], 4))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "rank", "variance", "shares"),
    [
        ((2, 2, 2, 2), 4, [0.25, 0.5, 0.75, 1], {0.5: 0.5, 0.51: 0.75, 1.0: 1.0}),
        ((0, 3, 0, 0), 1, [1, 1, 1, 1], {0.9: 0.25}),
        ((1, 3), math.exp(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25))), [0.9, 1], {0.9: 0.5}),
    ],
)
def test_variance_is_of_squares_and_rank_of_values(
    values: tuple[float, ...], rank: float, variance: list[float], shares: dict[float, float]
) -> None:
    spectrum = spectrum_of(*values)
    assert spectrum.effective_rank.item() == pytest.approx(rank)
    assert spectrum.explained_variance[0, 0].tolist() == pytest.approx(variance)
    assert {share: spectrum.share_for(share).item() for share in shares} == pytest.approx(shares)


def test_padding_adds_no_singular_value() -> None:
    padded = spectrum_of(2.0, 2.0, 0.0, 0.0, num_tokens=2)
    assert padded.effective_rank.item() == pytest.approx(2)
    assert padded.share_for(0.9).item() == pytest.approx(1)


def test_a_zero_matrix_has_a_finite_spectrum() -> None:
    assert spectrum_of(0.0, 0.0).explained_variance.isfinite().all()
    assert spectrum_of(0.0, 0.0).effective_rank.item() == 0
    assert spectrum_of(0.0, 0.0, num_tokens=0).share_for(0.9).isfinite().all()


def test_a_share_above_one_raises() -> None:
    with pytest.raises(ValueError, match=r"variance \(90\) must be above 0 and at most 1"):
        spectrum_of(1.0).share_for(90)


@all_variants
def test_the_spectrum_is_that_of_the_kernel_matrix(name: str, causal: bool) -> None:
    layer = make_layer(name, causal)
    x, valid = pad(make_sequences(8, 5), 10, "left")
    spectrum = layer_spectrum(layer, x, valid)
    matrix = layer.kernel_matrix(x, valid).detach()
    squares = torch.linalg.eigvalsh(matrix.mT @ matrix).flip(-1).clamp(min=0)
    torch.testing.assert_close(spectrum.singular_values.square(), squares, atol=1e-9, rtol=1e-9)
    assert (spectrum.singular_values[1, :, 5:] < 1e-9).all()
    assert (spectrum.effective_rank <= torch.tensor([[8.0], [5.0]]) + 1e-9).all()
    assert (spectrum.effective_rank >= 1 - 1e-9).all()


EYE, SWAP = torch.eye(2, dtype=torch.float64), torch.eye(2, dtype=torch.float64).flip(0)


@pytest.mark.parametrize(
    ("heads", "distance"),
    [
        ((EYE, 3 * EYE), 0),
        ((EYE, SWAP), math.sqrt(2)),
        ((EYE, -2 * EYE), 2),
        ((EYE, EYE, SWAP), 2 * math.sqrt(2) / 3),
        ((EYE, EYE + SWAP), math.sqrt(2 - math.sqrt(2))),  # 45 degrees
        ((0 * EYE, 0 * EYE), 0),
    ],
)
def test_head_distance_of_known_matrices(heads: tuple[Tensor, ...], distance: float) -> None:
    assert distance_of(torch.stack(heads)[None]).item() == pytest.approx(distance)


def test_equal_heads_have_distance_zero() -> None:
    layer = make_layer("softmax", causal=True, dtype=torch.float32)
    for projection in (layer.query, layer.key):
        first = projection.weight.data[: layer.head_width]
        projection.weight.data = first.repeat(layer.num_heads, 1)
        projection.bias.data.zero_()
    x = torch.stack(make_sequences(7, 7, dtype=torch.float32))
    assert (head_distance(layer, x) < 1e-6).all()


@all_variants
def test_head_distance_equals_a_loop_over_pairs(name: str, causal: bool) -> None:
    layer = make_layer(name, causal)
    sequences = make_sequences(8, 5)
    x, valid = pad(sequences, 10, "left")
    expected = []
    for sequence in sequences:
        heads = [K / K.norm() for K in layer.kernel_matrix(sequence[None]).detach()[0]]
        pairs = [(K - G).norm().item() for K, G in itertools.combinations(heads, 2)]
        expected.append(sum(pairs) / len(pairs))
    assert head_distance(layer, x, valid).tolist() == pytest.approx(expected)
    assert min(expected) > 0.01


def test_head_distance_ignores_the_order_of_heads() -> None:
    matrix = torch.randn(2, 4, 5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = distance_of(matrix)
    for order in itertools.permutations(range(4)):
        torch.testing.assert_close(distance_of(matrix[:, list(order)]), expected)


@pytest.mark.parametrize("side", SIDES)
def test_head_distance_ignores_the_content_of_padding(side: str) -> None:
    layer, sequences = make_layer("softmax", causal=False), make_sequences(8, 5)
    zeros, nans = (head_distance(layer, *pad(sequences, 10, side, fill)) for fill in (0.0, math.nan))
    assert zeros.isfinite().all()
    torch.testing.assert_close(zeros, nans, atol=0, rtol=0)


def test_head_distance_of_one_head_raises() -> None:
    with pytest.raises(ValueError, match=r"num_heads \(1\) must be at least 2"):
        distance_of(EYE[None, None])


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = build_attention("softmax", width=8, num_heads=2, causal=True)
        self.top = build_attention("primal", width=8, num_heads=2, causal=True, rank=3)

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        x = x + self.first(x, valid=valid).hidden
        return self.top(x, valid, positions=slice(-1, None)).hidden


MODEL, X, VALID = Stack(), torch.randn(2, 6, 8), torch.arange(6) < torch.tensor([[6], [4]])


def test_model_spectra_cover_each_layer() -> None:
    spectra = model_spectra(MODEL, X, valid=VALID)
    assert list(spectra) == ["first", "top"]
    assert spectra["top"].num_tokens.tolist() == [6, 4]
    assert not spectra["top"].singular_values.requires_grad
    with torch.no_grad():
        expected = layer_spectrum(MODEL.top, X + MODEL.first(X, VALID).hidden, VALID)
    torch.testing.assert_close(spectra["top"].singular_values, expected.singular_values)


def test_model_head_distances_cover_each_layer() -> None:
    distances = model_head_distances(MODEL, X, valid=VALID)
    assert list(distances) == ["first", "top"]
    torch.testing.assert_close(distances["first"], head_distance(MODEL.first, X, VALID))
    assert not distances["top"].requires_grad


def test_model_spectra_leave_no_hooks() -> None:
    model_spectra(MODEL, X, VALID)
    assert not MODEL.first._forward_pre_hooks
    with pytest.raises(TypeError):
        model_spectra(MODEL, X)  # the model needs valid
    assert not MODEL.first._forward_pre_hooks


def test_half_precision_gives_float32_results() -> None:
    layer = Stack().top.bfloat16()
    assert layer_spectrum(layer, X.bfloat16(), VALID).singular_values.dtype == torch.float32
    assert head_distance(layer, X.bfloat16(), VALID).dtype == torch.float32


@pytest.mark.slow
def test_the_plot_shows_each_layer_and_head(tmp_path: Path) -> None:
    spectra = model_spectra(MODEL, X, VALID)
    figure = plot_spectra(spectra, tmp_path / "spectra.png")
    assert [panel.get_title() for panel in figure.axes] == ["first", "top"]
    for panel, spectrum in zip(figure.axes, spectra.values(), strict=True):
        drawn = torch.stack([torch.tensor(line.get_ydata(), dtype=torch.float32) for line in panel.get_lines()])
        torch.testing.assert_close(drawn, spectrum.explained_variance.mean(0))
    assert (tmp_path / "spectra.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="no spectrum"):
        plot_spectra({})


def test_the_plot_names_the_missing_dependency(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"primal-dt\[plots\]"):
        plot_spectra({"layer": spectrum_of(1.0, 1.0)})
