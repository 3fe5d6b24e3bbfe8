"""Specifications of environments: an id with arguments, an episode limit and wrappers, as Minari's metadata has them.

Reading a specification executes nothing that it names. Creating its environment imports only gymnasium,
gymnasium-robotics and gymnasium's own wrappers; any other module is imported only if the user trusts it.
"""

import importlib
import importlib.util
import io
import json
import re
import warnings
from contextlib import redirect_stderr
from dataclasses import replace
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec

from envs.errors import DataError
from primal_dt.system.modules import import_from_here
from primal_dt.task import NO_LIMIT, OWN_WRAPPERS, Specification, Wrapper

__all__ = [
    "check_makeable",
    "make_specified",
    "parse_specification",
    "plain_where_equal",
    "registered",
    "same_environment",
]

ROBOTICS = re.compile(r"(AdroitHand|AntMaze_|PointMaze_|FrankaKitchen|Fetch|HandReach|HandManipulate)\w*-v\d+")
"""Ids of gymnasium-robotics, which are in the registry once it is imported."""
TRUSTED = ("gymnasium.", "gymnasium_robotics.")
"""Packages whose environments are those of the registry, wherever their classes are in a release."""
NO_EFFECT = ("RecordVideo", "RecordEpisodeStatistics", "HumanRendering", "RenderCollection")
"""Wrappers of gymnasium that only watch: they are left out."""
STATEFUL = dict.fromkeys(
    ("NormalizeObservation", "NormalizeReward"), "its running statistics at the time of the recording are not known"
)
"""Wrapper -> why it cannot be restored."""
COMPATIBLE = "GymV2"
"""Start of the ids of environments that load an environment of OpenAI Gym, with its module, by an argument."""
NO_BEHAVIOR = ("render_mode", "width", "height", "camera_name", "camera_id", "default_camera_config")
"""Arguments that change pictures only."""
JOINT_TYPES = (
    "gymnasium-robotics 1.4.2 finds no joint type of MuJoCo 3.12 or newer equal to a number, which its arms need: "
    "pip install 'mujoco<3.12'"
)
Env = gymnasium.Env[Any, Any]


def registered(env_id: str, *, trust: bool = False) -> EnvSpec | None:
    """The registry's entry of an environment id; None if there is none.

    Args:
        env_id: the id, such as ``Hopper-v5`` or ``my_module:Walk-v0``.
        trust: whether the module of ``my_module:Walk-v0`` may be imported.

    Raises:
        DataError: if the module is not trusted or cannot be imported, or if gymnasium-robotics is not installed.
    """
    module, _, name = env_id.rpartition(":")
    if module:
        _require_trust(env_id, module, trust)
        _import(module, f"the environment {env_id}")
    if name not in gymnasium.registry and ROBOTICS.fullmatch(name):
        if importlib.util.find_spec("gymnasium_robotics") is None:
            raise DataError(
                f"the environment {name} is in gymnasium-robotics, which is not installed: "
                "pip install -c constraints.txt -e '.[robotics]'"
            )
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):  # it prints news about its environments
            warnings.simplefilter("ignore")
            gymnasium.register_envs(importlib.import_module("gymnasium_robotics"))
    return gymnasium.registry.get(name)


