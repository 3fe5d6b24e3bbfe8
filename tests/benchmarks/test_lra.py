"""The Long-Range Arena's loaders and tables, on small files of the standard formats."""

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.lra import rows_in_order
from benchmarks.lra_data import TRAINING_FILES, load_image, load_text
from benchmarks.lra_efficiency import CANONICAL, FUSED, ROWS, Cell, tables

CPU = torch.device("cpu")


def write_pictures(path: Path, number: int, seed: int) -> np.ndarray:
    rows = np.random.default_rng(seed).integers(0, 256, (number, 3073)).astype(np.uint8)
    rows[:, 0] %= 10
    path.write_bytes(rows.tobytes())
    return rows


def test_pictures_become_grey_pixels_in_reading_order(tmp_path: Path) -> None:
    written = [write_pictures(tmp_path / name, 4, seed) for seed, name in enumerate(TRAINING_FILES)]
    test = write_pictures(tmp_path / "test_batch.bin", 3, 9)
    splits = load_image(tmp_path)
    assert {name: len(own.labels) for name, own in splits.items()} == {"train": 18, "validation": 2, "test": 3}
    red, green, blue = test[1, 1:].reshape(3, 1024).astype(float)
    expected = np.rint(0.299 * red + 0.587 * green + 0.114 * blue)
    assert np.array_equal(splits["test"].tokens[1], expected)
    assert splits["test"].labels.tolist() == test[:, 0].tolist()
    assert splits["validation"].labels.tolist() == written[-1][-2:, 0].tolist()
    batch = splits["train"].batch([0, 5], CPU)
    assert batch.valid is None
    assert batch.x.shape == (2, 1024)
    assert batch.labels.tolist() == [int(written[0][0, 0]), int(written[1][1, 0])]


def test_what_is_not_cifar_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="CIFAR-10's binary version is wanted"):
        load_image(tmp_path)
    for name in TRAINING_FILES:
        (tmp_path / name).write_bytes(b"x" * 100)
    with pytest.raises(ValueError, match="it has 100 bytes, not a multiple of 3,073"):
        load_image(tmp_path)
    (tmp_path / TRAINING_FILES[0]).write_bytes(bytes([77] * 3073))
    with pytest.raises(ValueError, match="it has a class 77, not 0 to 9"):
        load_image(tmp_path)


def test_reviews_are_bytes(tmp_path: Path) -> None:
    for split in ("train", "test"):
        for name in ("neg", "pos"):
            (tmp_path / split / name).mkdir(parents=True)
            for number in range(10):
                text = f"{split} {name} {number} \u00e9" + "x" * (5000 if number == 0 else 0)
                (tmp_path / split / name / f"{number}_1.txt").write_text(text)
    splits = load_text(tmp_path)
    assert {name: len(own.labels) for name, own in splits.items()} == {"train": 18, "validation": 2, "test": 20}
    test = splits["test"]
    assert len(test.tokens[0]) == 4096
    assert bytes(test.tokens[11]).decode() == "test pos 1 \u00e9"
    assert test.labels.tolist() == [0] * 10 + [1] * 10
    for own in (splits["train"], splits["validation"]):
        for tokens, label in zip(own.tokens, own.labels, strict=True):
            assert bytes(tokens[6:9]).decode() == ("neg", "pos")[label]
    batch = test.batch([1, 0], CPU)
    assert batch.valid is not None
    assert batch.valid.sum(1).tolist() == [len(test.tokens[1]), 4096]
    with pytest.raises(ValueError, match="there are no reviews in"):
        load_text(tmp_path / "nowhere")


def test_every_row_comes_once_before_any_comes_again() -> None:
    batches = rows_in_order(10, 3, seed=0)
    first = [next(batches) for _ in range(3)]
    seen = [row for batch in first for row in batch]
    assert len(set(seen)) == 9
    assert set(next(batches)) <= set(range(10))
    assert next(rows_in_order(10, 3, seed=0)) == first[0] != next(rows_in_order(10, 3, seed=1))


def test_the_table_of_costs_compares_with_the_matrix_in_memory_and_with_the_paper() -> None:
    cells = {(row, 4096): Cell(row, 4096, 1.0, 100.0) for row in ROWS}
    cells[CANONICAL, 4096] = Cell(CANONICAL, 4096, 8.0, 2000.0)
    cells["primalformer", 4096] = Cell("primalformer", 4096, 0.5, 100.0)
    cells[FUSED, 4096] = Cell(FUSED, 4096, float("inf"), float("inf"))
    text = tables(cells, (4096,), 4)
    assert "| primalformer                  |   16.0 (7.4) |" in text  # 694.8 / 93.6
    assert "| primalformer                  |  20.0 (15.5) |" in text  # 21.24 / 1.37
    assert "does not fit" in text
    assert "[met] primalformer, 4,096 tokens: 16.0 times as fast" in text
    assert "[met] the fastest at 4,096 tokens is primalformer" in text
