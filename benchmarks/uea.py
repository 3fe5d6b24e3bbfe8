"""Time-series classification on the UEA archive, the attention stacks beside one another and beside the paper.

Settings are the paper's: 2 layers, width 512, 8 heads, RAdam at 1e-3, batches of 16, 100 epochs, dropout 0.1, and its
rank and eta for each data set. What it leaves open is in ``benchmarks/encoder.py``: pre-norm blocks, an MLP as wide as
the model. Series are standardised with the training split; the test split is looked at once, after the last epoch:
nothing is chosen on it.
"""

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from benchmarks.classify import LabelledBatch, accuracy, update
from benchmarks.encoder import STACKS, Encoder, EncoderShape
from benchmarks.program import run_program
from benchmarks.published import TABLE_1
from primal_dt.files import atomic_write
from primal_dt.logbook import Logbook
from primal_dt.table import format_table

TEST_BATCH = 64
SAVED = "encoder.json"
"""In the folder of each training, beside its curves and weights."""


@dataclass(frozen=True)
class Penalised:
    """What Primal-Attention is told."""

    rank: int
    eta: float
    rank_multi: int = 10


PAPER = {
    ("JapaneseVowels", "primal-plus"): Penalised(30, 0.2, 5),
    ("Handwriting", "primal-plus"): Penalised(20, 0.5, 5),
    ("UWaveGestureLibrary", "primal-plus"): Penalised(40, 0.1, 10),
    ("JapaneseVowels", "primalformer"): Penalised(40, 0.5, 5),
    ("Handwriting", "primalformer"): Penalised(30, 0.2, 5),
    ("UWaveGestureLibrary", "primalformer"): Penalised(20, 0.0, 10),
}
"""(data set, stack) -> what the paper uses. Its rank_multi for PrimalFormer is not known; Primal.+'s is taken."""
OTHERWISE = Penalised(30, 0.1)
BARS = {"JapaneseVowels": 98.0}
"""Data set -> what Primal.+ and PrimalFormer should reach on average."""


@dataclass(frozen=True)
class Config:
    """What to train."""

    dataset: str = "JapaneseVowels"
    """The archive's name. JapaneseVowels comes with aeon; others are read from the folder."""
    folder: Path | None = None
    """Where NAME_TRAIN.ts and NAME_TEST.ts are, as https://timeseriesclassification.com has them."""
    attention: tuple[str, ...] = ("softmax", "primal-plus", "primalformer")
    """Stacks: softmax; primal-plus (last layer); primalformer (all layers); or another kind in all layers."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Of weights, batches and dropout: one training each."""
    epochs: int = 100
    """Passes over the training split."""
    batch_size: int = 16
    """Series of an update."""
    lr: float = 1e-3
    """Learning rate of RAdam."""
    rank: int | None = None
    """Directions of Primal-Attention. If not given: the paper's for the data set, or 30."""
    eta: float | None = None
    """Weight of the KSVD penalty. If not given: the paper's for the data set, or 0.1."""
    rank_multi: int | None = None
    """Rows of the data-dependent weights, times the rank. If not given: the paper's for the data set, or 10."""
    device: str = "cpu"
    """cpu, cuda, mps."""
    again: bool = False
    """Train again what was trained with the same settings before. Otherwise its result is read from its folder."""
    out: Path = Path("runs/uea")
    """Where curves and results go."""

    def __post_init__(self) -> None:
        if unknown := set(self.attention) - set(STACKS):
            raise ValueError(f"attention can be {', '.join(STACKS)}, not {', '.join(sorted(unknown))}")
        if not self.attention or not self.seeds:
            raise ValueError("at least one attention and one seed are needed")
        if min(self.epochs, self.batch_size) < 1 or self.lr <= 0:
            raise ValueError("epochs and batch_size must be at least 1, lr above 0")

    def penalised(self, attention: str) -> Penalised:
        """What Primal-Attention is told in a stack."""
        given = {name: getattr(self, name) for name in ("rank", "eta", "rank_multi")}
        paper = PAPER.get((self.dataset, attention), OTHERWISE)
        return Penalised(**(asdict(paper) | {name: value for name, value in given.items() if value is not None}))

    def run_folder(self, attention: str, seed: int) -> Path:
        """Where a training writes: another one for other settings, so that neither is lost."""
        told = self.penalised(attention)
        settings = f"__r{told.rank}-eta{told.eta:g}" if primal(attention) else ""
        return self.out / f"{self.dataset}__{attention}{settings}__s{seed}"


