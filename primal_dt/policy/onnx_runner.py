"""Run an exported policy with numpy and onnxruntime alone; torch is not needed.

    from primal_dt.policy.onnx_runner import OnnxPolicy

    policy = OnnxPolicy("policy.onnx")
    policy.reset(3600.0)
    action = policy.act(observation)
    policy.observe(reward)

Axes: E environments, C candidates, K context steps, S state, A action.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from primal_dt.policy.stepwise import OnBad, PastEnd, PolicyLimits, StepwisePolicy

__all__ = ["OnnxPolicy"]

KEY = "primal_dt"
"""Key of the metadata in the file."""
FORMAT = 1
"""Version of the inputs, outputs and metadata."""
STATE, LEAVING, ENTERING = "state_", "leaving_", "entering_"
"""Beginnings of the names of the streaming state, and of the tokens that leave and enter the window of a layer."""


class OnnxPolicy(StepwisePolicy):
    """An exported policy; :class:`~primal_dt.policy.stepwise.StepwisePolicy` describes its calls.

    Args:
        path: the file that ``export.py`` has written.
        threads: number of CPU threads. One is fastest for a few environments.
        on_bad: ``error`` or ``hold``, see :class:`~primal_dt.policy.stepwise.StepwisePolicy`.
        past_end: ``clamp`` or ``error``, see there.

    Raises:
        ValueError: if the file is not an exported policy of this version.
    """

    def __init__(
        self, path: str | Path, *, threads: int = 1, on_bad: OnBad = "error", past_end: PastEnd = "clamp"
    ) -> None:
        import onnxruntime

        if threads < 1:
            raise ValueError(f"threads ({threads}) must be at least 1")
        if not Path(path).is_file():
            raise FileNotFoundError(f"there is no exported policy {path}")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = threads
        try:
            self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime has its own exceptions for foreign files
            raise ValueError(f"{path} is not an ONNX file: {str(error).splitlines()[0]}") from error
        metadata = _metadata(path, self._session.get_modelmeta().custom_metadata_map)
        limits: dict[str, Any] = dict(metadata["limits"])
        limits |= {name: tuple(limits[name]) for name in ("categories", "candidates")}
        super().__init__(PolicyLimits(**limits), on_bad=on_bad, past_end=past_end)
        self.about: dict[str, Any] = metadata["about"]
        """What the file says of itself: task, targets, versions, license."""
        self.mode: str = metadata["mode"]
        self._context = int(metadata["context"])
        self._predicts = bool(metadata["predicts_returns"])
        self._inputs = {entry.name: entry.shape for entry in self._session.get_inputs()}
        self._outputs = [entry.name for entry in self._session.get_outputs()]
        self._start(np.zeros(0))

    @property
    def predicted_returns(self) -> NDArray[np.float64] | None:
        """(E,), the returns-to-go that the last actions follow; None for a policy that predicts none."""
        return self._followed.astype(np.float64) if self._predicts else None

    def _begin(self) -> None:
        E, limits = len(self.left), self.limits
        steps = (E, self._context)
        self._history = {
            "observations": np.zeros((*steps, limits.state_width), np.float32),
            "actions": np.zeros((*steps, limits.action_width), np.float32),
            "returns_to_go": np.zeros((*steps, len(limits.candidates)), np.float32),
        }
        rows = E * len(limits.candidates)
        self._state = {
            name: np.zeros((rows, *shape[1:]), np.float32)
            for name, shape in self._inputs.items()
            if name.startswith(STATE)
        }
        self._rings = {  # the tokens of K steps, T each: those of step t from place T (t modulo K) on
            name.removeprefix(LEAVING): np.zeros((rows, shape[1] * self._context, shape[2]), np.float32)
            for name, shape in self._inputs.items()
            if name.startswith(LEAVING)
        }
        self._last = np.zeros((E, limits.action_width), np.float32)
        self._followed = np.zeros(E, np.float32)

    def _choose(self, observations: NDArray[np.float32]) -> NDArray[np.float32]:
        if self.mode == "window":
            inputs = self._window(observations)
        else:
            inputs = {"observation": observations, "last_action": self._last, **self._state, **self._leaving()}
            inputs["return_to_go"] = self.left.astype(np.float32)
        inputs["timestep"] = np.array(self.timestep)
        used = {name: inputs[name] for name in self._inputs}
        results = dict(zip(self._outputs, self._session.run(None, used), strict=True))
        self._last, self._followed = results["action"], results["followed_return"]
        self._state = {name: results[f"next_{name}"] for name in self._state}
        for name, ring in self._rings.items():
            entering = results[ENTERING + name]  # (E C, T, D)
            begin = self.timestep % self._context * entering.shape[1]
            ring[:, begin : begin + entering.shape[1]] = entering
        if self._predicts:
            newest = min(self.timestep, self._context - 1)
            self._history["returns_to_go"][:, newest] = results["returns"]
        return self._last.copy()

    def _leaving(self) -> dict[str, NDArray[np.float32]]:
        """The tokens that leave the window of each primal layer: the oldest step's, from its second token on."""
        tokens = {}
        for name, ring in self._rings.items():
            size = ring.shape[1]
            T = size // self._context
            begin = self.timestep % self._context * T + 1
            last = ring[:, (begin + T - 1) % size, None]
            tokens[LEAVING + name] = np.concatenate((ring[:, begin : begin + T - 1], last), 1)
        return tokens

    def _window(self, observations: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
        """Add the newest step to the history, and return the inputs."""
        t, K, history = self.timestep, self._context, self._history
        if t:  # the actions of the step before, which may have been replaced since
            history["actions"][:, min(t, K) - 1] = self._last
        if t >= K:
            for values in history.values():
                values[:, :-1] = values[:, 1:]
        newest = min(t, K - 1)
        history["observations"][:, newest] = observations
        history["actions"][:, newest] = 0
        history["returns_to_go"][:, newest] = self.left
        return {**history, "num_steps": np.array(newest + 1)}

    def _replace_actions(self, actions: NDArray[np.float64]) -> None:
        self._last = actions.astype(np.float32)

    def _keep(self, rows: NDArray[np.bool_]) -> None:
        self._history = {name: values[rows] for name, values in self._history.items()}
        every = np.repeat(rows, len(self.limits.candidates))
        self._state = {name: values[every] for name, values in self._state.items()}
        self._rings = {name: values[every] for name, values in self._rings.items()}
        self._last, self._followed = self._last[rows], self._followed[rows]


def _metadata(path: str | Path, entries: dict[str, str]) -> dict[str, Any]:
    if KEY not in entries:
        raise ValueError(f"{path} is not a policy that export.py has written: it has no entry {KEY!r}")
    metadata = json.loads(entries[KEY])
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        raise ValueError(f"{path} is of another version of this package: export the policy again")
    return metadata
