"""The table of tasks: the constants of each environment, and their sources.

Sources:
    [d4rl]  D4RL's reference returns, ``d4rl/infos.py``; the same for its data sets v0, v1 and v2.
    [dt]    targets, return scale and episode limit in the Decision Transformer's published code (arXiv 2106.01345).
    [paper] ranks in the published script of the Primal-Attention paper's RL experiments (arXiv 2305.19798). They are
            not always the best of its Table 7, where 64 is above 96 on walker2d-medium, and its command for
            hopper-medium names halfcheetah. Ranks above the 60 tokens of a window or the 64 features of a head are
            outside the paper's theory (R <= rank of K).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from envs.errors import DataError
from primal_dt.task import Reference, RunTask

__all__ = ["ENVIRONMENTS", "ActionBox", "Environment", "Task", "task_named", "task_of"]

NEWEST_VERSION = "v5"


@dataclass(frozen=True)
class ActionBox:
    """The bounds of an environment's actions, the same for each entry."""

    low: float
    high: float


UNIT_BOX = ActionBox(-1.0, 1.0)
D4RL = "D4RL, d4rl/infos.py"


@dataclass(frozen=True)
class Environment:
    """An environment, independent of its version."""

    name: str
    """The name in data set names, such as ``hopper``."""
    gymnasium_name: str
    """Gymnasium's name without the version, such as ``Hopper``."""
    state_width: int
    action_width: int
    reference: Reference
    """The returns for normalization [d4rl]."""
    targets: tuple[float, ...]
    """The target returns [dt]. The first is the headline target: fixed here, never the best of several."""
    paper_rank: Mapping[str, int]
    """The published rank of the primal layer for each tier [paper]."""
    return_scale: float = 1000.0
    """The divisor of returns [dt]."""
    episode_limit: int = 1000
    """The maximum number of steps per episode [dt]."""
    reference_source: str = D4RL
    """The source of the reference returns."""
    action_box: ActionBox = UNIT_BOX
    """The bounds of each entry of an action."""


ENVIRONMENTS: Mapping[str, Environment] = {
    environment.name: environment
    for environment in (
        Environment(
            name="hopper",
            gymnasium_name="Hopper",
            state_width=11,
            action_width=3,
            reference=Reference(-20.272305, 3234.3),
            targets=(3600.0, 1800.0),
            paper_rank={"medium-expert": 64, "medium": 96, "medium-replay": 64},
        ),
        Environment(
            name="halfcheetah",
            gymnasium_name="HalfCheetah",
            state_width=17,
            action_width=6,
            reference=Reference(-280.178953, 12135.0),
            targets=(12000.0, 6000.0),
            paper_rank={"medium-expert": 96, "medium": 64, "medium-replay": 32},
        ),
        Environment(
            name="walker2d",
            gymnasium_name="Walker2d",
            state_width=17,
            action_width=6,
            reference=Reference(1.629008, 4592.3),
            targets=(5000.0, 2500.0),
            paper_rank={"medium-expert": 96, "medium": 96, "medium-replay": 96},
        ),
    )
}


@dataclass(frozen=True)
class Task:
    """An environment in one version, and the data set's tier, if it has one."""

    environment: Environment
    env_id: str
    tier: str | None = None

    def run_task(
        self,
        targets: Sequence[float] | None = None,
        *,
        dataset: str = "no data set",
        data_env_ids: Iterable[str] = (),
        fingerprint: str = "",
        data_returns: Sequence[float] = (),
    ) -> RunTask:
        """The task as a run stores it, with the name, the environments and the digest of the data that it trains on.

        The headline target always comes first. ``targets`` replaces the table's other targets. ``data_returns`` are
        percentiles of the returns of the data's episodes.
        """
        every = (self.environment.targets[0], *(targets or self.environment.targets))
        return RunTask(
            env_id=self.env_id,
            tier=self.tier,
            dataset=dataset,
            data_env_ids=tuple(sorted(set(data_env_ids))),
            fingerprint=fingerprint,
            targets=tuple(dict.fromkeys(every)),
            reference=self.environment.reference,
            data_returns=tuple(data_returns),
        )

    @property
    def paper_rank(self) -> int | None:
        """The paper's rank for this task, or None if the paper does not include it."""
        return None if self.tier is None else self.environment.paper_rank.get(self.tier)


def task_of(env_id: str, tier: str | None = None, *, where: str | None = None) -> Task:
    """The task of an environment id such as ``Hopper-v5``.

    Args:
        env_id: the environment id, with a version from v2 to v5.
        tier: the data set's tier.
        where: the file that names the environment, for the error message.

    Raises:
        DataError: if the environment is not in the table.
    """
    match = re.fullmatch(r"(?P<name>[A-Za-z0-9]+)-v[2-5]", env_id)
    for environment in ENVIRONMENTS.values():
        if match is not None and match["name"] == environment.gymnasium_name:
            return Task(environment, env_id, tier)
    known = ", ".join(f"{environment.gymnasium_name}-v5" for environment in ENVIRONMENTS.values())
    prefix = "" if where is None else f"{where}: "
    raise DataError(f"{prefix}there is no task for the environment {env_id!r}: it must be an id such as {known}")


def task_named(name: str) -> Task:
    """The task of a name such as ``hopper`` (the newest version) or an id such as ``Hopper-v4``.

    Raises:
        DataError: if the environment is not in the table.
    """
    if name in ENVIRONMENTS:
        return task_of(f"{ENVIRONMENTS[name].gymnasium_name}-{NEWEST_VERSION}")
    if "-" not in name:
        raise DataError(
            f"there is no task {name!r}: it must be one of {', '.join(ENVIRONMENTS)}, or an id such as Hopper-v4"
        )
    return task_of(name)
