"""Ablation of training speed: primal-plus as it is, and with one optimization removed at a time.

Every variant trains in its own process. The processes make one step each in turn, as in ``benchmarks.train``.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.program import run_program, save_report
from benchmarks.workers import ours, quartiles, take_turns, working, write_episodes
from primal_dt.system.table import format_table

WITHOUT = {
    "shards": "all threads work on each operation, instead of each on its own part of the batch",
    "state positions": "the top layer's output and MLP at all tokens, instead of only at the states",
    "cheap dropout": "nn.Dropout's masks, one random number per entry, instead of 16 random bits",
    "kept memory": "malloc returns freed memory to the system, instead of reusing it in the next step",
    "right padding": "a padding mask in the softmax layers, which right padding makes unnecessary",
    "fused optimizer": "torch's default AdamW, instead of the fused one",
    "eager": "torch.compile, instead of eager execution (in one shard)",
}
"""Optimization -> what replaces it when it is removed."""
AS_IT_IS = "as it is"


@dataclass(frozen=True)
class Config:
    """Settings of the benchmark."""

    widths: tuple[int, ...] = (128, 256)
    """Model widths. Width 128 has 1 head and width 256 has 4, as in the papers; other widths have 1."""
    context: int = 20
    """Context length K in environment steps."""
    steps: int = 40
    """Timed training steps of each variant."""
    without: tuple[str, ...] = tuple(WITHOUT)
    """Optimizations to remove, one at a time."""
    threads: int = torch.get_num_threads()
    """Torch threads in each process."""
    out: Path = Path("runs/benchmarks")
    """Folder for ablation.json."""

    def __post_init__(self) -> None:
        if unknown := set(self.without) - WITHOUT.keys():
            raise ValueError(f"without must be among {', '.join(WITHOUT)}, not {', '.join(sorted(unknown))}")
        if min((self.context, self.steps, self.threads, *self.widths)) < 1:
            raise ValueError("widths, context, steps and threads must be at least 1")


def main(config: Config) -> None:
    """Measure, print, save."""
    jobs = [ours("primal-plus", name=AS_IT_IS)]
    jobs += [ours("primal-plus", name=name, without=name) for name in config.without]
    measured: dict[int, dict[str, list[float]]] = {}
    tables = []
    with tempfile.TemporaryDirectory(prefix="primal-dt-benchmark-") as folder:
        data = Path(folder) / "episodes.npz"
        write_episodes(data)
        for width in config.widths:
            num_heads = 4 if width == 256 else 1
            shape = {"width": width, "num_heads": num_heads, "context": config.context}
            with working(jobs, data, threads=config.threads, **shape) as workers:
                measured[width] = take_turns(workers, config.steps, f"width {width}")
            tables.append(table(measured[width], f"width {width}, K {config.context}"))
            print(tables[-1] + "\n", flush=True)
    raw = {"threads": config.threads, "context": config.context, "steps": config.steps, "seconds": measured}
    save_report(config.out / "ablation.json", "\n\n".join(tables), raw)
    print(f"Saved ablation.json in {config.out}")


def table(seconds: dict[str, list[float]], title: str) -> str:
    """Table of milliseconds per step, and of the change in step time without each optimization."""
    base = quartiles(seconds[AS_IT_IS])[1]
    rows = []
    for name, seen in seconds.items():
        lower, median, upper = (1e3 * value for value in quartiles(seen))
        longer = "" if name == AS_IT_IS else f"{100 * (median / 1e3 / base - 1):+.0f} %"
        label = name if name == AS_IT_IS else f"without {name}: {WITHOUT[name]}"
        rows.append([label, f"{median:.1f}", f"{lower:.1f} to {upper:.1f}", longer])
    return format_table([title, "ms per step", "quartiles", "change"], rows)


if __name__ == "__main__":
    run_program(main, Config, name="benchmarks.ablation", description=__doc__)
