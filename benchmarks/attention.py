"""Time and memory of every kind of attention layer, against sequence length.

Each measurement is a forward and backward pass of one layer, as in training (Primal-Attention with its objective). All
layers are timed alternately in one process. Memory is the peak resident memory of one pass above the process at rest.
Each memory value is measured in a fresh process, whose malloc returns memory to the system as soon as it is freed.
"""

import importlib.util
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import Timing, large_matrix_product, peak_memory_mib, run_alone, time_interleaved
from benchmarks.program import run_program, save_report
from primal_dt.attention import ATTENTION_KINDS, CAUSAL_KINDS, AttentionLayer, build_attention
from primal_dt.system.table import format_table
from primal_dt.training.distributed import choose_device

WIDTH, NUM_HEADS, RANK = 128, 2, 32
PRIMAL, EXPLICIT, FUSED = "primal", "softmax, matrix in memory", "softmax, fused"
RATE_SIZE = 1024


@dataclass(frozen=True)
class Config:
    """Settings of the benchmark."""

    lengths: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192, 16384)
    """Sequence lengths in tokens."""
    seconds: float = 2.0
    """Seconds to time each layer at each length."""
    threads: int | None = None
    """CPU threads. If not given, torch chooses."""
    device: str = "cpu"
    """Torch device, for example cpu or cuda."""
    out: Path = Path("runs/benchmarks/attention")
    """Folder for attention.json and attention.png."""


@dataclass(frozen=True)
class Variant:
    """A row of the tables: a kind of attention, bidirectional or causal."""

    label: str
    causal: bool

    @property
    def name(self) -> str:
        """The label and the direction."""
        return f"{self.label} ({'causal' if self.causal else 'bidirectional'})"

    def build(self, length: int) -> AttentionLayer:
        """Build the layer for sequences of this length."""
        kind, _, _ = self.label.partition(",")
        options: dict[str, dict[str, Any]] = {
            PRIMAL: {"rank": RANK},
            "primal, data-independent": {"rank": RANK, "data_dependent": False},
            EXPLICIT: {"fused": False},
            "cosformer": {"horizon": length},
            "linformer": {"max_length": length},
        }
        torch.manual_seed(0)
        return build_attention(
            kind, width=WIDTH, num_heads=NUM_HEADS, causal=self.causal, **options.get(self.label, {})
        )


@dataclass(frozen=True)
class Cell:
    """Measurements of one layer at one length; None if it did not fit in memory."""

    variant: Variant
    length: int
    timing: Timing | None
    memory_mib: float | None


def variants() -> list[Variant]:
    """All kinds of attention: bidirectional, then causal for those that have a causal form."""
    baselines = [kind for kind in ATTENTION_KINDS if kind not in ("primal", "softmax")]
    labels = [PRIMAL, "primal, data-independent", EXPLICIT, FUSED, *baselines]
    causal = [label for label in labels if label.partition(",")[0] in CAUSAL_KINDS and "data" not in label]
    return [Variant(label, False) for label in labels] + [Variant(label, True) for label in causal]


def training_step(variant: Variant, length: int, device: torch.device) -> Callable[[], None]:
    """Make a function that runs a forward and backward pass on one sequence."""
    layer = variant.build(length).to(device)
    x = torch.randn(1, length, WIDTH, device=device, requires_grad=True)
    gradient = torch.randn(1, length, WIDTH, device=device)  # stands for the gradient from the rest of a model

    def step() -> None:
        layer.zero_grad()
        x.grad = None
        hidden, objective = layer(x, with_objective=True)
        if objective is None:
            hidden.backward(gradient)
        else:
            torch.autograd.backward((hidden, 0.05 * objective.square().mean()), (gradient, None))

    return step


def measure_memory(variant: Variant, length: int, device_name: str) -> float:
    """Measure one cell of the memory table. Call it in a fresh process."""
    device = torch.device(device_name)
    return peak_memory_mib(training_step(variant, 8, device), training_step(variant, length, device), device)


@dataclass(frozen=True)
class Column:
    """Measurements of all layers at one length."""

    length: int
    cells: tuple[Cell, ...]
    product_rate: float
    """FLOP/s of large matrix products, timed among the layers."""


def measure(config: Config, device: torch.device, note: Callable[[str], None]) -> Iterator[Column]:
    """Measure one length after another."""
    for number, length in enumerate(config.lengths, 1):
        stage = f"{number} of {len(config.lengths)}: {length:,} tokens"
        note(stage)
        memory: dict[Variant, float | None] = {}
        for variant in variants():
            note(f"{stage}, memory of {variant.name}")
            try:
                memory[variant] = run_alone(measure_memory, variant, length, config.device)
            except MemoryError:
                memory[variant] = None
        calls: dict[str, Callable[[], object]] = {
            variant.name: training_step(variant, length, device)
            for variant, needed in memory.items()
            if needed is not None
        }
        calls["matrix product"] = large_matrix_product(device, size=RATE_SIZE)
        timings = time_interleaved(
            calls,
            seconds=config.seconds,
            device=device,
            on_call=lambda name, stage=stage: note(f"{stage}, time of {name}"),  # type: ignore[misc]
        )
        cells = tuple(Cell(v, length, timings.get(v.name), needed) for v, needed in memory.items())
        yield Column(length, cells, 2 * RATE_SIZE**3 / timings["matrix product"].median)