@dataclass(frozen=True)
class Split:
    """Series and their classes."""

    series: list[Tensor]
    """(L, channels) each."""
    labels: Tensor
    """(number,) int64."""

    def batch(self, rows: Sequence[int], device: torch.device) -> LabelledBatch:
        """These series, padded on the right."""
        chosen = [self.series[row] for row in rows]
        lengths = torch.tensor([len(series) for series in chosen])
        x = nn.utils.rnn.pad_sequence(chosen, batch_first=True)
        valid = torch.arange(x.shape[1]) < lengths[:, None]
        return LabelledBatch(x.to(device), valid.to(device), self.labels[list(rows)].to(device))

    def batches(self, size: int, device: torch.device, order: Sequence[int] | None = None) -> Iterator[LabelledBatch]:
        """All of them, in an order."""
        order = range(len(self.series)) if order is None else order
        for first in range(0, len(order), size):
            yield self.batch(order[first : first + size], device)

    @property
    def longest(self) -> int:
        """Steps."""
        return max(len(series) for series in self.series)


def load(dataset: str, folder: Path | None) -> tuple[Split, Split]:
    """The training and the test split, standardised channel by channel with the former.

    Raises:
        ValueError: if the files are not there, or not of one archive.
    """
    try:
        from aeon.datasets import load_from_ts_file, load_japanese_vowels
    except ImportError as error:
        raise ValueError(
            "the UEA archive is read by aeon: pip install -c constraints.txt -e '.[benchmarks]'"
        ) from error
    if folder is None:
        if dataset != "JapaneseVowels":
            raise ValueError(
                f"{dataset} does not come with aeon: give --folder, with {dataset}_TRAIN.ts and {dataset}_TEST.ts in it"
            )
        raw = [load_japanese_vowels(split=split) for split in ("train", "test")]
    else:
        paths = [folder / f"{dataset}_{split}.ts" for split in ("TRAIN", "TEST")]
        if missing := [path for path in paths if not path.is_file()]:
            raise ValueError(f"there is no {missing[0]}: the archive's files are NAME_TRAIN.ts and NAME_TEST.ts")
        raw = [load_from_ts_file(str(path)) for path in paths]
    (train_series, train_labels), (test_series, test_labels) = raw
    classes = {name: number for number, name in enumerate(sorted(set(train_labels)))}
    if unknown := set(test_labels) - set(classes):
        raise ValueError(f"the test split of {dataset} has classes that the training split has not: {sorted(unknown)}")
    every = np.concatenate([np.asarray(series) for series in train_series], axis=1)  # (channels, steps of all)
    mean, deviation = every.mean(1), every.std(1) + 1e-8

    def split(series: Sequence[np.ndarray], labels: Sequence[str]) -> Split:
        scaled = [(np.asarray(one).T - mean) / deviation for one in series]
        return Split(
            [torch.from_numpy(one.astype(np.float32)) for one in scaled],
            torch.tensor([classes[name] for name in labels]),
        )

    return split(train_series, train_labels), split(test_series, test_labels)


def facts(config: Config, attention: str, seed: int) -> dict[str, Any]:
    """What a training depends on, besides the data."""
    own = {name: getattr(config, name) for name in ("dataset", "epochs", "batch_size", "lr", "device")}
    told = asdict(config.penalised(attention)) if primal(attention) else {}
    return {**own, "attention": attention, "seed": seed, **told, "torch": torch.__version__}


def trained_before(config: Config, attention: str, seed: int) -> float | None:
    """The test accuracy of a training with these settings that came to its end, if there was one."""
    path = config.run_folder(attention, seed) / SAVED
    if config.again or not path.is_file():
        return None
    about = json.loads(path.read_text())
    return about["test_accuracy"] if about["facts"] == facts(config, attention, seed) else None


