"""Time-series classification on the UEA archive: the attention stacks compared with one another and with the paper.

The settings are those of the paper's published code: 2 layers, width 512, 8 heads, RAdam at a constant 1e-3, batches of
16, 100 epochs, dropout 0.1, gradients clipped at norm 4, and rank, eta and rank_multi for each of its ten data sets.
Another data set uses rank 30, eta 0.1 and rank_multi 10.

Series are standardized with the training split. The result is the accuracy on the test split after the last epoch. The
paper reports the best epoch on the test split; --test-every-epochs shows that too.
"""

import json
import math
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from benchmarks.batches import EpochOrder, LabeledBatch, Sequences
from benchmarks.blocks import PENALIZED
from benchmarks.encoder import Encoder, EncoderShape
from benchmarks.published import TABLE_1, UEA_SETTINGS, UeaSettings
from benchmarks.published_encoder import build_encoder
from benchmarks.runs import RESULT, SavedRun, load_weights, num_parameters, run_stacks, save_run, spread
from benchmarks.settings import ClassifierFlags, Primal
from benchmarks.step import accuracy
from benchmarks.trainer import Best, Plan, Trainer
from benchmarks.uea.data import load
from primal_dt.system.files import atomic_write, check_writable
from primal_dt.system.provenance import commit
from primal_dt.system.table import format_table
from primal_dt.training.distributed import Processes, join_processes

TEST_BATCH = 64
FAR = 10.0
"""With --recover, a run has diverged if its last training loss is more than this many times the lowest."""
OTHERWISE = UeaSettings((30, 0.1, 10), (30, 0.1, 10))
"""Settings for data sets that are not in the paper."""
BARS = {"JapaneseVowels": 98.0}
"""Data set -> minimum mean test accuracy of Primal.+ and PrimalFormer in percent."""
BATCH, RATE = 16, 1e-3
WIDTH = 512
CLIP = 4.0
"""Maximum norm of the gradient, as published."""


@dataclass(frozen=True)
class Config(ClassifierFlags):
    """Settings of the benchmark."""

    dataset: str = "JapaneseVowels"
    """Name of the data set in the archive. JapaneseVowels comes with aeon; others are read from --folder."""
    folder: Path | None = None
    """Folder with NAME_TRAIN.ts and NAME_TEST.ts, files from https://timeseriesclassification.com."""
    epochs: int | None = None
    """Epochs over the training split. If not given, the published number for the data set (100 for most)."""
    batch_size: int = BATCH
    """Series per update."""
    lr: float = RATE
    """Initial learning rate."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Learning rate: constant, as published, or a cosine decay to zero."""
    recover: bool = False
    """Test the weights of the epoch with the lowest training loss if the loss has jumped by the end.
    That is, if it is more than ten times as high in the last epoch. Tables mark such runs."""
    test_every_epochs: int = 0
    """Epochs between tests on the way; 0: none. The best test is shown beside the result, because it is what the paper
    reports (with 2). Nothing is chosen by it."""
    out: Path = Path("runs/uea")
    """Folder for curves and results."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_at_least_one("epochs", "batch_size")
        if self.test_every_epochs < 0:
            raise ValueError(f"test_every_epochs ({self.test_every_epochs}) must be at least 0")
        if not 0 < self.lr < math.inf:
            raise ValueError(f"lr ({self.lr}) must be finite and above 0")

    @property
    def published(self) -> UeaSettings:
        """Published settings of the data set, or those for other data sets."""
        return UEA_SETTINGS.get(self.dataset, OTHERWISE)

    @property
    def num_epochs(self) -> int:
        """The number of epochs: the given one, or the published one."""
        return self.published.epochs if self.epochs is None else self.epochs

    def primal(self, attention: str) -> Primal:
        """The primal layers of a stack: the published settings, with the changes that the flags make."""
        own = self.published.primalformer if attention == "primalformer" else self.published.primal_plus
        return self.with_flags(Primal(*own))

    def settings(self, attention: str, seed: int) -> dict[str, Any]:
        """All settings that the result of a training run depends on."""
        return {
            "dataset": self.dataset,
            "data": None if self.folder is None else self.folder.name,
            "network": self.network,
            "epochs": self.num_epochs,
            "batch_size": self.batch_size,
            "lr": self.lr,
            "optimizer": self.published.optimizer,
            "schedule": self.schedule,
            "recover": self.recover,
            "device": self.device,
            "attention": attention,
            "seed": seed,
            **self.primal_settings(attention, self.primal(attention)),
            "torch": torch.__version__,
        }

    def run_folder(self, attention: str, seed: int) -> Path:
        """Folder of a training run. Different settings have different folders, so that no result is overwritten."""
        settings = [self.primal(attention).label] if attention in PENALIZED else []
        usual = {"epochs": self.published.epochs, "batch": BATCH, "lr": RATE}
        given = {"epochs": self.num_epochs, "batch": self.batch_size, "lr": self.lr}
        settings += [f"{name}{given[name]:g}" for name in given if given[name] != usual[name]]
        settings += [self.network] if self.network != "published" else []
        settings += [self.schedule] if self.schedule != "constant" else []
        settings += ["recover"] if self.recover else []
        return self.out / "__".join([self.dataset, attention, *settings, f"s{seed}"])

    def shape(self, attention: str, splits: tuple[Sequences, Sequences]) -> EncoderShape:
        """The shape of a stack's network."""
        training, test = splits
        published = self.network == "published"
        return EncoderShape(
            num_classes=int(torch.cat([training.labels, test.labels]).max()) + 1,
            max_length=training.longest if published else max(training.longest, test.longest),
            attention=attention,
            width=WIDTH,
            mlp_width=4 * WIDTH if published else WIDTH,
            options={
                "primal": self.primal(attention).options,
                "softmax": {"attention_dropout": EncoderShape.dropout if published else 0.0},
            },
            network="uea" if published else "ours",
        )


