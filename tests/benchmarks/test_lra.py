"""The Long-Range Arena's loaders, training and tables, on small files in the standard formats."""

from itertools import product
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.classify import Losses
from benchmarks.lra.data import TRAINING_FILES, Penalized, load_image, load_text
from benchmarks.lra.efficiency import CANONICAL, ROWS, Cell, make_step, measure_length, tables
from benchmarks.lra.run import Config, main, rows_in_order
from primal_dt.training.metrics_log import read_metrics

CPU = torch.device("cpu")


def write_cifar(folder: Path, pixels: np.ndarray, labels: np.ndarray) -> None:
    """Write pictures (number, 3072) and their classes, divided evenly among CIFAR-10's six files."""
    parts = np.split(np.column_stack([labels, pixels]).astype(np.uint8), 6)
    for name, part in zip((*TRAINING_FILES, "test_batch.bin"), parts, strict=True):
        (folder / name).write_bytes(part.tobytes())


def test_pictures_become_gray_pixels_in_reading_order(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    pixels, labels = random.integers(0, 256, (24, 3072)), random.integers(0, 10, 24)
    write_cifar(tmp_path, pixels, labels)
    splits = load_image(tmp_path)
    red, green, blue = pixels.reshape(24, 3, 1024).swapaxes(0, 1)
    gray = 0.299 * red + 0.587 * green + 0.114 * blue
    for name, rows in (("train", slice(18)), ("validation", slice(18, 20)), ("test", slice(20, 24))):
        assert splits[name].labels.tolist() == labels[rows].tolist()
        np.testing.assert_allclose(torch.stack(list(splits[name].tokens)), gray[rows], atol=0.5 + 1e-6, rtol=0)
    batch = splits["train"].batch([0, 5], CPU)
    assert batch.valid is None
    assert batch.x.shape == (2, 1024)
    assert batch.labels.tolist() == labels[[0, 5]].tolist()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"must contain the \.bin files of CIFAR-10's binary version"),
        (b"x" * 100, "it has 100 bytes, not a multiple of 3,073"),
        (bytes([77] * 3073), "it has a class 77, not 0 to 9"),
    ],
)
def test_other_files_than_cifar_are_rejected(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / TRAINING_FILES[0]).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_image(tmp_path)


def test_reviews_become_bytes(tmp_path: Path) -> None:
    for split, name, number in product(("train", "test"), ("neg", "pos"), range(10)):
        path = tmp_path / split / name / f"{number}_1.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{split} {name} {number} \u00e9" + "x" * (5000 if number == 0 else 0))
    splits = load_text(tmp_path)
    assert {name: len(split.labels) for name, split in splits.items()} == {"train": 18, "validation": 2, "test": 20}
    test = splits["test"]
    assert len(test.tokens[0]) == 4096
    assert bytes(test.tokens[11].tolist()).decode() == "test pos 1 \u00e9"
    assert test.labels.tolist() == [0] * 10 + [1] * 10
    for name in ("train", "validation"):
        for tokens, label in zip(splits[name].tokens, splits[name].labels, strict=True):
            assert bytes(tokens[6:9].tolist()).decode() == ("neg", "pos")[label]
    batch = test.batch([1, 0], CPU)
    assert batch.valid is not None
    assert batch.valid.sum(1).tolist() == [len(test.tokens[1]), 4096]


def test_folder_without_reviews_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no reviews"):
        load_text(tmp_path / "missing")


def test_no_row_repeats_within_a_pass() -> None:
    batches = rows_in_order(10, 3, seed=0)
    first = [next(batches) for _ in range(3)]
    assert len({row for batch in first for row in batch}) == 9
    assert set(next(batches)) <= set(range(10))
    assert next(rows_in_order(10, 3, seed=0)) == first[0] != next(rows_in_order(10, 3, seed=1))


def cost_tables(changed: dict[str, tuple[float, float]]) -> str:
    """Tables of seconds and MiB at 4,096 tokens; infinite for a row that does not fit."""
    costs = {CANONICAL: (8.0, 2000.0), "primalformer": (0.5, 100.0), "softmax, fused": (inf, inf)} | changed
    return tables({(row, 4096): Cell(row, 4096, *costs.get(row, (1.0, 100.0))) for row in ROWS}, (4096,), 4)


