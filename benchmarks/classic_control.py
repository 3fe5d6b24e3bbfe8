"""Trains ``quick`` for 1,500 steps on data of mixed quality from classic control, and compares it with the data.

Half of the data is from a rule that a beginner would write, with random actions in between; the other half is from
random actions. The policy is evaluated at the headline target, which is the largest return in the data. Its share is
``(policy - random) / (best - random)``: 0 % for random actions, 100 % for the best tenth of the data's episodes.
"""

import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.program import run_program, save_report
from envs.datasets.load import load_dataset
from primal_dt.system.table import format_table

ROOT = Path(__file__).parent.parent
Observation = NDArray[np.floating]


def balance_cart(observation: Observation, random: np.random.Generator) -> int:
    """Push toward the side to which the pole falls; 30 % random."""
    position, speed, angle, spin = observation
    rule = int(0.1 * position + 0.2 * speed + angle + 0.3 * spin > 0)
    return rule if random.random() < 0.7 else int(random.integers(2))


def swing_pendulum(observation: Observation, random: np.random.Generator) -> Observation:
    """Add energy until the top is reached, then hold it there; 20 % random."""
    cosine, sine, spin = observation.tolist()
    angle, energy = math.atan2(sine, cosine), spin**2 / 6 + 5 * (cosine - 1)
    torque = -12 * angle - 3 * spin if abs(angle) < 0.6 else math.copysign(2.0 if energy < 0 else 0.5, spin * -energy)
    rule = min(max(torque, -2.0), 2.0)
    return np.array([rule if random.random() < 0.8 else random.uniform(-2, 2)], np.float32)


def swing_acrobot(observation: Observation, random: np.random.Generator) -> int:
    """Push the second joint in the direction in which it turns; 30 % random."""
    rule = 2 if observation[5] > 0 else 0
    return rule if random.random() < 0.7 else int(random.integers(3))


TASKS: Mapping[str, tuple[str, Callable[..., object]]] = {
    "cartpole": ("CartPole-v1", balance_cart),
    "pendulum": ("Pendulum-v1", swing_pendulum),
    "acrobot": ("Acrobot-v1", swing_acrobot),
}


@dataclass(frozen=True)
class Config:
    """Settings of the benchmark."""

    tasks: tuple[str, ...] = tuple(TASKS)
    """Tasks: cartpole, pendulum, acrobot."""
    data_steps: int = 50_000
    """Steps of each of the two policies."""
    steps: int = 1_500
    """Training steps."""
    episodes: int = 100
    """Episodes of the evaluation."""
    seed: int = 0
    """Seed of the training."""
    out: Path = Path("runs/classic-control")
    """Folder of the runs, and of classic_control.json."""

    def __post_init__(self) -> None:
        if unknown := set(self.tasks) - TASKS.keys():
            raise ValueError(f"tasks must be among {', '.join(TASKS)}, not {', '.join(sorted(unknown))}")


def call(*command: object) -> None:
    """Run a program of the project.

    Raises:
        ValueError: if it fails.
    """
    done = subprocess.run([sys.executable, *map(str, command)], check=False, stdout=subprocess.DEVNULL)
    if done.returncode:
        raise ValueError(f"{' '.join(map(str, command))} ended with exit code {done.returncode}")


def measure(name: str, config: Config) -> dict[str, float]:
    """Record, train and evaluate one task."""
    env_id, policy = TASKS[name]
    rule = f"benchmarks.classic_control:{policy.__name__}"
    parts = {f"classic/{name}/mixed-v0": rule, f"classic/{name}/random-v0": "random"}
    for part, behavior in parts.items():
        flags = ["--policy", behavior, "--env-id", env_id, "--steps", config.data_steps, "--overwrite"]
        call("-m", "envs", "record", part, *flags)
    dataset, run = "+".join(parts), config.out / f"{name}-s{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    flags = ["--steps", config.steps, "--seed", config.seed, "--eval-every-steps", 0, "--out", run.parent]
    before = time.perf_counter()
    call(ROOT / "train.py", "--dataset", dataset, *flags, "--name", run.name)
    seconds = time.perf_counter() - before
    call(ROOT / "evaluate.py", run, "--episodes", config.episodes, "--out", run / "report")
    (group,) = json.loads((run / "report" / "report.json").read_text())["groups"]
    returns = np.sort(load_dataset(dataset).trajectories.returns)
    best = float(returns[-max(1, len(returns) // 10) :].mean())
    low = float(load_dataset(f"classic/{name}/random-v0").trajectories.returns.mean())
    reached = float(group["results"][0]["return_mean"])
    share = 100 * (reached - low) / (best - low)
    return {"random": low, "best": best, "policy": reached, "share": share, "training_seconds": seconds}


def main(config: Config) -> None:
    """Measure each task and print a table."""
    results = {name: measure(name, config) for name in config.tasks}
    rows = [
        [
            TASKS[name][0],
            *(f"{values[key]:.1f}" for key in ("random", "best", "policy")),
            f"{values['share']:.0f} %",
            f"{values['training_seconds'] / 60:.1f}",
        ]
        for name, values in results.items()
    ]
    table = format_table(["environment", "random", "best tenth", "policy", "share", "minutes"], rows)
    print(table)
    save_report(config.out / "classic_control.json", table, {"results": results, "seed": config.seed})


if __name__ == "__main__":
    run_program(main, Config, name="benchmarks.classic_control", description=__doc__)
