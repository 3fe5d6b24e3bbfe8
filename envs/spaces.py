"""Observation and action spaces as the model sees them: vectors of numbers.

Observations are flattened as by ``gymnasium.spaces.utils.flatten``: a Box by rows, Discrete and MultiDiscrete as
one-hot vectors, the parts of a Dict or Tuple back to back in the space's own order. Actions are a Box of one dimension,
or choices (Discrete, MultiDiscrete).

Axes: T rows, S flattened observation, A action entries.
"""

import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from envs.errors import DataError

__all__ = ["ActionBounds", "action_bounds", "flat_width", "flatten_rows", "parse_space", "to_action", "unit_box"]

Space = spaces.Space[Any]
MAX_WIDTH = 20_000
"""The largest number of entries of an observation, which is stored at every step."""


@dataclass(frozen=True)
class ActionBounds:
    """The entries of an action: bounds, or numbers of choices."""

    low: tuple[float, ...] = ()
    """(A,), the lower bounds; minus infinity where there is none. Empty if actions are choices."""
    high: tuple[float, ...] = ()
    """(A,), the upper bounds; infinity where there is none. Empty if actions are choices."""
    categories: tuple[int, ...] = ()
    """(A,), the number of choices of each entry. Empty if actions are numbers."""
    start: tuple[int, ...] = ()
    """(A,), the first choice of each entry: choices are stored from 0 on."""

    @property
    def width(self) -> int:
        """A, the number of entries."""
        return len(self.categories or self.low)

    def __str__(self) -> str:
        if self.categories:
            return f"{self.width} choices among {', '.join(map(str, self.categories))}"
        bounds = dict.fromkeys(zip(self.low, self.high, strict=True))
        return f"{self.width} numbers in {', '.join(f'[{low:g}, {high:g}]' for low, high in bounds)}"


def unit_box(width: int) -> ActionBounds:
    """The bounds of most simulated robots: every entry is in [-1, 1]."""
    return ActionBounds(low=(-1.0,) * width, high=(1.0,) * width)


def action_bounds(space: Space, where: str) -> ActionBounds:
    """The entries of actions of a space.

    Raises:
        DataError: if actions of such a space cannot be learned.
    """
    if isinstance(space, spaces.Discrete):
        return ActionBounds(categories=(int(space.n),), start=(int(space.start),))
    if isinstance(space, spaces.MultiDiscrete) and space.nvec.ndim == 1:
        start = np.broadcast_to(space.start, space.nvec.shape)
        return ActionBounds(categories=tuple(map(int, space.nvec)), start=tuple(map(int, start)))
    if isinstance(space, spaces.Box) and len(space.shape) == 1 and space.shape[0] > 0:
        return ActionBounds(low=tuple(map(float, space.low)), high=tuple(map(float, space.high)))
    raise DataError(
        f"{where}: actions must be a Box of one dimension, Discrete or a MultiDiscrete of one dimension, not {space}"
    )


def parse_space(content: Any, where: str) -> Space:
    """A space from its JSON form in Minari's metadata. Nothing is imported.

    Raises:
        DataError: if it is not such a form.
    """
    try:
        return _parsed(json.loads(content) if isinstance(content, str) else content)
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError, OverflowError, RecursionError) as error:
        raise DataError(f"{where}: the space cannot be read: {error!r}") from error


def _parsed(content: Mapping[str, Any]) -> Space:
    match content["type"]:
        case "Box":
            dtype = np.dtype(content["dtype"])
            if dtype.kind not in "fiub":
                raise ValueError(f"a Box must have real numbers, not {dtype}")
            low, high = (np.array(content[name], dtype) for name in ("low", "high"))
            return spaces.Box(low, high, tuple(content["shape"]), dtype.type)
        case "Discrete":
            return spaces.Discrete(content["n"], start=content.get("start", 0))
        case "MultiDiscrete":
            start = content.get("start")
            return spaces.MultiDiscrete(content["nvec"], start=None if start is None else np.array(start))
        case "MultiBinary":
            return spaces.MultiBinary(content["n"])
        case "Dict":
            # In the given order, which is the environment's own: gymnasium would sort the names of a plain dictionary.
            return spaces.Dict(OrderedDict((name, _parsed(part)) for name, part in content["subspaces"].items()))
        case "Tuple":
            return spaces.Tuple([_parsed(part) for part in content["subspaces"]])
        case "Text":
            return spaces.Text(content["max_length"])
    raise ValueError(f"the type {content['type']!r} is not known")


