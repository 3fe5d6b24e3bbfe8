"""The Long-Range Arena's loaders and tables, on small files of the standard formats."""

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.classify import Losses
from benchmarks.lra.data import TRAINING_FILES, Penalized, load_image, load_text
from benchmarks.lra.efficiency import CANONICAL, ROWS, Cell, make_step, measure_length, tables
from benchmarks.lra.run import Config, main, rows_in_order
from primal_dt.training.metrics_log import read_metrics

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
    assert np.array_equal(splits["test"].tokens[1].numpy(), expected)
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
    assert bytes(test.tokens[11].tolist()).decode() == "test pos 1 \u00e9"
    assert test.labels.tolist() == [0] * 10 + [1] * 10
    for own in (splits["train"], splits["validation"]):
        for tokens, label in zip(own.tokens, own.labels, strict=True):
            assert bytes(tokens[6:9].tolist()).decode() == ("neg", "pos")[label]
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


def cells_at(length: int) -> dict[tuple[str, int], Cell]:
    cells = {(row, length): Cell(row, length, 1.0, 100.0) for row in ROWS}
    cells[CANONICAL, length] = Cell(CANONICAL, length, 8.0, 2000.0)
    cells["primalformer", length] = Cell("primalformer", length, 0.5, 100.0)
    cells["softmax, fused", length] = Cell("softmax, fused", length, float("inf"), float("inf"))
    return cells


def test_the_table_of_costs_compares_with_the_matrix_in_memory_and_with_the_paper() -> None:
    text = tables(cells_at(4096), (4096,), 4)
    assert "| primalformer                  |   16.0 (7.4) |" in text  # 694.8 / 93.6
    assert "| primalformer                  |  20.0 (15.5) |" in text  # 21.24 / 1.37
    assert "| primal-plus, matrix in memory |    8.0 (1.9) |" in text  # 694.8 / 367.6
    assert text.count("| softmax, fused                | does not fit |") == 4  # in every table
    assert "[met] primalformer, 4,096 tokens: 16.0 times as fast" in text
    assert "[met] the fastest at 4,096 tokens is primalformer" in text
    slower = cells_at(4096) | {("primalformer", 4096): Cell("primalformer", 4096, 2.0, 200.0)}
    text = tables(slower, (4096,), 4)
    assert "[MISSED] primalformer, 4,096 tokens: 4.0 times as fast" in text
    assert "[MISSED] primalformer, 4,096 tokens: 10.0 times less memory" in text
    assert "[MISSED] the fastest at 4,096 tokens is softmax, weights not dropped" in text


@pytest.mark.parametrize("row", list(ROWS))
def test_every_row_of_the_table_is_a_training_step_of_its_stack(row: str) -> None:
    losses = make_step(row, 96, 2, CPU)()
    assert isinstance(losses, Losses)
    assert bool(losses.total.isfinite())
    assert bool(losses.penalty > 0) == row.startswith("primal")  # there is a J, and it counts


def test_memory_and_seconds_are_measured_in_processes_of_their_own() -> None:
    rows = [CANONICAL, "primalformer"]
    canonical, primal = measure_length(rows, 512, batch_size=1, seconds=0.01, device=CPU)
    assert (canonical.row, primal.row) == tuple(rows)
    assert canonical.fits
    assert primal.fits
    assert primal.memory_mib < canonical.memory_mib  # without the matrix, already at this length


def test_without_canonical_attention_nothing_is_said_to_be_met() -> None:
    cells = cells_at(4096) | {(CANONICAL, 4096): Cell(CANONICAL, 4096, float("inf"), float("inf"))}
    text = tables(cells, (4096,), 4)
    assert "inf" not in text.replace("linformer", "")
    assert "[met]" not in text
    assert "[not measured] canonical attention does not fit" in text


def bright_and_dark(path: Path, number: int) -> None:
    """Pictures of two classes: dark ones and bright ones."""
    rows = np.random.default_rng(0).integers(0, 60, (number, 3073)).astype(np.uint8)
    rows[:, 0] = np.arange(number) % 2
    rows[:, 1:] += (180 * rows[:, :1]).astype(np.uint8)
    path.write_bytes(rows.tobytes())


def test_training_learns_and_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in (*TRAINING_FILES, "test_batch.bin"):
        bright_and_dark(tmp_path / name, 20)
    config = Config(
        task="image",
        folder=tmp_path,
        attention=("primalformer",),
        steps=12,
        batch_size=8,
        lr=1e-2,
        out=tmp_path / "out",
    )
    main(config)
    printed = capsys.readouterr().out
    assert "primalformer, seed 0: validation 100.00 %, test 100.00 %" in printed
    assert "| primalformer |         100.0 |   100.0 |        43.0 |" in printed  # the last is the paper's
    assert "steps: 12 (published: 35,000)" in printed
    folder = config.run_folder("primalformer", 0)
    assert [line["step"] for line in read_metrics(folder)] == [12, 12]
    assert read_metrics(folder)[0]["train/penalty"] > 0
    main(config)
    assert f"(from {folder}; --again to train anew)" in capsys.readouterr().out


def test_settings_are_the_published_ones_unless_given() -> None:
    assert Config().penalized("primalformer") == Penalized(20, 0.1)
    assert Config().penalized("primal-plus") == Penalized(30, 0.05)
    assert Config(eta=0.0, rank=8).penalized("primal-plus") == Penalized(8, 0.0)
    assert Config().facts("softmax", 0)["steps"] == 5_000
    for wrong in ({"steps": 0}, {"batch_size": 0}, {"lengths": ()}, {"seeds": (1, 1)}, {"eta": -0.1}):
        with pytest.raises(ValueError, match="must"):
            Config(**wrong)
    with pytest.raises(ValueError, match="image needs --folder"):
        Config(task="image")
