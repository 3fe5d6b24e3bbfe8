"""Rollout speed: window and streaming inference, beside a plain loop and beside environments without a policy.

The environment is HalfCheetah, whose episodes all have 1,000 steps. The model has random weights. All rollouts are
timed alternately, ten steps of all environments at a time, after their context windows are full.

The row "plain loop" is the usual way to evaluate a Decision Transformer: one environment, and at each step a forward
pass of the whole model on the last K steps, with all threads. Rows "environments alone" step the environments with
fixed random actions. Rows "reproducible" have results that do not depend on the number of parallel environments, as
``evaluate.py`` has them.

Then the policies alone, with one environment: in torch and exported, and as the context grows
(:mod:`benchmarks.policy_alone`). Needs the extra ``export``.
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
from benchmarks.policy_alone import (
    PLAIN,
    STACKS,
    STEPS_PER_CALL,
    PlainPolicy,
    alone_table,
    context_table,
    time_alone,
    time_contexts,
)
from benchmarks.policy_alone import verdicts as verdicts_alone
from benchmarks.program import run_program, save_report
from envs.make import make_environment
from envs.tasks import task_of
from primal_dt.data.normalizer import Normalizer
from primal_dt.evaluation.evaluate import choose_workers
from primal_dt.evaluation.rollout import Policy
from primal_dt.evaluation.vector import Environments
from primal_dt.model.transformer import DecisionTransformer, ModelShape
from primal_dt.policy.inference import InferenceMode
from primal_dt.policy.policy import DecisionTransformerPolicy
from primal_dt.system.table import format_table

TASK = task_of("HalfCheetah-v5")
BARS = {"window": 3.5, "streaming": 15.0}


@dataclass(frozen=True)
class Config:
    """Settings of the benchmark."""

    envs: tuple[int, ...] = (1, 16, 64, 128)
    """Numbers of parallel environments."""
    context: int = 20
    """Context length K in environment steps."""
    contexts: tuple[int, ...] = (20, 100, 300, 1000)
    """Context lengths for the comparison of a cache with running sums. Empty: leave it out."""
    width: int = 128
    """Model width D."""
    attention: str = "primal-plus"
    """Attention stack."""
    seconds: float = 20.0
    """Seconds to time each rollout."""
    out: Path = Path("runs/benchmarks")
    """Folder for rollout.json."""


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


def model_shape(config: Config, attention: str, context: int, *, max_timesteps: int = 1000) -> ModelShape:
    """The shape of a model for the task."""
    environment = TASK.environment
    bounds = (1.0,) * environment.action_width
    return ModelShape(
        environment.state_width,
        tuple(-bound for bound in bounds),
        bounds,
        attention=attention,
        width=config.width,
        context=context,
        max_timesteps=max_timesteps,
    )


def sessions(
    config: Config, model: DecisionTransformer, units: Normalizer, stack: ExitStack
) -> Iterator[tuple[str, int, Callable[[], None]]]:
    """Make the rollouts to time: name, number of environments, and a function that runs some steps."""

    def session(policy: Policy | None, count: int, *, workers: int | None = None) -> Callable[[], None]:
        workers = choose_workers(count) if workers is None else workers
        made = Environments(partial(make_environment, TASK), count, num_workers=workers)
        return Session(policy, stack.enter_context(made), warm_up=0 if policy is None else config.context).steps

    yield f"{PLAIN}, 1", 1, session(PlainPolicy(model, units), 1)
    for count in config.envs:
        yield f"environments alone, {count}", count, session(None, count)
        if choose_workers(count):  # shows whether worker processes pay off
            yield f"environments alone, {count}, one process", count, session(None, count, workers=0)
        modes: tuple[InferenceMode, ...] = ("window", "streaming")
        for mode in modes:
            yield f"{mode}, {count}", count, session(DecisionTransformerPolicy(model, units, mode=mode), count)
    for mode in modes:
        for count in (config.envs[0], config.envs[-1]):
            policy = DecisionTransformerPolicy(model, units, mode=mode, reproducible=True)
            yield f"{mode}, {count}, reproducible", count, session(policy, count)


def table(timings: dict[str, tuple[int, Timing]]) -> str:
    """Table of steps per second, and of the speed relative to the plain loop."""
    plain = STEPS_PER_CALL / timings[f"{PLAIN}, 1"][1].median
    rows = []
    for name, (count, timing) in timings.items():
        steps = count * STEPS_PER_CALL
        rate = steps / timing.median
        quartiles = f"{steps / timing.upper_quartile:,.0f} to {steps / timing.lower_quartile:,.0f}"
        rows.append([name, f"{rate:,.0f}", quartiles, f"{rate / plain:.2f}"])
    return format_table(["", "steps per second", "quartiles", "times the plain loop"], rows)


def verdicts(timings: dict[str, tuple[int, Timing]]) -> Iterator[str]:
    """Compare both inference modes with their bars, at the last number of environments."""
    plain = timings[f"{PLAIN}, 1"][1].median
    for mode, bar in BARS.items():
        last = [name for name in timings if name.startswith(f"{mode}, ") and "reproducible" not in name][-1]
        count, timing = timings[last]
        times = count * plain / timing.median
        yield f"[{'met' if times >= bar else 'MISSED'}] {last}: {times:.2f} times the plain loop (bar {bar:g})"


def main(config: Config) -> None:
    """Time all rollouts alternately, then the policies alone; print, save."""
    torch.manual_seed(0)
    shape = model_shape(config, config.attention, config.context)
    model, width = DecisionTransformer(shape), shape.state_width
    units = Normalizer(np.zeros(width, np.float32), np.ones(width, np.float32), 1000.0)
    with ExitStack() as stack:
        made = {name: (count, step) for name, count, step in sessions(config, model, units, stack)}
        with tqdm(desc="steps", unit=" calls", leave=False, disable=None) as bar:
            seen = time_interleaved(
                {name: step for name, (_, step) in made.items()},
                seconds=config.seconds,
                device=torch.device("cpu"),
                on_call=lambda name: bar.update(),
            )
    timings = {name: (made[name][0], timing) for name, timing in seen.items()}
    alone = time_alone(model, units, seconds=config.seconds)
    shapes = [
        model_shape(config, attention, context, max_timesteps=max(1000, 2 * context))
        for attention in STACKS
        for context in config.contexts
    ]
    by_context = time_contexts(shapes, units, seconds=config.seconds)
    lines = "\n".join(f"* {line}" for line in (*verdicts(timings), *verdicts_alone(alone)))
    title = f"{TASK.env_id}, {config.attention}, width {config.width}, 3 layers, K {config.context}:"
    parts = [title, table(timings), alone_table(alone), context_table(by_context) if shapes else "", lines]
    report = "\n\n".join(filter(None, parts))
    print(report)
    content = {
        "timings": {name: {"environments": count, **asdict(timing)} for name, (count, timing) in timings.items()},
        "alone": {name: asdict(timing) for name, timing in alone.items()},
        "contexts": {
            name: {str(context): asdict(timing) for context, timing in row.items()} for name, row in by_context.items()
        },
    }
    save_report(config.out / "rollout.json", report, content)
    print(f"\nSaved rollout.json in {config.out}")


if __name__ == "__main__":
    run_program(main, Config, name="benchmarks.rollout", description=__doc__)