def primal_flops(length: int) -> int:
    """Floating-point operations of a step's matrix products: 2 per multiply-add, forward once, backward twice.

    Counts the data-independent layer. Data-dependent weights add little (rank * rank_multi rows at any length).
    """
    projections = 3 * WIDTH * WIDTH  # query, key, output
    head_width = WIDTH // NUM_HEADS
    scores_and_merge = NUM_HEADS * (2 * head_width * RANK + 2 * RANK * head_width)
    return 3 * 2 * length * (projections + scores_and_merge)


def tables(columns: Sequence[Column]) -> Iterator[str]:
    """Tables of time and memory, with a row per variant and a column per length."""
    lengths = [column.length for column in columns]
    found = {(cell.variant, cell.length): cell for column in columns for cell in column.cells}
    for causal in (False, True):
        rows = [variant for variant in variants() if variant.causal is causal]
        direction = "Causal" if causal else "Bidirectional"
        header = ["tokens", *(f"{length:,}" for length in lengths)]
        yield f"{direction} layers: milliseconds per forward and backward pass (median)\n\n" + format_table(
            header, [[row.label, *(_milliseconds(found[row, length]) for length in lengths)] for row in rows]
        )
        yield (
            f"{direction} layers: peak memory (MiB) of a forward and backward pass, above rest\n\n"
            + format_table(
                header, [[row.label, *(_mebibytes(found[row, length]) for length in lengths)] for row in rows]
            )
        )


def _milliseconds(cell: Cell) -> str:
    return "does not fit" if cell.timing is None else f"{1e3 * cell.timing.median:,.1f}"


def _mebibytes(cell: Cell) -> str:
    return "does not fit" if cell.memory_mib is None else f"{cell.memory_mib:,.1f}"


def findings(columns: Sequence[Column]) -> Iterator[str]:
    """Compare the results with their bars."""
    cells = [cell for column in columns for cell in column.cells]
    seconds = {(c.variant.label, c.variant.causal, c.length): c.timing.median for c in cells if c.timing}
    memory = {(c.variant.label, c.variant.causal, c.length): c.memory_mib for c in cells if c.memory_mib is not None}

    def verdict(claim: str, value: float, bar: float, *, at_least: bool) -> str:
        met = value >= bar if at_least else value <= bar
        sign = "at least" if at_least else "at most"
        return f"[{'met' if met else 'MISSED'}] {claim}: {value:.2f} (bar: {sign} {bar:g})"

    for causal in (False, True):
        name = "causal" if causal else "bidirectional"
        if {(PRIMAL, causal, n) for n in (1024, 16384)} <= seconds.keys():
            growth = seconds[PRIMAL, causal, 16384] / 16384 / (seconds[PRIMAL, causal, 1024] / 1024)
            yield verdict(f"{name}: time per token at 16,384 over 1,024", growth, 1.3, at_least=False)
        own = seconds.get((PRIMAL, causal, 4096))
        if own is None:
            continue
        peers = {
            label: t for (label, c, n), t in seconds.items() if c is causal and n == 4096 and "primal" not in label
        }
        for label, bar in ((EXPLICIT, 20.0), (FUSED, 8.0)):
            if label in peers:
                yield verdict(f"{name}: times as fast as {label}, 4,096", peers[label] / own, bar, at_least=True)
        if causal and FUSED in peers:
            whole = seconds[FUSED, False, 4096] / peers[FUSED]
            yield f"    (the fused causal kernel skips the future: {whole:.1f} times as fast as the bidirectional one)"
        if (EXPLICIT, causal, 4096) in memory:
            saving = memory[EXPLICIT, causal, 4096] / memory[PRIMAL, causal, 4096]
            yield verdict(f"{name}: times less memory than {EXPLICIT}, 4,096", saving, 20.0, at_least=True)
        rival = min(peers, key=peers.__getitem__)
        yield verdict(
            f"{name}: times as fast as the next fastest kind ({rival}), 4,096", peers[rival] / own, 1.0, at_least=True
        )
    if (PRIMAL, True, 4096) in seconds:
        ratio = seconds[PRIMAL, True, 4096] / seconds[PRIMAL, False, 4096]
        yield verdict("causal over bidirectional Primal-Attention, 4,096", ratio, 1.5, at_least=False)
    for column in columns:
        if (PRIMAL, False, column.length) not in seconds:
            continue
        bound = primal_flops(column.length) / column.product_rate
        yield (
            f"roofline, {column.length:,} tokens: at the {column.product_rate / 1e9:.0f} GFLOP/s of large matrix "
            f"products in this run, the layer's own products would take {1e3 * bound:.1f} ms; "
            f"the bidirectional layer takes {1e3 * seconds[PRIMAL, False, column.length]:.1f} ms"
        )