def to_action(space: Space, entries: NDArray[np.floating]) -> Any:
    """Entries of an action (A,), as a policy gives them -> an action of the space."""
    if isinstance(space, spaces.Discrete):
        return int(entries[0]) + int(space.start)
    if isinstance(space, spaces.MultiDiscrete):
        return (entries.astype(space.dtype) + space.start).astype(space.dtype)
    within = np.clip(entries, space.low, space.high) if isinstance(space, spaces.Box) else entries
    return (np.rint(within) if np.issubdtype(space.dtype, np.integer) else within).astype(space.dtype)


def flat_width(space: Space, where: str) -> int:
    """S, the width of flattened observations.

    Raises:
        DataError: if observations of the space cannot be flattened, or are images.
    """
    width = sum(width for _, width in _parts(space, where))
    if width > MAX_WIDTH:
        raise DataError(f"{where}: observations have {width:,} entries; at most {MAX_WIDTH:,} are supported")
    return width


def _parts(space: Space, where: str) -> Iterator[tuple[Space, int]]:
    """The simple spaces that a space is made of, in order, with their widths."""
    if isinstance(space, spaces.Dict):
        for name, part in space.spaces.items():
            yield from _parts(part, f"{where}, {name}")
    elif isinstance(space, spaces.Tuple):
        for number, part in enumerate(space.spaces):
            yield from _parts(part, f"{where}, part {number}")
    elif isinstance(space, spaces.Discrete):
        yield space, int(space.n)
    elif isinstance(space, spaces.MultiDiscrete):
        yield space, int(space.nvec.sum())
    elif isinstance(space, spaces.MultiBinary) or (isinstance(space, spaces.Box) and len(space.shape) <= 1):
        yield space, int(np.prod(space.shape))
    elif isinstance(space, spaces.Box):
        raise DataError(f"{where}: observations of shape {space.shape} (images) are not supported: only vectors are")
    else:
        raise DataError(f"{where}: observations in {type(space).__name__} are not supported: they have no fixed width")


def flatten_rows(space: Space, rows: Any) -> NDArray[np.float32]:
    """Flatten observations with a leading axis, (T, ...) in each part -> (T, S).

    Args:
        space: the observation space, which :func:`flat_width` accepts.
        rows: an array, or for a Dict a mapping and for a Tuple a sequence (or a mapping of ``_index_0`` and so on, as
            in Minari's files) of such values.
    """
    if isinstance(space, spaces.Dict):
        return np.concatenate([flatten_rows(part, rows[name]) for name, part in space.spaces.items()], axis=1)
    if isinstance(space, spaces.Tuple):
        values = _sequence(rows, len(space.spaces))
        return np.concatenate([flatten_rows(*pair) for pair in zip(space.spaces, values, strict=True)], axis=1)
    array = np.asarray(rows)
    if isinstance(space, spaces.Discrete):
        return _one_hot(array.reshape(len(array)) - space.start, int(space.n))
    if isinstance(space, spaces.MultiDiscrete):
        entries = array.reshape(len(array), -1) - np.asarray(space.start).reshape(-1)
        hot = [_one_hot(entries[:, i], int(number)) for i, number in enumerate(space.nvec.reshape(-1))]
        return np.concatenate(hot, axis=1)
    with np.errstate(over="ignore"):  # values too large for single precision become infinite and are refused later
        return array.reshape(len(array), -1).astype(np.float32)


def _sequence(rows: Any, number: int) -> Sequence[Any]:
    return [rows[f"_index_{i}"] for i in range(number)] if isinstance(rows, Mapping) else rows


def _one_hot(numbers: NDArray[np.integer], count: int) -> NDArray[np.float32]:
    if len(numbers) and not (0 <= numbers.min() and numbers.max() < count):
        raise DataError(f"a discrete observation must be one of {count} values, not {numbers.min()} to {numbers.max()}")
    hot = np.zeros((len(numbers), count), np.float32)
    hot[np.arange(len(numbers)), numbers.astype(np.int64)] = 1
    return hot
