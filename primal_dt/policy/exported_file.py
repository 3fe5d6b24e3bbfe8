"""What a file with an exported policy states of itself, and the inputs and outputs of its function.

This module needs numpy alone.

Axes: E environments, C candidates, N = E C rows, K context steps, T tokens per step, R = TK places of a ring, D width,
H heads, P = D / H, S state, A action.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from primal_dt.policy.stepwise import PolicyLimits
from primal_dt.schema import build

__all__ = ["AFTER", "BEFORE", "FORMAT", "KEY", "Shape", "Stated", "check_shapes", "read_stated"]

KEY = "primal_dt"
"""Key of the metadata in a file."""
FORMAT = 2
"""Version of the inputs, outputs and metadata."""
BEFORE: Mapping[str, tuple[str, str]] = {"softmax": ("keys", "values"), "primal": ("total", "leaving")}
"""Kind of a layer -> names of its two inputs in streaming mode. The layer's number follows: ``keys_0``."""
AFTER: Mapping[str, tuple[str, str]] = {"softmax": ("new_keys", "new_values"), "primal": ("new_total", "new_tokens")}
"""Kind of a layer -> names of its two outputs."""
Shape = tuple[int | str, ...]
"""A shape. Axes of any length are named E (environments), N (rows) and N H. Other letters are lengths of the file."""


@dataclass(frozen=True)
class Stated:
    """The metadata of a file."""

    format: int
    mode: Literal["window", "streaming"]
    context: int
    """K, the number of steps in the window."""
    tokens_per_step: int
    """T, the number of tokens of a step."""
    num_heads: int
    """H, the number of heads of softmax layers."""
    layers: tuple[str, ...]
    """The kind of each layer, ``softmax`` or ``primal``; empty in mode ``window``, which has nothing to remember."""
    predicts_returns: bool
    """Whether the model predicts the returns that its actions follow."""
    limits: PolicyLimits
    about: Mapping[str, Any]
    """What the file says of itself to a reader."""

    def __post_init__(self) -> None:
        if self.context < 1 or self.num_heads < 1 or self.tokens_per_step < 2:
            sizes = self.context, self.num_heads, self.tokens_per_step
            raise ValueError("context ({}), num_heads ({}) or tokens_per_step ({}) is too small".format(*sizes))
        if unknown := set(self.layers) - set(BEFORE):
            raise ValueError(f"layers must be of the kinds {', '.join(BEFORE)}, not {unknown.pop()!r}")
        if bool(self.layers) != (self.mode == "streaming"):
            raise ValueError(f"mode {self.mode} does not fit the layers {self.layers}")

    @property
    def ring(self) -> int:
        """R, the number of places in a ring."""
        return self.context * self.tokens_per_step

    @property
    def inputs(self) -> dict[str, Shape]:
        """The inputs of the function."""
        limits, K, T = self.limits, self.context, self.tokens_per_step
        S, A, C = limits.state_width, limits.action_width, len(limits.candidates)
        shapes: dict[str, Shape] = {"timestep": ()}
        if self.mode == "window":
            shapes |= {"observations": ("E", K, S), "actions": ("E", K, A), "returns_to_go": ("E", K, C)}
            return shapes | {"num_steps": ()}
        shapes |= {"observation": ("E", S), "last_action": ("E", A), "return_to_go": ("E", C)}
        ring: Shape = ("N H", self.ring, "P")
        return shapes | self._of_layers(BEFORE, {"softmax": (ring, ring), "primal": (("N", "D"), ("N", T, "D"))})

    @property
    def outputs(self) -> dict[str, Shape]:
        """The outputs of the function."""
        limits, T = self.limits, self.tokens_per_step
        shapes: dict[str, Shape] = {"action": ("E", limits.action_width)}
        if self.predicts_returns:
            shapes |= {"followed_return": ("E",), "returns": ("E", len(limits.candidates))}
        new: Shape = ("N H", T, "P")
        return shapes | self._of_layers(AFTER, {"softmax": (new, new), "primal": (("N", "D"), ("N", T, "D"))})

    def _of_layers(
        self, names: Mapping[str, tuple[str, str]], shapes: Mapping[str, tuple[Shape, Shape]]
    ) -> dict[str, Shape]:
        return {
            f"{name}_{number}": shape
            for number, kind in enumerate(self.layers)
            for name, shape in zip(names[kind], shapes[kind], strict=True)
        }


def read_stated(file: str, text: str | None) -> Stated:
    """Read the metadata of a file.

    Raises:
        ValueError: if it is not that of an exported policy of this version.
    """
    if text is None:
        raise ValueError(f"{file} is not a policy that export.py has written: it has no entry {KEY!r}")
    try:
        values = json.loads(text)
        if isinstance(values, dict) and values.get("format") != FORMAT:
            raise ValueError("it is of another version of this package: export the policy again")
        return build(Stated, values, where="it")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the metadata of {file} cannot be used: {error}") from error


def check_shapes(file: str, stated: Mapping[str, Shape], own: Mapping[str, Shape], *, optional: bool) -> None:
    """Check that a function has the inputs, or the outputs, that the file's metadata calls for.

    Args:
        file: the file, for messages.
        stated: the inputs by the metadata.
        own: those of the function. The axis of environments or rows has any name.
        optional: whether inputs that are not of a layer may be missing: the function may ignore them.

    Raises:
        ValueError: if the function has others.
    """
    needed = {name for name, shape in stated.items() if not optional or "D" in shape or "P" in shape}
    if wrong := sorted((own.keys() - stated.keys()) | (needed - own.keys())):
        raise ValueError(f"{file} does not fit its metadata: {wrong[0]} is unknown or missing")
    letters: dict[str, int] = {}  # the file's lengths
    for name, shape in own.items():
        wanted = [letters.get(length, length) if isinstance(length, str) else length for length in stated[name]]
        fits = len(wanted) == len(shape)
        for length, want in zip(shape, wanted, strict=False):
            if want in ("E", "N", "N H"):
                fits &= isinstance(length, str)
            elif isinstance(want, str) and isinstance(length, int):
                letters[want] = length
            else:
                fits &= length == want
        if not fits:
            raise ValueError(f"{file} does not fit its metadata: {name} has shape {shape}, not {tuple(wanted)}")
