"""Rank of trained attention layers (Figure 1 of the paper): explained variance as a plot and a table.

Reads run folders of ``train.py`` (Decision Transformers, on windows of their data set), of ``benchmarks.uea`` (encoders
of time series) and of ``benchmarks.images`` (vision transformers), the latter two on their test data. For every layer
it reports which share of the singular values of the attention or kernel matrix explains 90 % of the variance, the
effective rank, and the mean distance between its heads (0: equal, 1.41: orthogonal). They are means over sequences, the
first two also over heads.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from torch import nn

from benchmarks.images import run as images
from benchmarks.program import run_program
from benchmarks.runs import RESULT
from benchmarks.uea import run as uea
from envs.datasets.load import reload_dataset
from primal_dt.attention import AttentionLayer, Spectrum, model_head_distances, model_spectra
from primal_dt.data.sampler import WindowSampler
from primal_dt.system.files import atomic_write
from primal_dt.system.provenance import commit
from primal_dt.system.table import format_table
from primal_dt.training.checkpoint import CheckpointFolder
from primal_dt.training.run_folder import read_record

COLUMNS = 4
"""Panels of the plot side by side."""


@dataclass(frozen=True)
class Config:
    """Settings of the analysis."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run folders. If several paths are given, paths that are not runs are skipped."""
    sequences: int = 128
    """Number of sequences per run."""
    variance: float = 0.9
    """Share of the variance to explain."""
    out: Path = Path("runs/benchmarks")
    """Folder for spectrum.json and spectrum.png."""

    def __post_init__(self) -> None:
        if not self.runs:
            raise ValueError("give at least one run folder")
        if self.sequences < 1 or not 0 < self.variance <= 1:
            raise ValueError("sequences must be at least 1, and variance above 0 and at most 1")


def model_of(folder: Path, sequences: int) -> tuple[nn.Module, tuple[object, ...]]:
    """Load the model of a run, and inputs for it."""
    if (folder / RESULT).is_file():
        network = json.loads((folder / RESULT).read_text()).get("shape", {}).get("network")
        encoder, batch = (images if network == "vit" else uea).load_encoder(folder, sequences)
        return encoder, (batch.x, batch.valid)
    record = read_record(folder)
    _, checkpoint, _ = CheckpointFolder(folder / "checkpoints").newest()
    sampler = WindowSampler(
        reload_dataset(record).trajectories,
        checkpoint.normalizer,
        context=record.config.model.context,
        batch_size=sequences,
        seed=0,
    )
    return checkpoint.model(), (sampler.batch(0),)


def spectra_of(folder: Path, sequences: int) -> dict[str, Spectrum]:
    """Compute the spectrum of each layer of a run: name -> spectrum, from the first layer."""
    model, inputs = model_of(folder, sequences)
    return {f"layer {number}": spectrum for number, spectrum in enumerate(model_spectra(model, *inputs).values(), 1)}


def head_distances_of(folder: Path, sequences: int) -> dict[str, float | None]:
    """Compute the mean distance between the heads of each layer of a run: name -> distance; None with one head."""
    model, inputs = model_of(folder, sequences)
    layers = [layer for layer in model.modules() if isinstance(layer, AttentionLayer)]
    if any(layer.num_heads == 1 for layer in layers):
        return {f"layer {number}": None for number in range(1, len(layers) + 1)}
    found = model_head_distances(model, *inputs).values()
    return {f"layer {number}": float(distance.mean()) for number, distance in enumerate(found, 1)}


def numbers(spectrum: Spectrum, variance: float) -> tuple[float, float, float]:
    """Summarize a spectrum by means over sequences and heads.

    Returns:
        The share of the singular values that explains ``variance`` (%), the effective rank relative to the number of
        tokens (%), and the effective rank.
    """
    tokens = spectrum.num_tokens[:, None]
    return (
        100 * float(spectrum.share_for(variance).mean()),
        100 * float((spectrum.effective_rank / tokens).mean()),
        float(spectrum.effective_rank.mean()),
    )


