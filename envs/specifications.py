"""Specifications of environments: an id with arguments, an episode limit and wrappers, as Minari's metadata has them.

Reading a specification executes nothing. Creating its environment imports only what gymnasium's registry and its own
wrappers name; a module that only the data names is imported if the user trusts it.
"""

import importlib
import json
import warnings
from typing import Any

import gymnasium

from envs.errors import DataError
from primal_dt.task import Specification, Wrapper

__all__ = ["make_specified", "parse_specification"]

OWN_WRAPPERS = "gymnasium.wrappers."
"""Wrappers of gymnasium itself, which are trusted."""
Env = gymnasium.Env[Any, Any]


def parse_specification(text: str, where: str) -> Specification:
    """Read a specification in gymnasium's JSON form, as Minari stores it. Nothing is imported.

    An episode limit that is the registry's own is left out, so that plain environments have plain specifications.

    Raises:
        DataError: if it is not such a specification.
    """
    try:
        content = json.loads(text)
        wrappers = tuple(
            Wrapper(_text(each["name"]), _text(each["entry_point"]), _sorted(each.get("kwargs")))
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
    if limit is not None and specification.max_episode_steps < 1:  # type: ignore[operator]
        raise DataError(f"{where}: the episode limit must be at least 1, not {limit}")
    known = gymnasium.registry.get(specification.env_id)
    if known is not None and known.max_episode_steps == specification.max_episode_steps:
        return Specification(specification.env_id, specification.arguments, None, wrappers, specification.entry_point)
    return specification


def make_specified(specification: Specification, *, trust: bool = False, **options: Any) -> Env:
    """Create the environment of a specification.

    Args:
        specification: the specification.
        trust: whether modules that only the data names may be imported.
        options: passed to ``gymnasium.make``, such as ``render_mode``.

    Raises:
        DataError: if it cannot be created, or would import a module that is not trusted.
    """
    arguments = json.loads(specification.arguments)
    target: Any = specification.env_id
    if specification.env_id not in gymnasium.registry and ":" not in specification.env_id:
        if specification.entry_point is None:
            raise DataError(f"the environment {specification.env_id} is not registered, and the data does not name it")
        _require_trust(specification.env_id, specification.entry_point, trust)
        target = gymnasium.envs.registration.EnvSpec(
            specification.env_id, entry_point=specification.entry_point, max_episode_steps=None
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "out of date": D4RL's data needs -v4; precision of wrappers' bounds
            env: Env = gymnasium.make(
                target,
                max_episode_steps=specification.max_episode_steps,
                disable_env_checker=True,
                **arguments | options,
            )
            for wrapper in specification.wrappers:
                if not wrapper.entry_point.startswith(OWN_WRAPPERS):
                    _require_trust(f"the wrapper {wrapper.name}", wrapper.entry_point, trust)
                env = _load(wrapper.entry_point)(env, **json.loads(wrapper.arguments))
    except DataError:
        raise
    # An environment's constructor may raise anything, in particular for arguments that this version does not take.
    except Exception as error:
        raise DataError(
            f"the environment {specification} cannot be created: {type(error).__name__}: {error}"
        ) from error
    return env


def _require_trust(what: str, entry_point: str, trust: bool) -> None:
    if not trust:
        raise DataError(
            f"{what} would import {entry_point}, which only the data names: if you trust the data, add --trust-env; "
            "or name the environment yourself with --env-id"
        )


def _load(entry_point: str) -> Any:
    module, _, name = entry_point.partition(":")
    return getattr(importlib.import_module(module), name)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} must be a text")
    return value


def _sorted(arguments: Any) -> str:
    if not isinstance(arguments or {}, dict):
        raise TypeError(f"arguments must be a mapping, not {arguments!r}")
    return json.dumps(arguments or {}, sort_keys=True)
