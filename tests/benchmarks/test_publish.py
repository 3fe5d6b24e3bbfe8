"""Published tables: the page has exactly what the raw results give, and runs are collected as they are."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import evaluate
import train
from benchmarks import publish
from benchmarks.program import save_report
from benchmarks.publish import PAGES, RESULTS, Config, main, merge, policy_row, read_rows, render, uea_row
from benchmarks.result_tables import LANGUAGE_RUN, LANGUAGE_SIZES, REPORTS, SEEDS, SHORT, TABLES, language, variants
from tests.conftest import ON_ONE_CORE, SMALL, run_program, small_data


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_page_has_the_tables_of_the_raw_results(page: Path) -> None:
    assert render(page.read_text()) == page.read_text(), "run python -m benchmarks.publish"


def test_the_pages_have_every_table() -> None:
    """Except the reports of benchmarks that have not been published in this form yet."""
    found = {name for page in PAGES for name in re.findall(r"<!-- begin (\w+) -->", page.read_text())}
    missing = set(TABLES) - found
    assert missing <= set(REPORTS)
    for name in missing:
        path = RESULTS / f"{name}.json"
        assert not path.exists() or "report" not in json.loads(path.read_text())


def test_a_number_that_is_not_measured_is_found() -> None:
    (path,) = (page for page in PAGES if page.name == "results.md")
    page = path.read_text()
    digits = [match for name in TABLES for match in re.finditer(rf"(?s)begin {name} -->.*?(\d\.\d).*?end {name}", page)]
    assert digits
    for match in digits:
        changed = page[: match.start(1)] + "7.77" + page[match.end(1) :]
        assert render(changed) == page


def test_every_result_has_its_commit() -> None:
    rows = [row for name in ("policies.json", "uea.json", "language.json") for row in read_rows(RESULTS / name)]
    assert rows
    for row in rows:
        assert re.fullmatch(r"[0-9a-f]{7,12}", row["commit"]), row["settings"]  # no plus sign: nothing was modified


def table(rows: Mapping[str, list[dict[str, Any]]]) -> str:
    return f"| {len(rows['uea'])} |"


def test_tables_are_written_between_their_marks() -> None:
    page = "a\n<!-- begin one -->\nold\n<!-- end one -->\nb\n"
    assert re.fullmatch(r"a\n<!-- begin one -->\n\n\| \d+ \|\n\n<!-- end one -->\nb\n", render(page, {"one": table}))


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("<!-- begin one -->\n", "must have the lines <!-- begin one --> and <!-- end one --> once each"),
        ("<!-- begin one -->\n<!-- end one -->\n<!-- begin two -->\n", "a table 'two' that is not among one"),
    ],
)
def test_a_page_without_its_marks_is_rejected(page: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        render(page, {"one": table})


def test_a_run_replaces_its_earlier_result(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    merge(path, [{"settings": {"seed": 0}, "score": 1}, {"settings": {"seed": 1}, "score": 2}])
    merge(path, [{"settings": {"seed": 0}, "score": 3}])
    assert read_rows(path) == [{"settings": {"seed": 0}, "score": 3}, {"settings": {"seed": 1}, "score": 2}]


@pytest.mark.slow
def test_policies_are_collected_with_their_returns(own_folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = small_data(own_folders / "hopper.hdf5")
    flags = [*SMALL, *ON_ONE_CORE, "--dataset", data, "--eval-every-steps", "0", "--steps", "5"]
    assert run_program(train, monkeypatch, *flags, "--name", "one") == 0
    folder = own_folders / "runs" / "one"
    with pytest.raises(ValueError, match="has 0 evaluations, and must have one: run evaluate"):
        policy_row(folder)
    assert run_program(evaluate, monkeypatch, str(folder), "--episodes", "2") == 0
    row = policy_row(folder)
    cached = [json.loads(line) for line in next((folder / "evaluations").iterdir()).read_text().splitlines()[1:]]
    assert row["targets"]["3600"]["returns"] == [
        pytest.approx(episode["total_reward"], abs=0.01) for episode in cached if episode["target"] == 3600
    ]
    assert (row["headline"], row["seed"], row["settings"]["init"]) == ("3600", 0, "small")
    monkeypatch.setattr(publish, "RESULTS", own_folders)
    monkeypatch.setattr(publish, "PAGES", (own_folders / "page.md",))
    marks = "".join(f"<!-- begin {name} -->\n<!-- end {name} -->\n" for name in TABLES)
    (own_folders / "page.md").write_text(marks)
    monkeypatch.setattr(publish, "policy_row", lambda _: row | {"commit": "0123456789ab+"})
    with pytest.raises(ValueError, match=r"files were modified \(0123456789ab\+\): run at a clean commit"):
        main(Config((folder,)))
    assert read_rows(own_folders / "policies.json") == []
    monkeypatch.setattr(publish, "policy_row", lambda _: row | {"commit": "0123456789ab"})
    main(Config((folder,)))
    assert read_rows(own_folders / "policies.json") == [json.loads(json.dumps(row | {"commit": "0123456789ab"}))]


def test_reports_of_benchmarks_are_published(
    own_folders: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("benchmarks.program.commit", lambda: "0123456789ab")
    save_report(tmp_path / "rollout.json", "| a |\n| 1 |", {"timings": [1.0]})
    save_report(tmp_path / "other.json", "| a |", {})
    page = tmp_path / "page.md"
    page.write_text("<!-- begin rollout -->\n<!-- end rollout -->\n")
    monkeypatch.setattr(publish, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(publish, "PAGES", (page,))
    with pytest.raises(ValueError, match=r"other.json must be the report of a benchmark, one of train.json.*, cost"):
        main(Config((tmp_path / "other.json",)))
    main(Config((tmp_path / "rollout.json",)))
    assert json.loads((tmp_path / "results" / "rollout.json").read_text())["timings"] == [1.0]
    assert "| a |\n| 1 |\n\ntorch " in page.read_text()
    assert "Commit 0123456." in page.read_text()


def policy(seed: int, score: float, **changes: Any) -> dict[str, Any]:
    """A run on the Hopper medium-replay data with a normalized return of ``score``."""
    return {
        "dataset": "primal/hopper/medium-replay-v0",
        "seed": seed,
        "settings": {**SHORT, "attention": "primal-plus", **changes},
        "commit": "0123456789ab",
        "random_return": 0.0,
        "expert_return": 100.0,
        "headline": "3600",
        "targets": {"3600": {"returns": [score, score]}},
        "num_parameters": 1,
    }


def test_tables_take_only_runs_with_their_settings() -> None:
    rows = [policy(seed, 40.0 + seed) for seed in SEEDS]
    others = [policy(0, 99.0, eta=0.0), policy(1, 99.0, init="published"), policy(2, 99.0, steps=5000), policy(7, 99.0)]
    assert "41.0 ± 1.0" in variants({"policies": rows + others})
    assert "99" not in variants({"policies": rows + others})
    assert "41" not in variants({"policies": rows[:2] + others})  # a seed is missing


def test_runs_of_other_programs_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text('{"settings": {"task": "image"}}')
    with pytest.raises(ValueError, match="is not a run of this version of benchmarks"):
        uea_row(tmp_path)


def test_encoders_are_collected(tmp_path: Path) -> None:
    content = {"settings": {"dataset": "Toy"}, "scores": {"test": 98.5}, "num_parameters": 7, "commit": "abc"}
    content |= {"epoch": None}
    (tmp_path / "result.json").write_text(json.dumps(content))
    lines: list[dict[str, float]] = [{"step": step, "time": 0.0, "train/loss": 1 / step} for step in (1, 2, 3)]
    lines.append({"step": 3, "time": 0.0, "test/accuracy": 98.5})
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    row = uea_row(tmp_path)
    assert (row["test_accuracy"], row["commit"], row["num_parameters"]) == (98.5, "abc", 7)
    assert row["epochs"] == [{"train/loss": 1.0}, {"train/loss": 1 / 3}]


def language_run(folder: Path, attention: str, seed: int, score: float, **changes: Any) -> Path:
    """The folder of a run of ``benchmarks.language`` with these perplexities."""
    own: dict[str, Any] = {"attention": attention, "seed": seed, "fingerprint": "f"}
    if attention.startswith("primal"):
        own |= {"rank": 30, "eta": 0.1, "feature_map": "cosine", "scores": "both", "init": "unit", "penalty": "mean"}
    content = {
        "settings": LANGUAGE_RUN | own | changes,
        "shape": {"num_words": 33_278},
        "scores": {"valid": score, "test": score - 10.0},
        "commit": "0123456789ab",
        "num_parameters": 5_000_000,
        "epoch": None,
    }
    path = folder / "-".join(map(str, (attention, seed, *changes.items())))
    path.mkdir()
    (path / "result.json").write_text(json.dumps(content))
    return path


def test_language_models_are_collected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only runs with the settings of the table are in it, and costs that were measured with its sizes."""
    folders = [language_run(tmp_path, "primal-plus", seed, 300.0 + seed) for seed in SEEDS]
    folders += [language_run(tmp_path, "primal-plus", 7, 999.0), language_run(tmp_path, "softmax", 0, 999.0, lr=1.0)]
    cells = [{"attention": "primal-plus", "seconds": 0.5, "memory_mib": 1234.0}]
    cost = {"sizes": LANGUAGE_SIZES | {"rank": 30, "num_words": 33_278}, "cells": cells, "report": [], "commit": "fedc"}
    (tmp_path / "cost.json").write_text(json.dumps(cost))
    page = tmp_path / "page.md"
    page.write_text("<!-- begin language -->\n<!-- end language -->\n")
    monkeypatch.setattr(publish, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(publish, "PAGES", (page,))
    main(Config((*folders, tmp_path / "cost.json")))
    rows = read_rows(tmp_path / "results" / "language.json")
    assert {(row["valid_perplexity"], row["num_words"]) for row in rows} >= {(301.0, 33_278)}
    assert len(rows) == 5
    shown = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.read_text().splitlines()]
    expected = ["primal-plus", "301.0 ± 1.0", "291.0 ± 1.0", "3", "31.0", "5,000,000", "500", "1,234"]
    assert [line for line in shown if "primal-plus" in line] == [expected]
    assert "999" not in page.read_text()
    assert "Commits 0123456, fedc." in page.read_text()
    other = {"language": rows, "language_cost": cost | {"sizes": LANGUAGE_SIZES | {"rank": 30, "tokens": 7}}}
    assert "1,234" not in language(other)
    assert language({"language": rows[3:4]}) == language({}) == "Not measured yet."


def test_a_language_model_of_modified_code_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = language_run(tmp_path, "softmax", 0, 300.0)
    content = json.loads((path / "result.json").read_text())
    (path / "result.json").write_text(json.dumps(content | {"commit": "0123456789ab+"}))
    monkeypatch.setattr(publish, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(publish, "PAGES", ())
    with pytest.raises(ValueError, match=r"files were modified \(0123456789ab\+\)"):
        main(Config((path,)))
