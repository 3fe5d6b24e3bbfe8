"""Collects the raw results of finished runs in benchmarks/results, and writes the tables of the docs from them.

Give run folders to add their results: runs of ``train.py`` that ``evaluate.py`` has evaluated, and runs of
``benchmarks.uea`` and ``benchmarks.language``. A run replaces an earlier one with the same settings and seed. Give
files such as rollout.json to publish the reports of benchmarks, or cost.json for the costs of ``benchmarks.language``.
Without arguments, only the tables are written. A test checks that the pages have exactly the tables that these files
give.
"""

import csv
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tyro

from benchmarks.language.run import COST
from benchmarks.program import run_program
from benchmarks.result_tables import REPORTS, TABLES
from benchmarks.runs import RESULT
from primal_dt.evaluation.score import target_text
from primal_dt.system.files import atomic_write
from primal_dt.training.metrics_log import read_metrics
from primal_dt.training.run_folder import read_record

__all__ = ["RESULTS", "language_row", "policy_row", "render", "uea_row"]

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
POLICIES, UEA, LANGUAGE = "policies.json", "uea.json", "language.json"
REPORT_FILES = {f"{name}.json": f"{name}.json" for name in REPORTS} | {COST: "language_cost.json"}
"""Name of a benchmark's report -> its name in benchmarks/results."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Config:
    """What to collect."""

    runs: tyro.conf.Positional[tuple[Path, ...]] = ()
    """Folders of finished runs, and files with the report of a benchmark."""


def policy_row(folder: Path) -> Row:
    """The result of a run of ``train.py``: its settings, and the returns of its evaluated episodes by target.

    Raises:
        ValueError: if the run has not been evaluated, or in more than one way, or if it has no reference returns.
    """
    record = read_record(folder)
    files = sorted((folder / "evaluations").glob("*.jsonl"))
    if len(files) != 1:
        raise ValueError(f"{folder} has {len(files)} evaluations, and must have one: run evaluate.py {folder}")
    head, *lines = (json.loads(line) for line in files[0].read_text().splitlines())
    targets: dict[str, dict[str, list[float]]] = {}
    for line in sorted(lines, key=lambda line: line["seed"]):
        of_target = targets.setdefault(target_text(line["target"]), {"returns": [], "lengths": []})
        of_target["returns"].append(round(line["total_reward"], 2))
        of_target["lengths"].append(line["length"])
    config, task = record.config, record.task
    if task.reference is None:
        raise ValueError(f"{folder} has no reference returns, and published results are normalized returns")
    return {
        "dataset": config.dataset,
        "seed": config.run.seed,
        "settings": asdict(config.model) | asdict(config.optimizer),
        "num_parameters": record.num_parameters,
        "commit": record.provenance["commit"],
        "env_id": head["env_id"],
        "random_return": task.reference.random_return,
        "expert_return": task.reference.expert_return,
        "headline": target_text(task.headline),
        "targets": targets,
    }


def uea_row(folder: Path) -> Row:
    """The result of a run of ``benchmarks.uea``, and the means over its first and its last epoch."""
    content = json.loads((folder / RESULT).read_text())
    if "dataset" not in content.get("settings", {}):
        raise ValueError(f"{folder} is not a run of this version of benchmarks.uea")
    epochs = [line for line in read_metrics(folder) if "train/loss" in line]
    return {
        "settings": content["settings"],
        "test_accuracy": content["scores"]["test"],
        "best_test_accuracy": content["scores"].get("best_test"),
        "num_parameters": content["num_parameters"],
        "commit": content["commit"],
        "epoch": content["epoch"],
        "epochs": [
            {name: line[name] for name in line if name.startswith("train/")} for line in (epochs[0], epochs[-1])
        ],
    }


def language_row(folder: Path) -> Row:
    """The result of a run of ``benchmarks.language``."""
    content = json.loads((folder / RESULT).read_text())
    return {
        "settings": content["settings"],
        "valid_perplexity": content["scores"]["valid"],
        "test_perplexity": content["scores"]["test"],
        "num_parameters": content["num_parameters"],
        "num_words": content["shape"]["num_words"],
        "commit": content["commit"],
    }


def row_of(folder: Path) -> tuple[str, Row]:
    """The file of results that a run belongs to, and its row."""
    if not (folder / RESULT).is_file():
        return POLICIES, policy_row(folder)
    if "corpus" in json.loads((folder / RESULT).read_text()).get("settings", {}):
        return LANGUAGE, language_row(folder)
    return UEA, uea_row(folder)


def report_of(path: Path) -> tuple[str, Row]:
    """The name of a benchmark's report in benchmarks/results, and the report with its raw results.

    Raises:
        ValueError: if the file has no report, or is not named as one.
    """
    content = json.loads(path.read_text())
    if "report" not in content or path.name not in REPORT_FILES:
        raise ValueError(f"{path} must be the report of a benchmark, one of {', '.join(REPORT_FILES)}")
    return REPORT_FILES[path.name], dict(content)


def key_of(row: Row) -> str:
    """What identifies a run: its settings and seed."""
    return json.dumps([row.get("dataset"), row.get("seed"), row["settings"]], sort_keys=True)


def merge(path: Path, rows: Iterable[Row]) -> None:
    """Add rows to a file of results, one line each. A row replaces the one with the same key."""
    known = {key_of(row): row for row in read_rows(path)}
    known |= {key_of(row): row for row in rows}
    lines = ",\n".join(json.dumps(known[key]) for key in sorted(known))
    with atomic_write(path) as file:
        file.write(f"[\n{lines}\n]\n".encode())


def read_rows(path: Path) -> list[Row]:
    """The rows of a file of results; none if it does not exist."""
    return json.loads(path.read_text()) if path.is_file() else []


def render(page: str, tables: Mapping[str, Callable[[Mapping[str, Any]], str]] = TABLES) -> str:
    """Return the page with the text between ``<!-- begin NAME -->`` and ``<!-- end NAME -->`` made from the results.

    Raises:
        ValueError: if the page has a table that is not known, or a mark without its other half.
    """
    results: dict[str, Any] = {path.stem: json.loads(path.read_text()) for path in RESULTS.glob("*.json")}
    results |= {path.stem: list(csv.DictReader(path.read_text().splitlines())) for path in RESULTS.glob("*.csv")}
    for name in re.findall(r"<!-- begin (\w+) -->", page):
        begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
        if name not in tables:
            raise ValueError(f"the page has a table {name!r} that is not among {', '.join(tables)}")
        if page.count(begin) != 1 or page.count(end) != 1:
            raise ValueError(f"the page must have the lines {begin.strip()} and {end} once each")
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}\n{tables[name](results)}\n\n{end}{rest.partition(end)[2]}"
    return page


def main(config: Config) -> None:
    """Collect, and write the page."""
    reports = dict(report_of(path) for path in config.runs if path.is_file())
    found: dict[str, list[Row]] = {}
    for folder in (path for path in config.runs if not path.is_file()):  # all are read before any file is written
        name, row = row_of(folder)
        found.setdefault(name, []).append(row)
    for row in (*(row for rows in found.values() for row in rows), *reports.values()):
        if row["commit"] is None or row["commit"].endswith("+"):
            raise ValueError(f"a run has no commit, or files were modified ({row['commit']}): run at a clean commit")
    for name, rows in found.items():
        merge(RESULTS / name, rows)
    for name, content in reports.items():
        with atomic_write(RESULTS / name) as file:
            file.write(json.dumps(content, indent=1).encode() + b"\n")
    for page in PAGES:
        with atomic_write(page) as file:
            file.write(render(page.read_text()).encode())
    print(f"Added {len(config.runs)} results; wrote {', '.join(page.name for page in PAGES)}")


if __name__ == "__main__":
    run_program(main, Config, name="benchmarks.publish", description=__doc__)
