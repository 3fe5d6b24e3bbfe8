"""An exported policy: a function without memory from a file, and the history that it is called with.

This module needs numpy alone. What runs the function is in :mod:`primal_dt.policy.onnx_runner` for ONNX files, and in
:mod:`primal_dt.policy.torch_runner` for those of ``torch.export``.

Axes: E environments, C candidates, N = E C rows, K context steps, T tokens per step, R = TK places of a ring, D width,
S state, A action.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from primal_dt.policy.exported_file import AFTER, BEFORE, Shape, Stated, check_shapes, read_stated
from primal_dt.policy.stepwise import OnBad, PastEnd, StepwisePolicy

__all__ = ["Arrays", "ExportedPolicy", "Graph"]

Arrays = dict[str, NDArray[Any]]


class Graph(Protocol):
    """An exported function, and what its file says of itself."""

    name: str
    """The file, for messages."""
    metadata: str | None
    """JSON text; None if the file has none under the key of this package."""
    inputs: dict[str, Shape]
    """The inputs; the axis of environments or rows has any name."""
    outputs: dict[str, Shape]
    """The outputs."""

    def bind(self, inputs: Arrays, outputs: Arrays) -> None:
        """Set the arrays that :meth:`run` reads and writes, until the next call of bind. Unknown inputs are ignored."""

    def run(self) -> None:
        """Compute the outputs."""


class ExportedPolicy(StepwisePolicy):
    """An exported policy; :class:`~primal_dt.policy.stepwise.StepwisePolicy` describes its calls.

    Args:
        graph: the function.
        on_bad: ``error`` or ``hold``, see :class:`~primal_dt.policy.stepwise.StepwisePolicy`.
        past_end: ``clamp`` or ``error``, see there.

    Raises:
        ValueError: if the file is not an exported policy of this version.
    """

    def __init__(self, graph: Graph, *, on_bad: OnBad = "error", past_end: PastEnd = "clamp") -> None:
        self._graph, self._stated = graph, read_stated(graph.name, graph.metadata)
        check_shapes(graph.name, self._stated.inputs, graph.inputs, optional=True)
        check_shapes(graph.name, self._stated.outputs, graph.outputs, optional=False)
        super().__init__(self._stated.limits, on_bad=on_bad, past_end=past_end)
        self.about: dict[str, Any] = dict(self._stated.about)
        """What the file says of itself: task, targets, provenance, license."""
        self.mode = self._stated.mode
        self._start(np.zeros(0))

    @property
    def predicted_returns(self) -> NDArray[np.float64] | None:
        """(E,), the returns-to-go that the last actions follow; None for a policy that predicts none."""
        return self._history.outputs["followed_return"].astype(np.float64) if self._stated.predicts_returns else None

    def _begin(self) -> None:
        kind = _Window if self.mode == "window" else _Streaming
        self._history: _History = kind(self._stated, self._graph, len(self.left))
        self._is_bound = False

    def _choose(self, observations: NDArray[np.float32]) -> NDArray[np.float32]:
        history = self._history
        if not self._is_bound:
            self._graph.bind(history.inputs, history.outputs)
            self._is_bound = True
        history.inputs["timestep"][...] = self.timestep
        history.begin_step(self.timestep, observations, self.left)
        self._graph.run()
        history.end_step(self.timestep)
        history.last_action[...] = history.outputs["action"]
        return history.last_action.copy()

    def _replace_actions(self, actions: NDArray[np.float64]) -> None:
        self._history.last_action[...] = actions

    def _keep(self, rows: NDArray[np.bool_]) -> None:
        self._history.keep(rows, np.repeat(rows, len(self.limits.candidates)))
        self._is_bound = False


class _History(ABC):
    """The arrays that a function reads and writes in an episode. They stay the same until :meth:`keep`.

    Args:
        stated: the metadata of the file.
        graph: the function.
        num_environments: E, the number of environments.
    """

    def __init__(self, stated: Stated, graph: Graph, num_environments: int) -> None:
        self.stated = stated
        rows = num_environments * len(stated.limits.candidates)
        self._lengths = {"E": num_environments, "N": rows, "N H": rows * stated.num_heads}
        self.inputs = self._zeros(stated.inputs, graph.inputs)
        self.outputs = self._zeros(stated.outputs, graph.outputs)
        self.last_action = np.zeros((num_environments, stated.limits.action_width), np.float32)
        """(E, A), the actions of the last step. They become an input at the next step, so they may be changed first."""

    def _zeros(self, stated: Mapping[str, Shape], own: Mapping[str, Shape]) -> Arrays:
        """Arrays of the stated shapes. The function's own shapes have the lengths that the file chooses."""
        arrays: Arrays = {}
        for name, shape in stated.items():
            lengths = [self._lengths.get(str(one), two) for one, two in zip(shape, own.get(name, shape), strict=True)]
            arrays[name] = np.zeros(lengths, np.float32 if shape else np.int64)  # type: ignore[arg-type] # all known
        return arrays

    @abstractmethod
    def begin_step(self, timestep: int, observations: NDArray[np.float32], returns: NDArray[np.float64]) -> None:
        """Fill the inputs of a step: observations (E, S), returns-to-go (E, C)."""

    @abstractmethod
    def end_step(self, timestep: int) -> None:
        """Store what later steps need of the outputs."""

    def keep(self, rows: NDArray[np.bool_], every: NDArray[np.bool_]) -> None:
        """Continue with the environments where ``rows`` (E,) is True, and their candidates (N,)."""
        self.last_action = self.last_action[rows]
        chosen = {"E": rows, "N": every, "N H": np.repeat(every, self.stated.num_heads)}
        self.inputs = self._kept(self.inputs, self.stated.inputs, chosen)
        self.outputs = self._kept(self.outputs, self.stated.outputs, chosen)

    @staticmethod
    def _kept(arrays: Arrays, shapes: Mapping[str, Shape], chosen: Mapping[str, NDArray[np.bool_]]) -> Arrays:
        return {
            name: values[chosen[str(shapes[name][0])]] if values.ndim else values for name, values in arrays.items()
        }


