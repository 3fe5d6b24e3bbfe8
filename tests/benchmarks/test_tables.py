"""The commands for the paper's Tables 6, 8 and 9: which runs they make, and what they print."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lra.data import TASKS
from benchmarks.published import TABLE_1, TABLE_2, TABLE_6, TABLE_8, TABLE_9, UEA_SETTINGS
from benchmarks.runs import SavedRun
from benchmarks.settings import Primal
from benchmarks.tables import Config, main


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch, own_folders: Path) -> list[Any]:
    """The configurations of the runs, which are not made: each has an accuracy of 50 %."""
    configs: list[Any] = []

    def run_all(config: Any, _: object) -> dict[str, list[SavedRun]]:
        configs.append(config)
        return {config.attention[0]: [SavedRun({"test": 50.0}, None, 1) for _ in config.seeds]}

    monkeypatch.setattr("benchmarks.uea.run.run_all", run_all)
    monkeypatch.setattr("benchmarks.lra.run.run_all", run_all)
    return configs


def test_table6_varies_rank_and_eta(seen: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    main(Config("table6", ("JapaneseVowels",), seeds=(0, 1)))
    assert [(config.rank, config.eta) for config in seen] == list(TABLE_6["JapaneseVowels"])
    assert {(config.attention, config.network, config.seeds) for config in seen} == {
        (("primalformer",), "published", (0, 1))
    }
    assert "50.0 (98.4)" in capsys.readouterr().out  # rank 40, eta 0.5


def test_table8_varies_the_weights(seen: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    main(Config("table8", folder=Path("archive")))
    assert [(config.dataset, config.data_dependent) for config in seen] == [
        (dataset, dependent) for dataset in TABLE_8 for dependent in (False, True)
    ]
    assert {config.folder for config in seen} == {Path("archive")}
    assert "50.0 (90.2)" in capsys.readouterr().out  # PEMS-SF, data-dependent


def test_table9_has_a_folder_for_each_task(seen: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    main(Config("table9", ("listops", "image"), folder=Path("arena")))
    assert [(config.task, config.folder, config.data_dependent) for config in seen] == [
        ("listops", None, False),
        ("listops", None, True),
        ("image", Path("arena/image"), False),
        ("image", Path("arena/image"), True),
    ]
    assert "50.0 (37.3)" in capsys.readouterr().out


def test_unknown_data_sets_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"datasets of table9 must be among listops, .*, not Handwriting"):
        Config("table9", ("Handwriting",))
    assert replace(Config("table6"), table="table9").names[0] == "listops"


def test_the_published_tables_have_the_same_data_sets() -> None:
    assert TABLE_1.keys() == TABLE_6.keys() == TABLE_8.keys() == UEA_SETTINGS.keys()
    for dataset, settings in UEA_SETTINGS.items():  # PrimalFormer's row of Table 1 is its best cell of Table 6
        rank, eta, _ = settings.primalformer
        assert TABLE_6[dataset][rank, eta] == TABLE_1[dataset]["primalformer"]


def test_table9_agrees_with_table2() -> None:
    """Both have Primal.+ with data-dependent weights."""
    assert {task: row["data-dependent"] for task, row in TABLE_9.items()} == {
        task: row["primal-plus"] for task, row in TABLE_2.items()
    }


def test_the_published_settings_are_those_of_the_paper() -> None:
    """Rank, eta and rank_multi of Primal.+ and PrimalFormer, as the published commands have them."""
    uea = {name: (*settings.primal_plus, *settings.primalformer) for name, settings in UEA_SETTINGS.items()}
    assert uea == {
        "EthanolConcentration": (40, 0.2, 10, 30, 0.1, 10),
        "FaceDetection": (40, 0.2, 5, 20, 0.1, 5),
        "Handwriting": (20, 0.5, 5, 30, 0.2, 5),
        "Heartbeat": (40, 0.5, 10, 30, 0.5, 10),
        "JapaneseVowels": (30, 0.2, 5, 40, 0.5, 5),
        "PEMS-SF": (40, 0.0, 5, 40, 0.1, 5),
        "SelfRegulationSCP1": (30, 0.2, 10, 30, 0.5, 10),
        "SelfRegulationSCP2": (20, 0.2, 10, 20, 0.0, 10),
        "SpokenArabicDigits": (30, 0.2, 5, 20, 0.1, 5),
        "UWaveGestureLibrary": (40, 0.1, 10, 20, 0.0, 10),
    }
    lra = {
        name: (task.batch_size, task.steps, task.warmup_steps, task.primal["primal-plus"], task.primal["primalformer"])
        for name, task in TASKS.items()
    }
    assert lra == {
        "listops": (32, 5_000, 1_000, Primal(30, 0.05), Primal(20, 0.1)),
        "text": (32, 20_000, 8_000, Primal(30, 0.1), Primal(20, 0.05)),
        "retrieval": (32, 30_000, 800, Primal(20, 0.05), Primal(30, 0.0)),
        "image": (256, 35_000, 175, Primal(30, 0.1), Primal(30, 0.1)),
        "pathfinder": (256, 62_400, 312, Primal(20, 0.05), Primal(30, 0.1)),
    }
