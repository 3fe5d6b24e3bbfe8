"""The task of a data set: its environment, spaces and reference returns.

They are taken from the user's word, the table of tasks, the data's metadata, the environment itself or the numbers, in
an order that each function states.
"""

from contextlib import suppress
from dataclasses import dataclass, replace

from envs.datasets.checks import EpisodeSource
from envs.datasets.d4rl import D4rlFile
from envs.datasets.minari import MinariData
from envs.datasets.names import DatasetName, parse_name
from envs.datasets.suites import name_of_file
from envs.errors import DataError
from envs.specifications import (
    check_makeable,
    plain_where_equal,
    registered,
    same_environment,
)
from envs.tasks import Environment, Spaces, Task, environment_of, task_of
from primal_dt.config import Config, check_reference
from primal_dt.system.modules import import_from_here
from primal_dt.task import Reference, Specification

__all__ = ["DataOptions", "check_early", "common_task", "environment_recorded_in", "is_described", "task_of_part"]


@dataclass(frozen=True)
class DataOptions:
    """How a data set is read, and the environment that its policies act in."""

    env_id: str | None = None
    """The environment that policies act in. If the data does not name its environment, this is also the data's."""
    mix_versions: bool = False
    """Whether the environments of the parts may differ from each other and from ``env_id``."""
    trust_env: bool = False
    """Whether modules that the data names may be imported."""
    trust_env_id: bool = True
    """Whether the module in ``env_id`` may be imported: it is the user's own word, unless it was read from a file."""
    clip_actions: bool = False
    """Whether actions out of bounds are clipped. Otherwise they are an error."""
    reference: tuple[float, float] | None = None
    """The returns of scores 0 and 100. If None: the table's, else the metadata's."""
    needs_environment: bool = True
    """Whether policies must act, so that data without an environment is an error."""

    def __post_init__(self) -> None:
        try:
            check_reference(self.reference)
        except ValueError as error:
            raise DataError(str(error)) from error

    @classmethod
    def of(cls, config: Config) -> "DataOptions":
        """The options of a training run."""
        return cls(
            env_id=config.env_id,
            mix_versions=config.mix_versions,
            trust_env=config.trust_env,
            clip_actions=config.clip_actions,
            reference=config.reference,
            needs_environment=config.evaluation.eval_every_steps > 0,
        )

    @property
    def specification(self) -> Specification | None:
        """The environment that the user names."""
        return None if self.env_id is None else Specification(self.env_id)


def task_of_part(name: str, source: EpisodeSource | None, options: DataOptions) -> Task:
    """The task of one part of a data set."""
    known = _known(name, source)
    named = (source and source.specification) or (known and known.specification)
    own = _plain(named, trust=options.trust_env) if named else options.specification
    trusted = options.trust_env
    if own is not None and options.specification is not None and same_environment(own, options.specification):
        own, trusted = options.specification, options.trust_env_id
    if own is None and options.needs_environment:
        where = name if source is None else source.path
        if known is not None and known.known is not None:
            raise DataError(
                f"{where}: policies cannot act in an environment of today: {known.known.fit.why_not}. "
                "Train without evaluations (--eval-every-steps 0)"
            )
        raise DataError(
            f"{where} does not name its environment: pass --env-id, such as --env-id Hopper-v5 "
            "(Hopper-v4 for D4RL's data), or train without evaluations (--eval-every-steps 0)"
        )
    tier = None if known is None else known.tier
    if source is None:
        assert known is not None
        assert known.task is not None
        return known.task
    environment = _environment(source, own, known, trusted, options)
    widths = (environment.state_width, environment.action_width)
    if source.widths != widths:
        raise DataError(
            f"{source.path} has observations of width {source.widths[0]} and actions of width {source.widths[1]}, "
            f"but {own} has {widths[0]} and {widths[1]}"
        )
    return Task(_with_reference(environment, source, known, own, options), own, tier, trusted)


def check_early(specification: Specification, options: DataOptions) -> None:
    """Check before a download that policies will be able to act."""
    if options.needs_environment and options.env_id is None:
        check_makeable(plain_where_equal(specification), trust=options.trust_env)


def is_described(name: str) -> bool:
    """Whether the task of a data set is known before it is read."""
    known = parse_name(name)
    return known is not None and known.task is not None


