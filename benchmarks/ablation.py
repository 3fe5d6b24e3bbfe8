"""What makes a training step fast: primal-plus as it is, and without one thing at a time, by turns.

Every variant trains in a process of its own, as in ``benchmarks.train``.
"""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.program import run_program
from benchmarks.workers import ours, quartiles, take_turns, working, write_episodes
from primal_dt.system.files import atomic_write
from primal_dt.system.table import format_table

WITHOUT = {
    "shards": "all threads share every operation, instead of a part of the batch for each",
    "state positions": "the top layer's output and MLP at all tokens, instead of at the states",
    "cheap dropout": "nn.Dropout's masks, a number for each entry, instead of 16 bits",
    "kept memory": "malloc gives memory back to the system, instead of keeping it for the next step",
    "right padding": "a mask for the softmax layers, which right padding makes needless",
    "fused optimizer": "AdamW as torch has it by default, instead of fused",
    "eager": "torch.compile, instead of running operations as they come (in one shard)",
}
"""What can be left out, and what there is instead."""
AS_IT_IS = "as it is"


@dataclass(frozen=True)
class Config:
    """What to measure."""

    widths: tuple[int, ...] = (128, 256)
    """Widths of the models: 128 with 1 head, 256 with 4, as in the papers; others with 1."""
    context: int = 20
    """Steps of a window."""
    steps: int = 40
    """Timed steps of each."""
    without: tuple[str, ...] = tuple(WITHOUT)
    """What to leave out, one at a time."""
    threads: int = torch.get_num_threads()
    """Of torch, in every process."""
    out: Path = Path("runs/benchmarks")
    """Where ablation.json goes."""

    def __post_init__(self) -> None:
        if unknown := set(self.without) - WITHOUT.keys():
            raise ValueError(f"without can be {', '.join(WITHOUT)}, not {', '.join(sorted(unknown))}")
        if min((self.context, self.steps, self.threads, *self.widths)) < 1:
            raise ValueError("widths, context, steps and threads must be at least 1")


def main(config: Config) -> None:
    """Measure, print, save."""
    jobs = [ours("primal-plus", name=AS_IT_IS)]
    jobs += [ours("primal-plus", name=name, without=name) for name in config.without]
    measured = {}
    with tempfile.TemporaryDirectory(prefix="primal-dt-benchmark-") as folder:
        data = Path(folder) / "episodes.npz"
        write_episodes(data)
        for width in config.widths:
            num_heads = 4 if width == 256 else 1
            shape = {"width": width, "num_heads": num_heads, "context": config.context}
            with working(jobs, data, threads=config.threads, **shape) as workers:
                measured[width] = take_turns(workers, config.steps, f"width {width}")
            print(table(measured[width], f"width {width}, K {config.context}") + "\n", flush=True)
    with atomic_write(config.out / "ablation.json") as file:
        content = {"torch": torch.__version__, "threads": config.threads, "context": config.context}
        file.write(json.dumps({**content, "seconds": measured}, indent=1).encode())
    print(f"Saved ablation.json in {config.out}")


def table(seconds: dict[str, list[float]], title: str) -> str:
    """Milliseconds, and how much longer a step takes without a thing."""
    base = quartiles(seconds[AS_IT_IS])[1]
    rows = []
    for name, seen in seconds.items():
        lower, median, upper = (1e3 * value for value in quartiles(seen))
        longer = "" if name == AS_IT_IS else f"{100 * (median / 1e3 / base - 1):+.0f} %"
        label = name if name == AS_IT_IS else f"without {name}: {WITHOUT[name]}"
        rows.append([label, f"{median:.1f}", f"{lower:.1f} to {upper:.1f}", longer])
    return format_table([title, "ms per step", "quartiles", "a step takes"], rows)


if __name__ == "__main__":
    run_program(main, Config, name="benchmarks.ablation", description=__doc__)
