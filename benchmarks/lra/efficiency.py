"""Cost of a training step of the Long-Range Arena's encoder, by attention stack and length (Table 3 of the paper)."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from tqdm import tqdm

from benchmarks.batches import LabeledBatch
from benchmarks.lra.data import OPTIONS, encoder_shape
from benchmarks.measure import peak_memory_mib, run_alone, time_interleaved
from benchmarks.published import TABLE_3
from benchmarks.published_encoder import build_encoder
from benchmarks.settings import Primal
from benchmarks.step import update
from primal_dt.system.files import atomic_write
from primal_dt.system.provenance import provenance
from primal_dt.system.table import format_table

__all__ = ["ROWS", "Cell", "cost_table", "findings", "report_efficiency"]

CANONICAL, PRIMALFORMER = "softmax, matrix in memory", "primalformer"
IN_MEMORY: dict[str, Any] = {"fused": False}
DROPPED = IN_MEMORY | OPTIONS["softmax"]


@dataclass(frozen=True)
class Row:
    """A row of the tables."""

    stack: str
    softmax: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of its softmax layers. On a CPU, torch has no fused kernel with dropout of attention weights."""
    is_published: bool = True
    """Whether the paper's table has this row."""


ROWS = {
    CANONICAL: Row("softmax", DROPPED),
    "softmax, weights not dropped": Row("softmax", IN_MEMORY, is_published=False),
    "softmax, fused": Row("softmax", is_published=False),
    "nystromformer": Row("nystromformer"),
    "linformer": Row("linformer"),
    "performer": Row("performer"),
    "reformer": Row("reformer"),
    "primal-plus, matrix in memory": Row("primal-plus", DROPPED),
    "primal-plus, fused": Row("primal-plus", is_published=False),
    PRIMALFORMER: Row(PRIMALFORMER),
}
"""Name -> row. In the rows with the matrix in memory, a tenth of the attention weights is dropped, as published. The
published canonical row also recomputes attention in the backward pass, and its times are in half precision, for batches
of 32, evaluations included."""
PUBLISHED_TASK = {1024: "image", 2048: "listops", 4096: "text"}
"""Length -> the task with that length in Table 3."""
NUM_TOKENS, NUM_CLASSES, RANK, ETA = 256, 10, 30, 0.05
STEPS = 1_000
BARS = {"speed": 7.4, "memory": 15.5}
"""Minimum ratios of canonical attention to PrimalFormer at 4,096 tokens: those of the paper."""


def make_step(row: str, length: int, batch_size: int, device: torch.device) -> Callable[[], object]:
    """Make a function that runs a training step with AdamW on random tokens."""
    torch.manual_seed(0)
    shape = encoder_shape(
        num_classes=NUM_CLASSES,
        max_length=length,
        attention=ROWS[row].stack,
        primal=Primal(RANK, ETA),
        softmax=ROWS[row].softmax,
    )
    model = build_encoder(nn.Embedding(NUM_TOKENS, shape.width), shape).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = LabeledBatch(
        torch.randint(NUM_TOKENS, (batch_size, length), device=device),
        None,
        torch.randint(NUM_CLASSES, (batch_size,), device=device),
    )
    return lambda: update(model, optimizer, batch, eta=ETA, clip=None)


def memory_of(row: str, length: int, batch_size: int, device_name: str) -> float:
    """Measure the MiB of a step above rest. Call it in a fresh process."""
    device = torch.device(device_name)
    small = make_step(row, 64, 1, device)
    return peak_memory_mib(small, make_step(row, length, batch_size, device), device)


def seconds_of(rows: list[str], length: int, batch_size: int, seconds: float, device_name: str) -> dict[str, float]:
    """Measure row -> median seconds of a step, timed alternately. Call it in a fresh process."""
    device = torch.device(device_name)
    steps = {row: make_step(row, length, batch_size, device) for row in rows}
    timings = time_interleaved(steps, seconds=seconds, device=device)
    return {row: timing.median for row, timing in timings.items()}


@dataclass(frozen=True)
class Cell:
    """Measurements of one row at one length; infinite if it did not fit in memory."""

    row: str
    length: int
    seconds: float
    """Seconds of a step."""
    memory_mib: float

    @property
    def fits(self) -> bool:
        """Whether it fit in memory."""
        return math.isfinite(self.seconds)


Cells = Mapping[tuple[str, int], Cell]
"""(row, length) -> measurements."""