class _Window(_History):
    """The last K steps, in order."""

    def begin_step(self, timestep: int, observations: NDArray[np.float32], returns: NDArray[np.float64]) -> None:
        K, inputs = self.stated.context, self.inputs
        newest = min(timestep, K - 1)
        if timestep:  # the actions of the step before, which may have been replaced since
            inputs["actions"][:, min(timestep, K) - 1] = self.last_action
        for name, values in (("observations", observations), ("actions", 0.0), ("returns_to_go", returns)):
            steps = inputs[name]
            if timestep >= K:
                steps[:, :-1] = steps[:, 1:]
            steps[:, newest] = values
        inputs["num_steps"][...] = newest + 1

    def end_step(self, timestep: int) -> None:
        if self.stated.predicts_returns:
            self.inputs["returns_to_go"][:, min(timestep, self.stated.context - 1)] = self.outputs["returns"]


class _Streaming(_History):
    """The newest step, and rings with the tokens of the last K steps: those of step t from place T (t modulo K) on."""

    def __init__(self, stated: Stated, graph: Graph, num_environments: int) -> None:
        super().__init__(stated, graph, num_environments)
        self._leaving = (np.arange(stated.ring) + 1) % stated.ring
        self._tokens = {  # the rings (N, R, D) of the primal layers' tokens
            name: np.zeros((len(new), stated.ring, new.shape[2]), np.float32)
            for name, new in self.outputs.items()
            if name.startswith("new_tokens")
        }
        self._connect()

    def _connect(self) -> None:
        """List the pairs of arrays between which numbers are copied in each step."""
        self._rings: list[tuple[NDArray[Any], NDArray[Any]]] = []
        self._totals: list[tuple[NDArray[Any], NDArray[Any]]] = []
        self._left: list[tuple[NDArray[Any], NDArray[Any]]] = []
        for number, kind in enumerate(self.stated.layers):
            before = [self.inputs[f"{name}_{number}"] for name in BEFORE[kind]]
            after = [self.outputs[f"{name}_{number}"] for name in AFTER[kind]]
            if kind == "softmax":
                self._rings += zip(before, after, strict=True)
                continue
            tokens = self._tokens[f"new_tokens_{number}"]
            self._totals.append((before[0], after[0]))
            self._left.append((before[1], tokens))
            self._rings.append((tokens, after[1]))

    def begin_step(self, timestep: int, observations: NDArray[np.float32], returns: NDArray[np.float64]) -> None:
        self.inputs["observation"][...] = observations
        self.inputs["return_to_go"][...] = returns
        self.inputs["last_action"][...] = self.last_action
        places = self._leaving[self._places(timestep)]
        for leaving, tokens in self._left:
            tokens.take(places, axis=1, out=leaving, mode="clip")  # numpy would buffer the output in another mode

    def end_step(self, timestep: int) -> None:
        places = self._places(timestep)
        for ring, new in self._rings:
            ring[:, places] = new
        for total, new in self._totals:
            total[...] = new

    def keep(self, rows: NDArray[np.bool_], every: NDArray[np.bool_]) -> None:
        super().keep(rows, every)
        self._tokens = {name: tokens[every] for name, tokens in self._tokens.items()}
        self._connect()

    def _places(self, timestep: int) -> slice:
        """The places of a step in the rings."""
        T = self.stated.tokens_per_step
        begin = T * (timestep % self.stated.context)
        return slice(begin, begin + T)
