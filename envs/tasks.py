"""The tasks, as a table: what belongs to an environment or a data set, and where each number comes from.

Sources:
    [d4rl]  reference returns of D4RL, ``d4rl/infos.py``; the same for its data sets v0, v1 and v2.
    [dt]    targets, return scale and episode limit of the Decision Transformer's published code (arXiv 2106.01345).
    [paper] ranks of the Primal-Attention paper's RL experiments (arXiv 2305.19798, Table 7 and appendix).
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
    """The actions that an environment takes, in each entry."""

    low: float
    high: float


UNIT_BOX = ActionBox(-1.0, 1.0)
D4RL = "D4RL, d4rl/infos.py"


@dataclass(frozen=True)
class Environment:
    """An environment, whatever its version."""

    name: str
    """As data sets call it."""
    gymnasium_name: str
    """As gymnasium calls it, without the version."""
    state_width: int
    action_width: int
    reference: Reference
    """[d4rl]."""
    targets: tuple[float, ...]
    """[dt], returns that a policy is asked for. The first is the headline: fixed here, never the best of several."""
    paper_rank: Mapping[str, int]
    """[paper], tier -> rank of the primal layer."""
    return_scale: float = 1000.0
    """[dt], what returns are divided by."""
    episode_limit: int = 1000
    """[dt], steps."""
    reference_source: str = D4RL
    """Where the reference returns come from."""
    action_box: ActionBox = UNIT_BOX
    """What it takes, in each entry of an action."""


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
    """An environment in one version, and the tier of the data, if it has one."""

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
    ) -> RunTask:
        """What a run knows of its task.

        Args:
            targets: returns to ask for beside the headline, which always comes first. If not given: the table's.
            dataset: what it is trained on.
            data_env_ids: the environments that the data was recorded in.
            fingerprint: the digest of the data's content.
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
        )

    @property
    def paper_rank(self) -> int | None:
        """The paper's rank for it, if the paper has the task."""
        return None if self.tier is None else self.environment.paper_rank.get(self.tier)


def task_of(env_id: str, tier: str | None = None, *, where: str | None = None) -> Task:
    """The task of an environment id such as ``Hopper-v5``.

    Args:
        env_id: with its version, from v2 to v5.
        tier: of the data.
        where: who says so, for the error.

    Raises:
        DataError: if the table has no such environment.
    """
    match = re.fullmatch(r"(?P<name>[A-Za-z0-9]+)-v[2-5]", env_id)
    for environment in ENVIRONMENTS.values():
        if match is not None and match["name"] == environment.gymnasium_name:
            return Task(environment, env_id, tier)
    known = ", ".join(f"{environment.gymnasium_name}-v5" for environment in ENVIRONMENTS.values())
    prefix = "" if where is None else f"{where}: "
    raise DataError(f"{prefix}there is no task for the environment {env_id!r}: it must be one such as {known}")


def task_named(name: str) -> Task:
    """The task of ``hopper`` (in the newest version) or ``Hopper-v4``.

    Raises:
        DataError: if the table has no such environment.
    """
    if name in ENVIRONMENTS:
        return task_of(f"{ENVIRONMENTS[name].gymnasium_name}-{NEWEST_VERSION}")
    if "-" not in name:
        raise DataError(f"there is no task {name!r}: it must be one of {', '.join(ENVIRONMENTS)}, or such as Hopper-v4")
    return task_of(name)
