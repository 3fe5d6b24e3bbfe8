"""Choice of the learning-rate schedule of benchmarks.uea, constant or cosine, by cross-validation.

The training split is divided into folds with an even share of each class. For each fold, seed, attention stack and
schedule, a classifier trains on the other folds and is tested on this one. The seed also determines the folds.

Each data set gets one schedule: the one with the higher mean accuracy over all of these runs. A tie goes to the
constant schedule, which is the paper's. The test split is not read. The chosen schedules are listed in
benchmarks/uea/run.py.
"""

import json
import random
import statistics
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import torch

from benchmarks.classify import Sequences, accuracy, keep_scores, kept_scores, spread
from benchmarks.encoder import check_stacks
from benchmarks.program import check_device, run_program
from benchmarks.uea.run import TEST_BATCH, Config, Schedule, Series, fit, metrics_log_of, read_split, standardized
from primal_dt.system.files import atomic_write, check_writable
from primal_dt.system.table import format_table

Scores = dict[tuple[str, Schedule], list[float]]
"""(stack, schedule) -> accuracies in percent."""
CANDIDATES: tuple[Schedule, ...] = get_args(Schedule)
"""The paper's schedule comes first, because the first one wins a tie."""


@dataclass(frozen=True)
class Search:
    """Settings of the cross-validation."""

    dataset: str = "JapaneseVowels"
    """Name of the data set in the archive. JapaneseVowels comes with aeon; others are read from --folder."""
    folder: Path | None = None
    """Folder with NAME_TRAIN.ts, a file from https://timeseriesclassification.com."""
    attention: tuple[str, ...] = ("softmax", "primal-plus", "primalformer")
    """Attention stacks that the schedule is chosen for."""
    seeds: tuple[int, ...] = (0, 1)
    """Seeds of folds, weights, batches and dropout."""
    folds: int = 3
    """Number of folds of the training split. Each is held out once."""
    epochs: int | None = None
    """Epochs over the other folds. If not given, the paper's number for the data set (100 for most)."""
    device: str = "cpu"
    """Torch device: cpu, cuda or mps."""
    out: Path = Path("runs/uea-schedule")
    """Folder for curves and results. Finished runs in it with the same settings are reused."""

    def __post_init__(self) -> None:
        check_stacks(self.attention, self.seeds)
        if self.folds < 2:
            raise ValueError(f"folds ({self.folds}) must be at least 2")

    def trials(self) -> Iterator["Trial"]:
        """All training runs. The two schedules of otherwise equal runs follow each other."""
        for seed in self.seeds:
            for fold in range(self.folds):
                for attention in self.attention:
                    for schedule in CANDIDATES:
                        yield Trial(self, attention, schedule, seed, fold)


@dataclass(frozen=True)
class Trial:
    """One training run."""

    search: Search
    attention: str
    schedule: Schedule
    seed: int
    fold: int
    """Index of the held-out fold, from 0."""

    def run(self, training: Series) -> float:
        """Return the accuracy on the held-out fold in percent. Train first, unless a finished run has the result."""
        search = self.search
        config = Config(
            dataset=search.dataset,
            folder=search.folder,
            epochs=search.epochs,
            schedule=self.schedule,
            device=search.device,
        )
        facts = config.facts(self.attention, self.seed) | {"fold": self.fold, "folds": search.folds}
        name = [search.dataset, self.attention, self.schedule, f"fold{self.fold + 1}of{search.folds}", f"s{self.seed}"]
        folder = search.out / "__".join(name)
        saved = kept_scores(folder, facts)
        if saved is not None:
            return saved["held-out"]
        splits = hold_out(training, deal(training.labels, search.folds, self.seed)[self.fold])
        with closing(metrics_log_of(config, self.attention, folder)) as logbook:
            model = fit(config, self.attention, self.seed, splits, logbook)
            score = accuracy(model, splits[1].batches(TEST_BATCH, torch.device(config.device)))
            logbook.write(config.num_epochs(), {"held-out/accuracy": score})
        keep_scores(folder, facts, {"held-out": score})
        return score


def deal(labels: Sequence[str], folds: int, seed: int) -> list[list[int]]:
    """Divide rows into folds. The rows of each class are shuffled and go to the folds in turn."""
    rows = list(range(len(labels)))
    random.Random(seed).shuffle(rows)
    rows.sort(key=lambda row: labels[row])
    return [sorted(rows[fold::folds]) for fold in range(folds)]


def hold_out(training: Series, rows: Sequence[int]) -> tuple[Sequences, Sequences]:
    """Split the series into the others and ``rows``, both standardized with the statistics of the others."""
    held = set(rows)

    def part(chosen: Sequence[int]) -> Series:
        return Series([training.values[row] for row in chosen], [training.labels[row] for row in chosen])

    return standardized(part([row for row in range(len(training.labels)) if row not in held]), part(rows))


def choice(scores: Scores) -> Schedule:
    """The schedule with the higher mean accuracy; a tie goes to the constant one."""
    return max(CANDIDATES, key=lambda schedule: statistics.mean(every(scores, schedule)))


def every(scores: Scores, schedule: Schedule) -> list[float]:
    """Accuracies of all stacks with one schedule."""
    return [score for (_, its), seen in scores.items() if its == schedule for score in seen]


def table(search: Search, scores: Scores) -> str:
    """Table of accuracies, with a row per stack and a column per schedule."""
    rows = [[stack, *(spread(scores[stack, schedule]) for schedule in CANDIDATES)] for stack in search.attention]
    rows.append(["mean of all", *(f"{statistics.mean(every(scores, schedule)):.2f}" for schedule in CANDIDATES)])
    return format_table([f"{search.dataset}, held out, %", *CANDIDATES], rows)


def main(search: Search) -> None:
    """Train, print, save."""
    check_writable(search.out)
    check_device(search.device)
    training = read_split(search.dataset, search.folder, "train")
    if search.folds > len(training.labels):
        raise ValueError(
            f"folds ({search.folds}) must be at most the number of training series ({len(training.labels)})"
        )
    scores: Scores = {}
    for trial in search.trials():
        score = trial.run(training)
        scores.setdefault((trial.attention, trial.schedule), []).append(score)
        where = f"seed {trial.seed}, fold {trial.fold + 1} of {search.folds}"
        print(f"{trial.attention}, {trial.schedule}, {where}: {score:.1f} %", flush=True)
    trainings = search.folds * len(search.seeds)
    print(f"\n{table(search, scores)}\n\n± over {trainings} training runs of each. Chosen: {choice(scores)}")
    path = search.out / f"{search.dataset}.json"
    content = {
        "dataset": search.dataset,
        "attention": search.attention,
        "epochs": search.epochs,
        "folds": search.folds,
        "seeds": search.seeds,
        "held_out_accuracy": [
            {"attention": attention, "schedule": schedule, "scores": seen}
            for (attention, schedule), seen in scores.items()
        ],
        "chosen": choice(scores),
    }
    with atomic_write(path) as file:
        file.write(json.dumps(content, indent=1).encode())
    print(f"Saved {path}; curves: tensorboard --logdir {search.out}")


if __name__ == "__main__":
    run_program(main, Search, name="benchmarks.uea.schedule", description=__doc__)
