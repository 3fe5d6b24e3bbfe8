"""Time-series classification on the UEA archive: the attention stacks compared with one another and with the paper.

Settings are the paper's: 2 layers, width 512, 8 heads, RAdam at 1e-3, batches of 16, 100 epochs, dropout 0.1, and the
paper's rank and eta for each data set. Handwriting is the exception: its learning rate falls along a cosine, as chosen
by cross-validation on the training split (benchmarks.uea.schedule).

The encoder differs from the published code, which is post-norm and passes all positions together to its classifier.
Here blocks are pre-norm, the MLP is as wide as the model, and the classifier sees the mean over real steps.

Series are standardized with the training split. The test split is used once, after the last epoch. If the training loss
has diverged by then (more than ten times its lowest value), the weights of the epoch with the lowest training loss are
tested.
"""

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from benchmarks.classify import (
    FACTS,
    LabeledBatch,
    Sequences,
    accuracy,
    keep,
    kept_encoder,
    kept_scores,
    spread,
    update,
)
from benchmarks.encoder import PENALIZED, Encoder, EncoderShape, check_stacks
from benchmarks.program import check_device
from benchmarks.published import TABLE_1
from primal_dt.system.files import atomic_write, check_writable
from primal_dt.system.table import format_table
from primal_dt.training.metrics_log import MetricsLog

TEST_BATCH = 64
FAR = 10.0
"""A run has diverged if its last training loss is more than this many times the lowest."""


@dataclass(frozen=True)
class Penalized:
    """Hyperparameters of Primal-Attention and its penalty."""

    rank: int
    eta: float
    rank_multi: int = 10


PAPER = {
    ("JapaneseVowels", "primal-plus"): Penalized(30, 0.2, 5),
    ("Handwriting", "primal-plus"): Penalized(20, 0.5, 5),
    ("UWaveGestureLibrary", "primal-plus"): Penalized(40, 0.1, 10),
    ("JapaneseVowels", "primalformer"): Penalized(40, 0.5, 5),
    ("Handwriting", "primalformer"): Penalized(30, 0.2, 5),
    ("UWaveGestureLibrary", "primalformer"): Penalized(20, 0.0, 10),
}
"""(data set, stack) -> the paper's hyperparameters."""
OTHERWISE = Penalized(30, 0.1)
EPOCHS = {"PEMS-SF": 400}
"""Data set -> the paper's number of epochs, where it is not 100."""
BARS = {"JapaneseVowels": 98.0}
"""Data set -> minimum mean test accuracy of Primal.+ and PrimalFormer in percent."""
Schedule = Literal["constant", "cosine"]
SCHEDULES: dict[str, Schedule] = {"JapaneseVowels": "constant", "Handwriting": "cosine"}
"""Data set -> the schedule that ``python -m benchmarks.uea.schedule`` chose."""
USUAL_BATCH, USUAL_RATE, USUAL_EPOCHS = 16, 1e-3, 100


