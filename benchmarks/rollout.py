"""Rollout speed: window and streaming inference, beside a plain loop and beside environments without a policy.

The environment is HalfCheetah, whose episodes all have 1,000 steps. The model has random weights. All rollouts are
timed alternately, ten steps of all environments at a time, after their context windows are full.

The row "plain loop" is the usual way to evaluate a Decision Transformer: one environment, and at each step a forward
pass of the whole model on the last K steps, with all threads. Rows "environments alone" step the environments with
fixed random actions. Rows "without tiles" show the cost of results that do not depend on the number of parallel
environments.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from benchmarks.measure import Timing, time_interleaved
from benchmarks.program import run_program, save_report
from envs.make import make_environment
from envs.tasks import task_of
from primal_dt.data.normalizer import Normalizer
from primal_dt.data.sampler import Batch
from primal_dt.evaluation.evaluate import choose_workers
from primal_dt.evaluation.rollout import Policy
from primal_dt.evaluation.vector import Environments
from primal_dt.model.transformer import DecisionTransformer, ModelShape
from primal_dt.policy.inference import InferenceMode
from primal_dt.policy.policy import DecisionTransformerPolicy
from primal_dt.system.table import format_table

TASK = task_of("HalfCheetah-v5")
PLAIN = "plain loop, 1 environment"
STEPS_PER_CALL = 10
BARS = {"window": 3.5, "streaming": 15.0}


@dataclass(frozen=True)
class Config:
    """Settings of the benchmark."""

    envs: tuple[int, ...] = (1, 16, 64, 128)
    """Numbers of parallel environments."""
    context: int = 20
    """Context length K in environment steps."""
    width: int = 128
    """Model width D."""
    attention: str = "primal-plus"
    """Attention stack."""
    seconds: float = 20.0
    """Seconds to time each rollout."""
    out: Path = Path("runs/benchmarks")
    """Folder for rollout.json."""


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


class Session:
    """Episodes that continue from call to call, and restart when they end."""

    def __init__(self, policy: Policy | None, environments: Environments, *, warm_up: int) -> None:
        self.policy = policy
        self.environments = environments
        self._rows = np.arange(environments.count)
        width = TASK.environment.action_width
        self._actions = np.random.default_rng(0).uniform(-1, 1, (environments.count, width)).astype(np.float32)
        self._warm_up = warm_up
        self._observations: NDArray[np.floating] = np.zeros((0, 0))
        self._begin()

    def steps(self) -> None:
        """Run several steps of all environments in a row, so that each step finds its data in the CPU caches."""
        for _ in range(STEPS_PER_CALL):
            self.step()

    def step(self) -> None:
        """Run one step of all environments."""
        actions = self._actions if self.policy is None else self.policy.act(self._observations)
        answer = self.environments.step(self._rows, actions)
        self._observations = answer.observations
        if self.policy is not None:
            self.policy.observe(answer.rewards)
        if answer.ended.any():
            self._begin()

    def _begin(self) -> None:
        self._observations = self.environments.reset(self._rows.tolist())
        if self.policy is not None:
            self.policy.reset(np.full(len(self._rows), TASK.environment.targets[0]))
        for _ in range(self._warm_up):
            self.step()


def sessions(config: Config, stack: ExitStack) -> Iterator[tuple[str, int, Callable[[], None]]]:
    """Make the rollouts to time: name, number of environments, and a function that runs some steps."""
    torch.manual_seed(0)
    environment = TASK.environment
    shape = ModelShape(
        environment.state_width,
        (-1.0,) * environment.action_width,
        (1.0,) * environment.action_width,
        attention=config.attention,
        width=config.width,
        context=config.context,
    )
    model = DecisionTransformer(shape)
    units = Normalizer(np.zeros(shape.state_width, np.float32), np.ones(shape.state_width, np.float32), 1000.0)

    def session(policy: Policy | None, count: int, *, workers: int | None = None) -> Callable[[], None]:
        workers = choose_workers(count) if workers is None else workers
        made = Environments(partial(make_environment, TASK), count, num_workers=workers)
        return Session(policy, stack.enter_context(made), warm_up=0 if policy is None else config.context).steps

    yield PLAIN, 1, session(PlainPolicy(model, units), 1)
    for count in config.envs:
        yield f"environments alone, {count}", count, session(None, count)
        if choose_workers(count):  # shows whether worker processes pay off
            yield f"environments alone, {count}, one process", count, session(None, count, workers=0)
        modes: tuple[InferenceMode, ...] = ("window", "streaming")
        for mode in modes:
            yield f"{mode}, {count}", count, session(DecisionTransformerPolicy(model, units, mode=mode), count)
    # The cost of results that do not depend on the number of environments: the same without tiles, with all threads.
    for mode in modes:
        for count in (config.envs[0], config.envs[-1]):
            policy = DecisionTransformerPolicy(model, units, mode=mode, reproducible=False)
            yield f"{mode}, {count}, without tiles", count, session(policy, count)


def table(timings: dict[str, tuple[int, Timing]]) -> str:
    """Table of steps per second, and of the speed relative to the plain loop."""
    plain = STEPS_PER_CALL / timings[PLAIN][1].median
    rows = []
    for name, (count, timing) in timings.items():
        steps = count * STEPS_PER_CALL
        rate = steps / timing.median
        quartiles = f"{steps / timing.upper_quartile:,.0f} to {steps / timing.lower_quartile:,.0f}"
        rows.append([name, f"{rate:,.0f}", quartiles, f"{rate / plain:.2f}"])
    return format_table(["", "steps per second", "quartiles", "times the plain loop"], rows)


def verdicts(timings: dict[str, tuple[int, Timing]]) -> Iterator[str]:
    """Compare both inference modes with their bars, at the last number of environments."""
    plain = timings[PLAIN][1].median
    for mode, bar in BARS.items():
        last = [name for name in timings if name.startswith(f"{mode}, ") and "without" not in name][-1]
        count, timing = timings[last]
        times = count * plain / timing.median
        yield f"[{'met' if times >= bar else 'MISSED'}] {last}: {times:.2f} times the plain loop (bar {bar:g})"


def main(config: Config) -> None:
    """Time all rollouts alternately, print, save."""
    with ExitStack() as stack:
        made = {name: (count, step) for name, count, step in sessions(config, stack)}
        with tqdm(desc="steps", unit=" calls", leave=False, disable=None) as bar:
            seen = time_interleaved(
                {name: step for name, (_, step) in made.items()},
                seconds=config.seconds,
                device=torch.device("cpu"),
                on_call=lambda name: bar.update(),
            )
    timings = {name: (made[name][0], timing) for name, timing in seen.items()}
    shape = f"{TASK.env_id}, {config.attention}, width {config.width}, 3 layers, K {config.context}:"
    report = "\n\n".join([shape, table(timings), "\n".join(f"* {line}" for line in verdicts(timings))])
    print(report)
    content = {name: {"environments": count, **asdict(timing)} for name, (count, timing) in timings.items()}
    save_report(config.out / "rollout.json", report, {"timings": content})
    print(f"\nSaved rollout.json in {config.out}")


if __name__ == "__main__":
    run_program(main, Config, name="benchmarks.rollout", description=__doc__)
