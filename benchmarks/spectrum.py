"""How low the rank of trained attention layers is (Figure 1 of the paper): explained variance, as plots and numbers.

Give folders of runs: of ``train.py`` (Decision Transformers, on windows of their data), or of ``benchmarks.uea``
(encoders, on their test series). For every layer: which share of the singular values of its attention or kernel matrix
explains 90 % of the variance, and the effective rank; means over sequences and heads.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import tyro

from benchmarks.program import run_program
from benchmarks.uea import SAVED, load_encoder
from envs.datasets import load_dataset
from envs.training import dataset_again
from primal_dt.attention import Spectrum, model_spectra
from primal_dt.checkpoint import CheckpointFolder
from primal_dt.data import WindowSampler
from primal_dt.files import atomic_write
from primal_dt.runs import read_config
from primal_dt.table import format_table


@dataclass(frozen=True)
class Config:
    """What to look at."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of runs."""
    sequences: int = 128
    """How many of each."""
    variance: float = 0.9
    """How much of it is to be explained."""
    out: Path = Path("runs/benchmarks")
    """Where spectrum.json and spectrum.png go."""

    def __post_init__(self) -> None:
        if not self.runs:
            raise ValueError("give at least one folder of a run")
        if self.sequences < 1 or not 0 < self.variance <= 1:
            raise ValueError("sequences must be at least 1, variance above 0 and at most 1")


def spectra_of(folder: Path, sequences: int) -> dict[str, Spectrum]:
    """Layer -> its spectrum, from the first."""
    if (folder / SAVED).is_file():
        encoder, batch = load_encoder(folder, sequences)
        found = model_spectra(encoder, batch.x, batch.valid)
    else:
        config, content = read_config(folder)
        _, checkpoint, _ = CheckpointFolder(folder / "checkpoints").newest()
        dataset = load_dataset(dataset_again(content["parts"]), env_id=config.env_id, mix_versions=config.mix_versions)
        sampler = WindowSampler(
            dataset.trajectories, checkpoint.normalizer, context=config.model.context, batch_size=sequences, seed=0
        )
        found = model_spectra(checkpoint.model().eval(), sampler.batch(0))
    return {f"layer {number}": spectrum for number, spectrum in enumerate(found.values(), 1)}


def numbers(spectrum: Spectrum, variance: float) -> tuple[float, float, float]:
    """Share of the singular values for this much variance, share of the effective rank in the tokens (%); that rank."""
    tokens = spectrum.num_tokens[:, None]
    return (
        100 * float(spectrum.share_for(variance).mean()),
        100 * float((spectrum.effective_rank / tokens).mean()),
        float(spectrum.effective_rank.mean()),
    )


def explained_at(spectrum: Spectrum, percent: int) -> float:
    """Percent of the variance that so many percent of the singular values explain: the mean over sequences and heads.

    Sequences differ in length: each has as many singular values as tokens.
    """
    needed = (spectrum.num_tokens * percent / 100).ceil().long().clamp(min=1)  # (B,)
    at = needed[:, None, None].expand(-1, spectrum.explained_variance.shape[1], 1) - 1  # (B, H, 1)
    return 100 * float(spectrum.explained_variance.take_along_dim(at, 2).mean())


def save_plot(every: Mapping[str, Mapping[str, Spectrum]], path: Path) -> None:
    """A panel for each layer, a line for each run."""
    from matplotlib.figure import Figure

    layers = list(dict.fromkeys(layer for spectra in every.values() for layer in spectra))
    percents = range(1, 101)
    figure = Figure(figsize=(1.0 + 3.6 * len(layers), 3.6), layout="constrained")
    for panel, layer in zip(figure.subplots(1, len(layers), sharey=True, squeeze=False)[0], layers, strict=True):
        for name, spectra in every.items():
            if layer in spectra:
                panel.plot(percents, [explained_at(spectra[layer], percent) for percent in percents], label=name)
        panel.axhline(90, color="black", lw=0.5, ls=":")
        panel.set(title=layer, xlabel="singular values, %")
        panel.grid(alpha=0.3)
    figure.axes[0].set(ylabel="explained variance, %", ylim=(0, 102))
    figure.axes[-1].legend(fontsize="x-small", loc="lower right")
    with atomic_write(path) as file:
        figure.savefig(file, format="png", dpi=120)


def main(config: Config) -> None:
    """Compute, print, save."""
    every = {folder.name: spectra_of(folder, config.sequences) for folder in config.runs}
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
    save_plot(every, config.out / "spectrum.png")
    print(f"\nSaved spectrum.json and spectrum.png in {config.out}")


if __name__ == "__main__":
    run_program(main, Config, name="benchmarks.spectrum", description=__doc__)