@dataclass(frozen=True)
class Config:
    """Settings of the benchmark."""

    dataset: str = "JapaneseVowels"
    """Name of the data set in the archive. JapaneseVowels comes with aeon; others are read from --folder."""
    folder: Path | None = None
    """Folder with NAME_TRAIN.ts and NAME_TEST.ts, files from https://timeseriesclassification.com."""
    attention: tuple[str, ...] = ("softmax", "primal-plus", "primalformer")
    """Attention stacks: softmax, primal-plus (primal in the last layer), primalformer (primal in all), another kind."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of weights, batches and dropout. Each stack is trained once per seed."""
    epochs: int | None = None
    """Epochs over the training split. If not given, the paper's number for the data set (100 for most)."""
    batch_size: int = USUAL_BATCH
    """Series per update."""
    lr: float = USUAL_RATE
    """Initial learning rate of RAdam."""
    schedule: Schedule | None = None
    """Learning-rate schedule. If not given, the one chosen by cross-validation, or else constant, as in the paper."""
    rank: int | None = None
    """Rank of Primal-Attention. If not given, the paper's for the data set, or 30."""
    eta: float | None = None
    """Weight of the KSVD penalty. If not given, the paper's for the data set, or 0.1."""
    rank_multi: int | None = None
    """Rows of the data-dependent weights, divided by the rank. If not given, the paper's for the data set, or 10."""
    device: str = "cpu"
    """Torch device: cpu, cuda or mps."""
    again: bool = False
    """Train again even if a finished run has the same settings. Otherwise its result is read from its folder."""
    out: Path = Path("runs/uea")
    """Folder for curves and results."""

    def __post_init__(self) -> None:
        check_stacks(self.attention, self.seeds)
        sizes = {"epochs": self.epochs, "batch_size": self.batch_size, "rank": self.rank, "rank_multi": self.rank_multi}
        if wrong := [name for name, value in sizes.items() if value is not None and value < 1]:
            raise ValueError(f"{wrong[0]} ({sizes[wrong[0]]}) must be at least 1")
        if self.lr <= 0 or (self.eta is not None and self.eta < 0):
            raise ValueError(f"lr ({self.lr}) must be above 0, and eta ({self.eta}) at least 0")

    def num_epochs(self) -> int:
        """The number of epochs: the given one, or the paper's."""
        return EPOCHS.get(self.dataset, USUAL_EPOCHS) if self.epochs is None else self.epochs

    def learning_rate(self) -> Schedule:
        """The learning-rate schedule: the given one, or the one chosen for the data set."""
        return SCHEDULES.get(self.dataset, "constant") if self.schedule is None else self.schedule

    def penalized(self, attention: str) -> Penalized:
        """Hyperparameters of Primal-Attention in a stack: the given ones, or the paper's."""
        given = {name: getattr(self, name) for name in ("rank", "eta", "rank_multi")}
        paper = PAPER.get((self.dataset, attention), OTHERWISE)
        return Penalized(**(asdict(paper) | {name: value for name, value in given.items() if value is not None}))

    def facts(self, attention: str, seed: int) -> dict[str, Any]:
        """All settings that the result of a training run depends on."""
        primal = asdict(self.penalized(attention)) if attention in PENALIZED else {}
        return {
            "dataset": self.dataset,
            "data": None if self.folder is None else str(self.folder.resolve()),
            "epochs": self.num_epochs(),
            "batch_size": self.batch_size,
            "lr": self.lr,
            "schedule": self.learning_rate(),
            "device": self.device,
            "attention": attention,
            "seed": seed,
            **primal,
            "torch": torch.__version__,
        }

    def run_folder(self, attention: str, seed: int) -> Path:
        """Folder of a training run. Different settings have different folders, so that no result is overwritten."""
        primal = self.penalized(attention)
        settings = [f"r{primal.rank}-eta{primal.eta:g}-x{primal.rank_multi}"] if attention in PENALIZED else []
        usual = {"epochs": EPOCHS.get(self.dataset, USUAL_EPOCHS), "batch": USUAL_BATCH, "lr": USUAL_RATE}
        given = {"epochs": self.num_epochs(), "batch": self.batch_size, "lr": self.lr}
        settings += [f"{name}{given[name]:g}" for name in given if given[name] != usual[name]]
        settings += [self.learning_rate()] if self.learning_rate() != "constant" else []
        return self.out / "__".join([self.dataset, attention, *settings, f"s{seed}"])


def load(dataset: str, folder: Path | None) -> tuple[Sequences, Sequences]:
    """Load the training and the test split, standardized per channel with the training split.

    Raises:
        ValueError: if a file is missing or in another format, if values are missing, or if the splits do not match.
    """
    training, test = (read_split(dataset, folder, split) for split in ("train", "test"))
    if unknown := set(test.labels) - set(training.labels):
        raise ValueError(f"the test split of {dataset} has classes that the training split lacks: {sorted(unknown)}")
    return standardized(training, test)


@dataclass(frozen=True)
class Series:
    """Time series of one split, as in the archive."""

    values: Sequence[np.ndarray]
    """One array (channels, steps) per series."""
    labels: Sequence[str]
    """One class name per series."""


def standardized(training: Series, other: Series) -> tuple[Sequences, Sequences]:
    """Standardize both per channel with the statistics of ``training``, and number the classes."""
    classes = {name: number for number, name in enumerate(sorted({*training.labels, *other.labels}))}
    every = np.concatenate(training.values, axis=1)  # (channels, steps of all)
    mean, deviation = every.mean(1), every.std(1) + 1e-8

    def scaled(series: Series) -> Sequences:
        values = [((one.T - mean) / deviation).astype(np.float32) for one in series.values]
        labels = torch.tensor([classes[name] for name in series.labels])
        return Sequences([torch.from_numpy(one) for one in values], labels)

    return scaled(training), scaled(other)


