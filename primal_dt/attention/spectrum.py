"""Singular values of kernel matrices, which show how low the rank of an attention layer is (Figure 1 of the paper).

Axes: B batch, H heads, L tokens.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from primal_dt.attention.layer import AttentionLayer, at_least_float32
from primal_dt.attention.padding import valid_counts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Spectrum", "layer_spectrum", "model_spectra", "plot_spectra"]


class Spectrum(NamedTuple):
    """The singular values s_1 >= s_2 >= ... of one layer's kernel matrix, for each sequence and head."""

    singular_values: Tensor
    """(B, H, L). Padding adds zeros at the end."""
    explained_variance: Tensor
    """(B, H, L), ``sum_{j <= i} s_j^2 / sum_j s_j^2``: increases to 1."""
    effective_rank: Tensor
    """(B, H), the exponential of the entropy of ``s / sum(s)``: 1 for rank one, n for n equal values, 0 if K = 0."""
    num_tokens: Tensor
    """(B,), the number of real tokens, an upper bound on the number of nonzero singular values."""

    def share_for(self, variance: float) -> Tensor:
        """(B, H), the smallest share of the singular values that explains the given share of the variance.

        Args:
            variance: the share of the variance, in (0, 1].
        """
        if not 0 < variance <= 1:
            raise ValueError(f"variance ({variance}) must be above 0 and at most 1")
        tokens = self.num_tokens.clamp(min=1)[:, None]
        needed = (self.explained_variance < variance).sum(-1) + 1  # (B, H)
        return needed.clamp(max=tokens) / tokens


@torch.no_grad()
def layer_spectrum(layer: AttentionLayer, x: Tensor, valid: Tensor | None = None) -> Spectrum:
    """Compute the spectrum of a layer's kernel (or attention) matrix for inputs x (B, L, D).

    The kernel of Primal-Attention has at most P = width / num_heads nonzero singular values.
    """
    matrix = layer.kernel_matrix(x, valid)  # (B, H, L, L)
    values = torch.linalg.svdvals(matrix.to(at_least_float32(matrix.dtype)))
    tiny = torch.finfo(values.dtype).tiny
    variance = values.square()
    explained = variance.cumsum(-1) / variance.sum(-1, keepdim=True).clamp(min=tiny)
    share = values / values.sum(-1, keepdim=True).clamp(min=tiny)
    entropy = -torch.special.xlogy(share, share).sum(-1)
    tokens = valid_counts(x, valid)
    return Spectrum(values, explained, entropy.exp().masked_fill(values[..., 0] == 0, 0.0), tokens)


@torch.no_grad()
def model_spectra(model: nn.Module, *inputs: object, **named_inputs: object) -> dict[str, Spectrum]:
    """Compute the spectrum of every attention layer in a model, by name, for the tokens it gets in ``model(*inputs)``.

    If a layer is called several times, the last call counts.
    """
    spectra: dict[str, Spectrum] = {}

    def watch(name: str, layer: AttentionLayer) -> torch.utils.hooks.RemovableHandle:
        def compute(_: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
            call = dict(zip(("x", "valid"), args, strict=False)) | kwargs
            spectra[name] = layer_spectrum(layer, call["x"], call.get("valid"))

        return layer.register_forward_pre_hook(compute, with_kwargs=True)

    hooks = [watch(name, layer) for name, layer in model.named_modules() if isinstance(layer, AttentionLayer)]
    try:
        model(*inputs, **named_inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return spectra


def plot_spectra(spectra: Mapping[str, Spectrum], path: Path | str | None = None) -> "Figure":
    """Plot the cumulative explained variance, one panel per layer and one line per head (mean over the batch).

    Args:
        spectra: layer name -> spectrum.
        path: file to save the figure to; its suffix sets the format.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plot_spectra needs matplotlib: install the extra primal-dt[plots]") from error
    if not spectra:
        raise ValueError("spectra is empty: there is no spectrum to plot")

    figure = Figure(figsize=(0.8 + 3.2 * len(spectra), 3.0), layout="constrained")
    panels = figure.subplots(1, len(spectra), sharey=True, squeeze=False)[0]
    for panel, (name, spectrum) in zip(panels, spectra.items(), strict=True):
        explained = spectrum.explained_variance.mean(0).cpu()  # (H, L)
        index = torch.arange(1, explained.shape[-1] + 1)
        for head, curve in enumerate(explained):
            rank = spectrum.effective_rank[:, head].mean().item()
            panel.plot(index.tolist(), curve.tolist(), label=f"head {head}: effective rank {rank:.1f}")
        panel.set(title=name, xlabel="singular value")
        panel.grid(alpha=0.3)
        panel.legend(fontsize="small", loc="lower right")
    panels[0].set(ylabel="cumulative explained variance", ylim=(0.0, 1.02))
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure
