"""The search for ``quick``: its settings, its rule, and that it resumes."""

import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import quick_search
from benchmarks.quick_search import (
    BASE,
    PRESENT,
    ROUNDS,
    SETTINGS,
    Config,
    flags_of,
    read,
    run_round,
    scores,
    survivors,
)
from primal_dt.training.arguments import parse_config


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_changes_what_it_names(setting: str) -> None:
    config = parse_config(["quick", *flags_of(setting)])
    values = vars(config.model) | vars(config.optimizer)
    assert {name: values[name] for name in BASE} == {**BASE, **SETTINGS[setting]}
    assert (not SETTINGS[setting]) == (setting == PRESENT)


def test_no_reported_result_uses_the_seeds_of_the_search() -> None:
    assert all(seed >= 100 for each in ROUNDS for seed in each.seeds)
    assert not set(ROUNDS[0].seeds) & set(ROUNDS[1].seeds)


def line(number: int, setting: str, score: float) -> dict[str, Any]:
    return {"round": str(number), "setting": setting, "score": str(score)}


def test_the_best_three_and_the_present_one_survive() -> None:
    lines = [line(1, name, score) for name, score in (("a", 50), ("b", 70), (PRESENT, 10), ("c", 60), ("d", 40))]
    lines += [line(1, "d", 80), line(2, "a", 99)]  # d: mean 60
    assert survivors(lines) == [PRESENT, "b", "c", "d"]
    assert scores(lines, 2) == {"a": 99.0}


def test_an_interrupted_round_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, int]] = []

    def train(run: dict[str, Any], config: Config) -> dict[str, Any]:
        started.append((run["setting"], run["steps"]))
        if len(started) == 2:
            raise KeyboardInterrupt
        time.sleep(0.1)  # so that it is noticed before all others have begun
        return run | {"score": 1.0, "sensitivity": 0.1, "action_mse": 0.2, "commit": "c"}

    monkeypatch.setattr(quick_search, "train", train)
    config, times = Config(jobs=1, out=tmp_path / "results.csv"), {PRESENT: 0.1, "context 2": 0.3}
    with pytest.raises(KeyboardInterrupt):
        run_round(ROUNDS[0], list(times), times, config)
    assert len(started) < 4  # those that had not begun are cancelled
    assert 1 <= len(read(config.out)) == len(started) - 1
    run_round(ROUNDS[0], list(times), times, config)
    assert len(read(config.out)) == 2 * len(ROUNDS[0].datasets)
    assert {(row["setting"], row["dataset"]) for row in read(config.out)} == {
        (setting, dataset) for setting in times for dataset in ROUNDS[0].datasets
    }
    assert dict(started) == {PRESENT: 1000, "context 2": 300}  # the same time for each