def measure_length(
    rows: Iterable[str], length: int, *, batch_size: int, seconds: float, device: torch.device
) -> Iterator[Cell]:
    """Measure rows at one length."""
    memory: dict[str, float] = {}
    for row in tqdm(rows, desc=f"memory, {length:,} tokens", leave=False, disable=None):
        try:
            memory[row] = run_alone(memory_of, row, length, batch_size, str(device))
        except MemoryError:
            memory[row] = math.inf
    fit = [row for row, peak in memory.items() if math.isfinite(peak)]
    took = run_alone(seconds_of, fit, length, batch_size, seconds, str(device), for_memory=False)
    for row, peak in memory.items():
        yield Cell(row, length, took.get(row, math.inf), peak)


def report_efficiency(
    *, lengths: tuple[int, ...], batch_size: int, seconds: float, device: torch.device, out: Path
) -> None:
    """Measure, print, save."""
    cells = {
        (cell.row, length): cell
        for length in lengths
        for cell in measure_length(ROWS, length, batch_size=batch_size, seconds=seconds, device=device)
    }
    print(f"Batches of {batch_size}; the paper's values, on a V100, are in parentheses.\n\n{tables(cells)}")
    with atomic_write(out / "efficiency.json") as file:
        content: dict[str, Any] = {
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "batch_size": batch_size,
            **provenance(),
        }
        content["cells"] = [asdict(cell) for cell in cells.values() if cell.fits]
        file.write(json.dumps(content, indent=1).encode())
    print(f"\nSaved efficiency.json in {out}")


def tables(cells: Cells) -> str:
    """Tables of speed and of memory against canonical attention, beside the paper's, and the bars."""
    parts = [cost_table(cells, "seconds"), cost_table(cells, "gigabytes"), "\n".join(findings(cells))]
    return "\n\n".join(parts)


def cost_table(cells: Cells, quantity: Literal["seconds", "gigabytes"]) -> str:
    """Ratios to canonical attention at each length (the paper's in parentheses), and the cost at the longest length."""
    lengths = sorted({length for _, length in cells})
    rows = []
    for row in ROWS:
        shown = [_ratio(cells, row, length, quantity) for length in lengths]
        longest = cells[row, lengths[-1]]
        cost = f"{STEPS * longest.seconds:,.0f}" if quantity == "seconds" else f"{longest.memory_mib:,.0f}"
        rows.append([row, *shown, cost if longest.fits else "does not fit"])
    title = "times as fast" if quantity == "seconds" else "times less memory"
    unit = f"s per {STEPS:,} steps" if quantity == "seconds" else "MiB"
    header = [title, *(f"{length:,} tokens" for length in lengths), f"{unit} at {lengths[-1]:,}"]
    return format_table(header, rows)


def _ratio(cells: Cells, row: str, length: int, quantity: Literal["seconds", "gigabytes"]) -> str:
    if not cells[CANONICAL, length].fits or not cells[row, length].fits:
        return "no reference" if cells[row, length].fits else "does not fit"
    value = (_speed if quantity == "seconds" else _saving)(cells, row, length)
    return f"{value:.1f}{_paper(quantity, row, length)}"


def _speed(cells: Cells, row: str, length: int) -> float:
    return cells[CANONICAL, length].seconds / cells[row, length].seconds


def _saving(cells: Cells, row: str, length: int) -> float:
    return cells[CANONICAL, length].memory_mib / cells[row, length].memory_mib


def _paper(quantity: str, row: str, length: int) -> str:
    published = TABLE_3[quantity].get(PUBLISHED_TASK.get(length, ""), {})
    if not ROWS[row].is_published or not published:
        return ""
    return f" ({published['softmax'] / published[ROWS[row].stack]:.1f})"


def findings(cells: Cells) -> list[str]:
    """Compare the results at 4,096 tokens with their bars."""
    if (CANONICAL, 4096) not in cells:
        return []
    if not cells[CANONICAL, 4096].fits:
        return ["* [not measured] canonical attention does not fit at 4,096 tokens: use a smaller --efficiency-batch"]
    speed, saving = _speed(cells, PRIMALFORMER, 4096), _saving(cells, PRIMALFORMER, 4096)
    fastest = min(ROWS, key=lambda row: cells[row, 4096].seconds)
    lines = [
        (
            speed >= BARS["speed"],
            f"primalformer, 4,096 tokens: {speed:.1f} times as fast as canonical attention (bar: {BARS['speed']})",
        ),
        (
            saving >= BARS["memory"],
            f"primalformer, 4,096 tokens: {saving:.1f} times less memory (bar: {BARS['memory']})",
        ),
        (fastest == PRIMALFORMER, f"the fastest at 4,096 tokens is {fastest} (bar: primalformer)"),
    ]
    return [f"* [{'met' if met else 'MISSED'}] {text}" for met, text in lines]
