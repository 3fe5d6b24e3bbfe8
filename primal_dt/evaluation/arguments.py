"""The command line of ``evaluate.py``. This module must not import torch."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from primal_dt.config import InferenceMode, check_range, check_targets
from primal_dt.evaluation.plan import EpisodePlan

__all__ = ["EvaluateConfig", "parse_evaluation"]

STARTED = time.strftime("%Y%m%d-%H%M%S")


# tyro starts a new line in --help where a field's docstring does, so each line below holds whole sentences.
@dataclass(frozen=True)
class EvaluateConfig:
    """The command line: what to evaluate, and how."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    """Run folders, whose last checkpoint is evaluated, or checkpoint files. Required unless --policy or --pretrained
    is given.
    Also policies that others share: hub:OWNER/NAME or hub:OWNER/NAME@REVISION on the Hugging Face hub, or a folder.
    If there are several paths, those that are not runs are skipped."""
    pretrained: tuple[str, ...] = ()
    """Policies that come with the package, such as hopper. They are evaluated like runs."""
    policy: str | None = None
    """Behavior policy to evaluate instead of runs.
    It is random, a built-in policy such as hopper/medium or hopper/expert, a D4RL file that carries its policy,
    or your own function as module:name."""
    task: str | None = None
    """Task in which --policy acts. Only for --policy.
    It is hopper, halfcheetah or walker2d, in the newest version of the environment, an id such as Hopper-v4, or
    module:Id for your own.
    If not given: the task in the name of a built-in policy. Other policies need this flag."""
    episodes: int = 100
    """Number of episodes for each target return."""
    targets: tuple[float, ...] | Literal["auto"] = ()
    """Target returns in addition to the task's headline target, which is always evaluated. Only for runs.
    They are returns of the environment, not normalized: 1800 for hopper, for example.
    auto: eight targets, from the data's lowest return to above its highest.
    If not given: the targets of the training run."""
    mode: InferenceMode = "window"
    """How the model is run. Only for runs.
    window: exact. Each action is computed from the last K steps, where K is the model's context.
    streaming: faster, because each token is computed once, but a different function after the first K steps.
    With streaming, the results of window are also reported. All layers must be softmax or primal layers."""
    seed: int = 2_000_000
    """Seed of the first episode. Episode i is reset with this seed plus i. With --policy, it also seeds the policy.
    The default gives other episodes than the evaluations during training."""
    envs: int = 64
    """Number of environments that run at the same time. Fewer take less memory.
    On a CPU the results do not depend on it."""
    workers: int | None = None
    """Number of processes that step the environments. 0: the main process steps them.
    If not given: one for every 32 environments, at most one for each CPU core, and 0 if that is fewer than two."""
    device: str = "auto"
    """Device of the model: auto, cpu, cuda, cuda:1 or mps. Only for runs.
    auto: cuda if it is available, else mps, else cpu."""
    env_id: str | None = None
    """Environment to evaluate in, such as Hopper-v4, or module:Id for your own. Only for runs.
    Another version than the one trained for needs --allow-version-mismatch.
    If not given: the environment that the run was trained for."""
    allow_version_mismatch: bool = False
    """Allow --env-id to name another version of the environment than the one trained for.
    Versions differ in physics or reward, so scores are not comparable.
    The report marks results in another version than that of the data. If not given: a mismatch is an error."""
    trust_env: bool = False
    """Allow importing the module that a run names for its environment or a wrapper. It executes its code."""
    compare: tuple[str, str] | None = None
    """Two policies of the report to compare, by their names in its table: --compare primal-plus softmax.
    The report then has their differences on each task and on average, with intervals."""
    fresh: bool = False
    """Run all episodes again, and replace the cached ones. Only for runs.
    If not given: only episodes that are not cached are run."""
    video: bool = False
    """Save an episode at the headline target for each run and mode, as mp4 in the report folder. Only for runs.
    Needs the extra "video": pip install -c constraints.txt -e '.[video]'"""
    json: bool = False
    """Print the report as JSON instead of a table. The report folder is written in either case."""
    out: Path | None = None
    """Report folder. If not given: reports/YYYYMMDD-HHMMSS, by the time of the start."""

    def __post_init__(self) -> None:
        if bool(self.sources) == (self.policy is not None):
            raise ValueError(
                "give runs to evaluate (runs/*, or --pretrained hopper) or a policy (--policy random --task hopper), "
                "not both"
            )
        if self.sources and self.task is not None:
            raise ValueError("--task is for --policy only: a run has its own task; --env-id selects another version")
        is_named = self.policy is not None and "/" in self.policy and not self.policy.endswith((".hdf5", ".h5"))
        if self.policy is not None and self.task is None and not is_named:
            raise ValueError(f"--policy {self.policy} needs --task, such as hopper, halfcheetah or walker2d")
        for_runs = {"--targets": self.targets, "--env-id": self.env_id, "--fresh": self.fresh, "--video": self.video}
        for_runs |= {"--mode streaming": self.mode != "window", "--device": self.device != "auto"}
        if self.policy is not None and (given := [name for name, value in for_runs.items() if value]):
            raise ValueError(f"{given[0]} is for runs only and cannot be used with --policy")
        if self.targets != "auto":
            check_targets(self.targets)
        check_range("episodes", self.episodes, low=1)
        check_range("envs", self.envs, low=1)
        check_range("seed", self.seed)
        check_range("workers", self.workers or 0)

    @property
    def sources(self) -> tuple[str, ...]:
        """What to evaluate: paths of runs, and names of shared policies."""
        return (*map(str, self.runs), *(f"pretrained:{name}" for name in self.pretrained))

    @property
    def folder(self) -> Path:
        """The report folder."""
        return self.out or Path("reports") / STARTED

    @property
    def plan(self) -> EpisodePlan:
        """The episodes to run."""
        return EpisodePlan(self.targets, self.episodes, self.seed, self.envs, self.workers, self.fresh)

    @property
    def modes(self) -> tuple[InferenceMode, ...]:
        """The inference modes to run: streaming is always reported beside window."""
        return ("window",) if self.mode == "window" else ("window", "streaming")


def parse_evaluation(arguments: Sequence[str], *, description: str | None = None) -> EvaluateConfig:
    """Parse the command line, as in ``sys.argv[1:]``. ``description`` is the text at the top of ``--help``."""
    return tyro.cli(EvaluateConfig, args=list(arguments), description=description)
