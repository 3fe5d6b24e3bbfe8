"""The Long-Range Arena's settings, training and tables."""

from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.lra.data import TASKS
from benchmarks.lra.efficiency import CANONICAL, ROWS, Cell, make_step, measure_length, tables
from benchmarks.lra.run import Config, main, make_schedule
from benchmarks.published import TABLE_2
from benchmarks.settings import Primal
from benchmarks.step import Losses
from primal_dt.training.metrics_log import read_metrics
from tests.benchmarks.test_lra_files import write_cifar

CPU = torch.device("cpu")


def cost_tables(changed: dict[str, tuple[float, float]]) -> str:
    """Tables of seconds and MiB at 4,096 tokens; infinite for a row that does not fit."""
    costs = {CANONICAL: (8.0, 2000.0), "primalformer": (0.5, 100.0), "softmax, fused": (inf, inf)} | changed
    return tables({(row, 4096): Cell(row, 4096, *costs.get(row, (1.0, 100.0))) for row in ROWS})


def test_costs_are_compared_with_softmax_and_the_paper() -> None:
    text = cost_tables({})
    assert "| primalformer                  |   16.0 (7.4) |" in text  # 694.8 / 93.6
    assert "| primalformer                  |  20.0 (15.5) |" in text  # 21.24 / 1.37
    assert "| primal-plus, matrix in memory |    8.0 (1.9) |" in text  # 694.8 / 367.6
    assert text.count("| softmax, fused                | does not fit |") == 2  # in both tables
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
@pytest.mark.parametrize("select", ["last", "validation"])
def test_training_learns_and_is_not_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str], select: str) -> None:
    labels = np.arange(60) % 2
    write_cifar(tmp_path, np.random.default_rng(0).integers(0, 60, (60, 3072)) + 180 * labels[:, None], labels)
    sizes: dict[str, Any] = {"steps": 8, "batch_size": 8, "lr": 1e-2, "select": select, "network": "ours"}
    config = Config(("primalformer",), task="image", folder=tmp_path, **sizes, out=tmp_path / "out")
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


@pytest.mark.slow
def test_pairs_are_trained_in_the_published_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for split in ("train", "eval", "test"):
        lines = [f"{row % 2}.0\ta\tb\tfirst {row}\tsecond document {row}\n" for row in range(2)]
        (tmp_path / f"new_aan_pairs.{split}.tsv").write_text("".join(lines))
    config = Config(("primal-plus",), task="retrieval", folder=tmp_path, steps=1, batch_size=1, out=tmp_path / "out")
    main(config)
    assert "| primal-plus |" in capsys.readouterr().out
    assert read_metrics(config.run_folder("primal-plus", 0))[0]["train/penalty"] >= 0


def test_settings_default_to_the_published_ones() -> None:
    assert Config().primal("primalformer") == Primal(20, 0.1)
    assert Config().primal("primal-plus") == Primal(30, 0.05)
    assert Config(eta=0.0, rank=8).primal("primal-plus") == Primal(8, 0.0)
    assert Config().settings("softmax", 0)["steps"] == 5_000
    assert TASKS.keys() == TABLE_2.keys()


def test_the_schedule_is_the_published_cycle() -> None:
    """From lr / 25 linearly to lr at the end of the warm-up, and linearly down to almost zero; beta1 the other way."""
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=1e-4)
    schedule = make_schedule(optimizer, 1e-4, 100, 0.2)
    rates, betas = [], []
    for _ in range(100):
        rates.append(optimizer.param_groups[0]["lr"])
        betas.append(optimizer.param_groups[0]["betas"][0])
        optimizer.step()
        schedule.step()
    up, down = np.linspace(1e-4 / 25, 1e-4, 20), np.linspace(1e-4, 1e-4 / 25 / 1e4, 81)
    np.testing.assert_allclose(rates, [*up, *down[1:]], rtol=1e-6)
    np.testing.assert_allclose(betas, [*np.linspace(0.95, 0.85, 20), *np.linspace(0.85, 0.95, 81)[1:]], rtol=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, r"steps \(0\) must be at least 1"),
        ({"batch_size": 0}, r"batch_size \(0\) must be at least 1"),
        ({"accumulate": 0}, r"accumulate \(0\) must be at least 1"),
        ({"task": "retrieval", "folder": Path(), "accumulate": 2}, r"accumulate \(2\) must be 1 for retrieval"),
        ({"lengths": ()}, r"lengths \(0\) must be at least 1"),
        ({"seeds": (1, 1)}, "seeds must have at least one entry and no duplicates"),
        ({"eta": -0.1}, r"eta \(-0\.1\) must be finite and at least 0"),
        ({"lr": float("nan")}, "lr and efficiency_seconds must be finite and above 0"),
        ({"task": "image"}, "image needs --folder"),
    ],
)
def test_invalid_settings_are_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config(**settings)
