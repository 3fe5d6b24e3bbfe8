"""The tables of docs/results.md, as functions of the raw results in benchmarks/results.

A row of results has the settings of a run, its commit and its scores. Cells that have not been measured are empty.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from benchmarks.language.cost import Cell as LanguageCell
from benchmarks.language.report import results_table
from benchmarks.lra.efficiency import ROWS, Cell, cost_table, findings
from benchmarks.published import TABLE_1, TABLE_6, UEA_SETTINGS
from benchmarks.runs import SavedRun, spread
from benchmarks.settings import Primal
from benchmarks.spectrum import table as spectrum_table
from primal_dt.system.table import format_table

__all__ = ["REPORTS", "TABLES"]

REPORTS = ("train", "ablation", "attention", "rollout", "data", "startup", "torture")
"""Benchmarks whose whole report is shown. The names are those of their files in benchmarks/results."""

Row = dict[str, Any]
Rows = Mapping[str, Any]
"""Name of a file in benchmarks/results, without its suffix -> its content."""
UEA_RUN: dict[str, Any] = {
    "network": "published",
    "epochs": 100,
    "schedule": "constant",
    "recover": False,
    "batch_size": 16,
    "lr": 1e-3,
}
DATASETS = ("JapaneseVowels", "Handwriting")
PRIMAL = ("primal-plus", "primalformer")


def uea_rows(rows: Rows, dataset: str, attention: str, **changes: Any) -> list[Row]:
    """The runs of a stack in the published network with the published settings, except for ``changes``, by seed."""
    wanted = UEA_RUN | {"dataset": dataset, "attention": attention}
    if attention in PRIMAL:
        published = UEA_SETTINGS[dataset]
        own = published.primalformer if attention == "primalformer" else published.primal_plus
        wanted |= vars(Primal(*own)) | changes
    found = [
        row for row in rows.get("uea", ()) if all(row["settings"].get(name) == value for name, value in wanted.items())
    ]
    return sorted(found, key=lambda row: row["settings"]["seed"])


def accuracy(found: Sequence[Row], seeds: Sequence[int]) -> str:
    """Mean and spread over these seeds; empty unless all of them are there."""
    chosen = {row["settings"]["seed"]: row["test_accuracy"] for row in found}
    return spread([chosen[seed] for seed in seeds]) if set(seeds) <= chosen.keys() else ""


def commits(found: Sequence[Row]) -> str:
    """The commits that the rows are from."""
    names = sorted({short(row["commit"]) for row in found})
    return f"Commit {names[0]}." if len(names) == 1 else f"Commits {', '.join(names)}."


def short(commit: str | None) -> str:
    """A commit in seven digits, with the plus sign of a modified tree."""
    return "not recorded" if commit is None else commit[:7] + ("+" if commit.endswith("+") else "")


def uea_published(rows: Rows) -> str:
    """Both data sets in the published network, beside Table 1.

    The best epoch on the test split, which the paper reports, is known for runs that were tested on the way.
    """
    cells: list[list[str]] = []
    used: list[Row] = []
    for dataset in DATASETS:
        for attention in ("softmax", *PRIMAL):
            found = uea_rows(rows, dataset, attention)
            used += found
            scores = [row["test_accuracy"] for row in found]
            if scores:
                best = [row["best_test_accuracy"] for row in found if row.get("best_test_accuracy") is not None]
                own = f"{min(scores):.1f} to {max(scores):.1f}"
                shown = f"{spread(best)} ({len(best)})" if best else ""
                paper = f"{TABLE_1[dataset][attention]:.1f}"
                cells.append([dataset, attention, spread(scores), own, str(len(scores)), shown, paper])
    header = ["data set", "attention", "last epoch, %", "range", "seeds", "best epoch (seeds)", "paper"]
    return f"{format_table(header, cells)}\n\n{commits(used)}" if cells else "Not measured yet."


def parameters(found: Sequence[Row]) -> str:
    """The number of parameters of a stack."""
    return f"{found[0]['num_parameters']:,}"


def uea_init(rows: Rows) -> str:
    """The two starts of W_e and W_r, three seeds."""
    cells: list[list[str]] = []
    used: list[Row] = []
    for attention in PRIMAL:
        before, after = (uea_rows(rows, "JapaneseVowels", attention, init=init) for init in ("orthonormal", "unit"))
        used += before + after
        for name, found in (("orthonormal columns (before)", before), ("norm 1 (published)", after)):
            three = [row for row in found if row["settings"]["seed"] in (0, 1, 2)]
            first = [
                f"{statistics.mean(row['epochs'][0][curve] for row in three):.3g}" if three else ""
                for curve in ("train/loss", "train/penalty")
            ]
            cells.append([attention, name, *first, accuracy(found, (0, 1, 2))])
    header = ["JapaneseVowels", "start", "loss, epoch 1", "mean J^2, epoch 1", "test accuracy, %"]
    return f"{format_table(header, cells)}\n\n{commits(used)}" if used else "Not measured yet."


def uea_table6(rows: Rows) -> str:
    """PrimalFormer by rank and eta, one seed a cell, beside Table 6."""
    cells: list[list[str]] = []
    used: list[Row] = []
    etas = (0.0, 0.1, 0.2, 0.5)
    for rank in (20, 30, 40):
        line = [str(rank)]
        for eta in etas:
            found = [
                row
                for row in uea_rows(rows, "JapaneseVowels", "primalformer", rank=rank, eta=eta)
                if row["settings"]["seed"] == 0
            ]
            used += found
            paper = TABLE_6["JapaneseVowels"][rank, eta]
            line.append(f"{found[0]['test_accuracy']:.1f} ({paper:.1f})" if found else f"({paper:.1f})")
        cells.append(line)
    table = format_table(["rank", *(f"eta {eta:g}" for eta in etas)], cells)
    return f"{table}\n\n{commits(used)}" if used else "Not measured yet."


VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "unchanged": ({}, {}),
    "e alone": ({"scores": "e"}, {"scores": "e"}),
    "r alone": ({"scores": "r"}, {"scores": "r"}),
    "exponential map": ({"feature_map": "exponential"}, {"feature_map": "exponential"}),
    "data-independent weights": ({"data_dependent": False}, {}),
}
"""Variant of Primal.+ -> its changes on UEA and in the Decision Transformer, whose weights never depend on the data."""


def variants(rows: Rows) -> str:
    """What each part of the layer brings, three seeds."""
    cells: list[list[str]] = []
    used: list[Row] = []
    for name, (uea_changes, policy_changes) in VARIANTS.items():
        found = uea_rows(rows, "JapaneseVowels", "primal-plus", **uea_changes)
        policies = policy_rows(rows, "primal/hopper/medium-replay-v0", "primal-plus", SHORT | policy_changes)
        shown = "the same as unchanged" if policy_changes == {} and uea_changes else headline(policies)
        used += found + policies
        cells.append([name, accuracy(found, (0, 1, 2)), shown])
    header = ["Primal.+", "JapaneseVowels, test accuracy, %", "Hopper medium-replay, normalized return"]
    return f"{format_table(header, cells)}\n\n{commits(used)}" if used else "Not measured yet."


def heads(rows: Rows) -> str:
    """Attention-BN and Attention-SH beside softmax attention, three seeds."""
    cells: list[list[str]] = []
    used: list[Row] = []
    for attention in ("softmax", "attention_bn", "attention_sh"):
        found = [uea_rows(rows, dataset, attention) for dataset in DATASETS]
        used += [row for one in found for row in one]
        cells.append([attention, *(accuracy(one, (0, 1, 2)) for one in found)])
    table = format_table(["test accuracy, %", *DATASETS], cells)
    return f"{table}\n\n{commits(used)}" if used else "Not measured yet."


QUICK: dict[str, Any] = {
    "width": 128,
    "num_heads": 1,
    "num_layers": 3,
    "context": 10,
    "rank": None,
    "eta": 0.05,
    "penalty": "mean",
    "feature_map": "cosine",
    "scores": "both",
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "init": "small",
    "primal_init": "unit",
    "batch_size": 64,
    "optimizer": "muon",
    "lr": 3e-3,
    "warmup_steps": 200,
    "schedule": "cosine",
    "sampling": "transitions",
}
"""The settings of the preset quick that the tables are for."""
LONG, SHORT = QUICK | {"steps": 5000}, QUICK | {"steps": 2000}
SEEDS = (0, 1, 2)


def policy_rows(
    rows: Rows, dataset: str, attention: str, settings: Mapping[str, Any], seeds: Sequence[int] = SEEDS
) -> list[Row]:
    """The runs of a stack on a data set with these settings and seeds; none unless there is one for each seed."""
    wanted = {"attention": attention, **settings}
    found = [
        row
        for row in rows.get("policies", ())
        if row["dataset"] == dataset and all(row["settings"][name] == value for name, value in wanted.items())
    ]
    chosen = [row for seed in seeds for row in found if row["seed"] == seed]
    return chosen if [row["seed"] for row in chosen] == list(seeds) else []


def score_of(row: Row, target: str) -> float:
    """Mean normalized return of a run at a target."""
    mean = statistics.mean(row["targets"][target]["returns"])
    return 100 * (mean - row["random_return"]) / (row["expert_return"] - row["random_return"])


def headline(found: Sequence[Row]) -> str:
    """Normalized return at the headline target, mean and spread over seeds; empty without runs."""
    return spread([score_of(row, row["headline"]) for row in found]) if found else ""


def policies(rows: Rows) -> str:
    """Primal.+DT and the canonical Decision Transformer on the built-in Hopper medium-expert data."""
    cells: list[list[str]] = []
    used: list[Row] = []
    for attention in ("primal-plus", "softmax"):
        found = policy_rows(rows, "primal/hopper/medium-expert-v0", attention, LONG)
        used += found
        for target in found[0]["targets"] if found else ():
            scores = [score_of(row, target) for row in found]
            mark = "*" if target == found[0]["headline"] else ""
            episodes = len(found[0]["targets"][target]["returns"])
            mean = statistics.mean(statistics.mean(row["targets"][target]["returns"]) for row in found)
            cells.append([attention, f"{target}{mark}", spread(scores), f"{mean:.0f}", str(len(found)), str(episodes)])
    header = ["policy", "target", "normalized return", "return", "seeds", "episodes"]
    return f"{format_table(header, cells)}\n\n{commits(used)}" if cells else "Not measured yet."


RL_DATA = ("primal/walker2d/medium-expert-v0", "primal/hopper/medium-replay-v0")


def policy_init(rows: Rows) -> str:
    """The two starts of W_e and W_r in the Decision Transformer, three seeds."""
    cells: list[list[str]] = []
    used: list[Row] = []
    for dataset in RL_DATA:
        found = [
            policy_rows(rows, dataset, "primal-plus", SHORT | {"primal_init": init}) for init in ("orthonormal", "unit")
        ]
        used += [row for one in found for row in one]
        cells.append([dataset, *map(headline, found)])
    header = ["normalized return", "orthonormal columns (before)", "norm 1 (published)"]
    return f"{format_table(header, cells)}\n\n{commits(used)}" if used else "Not measured yet."


def quick_init(rows: Rows) -> str:
    """The choice of the start for the preset quick, on seeds that no other table uses."""
    cells: list[list[str]] = []
    used: dict[str, list[Row]] = {"published": [], "small": []}
    for dataset in RL_DATA:
        for seed in (100, 101):
            line = [dataset, str(seed)]
            for init, found in used.items():
                own = policy_rows(rows, dataset, "primal-plus", SHORT | {"init": init}, [seed])
                found += own
                line.append(headline(own))
            cells.append(line)
    if any(len(found) < len(cells) for found in used.values()):
        return "Not measured yet."
    means = [statistics.mean(score_of(row, row["headline"]) for row in found) for found in used.values()]
    cells.append(["mean", "", *(f"{mean:.1f}" for mean in means)])
    every = [row for found in used.values() for row in found]
    return f"{format_table(['normalized return', 'seed', *used], cells)}\n\n{commits(every)}"


def equal_parameters(rows: Rows) -> str:
    """Softmax and primal-plus with as many parameters, three seeds."""
    cells: list[list[str]] = []
    used: list[Row] = []
    for attention, rank in (("softmax", None), ("primal-plus", 32)):
        found = policy_rows(rows, "primal/hopper/medium-replay-v0", attention, SHORT | {"rank": rank})
        used += found
        if found:
            name = attention if rank is None else f"{attention}, rank {rank}"
            cells.append([name, parameters(found), headline(found), str(len(found))])
    header = ["Hopper medium-replay", "parameters", "normalized return", "seeds"]
    return f"{format_table(header, cells)}\n\n{commits(used)}" if used else "Not measured yet."


LANGUAGE_SIZES: dict[str, Any] = {
    "corpus": "wikitext-2",
    "width": 128,
    "num_layers": 4,
    "num_heads": 4,
    "mlp_width": 512,
    "equal_parameters": True,
    "dropout": 0.1,
    "tokens": 128,
    "batch_size": 4,
    "accumulate": 1,
    "bf16": False,
    "compile": False,
    "device": "cpu",
}
LANGUAGE_RUN = LANGUAGE_SIZES | {"steps": 2500, "lr": 6e-3, "warmup_steps": 200, "context_window": 0}
"""The settings of the language models that the table is for."""


def language(rows: Rows) -> str:
    """Perplexities on WikiText-2, three seeds, and the cost of a training step."""
    used: list[Row] = []
    runs: dict[str, list[SavedRun]] = {}
    for attention in ("softmax", "flowformer", *PRIMAL):
        wanted = LANGUAGE_RUN | {"attention": attention}
        if attention in PRIMAL:
            wanted |= {"rank": 30, "eta": 0.1, "feature_map": "cosine", "scores": "both", "init": "unit"}
        found = [row for row in rows.get("language", ()) if has_settings(row["settings"], wanted)]
        chosen = [row for row in found if row["settings"]["seed"] in SEEDS]
        used += chosen
        if chosen:
            scores = [{split: row[f"{split}_perplexity"] for split in ("valid", "test")} for row in chosen]
            runs[attention] = [
                SavedRun(own, row["commit"], row["num_parameters"]) for own, row in zip(scores, chosen, strict=True)
            ]
    if not used:
        return "Not measured yet."
    cost = rows.get("language_cost", {})
    cells = {}
    if has_settings(cost.get("sizes", {}), LANGUAGE_SIZES | {"rank": 30}):
        cells = {cell["attention"]: LanguageCell(**cell) for cell in cost["cells"]}
    return f"{results_table('wikitext-2', runs, cells)}\n\n{commits([*used, *([cost] if cells else [])])}"


def has_settings(settings: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether settings include these."""
    return all(settings.get(name) == value for name, value in wanted.items())


