"""The paper's ablations by one command each: Table 6 (rank and eta), Tables 8 and 9 (data-dependent weights).

  python -m benchmarks.tables table6 --datasets JapaneseVowels
  python -m benchmarks.tables table8 --datasets JapaneseVowels
  python -m benchmarks.tables table9 --datasets listops

The runs are those of ``benchmarks.uea`` and ``benchmarks.lra``, in their folders: finished runs are not repeated. The
paper's values are in parentheses.
"""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import tyro

from benchmarks.lra import run as lra
from benchmarks.program import run_program
from benchmarks.published import TABLE_6, TABLE_8, TABLE_9
from benchmarks.runs import SavedRun
from benchmarks.uea import run as uea
from primal_dt.system.files import check_writable
from primal_dt.system.table import format_table
from primal_dt.training.distributed import Processes, join_processes

RANKS, ETAS = (20, 30, 40), (0.0, 0.1, 0.2, 0.5)
WEIGHTS = {"data-independent": False, "data-dependent": True}
"""Column of Tables 8 and 9 -> whether the weights depend on the data."""


@dataclass(frozen=True)
class Config:
    """Settings of the ablation."""

    table: tyro.conf.Positional[Literal["table6", "table8", "table9"]]
    """table6: PrimalFormer with ranks 20, 30, 40 and eta 0, 0.1, 0.2, 0.5 on UEA.
    table8, table9: Primal.+ with data-independent and data-dependent weights on UEA and on the Long-Range Arena."""
    datasets: tuple[str, ...] | None = None
    """Data sets of the archive, or tasks of the arena. If not given: all of the paper's."""
    folder: Path | None = None
    """table6, table8: folder of the archive's files; JapaneseVowels comes with aeon.
    table9: folder that has a folder of standard files for each task, such as FOLDER/image; ListOps is generated."""
    seeds: tuple[int, ...] = (0,)
    """Seeds. Each cell is trained once per seed."""
    epochs: int | None = None
    """table6, table8: epochs. If not given, the published number."""
    steps: int | None = None
    """table9: training steps. If not given, the published number."""
    device: str = "cpu"
    """Torch device: cpu, cuda or mps."""
    threads: int | None = None
    """Number of CPU threads. If not given: torch's default."""
    out: Path = Path("runs")
    """Folder whose folders uea and lra have the runs."""

    def __post_init__(self) -> None:
        known = self.published.keys()
        if unknown := set(self.names) - known:
            raise ValueError(
                f"datasets of {self.table} must be among {', '.join(known)}, not {', '.join(sorted(unknown))}"
            )

    @property
    def published(self) -> Mapping[str, object]:
        """The paper's table."""
        return {"table6": TABLE_6, "table8": TABLE_8, "table9": TABLE_9}[self.table]

    @property
    def names(self) -> tuple[str, ...]:
        """The data sets or tasks."""
        return tuple(self.published) if self.datasets is None else self.datasets


def uea_config(config: Config, dataset: str, attention: str) -> uea.Config:
    """The runs of a stack on a data set of the archive."""
    return uea.Config(
        attention=(attention,),
        seeds=config.seeds,
        dataset=dataset,
        folder=config.folder,
        epochs=config.epochs,
        device=config.device,
        threads=config.threads,
        out=config.out / "uea",
    )


def lra_config(config: Config, task: str) -> lra.Config:
    """The runs of Primal.+ on a task of the arena."""
    return lra.Config(
        attention=("primal-plus",),
        seeds=config.seeds,
        task=task,  # type: ignore[arg-type] # one of the table's tasks
        folder=None if task == "listops" or config.folder is None else config.folder / task,
        steps=config.steps,
        device=config.device,
        threads=config.threads,
        out=config.out / "lra",
    )


def cell(runs: Mapping[str, list[SavedRun]], paper: float) -> str:
    """Our mean test accuracy, and the paper's."""
    scores = [run.scores["test"] for seen in runs.values() for run in seen]
    return f"{statistics.mean(scores):.1f} ({paper:.1f})"


def table6(config: Config, processes: Processes) -> str:
    """Accuracy of PrimalFormer by rank and eta."""
    rows = []
    for dataset in config.names:
        base = uea_config(config, dataset, "primalformer")
        for rank in RANKS:
            runs = {eta: uea.run_all(replace(base, rank=rank, eta=eta), processes) for eta in ETAS}
            cells = [cell(runs[eta], TABLE_6[dataset][rank, eta]) for eta in ETAS]
            rows.append([dataset, str(rank), *cells])
    return format_table(["PrimalFormer, test accuracy, %", "rank", *(f"eta {eta:g}" for eta in ETAS)], rows)


def table8(config: Config, processes: Processes) -> str:
    """Accuracy of Primal.+ on UEA by the kind of weights."""
    rows = []
    for dataset in config.names:
        base = uea_config(config, dataset, "primal-plus")
        runs = {name: uea.run_all(replace(base, data_dependent=value), processes) for name, value in WEIGHTS.items()}
        rows.append([dataset, *(cell(runs[name], TABLE_8[dataset][name]) for name in WEIGHTS)])
    return format_table(["Primal.+, test accuracy, %", *WEIGHTS], rows)


def table9(config: Config, processes: Processes) -> str:
    """Accuracy of Primal.+ on the Long-Range Arena by the kind of weights."""
    rows = []
    for task in config.names:
        base = lra_config(config, task)
        runs = {name: lra.run_all(replace(base, data_dependent=value), processes) for name, value in WEIGHTS.items()}
        rows.append([task, *(cell(runs[name], TABLE_9[task][name]) for name in WEIGHTS)])
    return format_table(["Primal.+, test accuracy, %", *WEIGHTS], rows)


def main(config: Config) -> None:
    """Train what is missing, and print the table."""
    check_writable(config.out)
    tables: dict[str, Callable[[Config, Processes], str]] = {"table6": table6, "table8": table8, "table9": table9}
    with join_processes(config.device) as processes:
        text = tables[config.table](config, processes)
    if processes.is_main:
        print(f"\n{text}")


if __name__ == "__main__":
    run_program(main, Config, name="benchmarks.tables", description=__doc__)