def parse_specification(text: str, where: str) -> Specification:
    """Read a specification in gymnasium's JSON form, as Minari stores it. Nothing that it names is imported.

    Raises:
        DataError: if it is not such a specification.
    """
    try:
        content = json.loads(text)
        wrappers = tuple(
            Wrapper(_text(each["name"]), _text(each["entry_point"]), _recorded(each["kwargs"]))
            for each in content.get("additional_wrappers") or ()
            if not (each["name"] in NO_EFFECT and str(each["entry_point"]).startswith(OWN_WRAPPERS))
        )
        limit = content.get("max_episode_steps", "the registry's")
        limit = None if isinstance(limit, str) else NO_LIMIT if limit is None else int(limit)
        specification = Specification(
            env_id=_text(content["id"]),
            arguments=_sorted(content.get("kwargs")),
            max_episode_steps=limit,
            wrappers=wrappers,
            entry_point=None if content.get("entry_point") is None else _text(content["entry_point"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{where}: the specification of the environment cannot be read: {error!r}") from error
    if limit is not None and limit < 1 and limit != NO_LIMIT:
        raise DataError(f"{where}: the episode limit must be at least 1, not {limit}")
    return specification


def plain_where_equal(specification: Specification) -> Specification:
    """Leave out what equals the registry's entry, so that a plain environment has a plain specification."""
    known = gymnasium.registry.get(specification.bare_id)
    if known is None:
        return specification
    arguments = {
        name: value
        for name, value in json.loads(specification.arguments).items()
        if name not in known.kwargs or known.kwargs[name] != value
    }
    limit = specification.max_episode_steps
    replaces = specification.entry_point is not None and not (
        specification.entry_point == _entry_point(known) or specification.entry_point.startswith(TRUSTED)
    )
    return replace(
        specification,
        entry_point=None if (specification.entry_point or "").startswith(TRUSTED) else specification.entry_point,
        arguments=_sorted(arguments),
        max_episode_steps=None if limit == (known.max_episode_steps or NO_LIMIT) else limit,
        replaces=specification.replaces or replaces,
    )


def _entry_point(known: EnvSpec) -> str:
    """The class of an environment as ``module:name``."""
    made = known.entry_point
    return made if isinstance(made, str) else f"{getattr(made, '__module__', '')}:{getattr(made, '__qualname__', '')}"


def same_environment(one: Specification, two: Specification) -> bool:
    """Whether two specifications give the same environment, wherever its module is."""
    bare = [replace(each, env_id=each.bare_id) for each in map(plain_where_equal, (one, two))]
    return bare[0] == bare[1]


def make_specified(specification: Specification, *, trust: bool = False, **options: Any) -> Env:
    """Create the environment of a specification.

    Args:
        specification: the specification.
        trust: whether modules that only the data names may be imported.
        options: passed to ``gymnasium.make``, such as ``render_mode``.

    Raises:
        DataError: if it cannot be created, or would import a module that is not trusted.
    """
    known = check_makeable(specification, trust=trust)
    made: str | EnvSpec = specification.bare_id
    if known is None:
        _import(str(specification.entry_point).partition(":")[0], f"the environment {specification}")
        if specification.replaces or specification.bare_id not in gymnasium.registry:
            made = EnvSpec(specification.bare_id, entry_point=specification.entry_point)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "out of date": D4RL's data needs -v4; precision of wrappers' bounds
            settings = {"max_episode_steps": specification.max_episode_steps, "disable_env_checker": True}
            env: Env = gymnasium.make(made, **settings | json.loads(specification.arguments) | options)
            for wrapper in specification.wrappers:
                env = _load(wrapper.entry_point)(env, **json.loads(wrapper.arguments))
    # An environment's constructor may raise anything, in particular for arguments that this version does not take.
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        if isinstance(error, AssertionError) and ROBOTICS.fullmatch(specification.bare_id):
            said += JOINT_TYPES
        raise DataError(f"the environment {specification} cannot be created: {said}") from error
    return env


def check_makeable(specification: Specification, *, trust: bool = False) -> EnvSpec | None:
    """Check that an environment may be created, without creating it.

    Returns:
        The registry's entry; None if the environment is of the class that the data names.

    Raises:
        DataError: if it is not known, if it would import a module that is not trusted, or if a wrapper cannot be
            restored.
    """
    known = None if specification.replaces else registered(specification.env_id, trust=trust)
    if known is None and specification.entry_point is None:
        raise DataError(_unknown(specification.env_id))
    if known is None:
        _require_trust(str(specification), str(specification.entry_point), trust)
    if specification.bare_id.startswith(COMPATIBLE):
        _require_trust(str(specification), "the environment in its arguments", trust)
    for wrapper in specification.wrappers:
        reason = "its arguments were not recorded" if wrapper.arguments == "null" else STATEFUL.get(wrapper.name)
        if reason is not None:
            raise DataError(
                f"the wrapper {wrapper.name} of {specification.env_id} cannot be restored, because {reason}: choose an "
                "environment with --env-id and --mix-versions, or train without evaluations (--eval-every-steps 0)"
            )
        if not wrapper.entry_point.startswith(OWN_WRAPPERS):
            _require_trust(f"the wrapper {wrapper.name}", wrapper.entry_point, trust)
    return known


def _import(module: str, what: str) -> None:
    """Import a module that the user names. Whatever it raises becomes a message."""
    try:
        import_from_here(module)
    except Exception as error:
        raise DataError(
            f"{what}: the module {module} cannot be imported: {type(error).__name__}: {error}. Run from its folder, or "
            "install it"
        ) from error


def _unknown(env_id: str) -> str:
    module, _, name = env_id.rpartition(":")
    if module:
        return f"the module {module} does not register an environment {name}"
    name = name.partition("-v")[0]
    alike = sorted(each for each in gymnasium.registry if each.partition("-v")[0].lower() == name.lower())
    hint = f"there are {', '.join(alike)}" if alike else "name its module as well: --env-id my_module:MyEnv-v0"
    return f"the environment {env_id} is not registered: {hint}"


def _require_trust(what: str, entry_point: str, trust: bool) -> None:
    if not trust:
        raise DataError(
            f"{what} would import {entry_point}, which only the data names: if you trust the data, add --trust-env; "
            "or name the environment yourself with --env-id"
        )


def _load(entry_point: str) -> Any:
    module, _, name = entry_point.partition(":")
    return getattr(import_from_here(module), name)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} must be a text")
    return value


def _recorded(arguments: Any) -> str:
    """The arguments of a wrapper. Gymnasium writes null for a wrapper that does not record them."""
    return "null" if arguments is None else _sorted(arguments)


def _sorted(arguments: Any) -> str:
    if not isinstance(arguments or {}, dict):
        raise TypeError(f"arguments must be a mapping, not {arguments!r}")
    return json.dumps({k: v for k, v in (arguments or {}).items() if k not in NO_BEHAVIOR}, sort_keys=True)