def lra_cells(rows: Rows) -> dict[tuple[str, int], Cell]:
    """The measured costs of a training step: (row, length) -> cell. What did not fit in memory is not in the file."""
    cells = [Cell(**cell) for cell in rows["lra_efficiency"]["cells"]]
    missing = {(row, cell.length): Cell(row, cell.length, math.inf, math.inf) for row in ROWS for cell in cells}
    return missing | {(cell.row, cell.length): cell for cell in cells}


def lra_cost(quantity: Literal["seconds", "gigabytes"]) -> Callable[[Rows], str]:
    """Time or memory of a training step against canonical attention, beside Table 3."""
    return from_file("lra_efficiency", lambda rows: cost_table(lra_cells(rows), quantity))


def spectra(name: str) -> Callable[[Rows], str]:
    """The table of a file of spectra."""
    return from_file(name, lambda rows: spectrum_table(rows[name]))


def from_file(name: str, table: Callable[[Rows], str]) -> Callable[[Rows], str]:
    """A table of one file of results, and the file's commit."""

    def text(rows: Rows) -> str:
        if name not in rows:
            return "Not measured yet."
        return f"{table(rows)}\n\nCommit {short(rows[name].get('commit'))}."

    return text


def lra_bars(rows: Rows) -> str:
    """The costs at 4,096 tokens against their bars."""
    return "\n".join(findings(lra_cells(rows)))


