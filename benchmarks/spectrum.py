"""Rank of trained attention layers (Figure 1 of the paper): explained variance as a plot and a table.

Reads run folders of ``train.py`` (Decision Transformers, on windows of their data set) and of ``benchmarks.uea`` (time
series encoders, on their test series). For every layer it reports which share of the singular values of the attention
or kernel matrix explains 90 % of the variance, and the effective rank. Both are means over sequences and heads.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from benchmarks.classify import RESULT
from benchmarks.program import run_program
from benchmarks.uea.run import load_encoder
from envs.datasets.load import reload_dataset
from primal_dt.attention import Spectrum, model_spectra
from primal_dt.data.sampler import WindowSampler
from primal_dt.system.files import atomic_write
from primal_dt.system.table import format_table
from primal_dt.training.checkpoint import CheckpointFolder
from primal_dt.training.run_folder import read_record


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


def spectra_of(folder: Path, sequences: int) -> dict[str, Spectrum]:
    """Compute the spectrum of each layer of a run: name -> spectrum, from the first layer."""
    if (folder / RESULT).is_file():
        encoder, batch = load_encoder(folder, sequences)
        found = model_spectra(encoder, batch.x, batch.valid)
    else:
        record = read_record(folder)
        _, checkpoint, _ = CheckpointFolder(folder / "checkpoints").newest()
        sampler = WindowSampler(
            reload_dataset(record).trajectories,
            checkpoint.normalizer,
            context=record.config.model.context,
            batch_size=sequences,
            seed=0,
        )
        found = model_spectra(checkpoint.model().eval(), sampler.batch(0))
    return {f"layer {number}": spectrum for number, spectrum in enumerate(found.values(), 1)}


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
    figure = Figure(figsize=(1.0 + 3.6 * len(layers), 3.6), layout="constrained")
    for panel, layer in zip(figure.subplots(1, len(layers), sharey=True, squeeze=False)[0], layers, strict=True):
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


def is_run(folder: Path) -> bool:
    """Whether a folder looks like a run of train.py or benchmarks.uea."""
    return (folder / RESULT).is_file() or (folder / "config.json").is_file()


def names_of(folders: Sequence[Path]) -> list[str]:
    """Names of the runs: the folder names, or the paths if two folder names are equal."""
    names = [folder.name for folder in folders]
    return names if len(set(names)) == len(names) else [str(folder) for folder in folders]


def main(config: Config) -> None:
    """Compute, print, save. Of several paths, those that are not runs are skipped: runs/* may match other files."""
    folders = [folder for folder in config.runs if len(config.runs) == 1 or is_run(folder)]
    for other in sorted(set(config.runs) - set(folders)):
        print(f"{other} is skipped: it is not a run of train.py or benchmarks.uea", file=sys.stderr)
    if not folders:
        raise ValueError("none of these is a run of train.py or benchmarks.uea")
    every = {
        name: spectra_of(folder, config.sequences) for name, folder in zip(names_of(folders), folders, strict=True)
    }
    content = {
        name: {layer: numbers(spectrum, config.variance) for layer, spectrum in spectra.items()}
        for name, spectra in every.items()
    }
    rows = [
        [name, layer, f"{share:.1f} %", f"{rank:.1f}", f"{relative:.0f} %"]
        for name, layers in content.items()
        for layer, (share, relative, rank) in layers.items()
    ]
    header = ["run", "layer", f"singular values for {100 * config.variance:g} %", "effective rank", "of the tokens"]
    print(format_table(header, rows))
    with atomic_write(config.out / "spectrum.json") as file:
        file.write(json.dumps({"variance": config.variance, "runs": content}, indent=1).encode())
    save_plot(every, config.out / "spectrum.png", variance=config.variance)
    print(f"\nSaved spectrum.json and spectrum.png in {config.out}")


if __name__ == "__main__":
    run_program(main, Config, name="benchmarks.spectrum", description=__doc__)