def explained_at(spectrum: Spectrum, percent: int) -> float:
    """Variance (%) that the largest ``percent`` % of the singular values explain, as a mean over sequences and heads.

    Sequences differ in length: each has one singular value per token.
    """
    needed = (spectrum.num_tokens * percent / 100).ceil().long().clamp(min=1)  # (B,)
    at = needed[:, None, None].expand(-1, spectrum.explained_variance.shape[1], 1) - 1  # (B, H, 1)
    return 100 * float(spectrum.explained_variance.take_along_dim(at, 2).mean())


def save_plot(every: Mapping[str, Mapping[str, Spectrum]], path: Path, *, variance: float) -> None:
    """Plot the explained variance, with a panel per layer and a line per run."""
    from matplotlib.figure import Figure

    layers = list(dict.fromkeys(layer for spectra in every.values() for layer in spectra))
    percents, lowest = range(1, 101), 100.0
    columns = min(len(layers), COLUMNS)
    rows = -(-len(layers) // columns)
    figure = Figure(figsize=(1.0 + 3.6 * columns, 3.6 * rows), layout="constrained")
    panels = list(figure.subplots(rows, columns, sharey=True, squeeze=False).flat)
    for unused in panels[len(layers) :]:
        unused.remove()
    for panel, layer in zip(panels, layers, strict=False):
        for name, spectra in every.items():
            if layer in spectra:
                explained = [explained_at(spectra[layer], percent) for percent in percents]
                lowest = min(lowest, explained[0])
                panel.plot(percents, explained, label=name)
        panel.axhline(100 * variance, color="black", lw=0.5, ls=":")
        panel.set(title=layer, xlabel="singular values, %")
        panel.grid(alpha=0.3)
    figure.axes[0].set(ylabel="explained variance, %", ylim=(max(0.0, lowest - 5), 101))
    figure.axes[-1].legend(fontsize="x-small", loc="lower right")
    with atomic_write(path) as file:
        figure.savefig(file, format="png", dpi=120)


def table(content: Mapping[str, Any]) -> str:
    """Table of the numbers of each layer, from the content of ``spectrum.json``."""
    rows = [
        [name, layer, f"{share:.1f} %", f"{rank:.1f}", f"{relative:.0f} %", "" if heads is None else f"{heads:.2f}"]
        for name, layers in content["runs"].items()
        for layer, (share, relative, rank, heads) in layers.items()
    ]
    variance = f"singular values for {100 * content['variance']:g} %"
    return format_table(["run", "layer", variance, "effective rank", "of the tokens", "head distance"], rows)


def is_run(folder: Path) -> bool:
    """Whether a folder looks like a run of train.py, benchmarks.uea or benchmarks.images."""
    return (folder / RESULT).is_file() or (folder / "config.json").is_file()


def names_of(folders: Sequence[Path]) -> list[str]:
    """Names of the runs: the folder names, or the paths if two folder names are equal."""
    names = [folder.name for folder in folders]
    return names if len(set(names)) == len(names) else [str(folder) for folder in folders]


def main(config: Config) -> None:
    """Compute, print, save. Of several paths, those that are not runs are skipped: runs/* may match other files."""
    folders = [folder for folder in config.runs if len(config.runs) == 1 or is_run(folder)]
    for other in sorted(set(config.runs) - set(folders)):
        print(f"{other} is skipped: it is not a run of train.py, benchmarks.uea or benchmarks.images", file=sys.stderr)
    if not folders:
        raise ValueError("none of these is a run of train.py, benchmarks.uea or benchmarks.images")
    every = {
        name: spectra_of(folder, config.sequences) for name, folder in zip(names_of(folders), folders, strict=True)
    }
    distances = {name: head_distances_of(folder, config.sequences) for name, folder in zip(every, folders, strict=True)}
    runs = {
        name: {
            layer: [*numbers(spectrum, config.variance), distances[name][layer]] for layer, spectrum in spectra.items()
        }
        for name, spectra in every.items()
    }
    content = {"variance": config.variance, "sequences": config.sequences, "runs": runs, "commit": commit()}
    print(table(content))
    with atomic_write(config.out / "spectrum.json") as file:
        file.write(json.dumps(content, indent=1).encode())
    save_plot(every, config.out / "spectrum.png", variance=config.variance)
    print(f"\nSaved spectrum.json and spectrum.png in {config.out}")


if __name__ == "__main__":
    run_program(main, Config, name="benchmarks.spectrum", description=__doc__)
