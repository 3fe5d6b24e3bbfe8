"""Time of a training step: our models beside those of d3rlpy and transformers, and beside the machine's limit.

Every model trains in its own process. The processes make one step each in turn, so that a slow moment of the machine
affects all of them. Shapes, data, batch size and dropout are the same; each model assembles its batches as its users
would. d3rlpy and transformers run in their own virtual environments, which are created when first needed, because
d3rlpy pins an old gymnasium.

The column "matrix-product share" is the time that the step's matrix products (forward and backward) would take at the
rate of large products (``a @ b``, 1,024 x 1,024) in the same run, divided by the time of the step. The "preallocated"
column uses the rate of products into a preallocated output, which is as fast as the machine multiplies.
"""

import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import platformdirs
import torch

from benchmarks.program import run_program, save_report
from benchmarks.workers import PEERS, Job, environment_python, ours, quartiles, take_turns, working, write_episodes
from primal_dt.system.files import atomic_write
from primal_dt.system.table import format_table

OURS = ("primal-plus", "softmax")
PRODUCTS = Job("products", Path(sys.executable), "with_products.py", {})
BARS = {"times the fastest peer": 1.5, "matrix-product share": 0.75, "data": 0.02, "logging": 0.01, "growth": 0.01}


@dataclass(frozen=True)
class Config:
    """Settings of the benchmark."""

    widths: tuple[int, ...] = (128, 256)
    """Model widths. Width 128 has 1 head and width 256 has 4, as in the papers; other widths have 1."""
    contexts: tuple[int, ...] = (20, 100)
    """Context lengths K in environment steps."""
    steps: int = 60
    """Timed training steps of each model."""
    peers: tuple[str, ...] = tuple(PEERS)
    """Libraries to compare with: d3rlpy, transformers."""
    environments: Path = Path(platformdirs.user_cache_dir("primal-dt")) / "peers"
    """Folder for the virtual environments of these libraries. Later runs reuse them."""
    threads: int = torch.get_num_threads()
    """Torch threads in each process."""
    growth: bool = True
    """Also train primal-plus for 2,000 steps in the first shape, and check whether its memory grows."""
    out: Path = Path("runs/benchmarks")
    """Folder for train.json and train.png."""

    def __post_init__(self) -> None:
        if unknown := set(self.peers) - PEERS.keys():
            raise ValueError(f"peers must be among {', '.join(PEERS)}, not {', '.join(sorted(unknown))}")
        if min((self.steps, self.threads, *self.widths, *self.contexts)) < 1:
            raise ValueError("widths, contexts, steps and threads must be at least 1")


@dataclass(frozen=True)
class Result:
    """Measurements of one model in one shape."""

    name: str
    seconds: tuple[float, ...]
    """Seconds of each step, including its batch."""
    peak_mib: float
    """Peak memory in MiB above the process at rest with the data loaded."""
    flops: int | None
    """Floating-point operations of a step's matrix products; None for other libraries."""
    parts: dict[str, float]
    """Part of a step -> seconds; empty for other libraries."""

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """Lower quartile, median and upper quartile of the seconds."""
        return quartiles(self.seconds)

    @property
    def median(self) -> float:
        """Median seconds of a step."""
        return self.quartiles[1]


@dataclass(frozen=True)
class Shape:
    """A model shape, and the measurements of all models in it."""

    width: int
    num_heads: int
    context: int
    plain_rate: float
    """Median FLOP/s of large products ``a @ b``, timed among the steps."""
    given_rate: float
    """Median FLOP/s of the same products into a preallocated output."""
    results: tuple[Result, ...]

    @property
    def title(self) -> str:
        """Title of the shape's table."""
        heads = "1 head" if self.num_heads == 1 else f"{self.num_heads} heads"
        return f"width {self.width}, {heads}, K {self.context}"

    def fastest_peer(self) -> Result | None:
        """Result of the fastest other library; None if none was measured."""
        peers = [result for result in self.results if result.name in PEERS]
        return min(peers, key=lambda result: result.median) if peers else None

    def share(self, result: Result, rate: float) -> float | None:
        """Share of a step's time that its matrix products would take at ``rate`` FLOP/s; None for other libraries."""
        return None if result.flops is None else result.flops / rate / result.median


def measure(config: Config, pythons: dict[str, Path], data: Path, *, width: int, context: int) -> Shape:
    """Measure all models in one shape, one step each in turn."""
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
    """Measure the resident MiB of primal-plus at each logging point of 2,000 steps, in the first shape."""
    width, context = config.widths[0], config.contexts[0]
    shape = {"width": width, "num_heads": 4 if width == 256 else 1, "context": context}
    print("training 2,000 steps to check whether memory grows", file=sys.stderr)
    with working([ours("primal-plus")], data, threads=config.threads, **shape) as (worker,):
        resident: list[float] = worker.ask("growth")
    return resident


def table(shape: Shape) -> str:
    """Table of the results in one shape."""
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
    header = ["", "ms per step", "quartiles", "times the fastest peer", "matrix-product share"]
    header += ["preallocated", "peak MiB"]
    rates = f"Large products: {shape.plain_rate / 1e9:.0f} GFLOP/s, preallocated {shape.given_rate / 1e9:.0f}."
    return f"### {shape.title}\n\n{format_table(header, rows)}\n\n{rates}"


def parts_table(shapes: list[Shape]) -> str:
    """Table of the share of each part in our training steps."""
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
    """Compare the results with their bars."""
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
            found["matrix-product share"] = (share, BARS["matrix-product share"])
        for name, (value, bar) in found.items():
            yield f"* [{'met' if value >= bar else 'MISSED'}] {shape.title}: {name}: {value:.2f} (bar: at least {bar})"
        for name in ("data", "logging"):
            value, bar = mine.parts[name] / whole, BARS[name]
            mark = "met" if value <= bar else "MISSED"
            yield f"* [{mark}] {shape.title}: {name}: {100 * value:.2f} % of a step (bar: at most {100 * bar:.0f} %)"


def growth_finding(resident: list[float]) -> str:
    """Report whether memory grows after the first fifth of the steps."""
    first, last = resident[len(resident) // 5], resident[-1]
    grown, bar = last / first - 1, BARS["growth"]
    return (
        f"* [{'met' if grown <= bar else 'MISSED'}] memory: {first:.0f} MiB after a fifth of 2,000 steps, "
        f"{last:.0f} MiB at the end: {100 * grown:+.1f} % (bar: at most {100 * bar:.0f} %)"
    )


def save_plot(shapes: list[Shape], path: Path) -> None:
    """Plot the milliseconds per step, with one panel per shape."""
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
    figure.suptitle("Dotted: the time of the matrix products of primal-plus alone", fontsize=9)
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
    found = [*findings(shapes), *([growth_finding(resident)] if resident else [])]
    parts = [parts_table(shapes), "\n".join(found)]
    print("\n\n".join(parts))
    report = "\n\n".join([*(table(shape) for shape in shapes), *parts])
    raw = {"threads": config.threads, "peers": [PEERS[peer] for peer in config.peers], "steps": config.steps}
    raw |= {"shapes": [asdict(shape) for shape in shapes], "resident MiB": resident}
    save_report(config.out / "train.json", report, raw)
    save_plot(shapes, config.out / "train.png")
    print(f"\nSaved train.json and train.png in {config.out}")


if __name__ == "__main__":
    run_program(main, Config, name="benchmarks.train", description=__doc__)
