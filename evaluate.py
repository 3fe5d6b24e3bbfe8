"""Evaluate trained policies: normalized returns over seeds, as a table and as a report.

python evaluate.py runs/hopper* groups runs that differ in their seed alone, runs the episodes that have not been run
yet, and writes report.md, report.csv, report.json and plots. The ends of the scale: python evaluate.py --policy random
--task hopper, or --policy hopper/expert.
"""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

import tyro
from tqdm import tqdm

from envs.episodes import DataError
from envs.evaluated import Plan, Trained, evaluate_behaviour, evaluate_trained, open_trained
from envs.evaluation import Watch
from envs.published import TABLE_4
from envs.tasks import task_named
from envs.video import record_video
from primal_dt.checkpoint import CheckpointError
from primal_dt.distributed import choose_device
from primal_dt.inference import InferenceMode
from primal_dt.plots import plot_report
from primal_dt.report import Evaluated, Report
from primal_dt.report_files import FEW, results_table, write_report
from primal_dt.rollout import Episode, RolloutError

EXIT_MISTAKE, EXIT_INTERRUPTED = 1, 130


@dataclass(frozen=True)
class Config:
    """What to evaluate, and how."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    """Folders of runs, whose last checkpoints are taken; or files of checkpoints."""
    policy: str | None = None
    """Instead of runs: random, hopper/medium, hopper/expert, ..., or a function of your own as module:name."""
    task: str | None = None
    """Where --policy acts: hopper, halfcheetah, walker2d, or with a version, such as Hopper-v4."""
    episodes: int = 100
    """For each target."""
    targets: tuple[float, ...] = ()
    """Returns to ask for besides the task's headline, which is always evaluated. If not given: the training's."""
    mode: InferenceMode = "window"
    """window is exact; streaming is faster and another function: its score is shown beside that of window."""
    seed: int = 2_000_000
    """Episode i is seeded with this plus i: other episodes than those that are watched in training."""
    envs: int = 64
    """Environments that run at a time. The result does not depend on it."""
    workers: int | None = None
    """Processes that step them. If not given: one for every 16, up to the number of cores."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps."""
    env_id: str | None = None
    """Another version of the environment than the data's; needs --allow-version-mismatch."""
    allow_version_mismatch: bool = False
    """Evaluate in another version than the data's. The report carries a warning."""
    fresh: bool = False
    """Run again what has been run before."""
    video: bool = False
    """Save an episode for each target as mp4, in the report's folder. Needs the extra video."""
    json: bool = False
    """Print the report as JSON instead of the table."""
    out: Path | None = None
    """Folder of the report. If not given: reports/<time>."""

    def __post_init__(self) -> None:
        if bool(self.runs) == (self.policy is not None):
            raise ValueError("give runs to evaluate, such as runs/hopper*; or --policy random --task hopper")
        if self.policy is not None and self.task is None and "/" not in self.policy:
            raise ValueError(f"--policy {self.policy} needs --task: hopper, halfcheetah or walker2d")
        for name, value in (("episodes", self.episodes), ("envs", self.envs), ("seed", self.seed + 1)):
            if value < 1:
                raise ValueError(f"{name} ({value - (name == 'seed')}) is too small")

    @property
    def plan(self) -> Plan:
        """The episodes."""
        return Plan(self.targets, self.episodes, self.seed, self.envs, self.workers, self.fresh)


def main() -> int:
    """Parse, evaluate, report; and say what went wrong, if anything did."""
    try:
        config = tyro.cli(Config, description=__doc__)
        evaluated = evaluate_policy(config) if config.policy is not None else evaluate_runs(config)
        publish(Report.of(evaluated, TABLE_4), config)
    except (DataError, CheckpointError, RolloutError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_MISTAKE
    except KeyboardInterrupt:
        print("stopped; the episodes that had ended are kept", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0


def evaluate_runs(config: Config) -> list[Evaluated]:
    """Open all checkpoints, so that what is wrong is told at once; then run them one after the other."""
    device = choose_device(config.device)
    every = [
        open_trained(path, env_id=config.env_id, allow_version_mismatch=config.allow_version_mismatch)
        for path in config.runs
    ]
    modes: list[InferenceMode] = ["window"] if config.mode == "window" else ["window", "streaming"]
    evaluated = []
    for number, trained in enumerate(every, 1):
        for mode in modes:
            with Progress(f"{number}/{len(every)} {trained.name}, {mode}") as bar:
                evaluated.append(evaluate_trained(trained, config.plan, mode=mode, device=device, watches=[bar]))
        if config.video:
            film(trained, evaluated[-1], config)
    return evaluated


def evaluate_policy(config: Config) -> list[Evaluated]:
    """A behaviour policy."""
    name = str(config.policy)
    task = task_named(config.task or name.partition("/")[0])
    with Progress(f"{name} in {task.env_id}") as bar:
        return [evaluate_behaviour(name, task, config.plan, watches=[bar])]


def film(trained: Trained, evaluated: Evaluated, config: Config) -> None:
    """An episode for each target."""
    for target in dict.fromkeys(episode.target for episode in evaluated.episodes):
        path = folder_of(config) / f"{trained.name}-target-{target:g}.mp4"
        record_video(trained.checkpoint.policy(), trained.task, path, target=target, seed=config.seed)
        print(f"video: {path}", file=sys.stderr)


def publish(report: Report, config: Config) -> None:
    """Print the table, write the files."""
    folder = folder_of(config)
    try:
        plots = plot_report(report, folder)
    except ImportError:
        plots = []
        print("no plots: they need matplotlib, pip install -c constraints.txt -e '.[plots]'", file=sys.stderr)
    write_report(report, folder, plots=plots)
    if config.json:
        print(json.dumps(report.as_json(), indent=1))
        return
    print(f"\n{results_table(report)}\n\n* headline target", end="")
    few = any(result.is_few for group in report.groups for result in group.results)
    print(f"; {FEW} fewer than 3 seeds or 10 episodes" if few else "")
    for warning in report.warnings:
        print(f"warning: {warning}")
    print(f"report: {folder / 'report.md'}")


def folder_of(config: Config) -> Path:
    """Where the report goes."""
    return config.out or Path("reports") / STARTED


class Progress(Watch):
    """A bar with the time that is left, at most, in a terminal; a line at the end elsewhere."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._limit = self._num_episodes = 0
        self._begin = time.monotonic()
        self._bar = tqdm(desc=name, unit=" steps", disable=not sys.stderr.isatty(), leave=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
        if self._num_episodes:
            seconds = time.monotonic() - self._begin
            print(f"{self._name}: {self._num_episodes} episodes in {seconds:.1f} s", file=sys.stderr)
        else:
            print(f"{self._name}: nothing new to run", file=sys.stderr)

    def begin(self, num_episodes: int, episode_limit: int) -> None:
        """Every episode counts as if it had the most steps that it can have."""
        self._limit = episode_limit
        self._bar.reset(total=num_episodes * episode_limit)

    def step(self, running: int) -> None:
        """Environments that still run."""
        self._bar.set_postfix_str(f"{running} run", refresh=False)
        self._bar.update(running)

    def end_episode(self, episode: Episode) -> None:
        """What it was spared; the step that ended it is not counted among those of running environments."""
        self._num_episodes += 1
        self._bar.update(self._limit - episode.length + 1)


STARTED = time.strftime("%Y%m%d-%H%M%S")

if __name__ == "__main__":
    sys.exit(main())