def cells_of(columns: Sequence[Column]) -> Iterator[dict[str, Any]]:
    """The raw results, one for each layer and length. Times are None where the layer does not fit into memory."""
    for cell in (cell for column in columns for cell in column.cells):
        yield {
            "kind": cell.variant.label,
            "causal": cell.variant.causal,
            "tokens": cell.length,
            "seconds": None if cell.timing is None else asdict(cell.timing),
            "peak_memory_mib": cell.memory_mib,
        }


def save_plot(columns: Sequence[Column], path: Path) -> None:
    """Plot time and memory against length, on logarithmic axes."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), layout="constrained")
    panels = figure.subplots(2, 2, sharex=True, sharey="row")
    labels = list(dict.fromkeys(variant.label for variant in variants()))
    others = [label for label in labels if "primal" not in label]
    colors = {label: colormaps["tab20"](number) for number, label in enumerate(others)}
    lengths = [column.length for column in columns]
    for causal in (False, True):
        top, bottom = panels[0, int(causal)], panels[1, int(causal)]
        for label in labels:
            own = [c for column in columns for c in column.cells if c.variant == Variant(label, causal) and c.timing]
            ours = label.startswith("primal")
            style: dict[str, Any] = {
                "color": colors.get(label, "black"),
                "linestyle": ":" if label == "primal, data-independent" else "-",
                "linewidth": 2.5 if ours else 1.2,
                "marker": "o",
                "markersize": 3,
                "label": label,
            }
            if own:
                top.plot([c.length for c in own], [1e3 * c.timing.median for c in own if c.timing], **style)
                bottom.plot([c.length for c in own], [c.memory_mib or 0.0 for c in own], **style)
        top.set_title("causal" if causal else "bidirectional")
        bottom.set_xlabel("tokens")
        for panel in (top, bottom):
            panel.set(xscale="log", yscale="log")
            panel.set_xticks(lengths, [f"{length:,}" for length in lengths], minor=False)
            panel.set_xticks([], minor=True)
            panel.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
            panel.grid(alpha=0.3, which="both")
    panels[0, 0].set(ylabel="forward + backward (ms)")
    panels[1, 0].set(ylabel="peak memory above rest (MiB)")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside right center", fontsize="small")
    figure.suptitle(f"One attention layer, width {WIDTH}, {NUM_HEADS} heads, rank {RANK}, batch 1")
    figure.savefig(path, dpi=100)


def machine(device: torch.device) -> str:
    """Describe the software and hardware that the numbers come from."""
    threads = torch.get_num_threads()
    where = f"{threads} CPU thread{'s' if threads > 1 else ''} ({torch.backends.cpu.get_cpu_capability()})"
    if device.type == "cuda":
        where = torch.cuda.get_device_name(device)
    return f"torch {torch.__version__}, Python {platform.python_version()}, {where}, float32"


def note_progress(text: str) -> None:
    """Show progress on stderr: one line that is overwritten in a terminal, otherwise one line per length."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
    elif text.endswith("tokens"):
        print(text, file=sys.stderr, flush=True)


def check(config: Config) -> None:
    """Check flags and dependencies before the measurement, which takes about a quarter of an hour."""
    if not config.lengths or min(config.lengths) < 1:
        sys.exit(f"--lengths must be one or more numbers, each at least 1, not {config.lengths}")
    if config.threads is not None and config.threads < 1:
        sys.exit(f"--threads must be at least 1, not {config.threads}")
    if importlib.util.find_spec("matplotlib") is None:
        sys.exit("the plot needs matplotlib: pip install -c constraints.txt -e '.[plots]'")
    choose_device(config.device)
    try:
        config.out.mkdir(parents=True, exist_ok=True)
        (config.out / "attention.json").touch()
    except OSError as error:
        sys.exit(f"--out must be a writable folder, not {config.out}: {error.strerror}")


def main(config: Config) -> None:
    """Measure, print, save. Results are saved after each length, so an interrupted run keeps the finished lengths."""
    check(config)
    device = torch.device(config.device)
    if config.threads is not None:
        torch.set_num_threads(config.threads)

    columns: list[Column] = []
    report = ""
    heading = f"One attention layer, width {WIDTH}, {NUM_HEADS} heads, rank {RANK}, batch 1; {machine(device)}"
    try:
        for column in measure(config, device, note_progress):
            columns.append(column)
            report = "\n\n".join([heading, *tables(columns), "\n".join(f"* {line}" for line in findings(columns))])
            save_report(config.out / "attention.json", report, {"cells": list(cells_of(columns))})
            save_plot(columns, config.out / "attention.png")
    except KeyboardInterrupt:
        note_progress(f"interrupted after {len(columns)} of {len(config.lengths)} lengths\n")
    note_progress("")
    if report:
        print(report)
        print(f"\nSaved attention.json and attention.png in {config.out}")
    if len(columns) < len(config.lengths):
        sys.exit(130)


if __name__ == "__main__":
    run_program(main, Config, name="benchmarks.attention", description=__doc__)