def train(config: Config, attention: str, seed: int, splits: tuple[Split, Split]) -> float:
    """Train one classifier and return its test accuracy in percent."""
    training, test = splits
    told, device = config.penalised(attention), torch.device(config.device)
    torch.manual_seed(seed)
    order = torch.Generator().manual_seed(seed)
    shape = EncoderShape(
        num_classes=int(training.labels.max()) + 1,
        max_length=max(training.longest, test.longest),
        attention=attention,
        options={"primal": {"rank": told.rank, "rank_multi": told.rank_multi}},
    )
    model = Encoder(nn.Linear(training.series[0].shape[1], shape.width), shape).to(device)
    optimizer = torch.optim.RAdam(model.parameters(), lr=config.lr)
    folder = config.run_folder(attention, seed)
    folder.mkdir(parents=True, exist_ok=True)
    logbook = Logbook(folder, texts={"settings": settings(attention, told)})
    number = len(training.series)
    for epoch in tqdm(range(1, config.epochs + 1), desc=f"{attention}, seed {seed}", leave=False, disable=None):
        rows = torch.randperm(number, generator=order).tolist()
        losses = [
            update(model, optimizer, batch, eta=told.eta) for batch in training.batches(config.batch_size, device, rows)
        ]
        means = torch.stack([torch.stack((one.total, one.penalty, one.correct)) for one in losses]).mean(0).tolist()
        curves = dict(zip(("train/loss", "train/penalty", "train/accuracy"), means, strict=True))
        curves["train/accuracy"] *= 100 * len(losses) / number
        logbook.write(epoch, curves)
    score = accuracy(model, test.batches(TEST_BATCH, device))
    logbook.write(config.epochs, {"test/accuracy": score})
    logbook.close()
    data = None if config.folder is None else str(config.folder.resolve())
    about = {"facts": facts(config, attention, seed), "data": data, "shape": asdict(shape), "test_accuracy": score}
    with atomic_write(folder / "weights.pt") as file:
        torch.save(model.state_dict(), file)
    with atomic_write(folder / SAVED) as file:  # last: where it is, all is
        file.write(json.dumps(about, indent=1).encode())
    return score


def load_encoder(folder: Path, sequences: int) -> tuple[Encoder, LabelledBatch]:
    """A trained encoder, and the first test series of its data."""
    about = json.loads((folder / SAVED).read_text())
    _, test = load(about["facts"]["dataset"], None if about["data"] is None else Path(about["data"]))
    shape = EncoderShape(**about["shape"])
    model = Encoder(nn.Linear(test.series[0].shape[1], shape.width), shape)
    model.load_state_dict(torch.load(folder / "weights.pt", weights_only=True, map_location="cpu"))
    return model.eval(), test.batch(range(min(sequences, len(test.series))), torch.device("cpu"))


def primal(attention: str) -> bool:
    """Whether a stack has a KSVD penalty."""
    return attention in ("primal-plus", "primalformer")


def settings(attention: str, told: Penalised) -> str:
    """What Primal-Attention was told, if it is there."""
    return f"rank {told.rank}, eta {told.eta:g}, rank_multi {told.rank_multi}" if primal(attention) else ""


def table(config: Config, scores: dict[str, list[float]]) -> str:
    """Ours, and the paper's."""
    published = TABLE_1.get(config.dataset, {})
    rows = []
    for attention, seen in scores.items():
        spread = f" ± {statistics.stdev(seen):.1f}" if len(seen) > 1 else ""
        rows.append(
            [
                attention,
                f"{statistics.mean(seen):.1f}{spread}",
                f"{min(seen):.1f} to {max(seen):.1f}",
                f"{published[attention]:.1f}" if attention in published else "",
                settings(attention, config.penalised(attention)),
            ]
        )
    header = [config.dataset, "test accuracy, %", f"{len(config.seeds)} seeds", "paper", "settings"]
    return format_table(header, rows)


def findings(config: Config, scores: dict[str, list[float]]) -> Iterator[str]:
    """What it should show, and what it shows."""
    bar = BARS.get(config.dataset)
    for attention, seen in scores.items():
        if bar is not None and primal(attention):
            mean = statistics.mean(seen)
            yield f"* [{'met' if mean >= bar else 'MISSED'}] {attention}: {mean:.1f} % (bar: at least {bar} %)"


def main(config: Config) -> None:
    """Train, print, save."""
    splits = load(config.dataset, config.folder)
    scores: dict[str, list[float]] = {attention: [] for attention in config.attention}
    for seed in config.seeds:
        for attention in config.attention:
            kept = trained_before(config, attention, seed)
            scores[attention].append(train(config, attention, seed, splits) if kept is None else kept)
            note = "" if kept is None else f" (from {config.run_folder(attention, seed)}; --again to train anew)"
            print(f"{attention}, seed {seed}: {scores[attention][-1]:.2f} %{note}", flush=True)
    print(f"\n{table(config, scores)}\n")
    if config.dataset in TABLE_1:
        print("The paper's numbers are the best epoch on the test split; ours are the last epoch's.")
    print("".join(f"{line}\n" for line in findings(config, scores)))
    path = config.out / f"{config.dataset}.json"
    every = [
        {**facts(config, attention, seed), "test_accuracy": score}
        for attention, seen in scores.items()
        for seed, score in zip(config.seeds, seen, strict=True)
    ]
    with atomic_write(path) as file:
        file.write(json.dumps(every, indent=1).encode())
    print(f"Saved {path}; curves: tensorboard --logdir {config.out}")


if __name__ == "__main__":
    run_program(main, Config, name="benchmarks.uea", description=__doc__)
