"""Specifications of environments: an id with arguments, an episode limit and wrappers, as Minari's metadata has them.

Reading a specification executes nothing that it names. Creating its environment imports only gymnasium,
gymnasium-robotics and gymnasium's own wrappers; any other module is imported only if the user trusts it.
"""

import importlib
import importlib.util
import io
import json
import os
import re
import sys
import warnings
from contextlib import redirect_stderr
from dataclasses import replace
from types import ModuleType
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec

from envs.errors import DataError
from primal_dt.task import Specification, Wrapper

__all__ = [
    "import_from_here",
    "make_specified",
    "parse_specification",
    "plain_where_equal",
    "registered",
    "same_environment",
]

OWN_WRAPPERS = "gymnasium.wrappers."
"""Wrappers of gymnasium itself, which are trusted."""
ROBOTICS = re.compile(r"(AdroitHand|AntMaze_|PointMaze_|FrankaKitchen|Fetch|HandReach|HandManipulate)\w*-v\d+")
"""Ids of gymnasium-robotics, which are in the registry once it is imported."""
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
    if module and name not in gymnasium.registry:
        _require_trust(env_id, module, trust)
        try:
            import_from_here(module)
        except ImportError as error:
            raise DataError(
                f"the module of the environment {env_id} cannot be imported: {error}. Run from its folder, or "
                "install it"
            ) from error
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
        )
        limit = content.get("max_episode_steps")
        specification = Specification(
            env_id=_text(content["id"]),
            arguments=_sorted(content.get("kwargs")),
            max_episode_steps=None if limit is None else int(limit),
            wrappers=wrappers,
            entry_point=None if content.get("entry_point") is None else _text(content["entry_point"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{where}: the specification of the environment cannot be read: {error!r}") from error
    if limit is not None and int(limit) < 1:
        raise DataError(f"{where}: the episode limit must be at least 1, not {limit}")
    return specification


def plain_where_equal(specification: Specification) -> Specification:
    """Leave out what equals the registry's entry, so that a plain environment has a plain specification."""
    known = gymnasium.registry.get(specification.env_id.rpartition(":")[2])
    if known is None:
        return specification
    arguments = {
        name: value
        for name, value in json.loads(specification.arguments).items()
        if name not in known.kwargs or known.kwargs[name] != value
    }
    limit = specification.max_episode_steps
    return replace(
        specification,
        arguments=_sorted(arguments),
        max_episode_steps=None if limit == known.max_episode_steps else limit,
    )


def same_environment(one: Specification, two: Specification) -> bool:
    """Whether two specifications give the same environment, wherever its module is."""
    bare = [replace(each, env_id=each.env_id.rpartition(":")[2]) for each in map(plain_where_equal, (one, two))]
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
    known, target = registered(specification.env_id, trust=trust), specification.env_id.rpartition(":")[2]
    if known is None and specification.entry_point is None:
        raise DataError(_unknown(specification.env_id))
    for wrapper in specification.wrappers:
        if wrapper.arguments == "null":
            raise DataError(
                f"the wrapper {wrapper.name} of {specification.env_id} cannot be restored, because its arguments were "
                "not recorded: choose an environment with --env-id and --mix-versions, or train without evaluations "
                "(--eval-every-steps 0)"
            )
        if not wrapper.entry_point.startswith(OWN_WRAPPERS):
            _require_trust(f"the wrapper {wrapper.name}", wrapper.entry_point, trust)
    if known is None:
        _require_trust(specification.env_id, str(specification.entry_point), trust)
    made: str | EnvSpec = target if known else EnvSpec(target, entry_point=specification.entry_point)
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
        if isinstance(error, AssertionError) and ROBOTICS.fullmatch(target):
            said += JOINT_TYPES
        raise DataError(f"the environment {specification} cannot be created: {said}") from error
    return env


def _unknown(env_id: str) -> str:
    name = env_id.rpartition(":")[2].partition("-v")[0]
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


def import_from_here(module: str) -> ModuleType:
    """Import a module that is installed or in the working folder, which is on the path of ``python -m`` only."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    return importlib.import_module(module)


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
