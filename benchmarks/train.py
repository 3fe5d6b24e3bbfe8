"""How fast training is: ours beside the Decision Transformers that pip installs, and beside what the machine can do.

Every model trains in a process of its own, which makes one step at a time on command; the processes take turns, so that
a slow moment of the machine strikes all of them. Same shapes, data, batch, dropout; each assembles batches as its users
would have it. d3rlpy and transformers get virtual environments of their own, made when first needed, since d3rlpy pins
an old gymnasium. "share of the bound" is the time that the step's matrix products, forward and backward, would take at
the rate of a large product in the same run, over the time that the step takes.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs
import torch
from tqdm import tqdm

from benchmarks.measure import clocked, large_matrix_product
from benchmarks.program import run_program
from primal_dt.files import atomic_write
from primal_dt.table import format_table

WORKERS = Path(__file__).parent / "peers"
PEERS = {"d3rlpy": "d3rlpy==2.8.1", "transformers": "transformers==5.22.2"}
"""What pip is asked for, besides the torch that is here."""
OURS = ("primal-plus", "softmax")
NUM_LAYERS, BATCH_SIZE, DROPOUT = 3, 64, 0.1
STATE_WIDTH, ACTION_WIDTH, EPISODE, NUM_EPISODES = 17, 6, 1000, 100
WARM_UP_STEPS = 3
CPU, RATE_SIZE = torch.device("cpu"), 1024
BARS = {"times the fastest peer": 1.5, "share of the bound": 0.75, "data": 0.02, "logging": 0.01}


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
    out: Path = Path("runs/benchmarks")
    """Where train.json and train.png go."""

    def __post_init__(self) -> None:
        if unknown := set(self.peers) - PEERS.keys():
            raise ValueError(f"peers can be {', '.join(PEERS)}, not {', '.join(sorted(unknown))}")
        if min((self.steps, self.threads, *self.widths, *self.contexts)) < 1:
            raise ValueError("widths, contexts, steps and threads must be at least 1")


class Worker:
    """The other end of ``peers/serve.py``."""

    def __init__(self, name: str, python: Path, program: str, threads: int) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [python, WORKERS / program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            bufsize=1,
            env=os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(WORKERS.parent.parent)},
        )

    def ask(self, command: str | dict[str, Any]) -> Any:
        """The answer to a command; the first says what to build.

        Raises:
            ChildProcessError: if the process has died, with what it said.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            _, said = self._process.communicate()
            raise ChildProcessError(f"{self.name} has ended: {said.strip().splitlines()[-1] if said.strip() else '?'}")
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


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
        lower, median, upper = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return lower, median, upper

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
    seconds_per_flop: float
    """Median, of a large matrix product among the steps."""
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

    def share_of_bound(self, result: Result) -> float | None:
        """Of the time of a step, what its matrix products would need."""
        return None if result.flops is None else result.flops * self.seconds_per_flop / result.median


def environment_python(peer: str, folder: Path) -> Path:
    """The interpreter of a peer's environment, which is made if it is not there."""
    root = folder / f"{PEERS[peer]}-torch-{torch.__version__.partition('+')[0]}"
    python = root / "bin" / "python"
    done = root / "complete"
    if not done.exists():
        print(f"making an environment for {peer} in {root}", file=sys.stderr)
        venv.create(root, clear=True, with_pip=True)
        torch_release = f"torch=={torch.__version__.partition('+')[0]}"
        command: list[str | Path] = [python, "-m", "pip", "install", "--quiet", torch_release, PEERS[peer]]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            raise OSError(f"pip could not install {PEERS[peer]}: {result.stderr.strip().splitlines()[-1]}")
        done.touch()
    return python


def write_episodes(path: Path) -> None:
    """Noise in HalfCheetah's widths: what is learnt does not matter here."""
    random = np.random.default_rng(0)
    np.savez(
        path,
        observations=random.normal(size=(NUM_EPISODES, EPISODE, STATE_WIDTH)).astype(np.float32),
        actions=random.uniform(-1, 1, size=(NUM_EPISODES, EPISODE, ACTION_WIDTH)).astype(np.float32),
        rewards=random.normal(size=(NUM_EPISODES, EPISODE)).astype(np.float32),
    )


