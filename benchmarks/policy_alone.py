"""The speed of policies for one environment, without the environment: in torch and exported.

The model has random weights; observations are random and rewards fixed. Policies are timed alternately, ten steps at a
time, after their windows are full. An "exported" policy is run by onnxruntime with one thread.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.measure import Timing, time_interleaved
from primal_dt.data.normalizer import Normalizer
from primal_dt.data.sampler import Batch
from primal_dt.evaluation.rollout import Policy
from primal_dt.model.transformer import DecisionTransformer, ModelShape
from primal_dt.policy.export import export_policy
from primal_dt.policy.inference import InferenceMode
from primal_dt.policy.onnx_runner import OnnxPolicy
from primal_dt.policy.policy import DecisionTransformerPolicy
from primal_dt.system.table import format_table

__all__ = [
    "PLAIN",
    "STACKS",
    "STEPS_PER_CALL",
    "PlainPolicy",
    "alone_table",
    "context_table",
    "time_alone",
    "time_contexts",
    "verdicts",
]

PLAIN = "plain loop"
STEPS_PER_CALL = 10
BARS = {"window": 2.0, "streaming": 6.0, "streaming, exported": 15.0}
"""Row -> its least speed in one environment, relative to the plain loop."""
STACKS = ("softmax", "primalformer")
"""The stacks whose steps are timed as the context grows: a cache of keys and values, and running sums."""
Timings = dict[str, Timing]


class PlainPolicy:
    """A policy for one environment that runs the whole model on the last K steps at each step.

    The window is padded on the right, as in training.
    """

    def __init__(self, model: DecisionTransformer, normalizer: Normalizer) -> None:
        self.model = model.eval()
        self.normalizer = normalizer

    def reset(self, targets: NDArray[np.float64], /) -> None:
        """Start an episode."""
        assert len(targets) == 1
        self._left = float(targets[0])
        self._states: list[NDArray[np.float32]] = []
        self._actions: list[NDArray[np.float32]] = []
        self._returns: list[float] = []

    @torch.inference_mode()
    def act(self, observations: NDArray[np.floating], /) -> NDArray[np.floating]:
        """Choose the action: (1, S) -> (1, A)."""
        shape, K = self.model.shape, self.model.shape.context
        self._states.append(self.normalizer.states(observations[0]))
        self._returns.append(self._left / self.normalizer.return_scale)
        self._actions.append(np.zeros(shape.action_width, np.float32))
        count, first = min(K, len(self._states)), max(0, len(self._states) - K)
        states, actions = torch.zeros(1, K, shape.state_width), torch.zeros(1, K, shape.action_width)
        returns, timesteps = torch.zeros(1, K, 1), torch.zeros(1, K, dtype=torch.int64)
        states[0, :count] = torch.from_numpy(np.stack(self._states[first:]))
        actions[0, :count] = torch.from_numpy(np.stack(self._actions[first:]))
        returns[0, :count, 0] = torch.tensor(self._returns[first:])
        timesteps[0, :count] = torch.arange(first, first + count)
        valid = torch.arange(K)[None] < count
        action = self.model(Batch(states, actions, returns, timesteps, valid)).actions[0, count - 1]
        self._actions[-1] = action.numpy()
        return self._actions[-1][None]

    def observe(self, rewards: NDArray[np.float64], /) -> None:
        """Subtract the reward of the last action from the return-to-go."""
        self._left -= float(rewards[0])

    def keep(self, rows: NDArray[np.bool_], /) -> None:
        """Do nothing: there is only one environment."""


class Steps:
    """Steps of one policy in one environment, which restarts before its longest episode is over."""

    def __init__(self, policy: Policy, shape: ModelShape) -> None:
        self.policy, self.shape = policy, shape
        self._observations = np.random.default_rng(0).normal(size=(64, 1, shape.state_width)).astype(np.float32)
        self._done = shape.max_timesteps
        self()

    def __call__(self) -> None:
        """Make ten steps; the first call also fills the window."""
        if self._done + STEPS_PER_CALL > self.shape.max_timesteps:
            self.policy.reset(np.array([1000.0]))
            self._done = 0
            self._run(self.shape.context)
        self._run(STEPS_PER_CALL)

    def _run(self, number: int) -> None:
        for i in range(number):
            self.policy.act(self._observations[i % len(self._observations)])
            self.policy.observe(np.ones(1))
        self._done += number


def timed(calls: dict[str, Callable[[], object]], seconds: float) -> Timings:
    """Time policies alternately."""
    return time_interleaved(calls, seconds=seconds, device=torch.device("cpu"))


def exported(model: DecisionTransformer, units: Normalizer, mode: InferenceMode, folder: Path) -> OnnxPolicy:
    """Export a policy and load it."""
    path = folder / f"{mode}-{model.shape.attention}-{model.shape.context}.onnx"
    export_policy(path, model, units, mode=mode, about={})
    return OnnxPolicy(path)


def time_alone(model: DecisionTransformer, units: Normalizer, *, seconds: float) -> Timings:
    """Time one model's policies in one environment."""
    policies: dict[str, Policy] = {PLAIN: PlainPolicy(model, units)}
    modes: tuple[InferenceMode, ...] = ("window", "streaming")
    with TemporaryDirectory() as folder:
        for mode in modes:
            policies[mode] = DecisionTransformerPolicy(model, units, mode=mode)
            policies[f"{mode}, reproducible"] = DecisionTransformerPolicy(model, units, mode=mode, reproducible=True)
            policies[f"{mode}, exported"] = exported(model, units, mode, Path(folder))
    return timed({name: Steps(policy, model.shape) for name, policy in policies.items()}, seconds)