def test_costs_are_compared_with_softmax_and_the_paper() -> None:
    text = cost_tables({})
    assert "| primalformer                  |   16.0 (7.4) |" in text  # 694.8 / 93.6
    assert "| primalformer                  |  20.0 (15.5) |" in text  # 21.24 / 1.37
    assert "| primal-plus, matrix in memory |    8.0 (1.9) |" in text  # 694.8 / 367.6
    assert text.count("| softmax, fused                | does not fit |") == 4  # in every table
    assert "[met] primalformer, 4,096 tokens: 16.0 times as fast" in text
    assert "[met] the fastest at 4,096 tokens is primalformer" in text


def test_missed_cost_bars_are_reported() -> None:
    text = cost_tables({"primalformer": (2.0, 200.0)})
    assert "[MISSED] primalformer, 4,096 tokens: 4.0 times as fast" in text
    assert "[MISSED] primalformer, 4,096 tokens: 10.0 times less memory" in text
    assert "[MISSED] the fastest at 4,096 tokens is softmax, weights not dropped" in text


def test_no_bar_is_met_without_canonical_attention() -> None:
    text = cost_tables({CANONICAL: (inf, inf)})
    assert "inf" not in text.replace("linformer", "")
    assert "[met]" not in text
    assert "[not measured] canonical attention does not fit" in text


@pytest.mark.parametrize("row", list(ROWS))
def test_every_row_is_a_training_step_of_its_stack(row: str) -> None:
    losses = make_step(row, 96, 2, CPU)()
    assert isinstance(losses, Losses)
    assert bool(losses.total.isfinite())
    assert bool(losses.penalty > 0) == row.startswith("primal")  # only these stacks have an objective J


@pytest.mark.slow
def test_costs_are_measured_in_separate_processes() -> None:
    rows = [CANONICAL, "primalformer"]
    canonical, primal = measure_length(rows, 512, batch_size=1, seconds=0.01, device=CPU)
    assert [(cell.row, cell.fits) for cell in (canonical, primal)] == [(row, True) for row in rows]
    assert primal.memory_mib < canonical.memory_mib  # it has no attention matrix


@pytest.mark.slow
def test_training_learns_and_is_not_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    labels = np.arange(60) % 2
    write_cifar(tmp_path, np.random.default_rng(0).integers(0, 60, (60, 3072)) + 180 * labels[:, None], labels)
    config = Config("image", tmp_path, ("primalformer",), steps=8, batch_size=8, lr=1e-2, out=tmp_path / "out")
    main(config)
    printed = capsys.readouterr().out
    assert "primalformer, seed 0: validation 100.00 %, test 100.00 %" in printed
    assert "| primalformer |         100.0 |   100.0 |        43.0 |" in printed  # the last is the paper's
    assert "steps: 8 (published: 35,000)" in printed
    folder = config.run_folder("primalformer", 0)
    lines = read_metrics(folder)
    assert [line["step"] for line in lines] == [8, 8]
    assert lines[0]["train/penalty"] > 0
    main(config)
    assert f"(from {folder}; --again to retrain)" in capsys.readouterr().out


def test_settings_default_to_the_published_ones() -> None:
    assert Config().penalized("primalformer") == Penalized(20, 0.1)
    assert Config().penalized("primal-plus") == Penalized(30, 0.05)
    assert Config(eta=0.0, rank=8).penalized("primal-plus") == Penalized(8, 0.0)
    assert Config().facts("softmax", 0)["steps"] == 5_000


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, r"steps \(0\) must be at least 1"),
        ({"batch_size": 0}, r"batch_size \(0\) must be at least 1"),
        ({"lengths": ()}, r"lengths \(0\) must be at least 1"),
        ({"seeds": (1, 1)}, "seeds must have at least one entry and no duplicates"),
        ({"eta": -0.1}, "eta at least 0"),
        ({"task": "image"}, "image needs --folder"),
    ],
)
def test_invalid_settings_are_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config(**settings)
