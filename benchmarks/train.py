"""How fast training is: ours beside the Decision Transformers that pip installs, and beside what the machine can do.

Every model trains in a process of its own, which makes one step at a time on command; the processes take turns, so that
a slow moment of the machine strikes all of them. Same shapes, data, batch, dropout; each assembles batches as its users
would have it. d3rlpy and transformers get virtual environments of their own, made when first needed, since d3rlpy pins
an old gymnasium. "share of the products" is the time that the step's matrix products, forward and backward, would take
at the rate of large products (``a @ b``, 1,024 squared) in the same run, over the time that the step takes; beside it
the same at the rate that they have with room for the result given, which is as fast as the machine multiplies.
"""

import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import platformdirs
import torch

from benchmarks.program import run_program
from benchmarks.workers import PEERS, Job, environment_python, ours, quartiles, take_turns, working, write_episodes
from primal_dt.system.files import atomic_write
from primal_dt.system.table import format_table

OURS = ("primal-plus", "softmax")
PRODUCTS = Job("products", Path(sys.executable), "with_products.py", {})
BARS = {"times the fastest peer": 1.5, "share of the products": 0.75, "data": 0.02, "logging": 0.01, "growth": 0.01}


@dataclass(frozen=True)
class Config:
    """What to measure."""

    widths: tuple[int, ...] = (128, 256)
    """Widths of the models: 128 with 1 head, 256 with 4, as in the papers; others with 1."""
    contexts: tuple[int, ...] = (20, 100)
    """Steps of a window."""
    steps: int = 60
    """Timed steps of each."""
    peers: tuple[str, ...] = tuple(PEERS)
    """Which to compare with: d3rlpy, transformers."""
    environments: Path = Path(platformdirs.user_cache_dir("primal-dt")) / "peers"
    """Where their virtual environments are made, and found again."""
    threads: int = torch.get_num_threads()
    """Of torch, in every process."""
    growth: bool = True
    """Train primal-plus for 2,000 steps more in the first shape, and see whether its memory grows."""
    out: Path = Path("runs/benchmarks")
    """Where train.json and train.png go."""

    def __post_init__(self) -> None:
        if unknown := set(self.peers) - PEERS.keys():
            raise ValueError(f"peers can be {', '.join(PEERS)}, not {', '.join(sorted(unknown))}")
        if min((self.steps, self.threads, *self.widths, *self.contexts)) < 1:
            raise ValueError("widths, contexts, steps and threads must be at least 1")


@dataclass(frozen=True)
class Result:
    """Of one model in one shape."""

    name: str
    seconds: tuple[float, ...]
    """Of each step, its batch included."""
    peak_mib: float
    """Above the process at rest, with the data loaded."""
    flops: int | None
    """Of a step's matrix products, if it is ours."""
    parts: dict[str, float]
    """Seconds of the parts of a step, if it is ours."""

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """Lower, median, upper."""
        return quartiles(self.seconds)

    @property
    def median(self) -> float:
        """Seconds."""
        return self.quartiles[1]


@dataclass(frozen=True)
class Shape:
    """What was measured in one shape."""

    width: int
    num_heads: int
    context: int
    plain_rate: float
    """Floating-point operations in a second of large products among the steps, each ``a @ b``; the median."""
    given_rate: float
    """The same with room for the result given."""
    results: tuple[Result, ...]

    @property
    def title(self) -> str:
        """What it is."""
        heads = "1 head" if self.num_heads == 1 else f"{self.num_heads} heads"
        return f"width {self.width}, {heads}, K {self.context}"

    def fastest_peer(self) -> Result | None:
        """The one to beat."""
        peers = [result for result in self.results if result.name in PEERS]
        return min(peers, key=lambda result: result.median) if peers else None

    def share(self, result: Result, rate: float) -> float | None:
        """Of the time of a step, what its matrix products would take at a rate."""
        return None if result.flops is None else result.flops / rate / result.median


def measure(config: Config, pythons: dict[str, Path], data: Path, *, width: int, context: int) -> Shape:
    """All models in one shape, by turns."""
    num_heads = 4 if width == 256 else 1
    jobs = [*map(ours, OURS), *(Job(peer, pythons[peer], f"with_{peer}.py", {}) for peer in config.peers), PRODUCTS]
    shape = {"width": width, "num_heads": num_heads, "context": context}
    with working(jobs, data, threads=config.threads, **shape) as (*workers, products):
        plain: list[float] = []
        given: list[float] = []

        def multiply() -> None:
            plain.append(products.ask("plain"))
            given.append(products.ask("given"))

        seconds = take_turns(workers, config.steps, f"width {width}, K {context}", after_turn=multiply)
        results = []
        for worker in workers:
            memory = worker.ask("memory")
            flops, parts = (worker.ask("flops"), worker.ask("parts")) if worker.name in OURS else (None, {})
            results.append(Result(worker.name, tuple(seconds[worker.name]), memory, flops, parts))
    return Shape(width, num_heads, context, 1 / statistics.median(plain), 1 / statistics.median(given), tuple(results))


def measure_growth(config: Config, data: Path) -> list[float]:
    """Resident MiB of primal-plus, at each logging point of 2,000 steps of the first shape."""
    width, context = config.widths[0], config.contexts[0]
    shape = {"width": width, "num_heads": 4 if width == 256 else 1, "context": context}
    print("training 2,000 steps to see whether memory grows", file=sys.stderr)
    with working([ours("primal-plus")], data, threads=config.threads, **shape) as (worker,):
        resident: list[float] = worker.ask("growth")
    return resident


