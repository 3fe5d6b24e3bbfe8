"""Reads the UEA archive's ``.ts`` files, and standardizes the series."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.batches import Sequences

__all__ = ["load"]


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