@contextmanager
def workers(config: Config, pythons: dict[str, Path], build: dict[str, Any]) -> Iterator[list[Worker]]:
    """A process for each model, built."""
    with ExitStack() as stack:
        every = []
        for name in (*OURS, *config.peers):
            program = "with_primal_dt.py" if name in OURS else f"with_{name}.py"
            python = Path(sys.executable) if name in OURS else pythons[name]
            worker = Worker(name, python, program, config.threads)
            stack.callback(worker.close)
            worker.ask(build | {"attention": name if name in OURS else ""})
            every.append(worker)
        yield every


def measure(config: Config, pythons: dict[str, Path], data: Path, *, width: int, context: int) -> Shape:
    """All models in one shape, by turns."""
    num_heads = 4 if width == 256 else 1
    build = {
        "data": str(data),
        "threads": config.threads,
        "width": width,
        "num_heads": num_heads,
        "num_layers": NUM_LAYERS,
        "context": context,
        "batch_size": BATCH_SIZE,
        "dropout": DROPOUT,
    }
    with workers(config, pythons, build) as every:
        seconds: dict[str, list[float]] = {worker.name: [] for worker in every}
        product, products = large_matrix_product(CPU, size=RATE_SIZE), []
        bar = tqdm(range(WARM_UP_STEPS + config.steps), desc=f"width {width}, K {context}", leave=False, disable=None)
        for number in bar:
            for worker in every:
                took = worker.ask("step")
                if number >= WARM_UP_STEPS:
                    seconds[worker.name].append(took)
            products.append(clocked(product, CPU) / (2 * RATE_SIZE**3))
        results = []
        for worker in every:
            ours = worker.name in OURS
            memory = worker.ask("memory")
            flops, parts = (worker.ask("flops"), worker.ask("parts")) if ours else (None, {})
            results.append(Result(worker.name, tuple(seconds[worker.name]), memory, flops, parts))
    return Shape(width, num_heads, context, statistics.median(products), tuple(results))


def table(shape: Shape) -> str:
    """A shape's results."""
    fastest = shape.fastest_peer()
    rows = []
    for result in shape.results:
        lower, median, upper = result.quartiles
        share = shape.share_of_bound(result)
        rows.append(
            [
                result.name,
                f"{1e3 * median:.1f}",
                f"{1e3 * lower:.1f} to {1e3 * upper:.1f}",
                "" if fastest is None else f"{fastest.median / median:.2f}",
                "" if share is None else f"{100 * share:.0f} %",
                f"{result.peak_mib:.0f}",
            ]
        )
    header = ["", "ms per step", "quartiles", "times the fastest peer", "share of the bound", "peak MiB"]
    return f"### {shape.title}\n\n{format_table(header, rows)}"


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
        ours = next(result for result in shape.results if result.name == "primal-plus")
        fastest, share = shape.fastest_peer(), shape.share_of_bound(ours)
        whole = sum(ours.parts.values())
        found = {}
        if fastest is not None:
            found[f"times the fastest peer ({fastest.name})"] = (
                fastest.median / ours.median,
                BARS["times the fastest peer"],
            )
        if share is not None and shape.context == 20:
            found["share of the bound"] = (share, BARS["share of the bound"])
        for name, (value, bar) in found.items():
            yield f"* [{'met' if value >= bar else 'MISSED'}] {shape.title}: {name}: {value:.2f} (bar: at least {bar})"
        for name in ("data", "logging"):
            value, bar = ours.parts[name] / whole, BARS[name]
            mark = "met" if value <= bar else "MISSED"
            yield f"* [{mark}] {shape.title}: {name}: {100 * value:.2f} % of a step (bar: at most {100 * bar:.0f} %)"


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
        bound = 1e3 * (shape.results[0].flops or 0) * shape.seconds_per_flop
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
    print(parts_table(shapes) + "\n")
    print("\n".join(findings(shapes)))
    facts = {"torch": torch.__version__, "threads": config.threads, "peers": [PEERS[peer] for peer in config.peers]}
    with atomic_write(config.out / "train.json") as file:
        file.write(json.dumps({**facts, "shapes": [asdict(shape) for shape in shapes]}, indent=1).encode())
    save_plot(shapes, config.out / "train.png")
    print(f"\nSaved train.json and train.png in {config.out}")


if __name__ == "__main__":
    run_program(main, Config, name="benchmarks.train", description=__doc__)