def table(shape: Shape) -> str:
    """A shape's results."""
    fastest = shape.fastest_peer()
    rows = []
    for result in shape.results:
        lower, median, upper = result.quartiles
        shares = (shape.share(result, shape.plain_rate), shape.share(result, shape.given_rate))
        rows.append(
            [
                result.name,
                f"{1e3 * median:.1f}",
                f"{1e3 * lower:.1f} to {1e3 * upper:.1f}",
                "" if fastest is None else f"{fastest.median / median:.2f}",
                *("" if share is None else f"{100 * share:.0f} %" for share in shares),
                f"{result.peak_mib:.0f}",
            ]
        )
    header = ["", "ms per step", "quartiles", "times the fastest peer", "share of the products"]
    header += ["with room given", "peak MiB"]
    rates = f"Large products: {shape.plain_rate / 1e9:.0f} GFLOP/s, with room given {shape.given_rate / 1e9:.0f}."
    return f"### {shape.title}\n\n{format_table(header, rows)}\n\n{rates}"


def parts_table(shapes: list[Shape]) -> str:
    """Where our time goes."""
    names = list(dict.fromkeys(name for shape in shapes for result in shape.results for name in result.parts))
    rows = []
    for shape in shapes:
        for result in shape.results:
            if result.parts:
                whole = sum(result.parts.values())
                shares = [f"{100 * result.parts.get(name, 0.0) / whole:.1f} %" for name in names]
                rows.append([f"{result.name}, {shape.title}", *shares])
    return f"### Where the time of a step goes\n\n{format_table(['', *names], rows)}"


def findings(shapes: list[Shape]) -> Iterator[str]:
    """What it should show, and what it shows."""
    for shape in shapes:
        mine = next(result for result in shape.results if result.name == "primal-plus")
        fastest, share = shape.fastest_peer(), shape.share(mine, shape.plain_rate)
        whole = sum(mine.parts.values())
        found = {}
        if fastest is not None:
            found[f"times the fastest peer ({fastest.name})"] = (
                fastest.median / mine.median,
                BARS["times the fastest peer"],
            )
        if share is not None and shape.context == 20:
            found["share of the products"] = (share, BARS["share of the products"])
        for name, (value, bar) in found.items():
            yield f"* [{'met' if value >= bar else 'MISSED'}] {shape.title}: {name}: {value:.2f} (bar: at least {bar})"
        for name in ("data", "logging"):
            value, bar = mine.parts[name] / whole, BARS[name]
            mark = "met" if value <= bar else "MISSED"
            yield f"* [{mark}] {shape.title}: {name}: {100 * value:.2f} % of a step (bar: at most {100 * bar:.0f} %)"


def growth_finding(resident: list[float]) -> str:
    """Whether memory grows, once it has settled."""
    first, last = resident[len(resident) // 5], resident[-1]
    grown, bar = last / first - 1, BARS["growth"]
    return (
        f"* [{'met' if grown <= bar else 'MISSED'}] memory: {first:.0f} MiB after a fifth of 2,000 steps, "
        f"{last:.0f} after all: {100 * grown:+.1f} % (bar: at most {100 * bar:.0f} %)"
    )


def save_plot(shapes: list[Shape], path: Path) -> None:
    """Milliseconds of a step, a group of bars for each shape."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.2 * len(shapes), 3.4), layout="constrained")
    for place, shape in enumerate(shapes):
        axes = figure.add_subplot(1, len(shapes), place + 1)
        for number, result in enumerate(shape.results):
            lower, median, upper = (1e3 * value for value in result.quartiles)
            axes.bar(number, median, color=f"C{number}", alpha=0.8)
            axes.plot([number, number], [lower, upper], color="black", lw=2)
        bound = 1e3 * (shape.results[0].flops or 0) / shape.given_rate
        axes.axhline(bound, color="black", ls=":", lw=1)
        axes.set_xticks(range(len(shape.results)), [result.name for result in shape.results], rotation=30, ha="right")
        axes.set_title(shape.title, fontsize=9)
        axes.set_ylabel("ms per training step" if place == 0 else "")
    figure.suptitle("Dotted: what the matrix products of primal-plus alone would take", fontsize=9)
    with atomic_write(path) as file:
        figure.savefig(file, format="png", dpi=120)


def main(config: Config) -> None:
    """Measure, print, save."""
    pythons = {peer: environment_python(peer, config.environments) for peer in config.peers}
    shapes = []
    with tempfile.TemporaryDirectory(prefix="primal-dt-benchmark-") as folder:
        data = Path(folder) / "episodes.npz"
        write_episodes(data)
        for context in config.contexts:
            for width in config.widths:
                shapes.append(measure(config, pythons, data, width=width, context=context))
                print(table(shapes[-1]) + "\n", flush=True)
        resident = measure_growth(config, data) if config.growth else []
    print(parts_table(shapes) + "\n")
    print("\n".join(findings(shapes)))
    if resident:
        print(growth_finding(resident))
    facts = {"torch": torch.__version__, "threads": config.threads, "peers": [PEERS[peer] for peer in config.peers]}
    with atomic_write(config.out / "train.json") as file:
        content = {**facts, "shapes": [asdict(shape) for shape in shapes], "resident MiB": resident}
        file.write(json.dumps(content, indent=1).encode())
    save_plot(shapes, config.out / "train.png")
    print(f"\nSaved train.json and train.png in {config.out}")


if __name__ == "__main__":
    run_program(main, Config, name="benchmarks.train", description=__doc__)