def read_split(dataset: str, folder: Path | None, split: str) -> Series:
    """Read the training split (``train``) or the test split (``test``)."""
    try:
        from aeon.datasets import load_from_ts_file, load_japanese_vowels
    except ImportError as error:
        raise ValueError(
            "reading the UEA archive needs aeon: pip install -c constraints.txt -e '.[benchmarks]'"
        ) from error
    if folder is None:
        if dataset != "JapaneseVowels":
            names = f"{dataset}_TRAIN.ts and {dataset}_TEST.ts"
            raise ValueError(f"{dataset} does not come with aeon: give --folder with {names}")
        series, labels = load_japanese_vowels(split=split)
        return Series([np.asarray(one) for one in series], list(map(str, labels)))
    path = folder / f"{dataset}_{split.upper()}.ts"
    if not path.is_file():
        raise ValueError(f"{path} is missing: the archive's files are NAME_TRAIN.ts and NAME_TEST.ts")
    try:
        series, labels = load_from_ts_file(str(path))
    except Exception as error:  # the parser raises errors of many types
        raise ValueError(f"{path} is not in the archive's format: {error}") from error
    if len(series) == 0 or len(labels) != len(series):
        raise ValueError(f"{path} has {len(series)} series and {len(labels)} class labels: each series must have one")
    if missing := [number for number, one in enumerate(series) if not np.isfinite(one).all()]:
        raise ValueError(f"{path} has missing values in {len(missing)} series, the first of them number {missing[0]}")
    return Series([np.asarray(one) for one in series], list(map(str, labels)))


def train(config: Config, attention: str, seed: int, splits: tuple[Sequences, Sequences]) -> float:
    """Train one classifier and return its test accuracy in percent."""
    folder = config.run_folder(attention, seed)
    with closing(metrics_log_of(config, attention, folder)) as logbook:
        model = fit(config, attention, seed, splits, logbook)
        score = accuracy(model, splits[1].batches(TEST_BATCH, torch.device(config.device)))
        logbook.write(config.num_epochs(), {"test/accuracy": score})
    keep(folder, model, config.facts(attention, seed), {"test": score})
    return score


def metrics_log_of(config: Config, attention: str, folder: Path) -> MetricsLog:
    """Open the metrics log of a training run."""
    folder.mkdir(parents=True, exist_ok=True)
    return MetricsLog(folder, texts={"settings": settings(attention, config.penalized(attention))})


def fit(config: Config, attention: str, seed: int, splits: tuple[Sequences, Sequences], logbook: MetricsLog) -> Encoder:
    """Train one classifier.

    Args:
        config: the settings.
        attention: the attention stack.
        seed: the seed of weights, batches and dropout.
        splits: the data to train on, and the data to test on later. Of the latter, only the maximum length and the
            number of classes are used.
        logbook: the log of the training curves.
    """
    training, test = splits
    primal, device = config.penalized(attention), torch.device(config.device)
    torch.manual_seed(seed)
    order = torch.Generator().manual_seed(seed)
    shape = EncoderShape(
        num_classes=int(torch.cat([training.labels, test.labels]).max()) + 1,
        max_length=max(training.longest, test.longest),
        attention=attention,
        options={"primal": {"rank": primal.rank, "rank_multi": primal.rank_multi}},
    )
    model = Encoder(nn.Linear(training.tokens[0].shape[1], shape.width), shape).to(device)
    number, epochs = len(training.tokens), config.num_epochs()
    optimizer = torch.optim.RAdam(model.parameters(), lr=config.lr)
    falls = config.learning_rate() == "cosine"
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda done: (1 + math.cos(math.pi * done / epochs)) / 2 if falls else 1.0
    )
    best = Best()
    for epoch in tqdm(range(1, epochs + 1), desc=f"{attention}, seed {seed}", leave=False, disable=None):
        rows = torch.randperm(number, generator=order).tolist()
        batches = training.batches(config.batch_size, device, rows)
        losses = [torch.stack(update(model, optimizer, batch, eta=primal.eta)) for batch in batches]
        schedule.step()  # once an epoch
        loss, penalty, correct = torch.stack(losses).mean(0).tolist()
        curves = {"train/loss": loss, "train/accuracy": 100 * correct * len(losses) / number}
        logbook.write(epoch, curves | ({"train/penalty": penalty} if attention in PENALIZED else {}))
        best.see(epoch, loss, model)
    if best.is_far_below(loss):
        print(
            f"{attention}, seed {seed}: the training loss diverged from {best.loss:.3g} in epoch {best.epoch} to "
            f"{loss:.3g}; the weights of that epoch are used"
        )
        model.load_state_dict(best.weights)
    return model