def train(
    config: Config, attention: str, seed: int, splits: tuple[Sequences, Sequences], processes: Processes
) -> SavedRun:
    """Train one classifier, test it, and save both.

    The training uses only the longest series and the number of classes of the test split.
    """
    training, test = splits
    primal, device = config.primal(attention), processes.device
    torch.manual_seed(seed)
    model = build_encoder(nn.Linear(training.tokens[0].shape[1], WIDTH), config.shape(attention, splits)).to(device)
    order = EpochOrder(len(training.tokens), config.batch_size, seed, keep_last=True)
    epochs, per_epoch = config.num_epochs, order.steps_per_epoch
    optimizers = {"radam": torch.optim.RAdam, "adam": torch.optim.Adam}
    optimizer = optimizers[config.published.optimizer](model.parameters(), lr=config.lr)
    falls = config.schedule == "cosine"
    schedule = torch.optim.lr_scheduler.LambdaLR(  # changes once an epoch
        optimizer, lambda step: (1 + math.cos(math.pi * (step // per_epoch) / epochs)) / 2 if falls else 1.0
    )

    def test_accuracy() -> dict[str, float]:
        batches = test.batches(TEST_BATCH, device)
        return {"test/accuracy": accuracy(model, batches, processes)}

    def final() -> dict[str, float]:
        if config.recover and is_far_above(loss := trainer.lines[-1]["train/loss"], trainer.best):
            recovered.append(trainer.best.step // per_epoch)
            model.load_state_dict(trainer.best.weights)
            print(
                f"{attention}, seed {seed}: the training loss diverged from {trainer.best.value:.3g} in epoch "
                f"{recovered[0]} to {loss:.3g}; the weights of that epoch are used (--recover)"
            )
        return test_accuracy()

    recovered: list[int] = []
    settings, folder = config.settings(attention, seed), config.run_folder(attention, seed)
    version = commit()  # of the code that trains, even if it changes meanwhile
    trainer = Trainer(
        model,
        optimizer,
        lambda step: (training.batch(rows, device) for rows in order.shares(step, processes.rank, processes.count)),
        Plan(
            epochs * per_epoch,
            seed,
            eta=primal.eta if attention in PENALIZED else 0.0,
            penalty=primal.penalty,
            clip=CLIP,
            log_every_steps=per_epoch,
            save_every_steps=5 * per_epoch,
            evaluate_every_steps=config.test_every_epochs * per_epoch,
            best="train/loss" if config.recover else None,
        ),
        folder,
        settings=settings,
        processes=processes,
        schedule=schedule,
        evaluate=test_accuracy,
    )
    scores = {"test": trainer.run(name=f"{attention}, seed {seed}", final=final, again=config.again)["test/accuracy"]}
    if config.test_every_epochs:
        scores["best_test"] = max(line["test/accuracy"] for line in trainer.lines if "test/accuracy" in line)
    run = SavedRun(scores, version, num_parameters(model), recovered[0] if recovered else None)
    if processes.is_main:
        save_run(folder, model, settings, run, shape=asdict(model.shape), source=config.folder)
    trainer.finish()
    return run


def is_far_above(loss: float, best: Best) -> bool:
    """Whether a loss is more than ``FAR`` times the lowest one.

    With a constant learning rate, the loss of a converged model can jump, and it then takes several epochs to recover.
    """
    return bool(best.weights) and not loss <= FAR * best.value


def load_encoder(folder: Path, sequences: int) -> tuple[Encoder, LabeledBatch]:
    """Load a trained encoder and the first series of its test split."""
    content = json.loads((folder / RESULT).read_text())
    if "settings" not in content:
        raise ValueError(f"{folder} is from an earlier version: train it again")
    source = content.get("source")
    _, test = load(content["settings"]["dataset"], None if source is None else Path(source))
    encoder = build_encoder(nn.Linear(test.tokens[0].shape[1], WIDTH), EncoderShape(**content["shape"]))
    load_weights(folder, encoder)
    return encoder.eval(), test.batch(range(min(sequences, len(test.tokens))), torch.device("cpu"))


def table(config: Config, runs: dict[str, list[SavedRun]]) -> str:
    """Table of our accuracies beside the paper's."""
    published = TABLE_1.get(config.dataset, {})
    rows = []
    for attention, seen in runs.items():
        scores = [run.scores["test"] for run in seen]
        rows.append(
            [
                attention,
                spread(scores) + ("*" if any(run.epoch is not None for run in seen) else ""),
                f"{min(scores):.1f} to {max(scores):.1f}",
                *([spread([run.scores["best_test"] for run in seen])] if config.test_every_epochs else []),
                f"{published[attention]:.1f}" if attention in published else "",
                f"{seen[0].num_parameters:,}",
                str(config.primal(attention)) if attention in PENALIZED else "",
            ]
        )
    seeds = "1 seed" if len(config.seeds) == 1 else f"{len(config.seeds)} seeds"
    best = ["best epoch"] if config.test_every_epochs else []
    return format_table(
        [config.dataset, "test accuracy, %", seeds, *best, "paper", "parameters", "primal layers"], rows
    )


def findings(config: Config, runs: dict[str, list[SavedRun]]) -> Iterator[str]:
    """Compare the results with their bars, and name the runs that --recover changed."""
    bar = BARS.get(config.dataset)
    for attention, seen in runs.items():
        mean = statistics.mean(run.scores["test"] for run in seen)
        if bar is not None and attention in PENALIZED:
            yield f"* [{'met' if mean >= bar else 'MISSED'}] {attention}: {mean:.1f} % (bar: at least {bar} %)"
        for seed, run in zip(config.seeds, seen, strict=True):
            if run.epoch is not None:
                yield f"* {attention}, seed {seed}: the weights of epoch {run.epoch} were tested (--recover)"


def run_all(config: Config, processes: Processes) -> dict[str, list[SavedRun]]:
    """Train every stack with every seed, unless a finished run has the result: stack -> results."""
    config.use_threads()
    splits = load(config.dataset, config.folder)
    return run_stacks(
        config,
        lambda attention, seed: train(config, attention, seed, splits, processes),
        lambda run: f"{run.scores['test']:.2f} %",
        processes,
        needed=("best_test",) if config.test_every_epochs else (),
    )


def rows_of(config: Config, runs: dict[str, list[SavedRun]]) -> list[dict[str, Any]]:
    """The settings and the result of each run, as plain values."""
    return [
        {**config.settings(attention, seed), **asdict(run)}
        for attention, seen in runs.items()
        for seed, run in zip(config.seeds, seen, strict=True)
    ]


def main(config: Config) -> None:
    """Train, print, save."""
    check_writable(config.out)
    with join_processes(config.device) as processes:
        runs = run_all(config, processes)
    if not processes.is_main:
        return
    print(f"\n{table(config, runs)}\n")
    if config.dataset in TABLE_1:
        print("The paper reports the best epoch on the test split. Our result is that of the last epoch.")
    print("".join(f"{line}\n" for line in findings(config, runs)))
    path = config.out / f"{config.dataset}.json"
    with atomic_write(path) as file:
        file.write(json.dumps(rows_of(config, runs), indent=1).encode())
    print(f"Saved {path}; curves: tensorboard --logdir {config.out}")
