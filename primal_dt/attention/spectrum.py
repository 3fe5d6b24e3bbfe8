"""What kernel matrices show of an attention layer: how low its rank is, and how different its heads are.

The spectra are those of Figure 1 of the Primal-Attention paper. The distance between heads is after "A Primal-Dual
Framework for Transformers and Neural Networks" (ICLR 2023).

Axes: B batch, H heads, L tokens.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from primal_dt.attention.layer import AttentionLayer, at_least_float32
from primal_dt.attention.padding import valid_counts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Spectrum", "head_distance", "layer_spectrum", "model_head_distances", "model_spectra", "plot_spectra"]

Result = TypeVar("Result")


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
def head_distance(layer: AttentionLayer, x: Tensor, valid: Tensor | None = None) -> Tensor:
    """``mean_{h < g} || K_h / ||K_h||_F - K_g / ||K_g||_F ||_F``: the mean L2 distance between the heads of a layer.

    K_h is the kernel matrix of head h. The distance is 0 for equal heads, sqrt(2) for orthogonal ones (such as
    heads that never attend to the same token), at most 2. A low value means redundant heads.

    The ICLR 2023 paper measures redundancy by the mean L2 distance between heads. Two choices are this library's: the
    distance is between kernel matrices, not outputs, and each is divided by its Frobenius norm, so that kinds whose
    kernels differ in scale are comparable.

    Args:
        layer: an attention layer with at least two heads.
        x: (B, L, D), the input tokens.
        valid: (B, L) bool, True for real tokens; None if all tokens are real.

    Returns:
        (B,), the distance in each sequence; 0 in a sequence without real tokens.
    """
    matrix = layer.kernel_matrix(x, valid)  # (B, H, L, L)
    H = matrix.shape[1]
    if H < 2:
        raise ValueError(f"num_heads ({H}) must be at least 2: the distance is between pairs of heads")
    flat = matrix.to(at_least_float32(matrix.dtype)).flatten(2)  # (B, H, L * L)
    unit = F.normalize(flat, dim=-1, eps=torch.finfo(flat.dtype).tiny)
    # By differences, since in ||a||^2 + ||b||^2 - 2 <a, b> rounding errors exceed small distances.
    distances = torch.cdist(unit, unit, compute_mode="donot_use_mm_for_euclid_dist")  # (B, H, H)
    return distances.sum((1, 2)) / (H * (H - 1))  # each pair counts twice, and the diagonal is zero


def model_spectra(model: nn.Module, *inputs: object, **named_inputs: object) -> dict[str, Spectrum]:
    """Compute the spectrum of every attention layer in a model, by name, for the tokens it gets in ``model(*inputs)``.

    If a layer is called several times, the last call counts.
    """
    return _apply_to_layers(layer_spectrum, model, inputs, named_inputs)


def model_head_distances(model: nn.Module, *inputs: object, **named_inputs: object) -> dict[str, Tensor]:
    """Compute the head distance of every attention layer in a model, as :func:`model_spectra` does the spectrum."""
    return _apply_to_layers(head_distance, model, inputs, named_inputs)


@torch.no_grad()
def _apply_to_layers(
    function: Callable[[AttentionLayer, Tensor, Tensor | None], Result],
    model: nn.Module,
    inputs: tuple[object, ...],
    named_inputs: dict[str, object],
) -> dict[str, Result]:
    """Call the model, and ``function(layer, x, valid)`` for each attention layer in it: layer name -> result."""
    results: dict[str, Result] = {}

    def watch(name: str, layer: AttentionLayer) -> torch.utils.hooks.RemovableHandle:
        def compute(_: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
            call = dict(zip(("x", "valid"), args, strict=False)) | kwargs
            results[name] = function(layer, call["x"], call.get("valid"))

        return layer.register_forward_pre_hook(compute, with_kwargs=True)

    hooks = [watch(name, layer) for name, layer in model.named_modules() if isinstance(layer, AttentionLayer)]
    try:
        model(*inputs, **named_inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return results


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