def _known(name: str, source: EpisodeSource | None) -> DatasetName | None:
    """The table's entry of a data set: by its name, or by the name of a D4RL file that does not name an environment."""
    known = parse_name(name)
    if known is None and isinstance(source, D4rlFile) and source.env_id is None:
        in_suite = name_of_file(source.path.name)
        known = None if in_suite is None else parse_name(in_suite.name)
    return known


def _plain(specification: Specification, *, trust: bool = False) -> Specification:
    """A specification without what equals the registry's entry."""
    with suppress(DataError):  # it is reported if the environment is created
        known = registered(specification.env_id, trust=trust)  # imports gymnasium-robotics if it is from there
        if known is None and trust and specification.entry_point is not None:
            with suppress(Exception):
                import_from_here(specification.entry_point.partition(":")[0])
    return plain_where_equal(specification)


def _environment(
    source: EpisodeSource,
    specification: Specification | None,
    known: DatasetName | None,
    trusted: bool,
    options: DataOptions,
) -> Environment:
    """The environment of a part: from the table, the data's description, the environment itself or the numbers."""
    if source.spaces is not None:
        return environment_of(specification, source.spaces)
    if known is not None and known.task is not None and specification == known.specification:
        return known.task.environment
    if specification is not None and (options.needs_environment or options.env_id is not None):
        return task_of(specification, trusted=trusted).environment
    return environment_of(specification, Spaces(source.widths[0], source.guess_actions()))


def _with_reference(
    environment: Environment,
    source: EpisodeSource,
    known: DatasetName | None,
    specification: Specification | None,
    options: DataOptions,
) -> Environment:
    """The environment with the reference returns of the user, the table or the metadata, in this order."""
    if known is not None and known.known is not None and specification == known.specification:
        environment = replace(environment, reference=environment.reference or known.known.reference)
    if environment.reference is None and source.reference is not None:
        environment = replace(environment, reference=source.reference, reference_source="the data's metadata")
    return _with_users_reference(environment, options)


def common_task(tasks: list[tuple[str, Task]], options: DataOptions) -> Task | None:
    """The task of a policy that is trained on these parts; None if there are no parts.

    Raises:
        DataError: if the parts are from different environments, or from different versions without ``mix_versions``,
            or if they have different reference returns.
    """
    if not tasks:
        return None
    wanted = list(tasks)
    if (user := options.specification) is not None:
        own = next((task for _, task in tasks if task.specification == user), None)
        wanted.append(("--env-id", own or _user_task(user, options)))
    kinds = {(task.environment.gymnasium_name.lower(), task.environment.spaces) for _, task in wanted}
    versions = {str(task.specification) for _, task in wanted}
    listed = ", ".join(f"{name} {task.specification or 'without an environment'}" for name, task in wanted)
    if len(kinds) > 1:
        raise DataError(f"all parts must be from one environment, but these are from several: {listed}")
    if len(versions) > 1 and not options.mix_versions:
        raise DataError(
            "versions and variants of an environment differ in physics, reward or ends of episodes, and these are "
            f"mixed: {listed}. Omit --env-id or make the versions agree; if mixing is intended, pass --mix-versions"
        )
    if len(versions) > 1 and user is None:
        raise DataError(f"data from several versions of an environment needs --env-id, the version to act in: {listed}")
    references = {task.environment.reference for _, task in tasks}
    if len(references) > 1:
        values = ", ".join(f"{name} ({task.environment.reference or 'none'})" for name, task in tasks)
        raise DataError(f"the parts have different reference returns: {values}. Pass --reference LOW HIGH")
    tiers = {task.tier for _, task in tasks}
    tier = "medium-expert" if tiers == {"medium", "expert"} else tiers.pop() if len(tiers) == 1 else None
    return replace(wanted[-1][1], tier=tier)


def _user_task(user: Specification, options: DataOptions) -> Task:
    """The task of the environment that the user names, which is not that of the data."""
    task = task_of(user, trusted=options.trust_env_id)
    return replace(task, environment=_with_users_reference(task.environment, options))


def _with_users_reference(environment: Environment, options: DataOptions) -> Environment:
    if options.reference is None:
        return environment
    return replace(environment, reference=Reference(*options.reference), reference_source="--reference")


def environment_recorded_in(source: EpisodeSource, own: Task) -> Specification | None:
    """The environment that a part was recorded in, which may differ from the one that its metadata evaluates in."""
    if isinstance(source, MinariData) and source.recorded_in is not None and source.specification is not None:
        recorded_in = _plain(source.recorded_in)
        if not same_environment(recorded_in, source.specification):
            return recorded_in
    return own.specification