def time_contexts(shapes: Sequence[ModelShape], units: Normalizer, *, seconds: float) -> dict[str, dict[int, Timing]]:
    """Time streaming steps for each shape, in torch and exported: name -> context -> timing."""
    calls: dict[str, Callable[[], object]] = {}
    with TemporaryDirectory() as folder:
        for shape in shapes:
            model = DecisionTransformer(shape).eval()
            policies: dict[str, Policy] = {
                shape.attention: DecisionTransformerPolicy(model, units, mode="streaming"),
                f"{shape.attention}, exported": exported(model, units, "streaming", Path(folder)),
            }
            calls |= {f"{name}@{shape.context}": Steps(policy, shape) for name, policy in policies.items()}
    result: dict[str, dict[int, Timing]] = {}
    for key, timing in timed(calls, seconds).items():
        name, _, context = key.rpartition("@")
        result.setdefault(name, {})[int(context)] = timing
    return result


def alone_table(timings: Timings) -> str:
    """Table of steps per second, and of the speed relative to the plain loop."""
    rows = []
    for name, timing in timings.items():
        rates = [STEPS_PER_CALL / seconds for seconds in (timing.median, timing.upper_quartile, timing.lower_quartile)]
        milliseconds = f"{1e3 * timing.median / STEPS_PER_CALL:.2f}"
        times = f"{timings[PLAIN].median / timing.median:.2f}"
        rows.append([name, f"{rates[0]:,.0f}", f"{rates[1]:,.0f} to {rates[2]:,.0f}", milliseconds, times])
    header = ["policy alone, 1 environment", "steps per second", "quartiles", "ms a step", "times the plain loop"]
    return format_table(header, rows)


def context_table(timings: dict[str, dict[int, Timing]]) -> str:
    """Table of milliseconds per step by context length."""
    contexts = sorted({context for row in timings.values() for context in row})
    rows = [
        [name, *(f"{1e3 * row[context].median / STEPS_PER_CALL:.2f}" for context in contexts)]
        for name, row in timings.items()
    ]
    return format_table(["streaming, ms a step", *(f"K {context:,}" for context in contexts)], rows)


def verdicts(timings: Timings) -> Iterator[str]:
    """Compare one environment with its bars."""
    for name, bar in BARS.items():
        times = timings[PLAIN].median / timings[name].median
        yield f"[{'met' if times >= bar else 'MISSED'}] {name}, alone: {times:.2f} times the plain loop (bar {bar:g})"