def speed(name: str) -> Callable[[Rows], str]:
    """The report of a benchmark, with the machine and the commit that it is from."""

    def report(rows: Rows) -> str:
        content = rows[name]
        lines = "\n".join(content["report"])
        return f"{lines}\n\ntorch {content['torch']}, CPU threads: {content['threads']} ({content['cpu']})."

    return from_file(name, report)


def quick_search(number: int) -> Callable[[Rows], str]:
    """A round of the search for ``quick``: mean over tasks and seeds, the best first."""

    def table(rows: Rows) -> str:
        found = [row for row in rows.get("quick_search", ()) if row["round"] == str(number)]
        tasks = list(dict.fromkeys(row["dataset"] for row in found))
        scores: dict[tuple[str, str], list[float]] = {}
        for row in found:
            scores.setdefault((row["setting"], row["dataset"]), []).append(float(row["score"]))
        cells = {key: statistics.mean(values) for key, values in scores.items()}
        settings = {row["setting"] for row in found}
        means = {name: statistics.mean(cells[name, task] for task in tasks) for name in settings}
        ranked = sorted(means, key=lambda name: -means[name])
        lines = [[name, f"{means[name]:.1f}", *(f"{cells[name, task]:.1f}" for task in tasks)] for name in ranked]
        header = ["setting", "mean", *(task.removeprefix("primal/").removesuffix("-v0") for task in tasks)]
        return f"{format_table(header, lines)}\n\n{commits(found)}" if found else "Not measured yet."

    return table


TABLES: dict[str, Callable[[Rows], str]] = {
    "quick_search": quick_search(1),
    "quick_search_final": quick_search(2),
    "policies": policies,
    "policy_init": policy_init,
    "quick_init": quick_init,
    "equal_parameters": equal_parameters,
    "uea_published": uea_published,
    "uea_init": uea_init,
    "uea_table6": uea_table6,
    "variants": variants,
    "heads": heads,
    "language": language,
    "lra_speed": lra_cost("seconds"),
    "lra_memory": lra_cost("gigabytes"),
    "lra_bars": from_file("lra_efficiency", lra_bars),
    "spectrum_dt": spectra("spectrum_dt"),
    "spectrum_uea": spectra("spectrum_uea"),
} | {name: speed(name) for name in REPORTS}
"""Name of a table in the docs -> what writes it."""
