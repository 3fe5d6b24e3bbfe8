"""Summary statistics of a data set, and a histogram of its returns."""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from envs.datasets.load import Dataset
from envs.errors import DataError
from primal_dt.evaluation.score import normalized
from primal_dt.system.files import atomic_write

__all__ = ["describe", "plot_returns"]

QUANTILES = {"least": 0.0, "10 %": 0.1, "25 %": 0.25, "median": 0.5, "75 %": 0.75, "90 %": 0.9, "most": 1.0}


def describe(dataset: Dataset) -> dict[str, Any]:
    """Summarize a data set as a JSON-serializable dictionary."""
    data, task = dataset.trajectories, dataset.task
    run_task, reference = dataset.run_task(), task.environment.reference
    return {
        "name": dataset.name,
        "environment": run_task.environment_text or "none",
        "unit": run_task.unit,
        "episodes": len(data.lengths),
        "steps": int(data.offsets[-1]),
        "cut_off_episodes": sum(part.cut_off_episodes for part in dataset.parts),
        "state_width": data.observations.shape[1],
        "action_width": data.actions.shape[1],
        "returns": _summary(data.returns),
        "scores": None if reference is None else _summary(normalized(data.returns, reference)),
        "lengths": _summary(data.lengths),
        "fingerprint": dataset.store.fingerprint,
        "notes": [note for part in dataset.parts for note in part.notes],
        "actions": str(task.environment.actions),
        "targets": list(run_task.targets),
        "target_source": run_task.target_source,
        "return_scale": dataset.return_scale,
        "reference": None if reference is None else asdict(reference) | {"source": run_task.reference_source},
        "parts": [
            {"name": part.name, "path": str(part.path), "environment": part.env_id, **part.about}
            for part in dataset.parts
        ],
    }


def _summary(values: ArrayLike) -> dict[str, float]:
    numbers = np.asarray(values, np.float64)
    quantiles = np.quantile(numbers, list(QUANTILES.values()))
    spread = {"mean": float(numbers.mean()), "std": float(numbers.std())}
    return spread | dict(zip(QUANTILES, quantiles.tolist(), strict=True))


def plot_returns(dataset: Dataset, path: Path) -> None:
    """Save a histogram of the episodes' returns, with the normalized return as a second axis.

    Raises:
        DataError: if matplotlib is not installed, or does not support the file's suffix.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise DataError("--plot needs matplotlib: install the extra primal-dt[plots]") from error
    reference = dataset.task.environment.reference
    returns = dataset.trajectories.returns
    figure = Figure(figsize=(6.0, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.hist(returns, bins=40, color="#4477aa")
    axes.axvline(float(returns.mean()), color="#222222", linewidth=1, label=f"mean {returns.mean():.0f}")
    axes.set(xlabel="episode return", ylabel="episodes", title=f"{dataset.name} ({len(returns)} episodes)")
    axes.legend(frameon=False)
    if reference is not None:
        low, span = reference.random_return, reference.expert_return - reference.random_return
        score = axes.secondary_xaxis(
            "top", functions=(partial(normalized, reference=reference), lambda s: np.asarray(s) * span / 100 + low)
        )
        score.set_xlabel("normalized return")
    kinds = figure.canvas.get_supported_filetypes()
    if path.suffix[1:] not in kinds:
        raise DataError(f"--plot must end in one of .{', .'.join(sorted(kinds))}, not {path.name!r}")
    with atomic_write(path) as file:
        figure.savefig(file, dpi=150, format=path.suffix[1:])
