"""The benchmark of speed beside other work: shares, bars, and a tiny measurement."""

import json
import multiprocessing
from pathlib import Path

import pytest

from benchmarks import busy
from benchmarks.busy import Config, Rates, fair_share, findings, main, table


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(busy, "num_cores", lambda: 2)


def made_up(training: float, evaluation: float) -> Rates:
    """Rates when quiet and beside four busy processes. The fair share is a third of ten steps per second."""
    rates: Rates = {"training": {0: [9.0, 10.0, 11.0], 4: [training]}, "evaluation": {0: [10.0], 4: [evaluation]}}
    return rates | {f"{name}, spinning": {0: [8.0], 4: [1.0]} for name in ("training", "evaluation")}


def test_the_fair_share_is_that_of_equal_threads() -> None:
    assert [fair_share(load) for load in (0, 2, 4, 8)] == pytest.approx([1.0, 1 / 2, 1 / 3, 1 / 5])


def test_shares_are_of_the_quiet_median() -> None:
    rows = [" ".join(line.replace("|", " ").split()) for line in table(made_up(3.0, 2.0)).splitlines()]
    assert rows[2:4] == ["training 0 10.00 10.00 100 %", "training 4 3.00 3.33 90 %"]
    found = findings(made_up(3.0, 2.0))
    assert found[0] == "* [met] training: at least 90 % of the fair share (bar: 70 %)"
    assert found[1] == "* training: when quiet, 1.25 times as fast as with spinning threads"
    assert found[2] == "* [MISSED] evaluation: at least 60 % of the fair share (bar: 70 %)"


def test_busy_processes_end() -> None:
    with busy.busy(2):
        assert len(multiprocessing.active_children()) >= 2
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loads": (2, 4)}, r"the first of them 0, not \[2, 4\]"),
        ({"loads": (0, 2, 2)}, "loads must be different numbers"),
        ({"rounds": 0}, "rounds, threads, width and context must be at least 1"),
        ({"seconds": 0.0}, "seconds above 0"),
    ],
)
def test_invalid_settings_are_rejected(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config(**settings)  # type: ignore[arg-type]


@pytest.mark.slow
def test_training_and_evaluation_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(Config((0, 1), 0.01, 1, peer=False, width=16, context=4, threads=1, out=tmp_path))
    assert "| evaluation, spinning |" in capsys.readouterr().out
    rates = json.loads((tmp_path / "busy.json").read_text())["rates"]
    assert rates.keys() == {"training", "evaluation", "training, spinning", "evaluation, spinning"}
    assert all(len(by_load["1"]) == 1 for by_load in rates.values())
