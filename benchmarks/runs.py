"""Finished trainings of the benchmarks: their settings, scores and weights, and a loop over stacks and seeds."""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from primal_dt.system.files import atomic_write
from primal_dt.training.distributed import Processes

__all__ = ["RESULT", "SavedRun", "load_weights", "num_parameters", "run_stacks", "save_run", "saved_run", "spread"]

RESULT, WEIGHTS = "result.json", "weights.pt"
"""Files of a finished run: its settings and scores, and its weights."""


def spread(values: Sequence[float]) -> str:
    """Format the mean and, for several values, the sample standard deviation: ``98.5 ± 0.7``."""
    deviation = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{deviation}"


@dataclass(frozen=True)
class SavedRun:
    """The result of a finished run."""

    scores: Mapping[str, float]
    """Name -> score, such as the accuracy on a split in percent."""
    commit: str | None
    """The commit of the code that trained it."""
    num_parameters: int
    epoch: int | None = None
    """The epoch or step whose weights were tested, if it is not the last one."""


def save_run(
    folder: Path,
    model: nn.Module,
    settings: Mapping[str, Any],
    run: SavedRun,
    *,
    shape: Mapping[str, Any],
    source: Path | None = None,
) -> None:
    """Save a finished run: its weights, all settings that its result depends on, the result, and the data's folder."""
    with atomic_write(folder / WEIGHTS) as file:
        torch.save(model.state_dict(), file)
    path = None if source is None else str(source.resolve())
    content = {"settings": settings, "shape": shape, **asdict(run), "source": path}
    with atomic_write(folder / RESULT) as file:  # written last: if it exists, the run is complete
        file.write(json.dumps(content, indent=1).encode())


def saved_run(folder: Path, settings: Mapping[str, Any]) -> SavedRun | None:
    """Read the result of a finished run with exactly these settings; None if there is none."""
    path = folder / RESULT
    if not path.is_file():
        return None
    content = json.loads(path.read_text())
    if content.get("settings") != json.loads(json.dumps(settings)):  # other settings, or an earlier version's file
        return None
    return SavedRun(content["scores"], content["commit"], content["num_parameters"], content["epoch"])


def load_weights(folder: Path, model: nn.Module) -> None:
    """Load the weights of a finished run into a model of its shape."""
    model.load_state_dict(torch.load(folder / WEIGHTS, weights_only=True, map_location="cpu"))


def num_parameters(model: nn.Module) -> int:
    """Number of trainable parameters."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


class Runs(Protocol):
    """What the flags of a benchmark say of its trainings."""

    @property
    def attention(self) -> tuple[str, ...]: ...

    @property
    def seeds(self) -> tuple[int, ...]: ...

    @property
    def again(self) -> bool: ...

    def settings(self, attention: str, seed: int) -> dict[str, Any]: ...

    def run_folder(self, attention: str, seed: int) -> Path: ...


def run_stacks(
    config: Runs,
    train: Callable[[str, int], SavedRun],
    shown: Callable[[SavedRun], str],
    processes: Processes,
    needed: Sequence[str] = (),
) -> dict[str, list[SavedRun]]:
    """Train every stack with every seed, unless a finished run has the result: stack -> results.

    Args:
        config: which stacks and seeds.
        train: trains one and saves it.
        shown: a result in a few words.
        processes: the processes that train together.
        needed: scores that a finished run must have.
    """
    runs: dict[str, list[SavedRun]] = {attention: [] for attention in config.attention}
    for seed in config.seeds:
        for attention in config.attention:
            folder = config.run_folder(attention, seed)
            saved = None if config.again else saved_run(folder, config.settings(attention, seed))
            if saved is not None and not set(needed) <= saved.scores.keys():
                saved = None
            run = train(attention, seed) if saved is None else saved
            runs[attention].append(run)
            note = "" if saved is None else f" (from {folder}; --again to retrain)"
            if processes.is_main:
                print(f"{attention}, seed {seed}: {shown(run)}{note}", flush=True)
    return runs