@dataclass
class Best:
    """The epoch with the lowest training loss.

    With a constant learning rate, the loss of a converged model can jump, and it then takes several epochs to recover.
    If the training loss shows that the last epoch is in such a phase, the weights of the best epoch are used instead.
    """

    epoch: int = 0
    loss: float = math.inf
    weights: dict[str, Tensor] = field(default_factory=dict)

    def see(self, epoch: int, loss: float, model: nn.Module) -> None:
        """Record an epoch if its loss is the lowest so far."""
        if loss < self.loss:
            self.epoch, self.loss = epoch, loss
            self.weights = {name: value.clone() for name, value in model.state_dict().items()}

    def is_far_below(self, loss: float) -> bool:
        """Whether ``loss`` is more than ``FAR`` times the lowest loss, or NaN."""
        return bool(self.weights) and not loss <= FAR * self.loss


def load_encoder(folder: Path, sequences: int) -> tuple[Encoder, LabeledBatch]:
    """Load a trained encoder and the first series of its test split."""
    facts = json.loads((folder / FACTS).read_text())["facts"]
    _, test = load(facts["dataset"], None if facts["data"] is None else Path(facts["data"]))
    channels, width = test.tokens[0].shape[1], EncoderShape.width
    encoder = kept_encoder(folder, nn.Linear(channels, width))
    return encoder, test.batch(range(min(sequences, len(test.tokens))), torch.device("cpu"))


def settings(attention: str, primal: Penalized) -> str:
    """Hyperparameters of Primal-Attention as text; empty for stacks without it."""
    return f"rank {primal.rank}, eta {primal.eta:g}, rank_multi {primal.rank_multi}" if attention in PENALIZED else ""


def table(config: Config, scores: dict[str, list[float]]) -> str:
    """Table of our accuracies beside the paper's."""
    published = TABLE_1.get(config.dataset, {})
    rows = [
        [
            attention,
            spread(seen),
            f"{min(seen):.1f} to {max(seen):.1f}",
            f"{published[attention]:.1f}" if attention in published else "",
            settings(attention, config.penalized(attention)),
        ]
        for attention, seen in scores.items()
    ]
    seeds = "1 seed" if len(config.seeds) == 1 else f"{len(config.seeds)} seeds"
    return format_table([config.dataset, "test accuracy, %", seeds, "paper", "settings"], rows)


def findings(config: Config, scores: dict[str, list[float]]) -> Iterator[str]:
    """Compare the results with their bars."""
    bar = BARS.get(config.dataset)
    for attention, seen in scores.items():
        if bar is not None and attention in PENALIZED:
            mean = statistics.mean(seen)
            yield f"* [{'met' if mean >= bar else 'MISSED'}] {attention}: {mean:.1f} % (bar: at least {bar} %)"


def main(config: Config) -> None:
    """Train, print, save."""
    check_writable(config.out)
    check_device(config.device)
    splits = load(config.dataset, config.folder)
    scores: dict[str, list[float]] = {attention: [] for attention in config.attention}
    for seed in config.seeds:
        for attention in config.attention:
            folder = config.run_folder(attention, seed)
            saved = None if config.again else kept_scores(folder, config.facts(attention, seed))
            scores[attention].append(train(config, attention, seed, splits) if saved is None else saved["test"])
            note = "" if saved is None else f" (from {folder}; --again to retrain)"
            print(f"{attention}, seed {seed}: {scores[attention][-1]:.2f} %{note}", flush=True)
    print(f"\n{table(config, scores)}\n")
    if config.dataset in TABLE_1:
        print("The paper reports the best epoch on the test split. Ours is tested once, after the last epoch.")
    print("".join(f"{line}\n" for line in findings(config, scores)))
    path = config.out / f"{config.dataset}.json"
    every = [
        {**config.facts(attention, seed), "test_accuracy": score}
        for attention, seen in scores.items()
        for seed, score in zip(config.seeds, seen, strict=True)
    ]
    with atomic_write(path) as file:
        file.write(json.dumps(every, indent=1).encode())
    print(f"Saved {path}; curves: tensorboard --logdir {config.out}")
