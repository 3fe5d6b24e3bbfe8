"""Plain values -> dataclasses, with a check of names and types. Standard library only."""

import reprlib
import sys
from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

__all__ = ["build", "require_keys"]

T = TypeVar("T")


def build(kind: type[T], values: object, *, where: str, optional: Collection[str] = ()) -> T:
    """Build a dataclass, and those in its fields, from plain values: the inverse of ``dataclasses.asdict``.

    Args:
        kind: the dataclass. Its annotations may name int, float, bool, str, None, literals, tuples, mappings,
            dataclasses, and None as an alternative.
        values: the values by field, from JSON or a checkpoint. Lists become tuples; dataclasses may be built already.
        where: name of the values in messages.
        optional: fields that may be missing; they then have their defaults.

    Raises:
        ValueError: if a field is missing, unknown, or has a value of another type. Numbers must be finite.
    """
    types = get_type_hints(kind)
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    own = require_keys(values, [name for name in names if name not in optional], where=where)
    if unknown := [key for key in own if key not in names]:
        raise ValueError(f"{where} has the unknown key {reprlib.repr(unknown[0])}")
    return kind(**{name: _checked(types[name], value, f"{where}.{name}", optional) for name, value in own.items()})


def require_keys(values: object, names: Collection[str], *, where: str) -> Mapping[Any, Any]:
    """Return ``values``, if it is a mapping that has these keys. Else raise ValueError."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{where} must be a mapping, not {reprlib.repr(values)}")
    if missing := [name for name in names if name not in values]:
        raise ValueError(f"{where} lacks {', '.join(missing)}")
    return values


def _checked(kind: Any, value: Any, where: str, optional: Collection[str]) -> Any:
    """Return the value in the form that the annotation ``kind`` describes, or raise ValueError."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        if value is None and NoneType in arguments:
            return None
        (kind,) = (each for each in arguments if each is not NoneType)
        return _checked(kind, value, where, optional)
    if is_dataclass(kind):
        if isinstance(value, kind):  # type: ignore[arg-type]
            return value
        return build(kind, value, where=where, optional=optional)  # type: ignore[arg-type]
    if origin is tuple and isinstance(value, list | tuple):
        kinds = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else arguments
        if len(kinds) != len(value):
            raise ValueError(f"{where} must have {len(kinds)} values, not {len(value)}")
        pairs = zip(kinds, value, strict=True)
        return tuple(_checked(each, item, f"{where}[{i}]", optional) for i, (each, item) in enumerate(pairs))
    if origin is Literal and isinstance(value, str) and value in arguments:
        return value
    if kind is float and type(value) in (int, float) and abs(value) <= sys.float_info.max:  # false for NaN
        return value
    if (kind in (int, bool, str) and type(value) is kind) or (origin is Mapping and isinstance(value, Mapping)):
        return value
    name = f"one of {', '.join(arguments)}" if origin is Literal else getattr(origin or kind, "__name__", str(kind))
    raise ValueError(f"{where} must be {'a finite number' if kind is float else name}, not {reprlib.repr(value)}")
