"""Random command lines: flags with values within and beyond their types."""

import inspect
import random
import shlex
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from benchmarks.torture.world import HALF, NAME, RECORD, TINY, WHOLE
from envs.__main__ import info, record, show_cache
from primal_dt.config import Config, EvaluationConfig, ModelConfig, OptimizerConfig, RunConfig
from primal_dt.evaluation.arguments import EvaluateConfig
from primal_dt.sweep.arguments import SweepConfig

__all__ = ["random_command"]

NUMBERS: tuple[str, ...] = (
    *shlex.split("0 1 2 3 7 64 1000 -1 1e3 0.5 0.999 1e-3 -0.0 1e-308 1e300 1e308 nan inf -inf 0x10 1_000 \u0661"),
    *(str(number) for number in (10**9, 2**31, 2**32, 2**52 + 1, 2**63 - 1, 2**63, 2**64, 10**30)),
)
WORDS: tuple[str, ...] = (
    *shlex.split("'' ' ' . .. a/b ä - %s {} $HOME None True [1] + a+a"),
    *("x" * 300, "\n", "\udcff"),
)
PATHS = ("runs/x", "reports/a/b/c", "reports/a file", "home/secret", "home/secret/x", "runs/whole", "runs/" + "x" * 300)
ENVIRONMENTS = ("Hopper-v5", "Hopper-v4", "CartPole-v1", "Nothing-v0", "os:Hopper-v5", "nothing:Hopper-v5", "Hop", ":")
DATA = (NAME, f"{NAME}+{NAME}", "minari/mine/hopper/small-v0", "runs/whole", "home/secret", "mine/nothing-v0", "+")
POOLS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("out", "plot"), PATHS),
    "name": ("x", "a file", "whole", "", ".", "..", "../x", "/x", "a/b", "x" * 300, "\n"),
    "resume": (HALF, WHOLE, "runs", "runs/nothing", "home/secret", ""),
    "env_id": ENVIRONMENTS,
    "task": (*ENVIRONMENTS, "hopper", "walker2d"),
    "policy": ("random", "hopper/medium", "hopper/nothing", "home/secret", "os:getcwd", "nothing:x", ""),
    "dataset": DATA,
    "datasets": DATA,
    "device": ("cpu", "cuda", "cuda:7", "meta", "mps", "auto", "", "cpu:99", "xpu"),
    "address": ("nowhere:1", "", "127.0.0.1:1", "x" * 300),
}
"""Values of flags that are names or paths. None leads out of the world."""
LONG = ("video", "compile", "bf16")
"""Flags that are left out: they take too long, or need a screen."""
Base = Callable[[random.Random], list[str]]


def _flags_of(*parts: Any) -> dict[str, Any]:
    """Name -> type of the flags of dataclasses or functions."""
    found: dict[str, Any] = {}
    for part in parts:
        if inspect.isfunction(part):
            found |= {name: each.annotation for name, each in inspect.signature(part).parameters.items()}
        else:
            found |= {each.name: each.type for each in fields(part)}
    nested = ("model", "optimizer", "evaluation", "run", "sweep", "runs")
    return {name: kind for name, kind in found.items() if name not in (*nested, *LONG)}


PROGRAMS: tuple[tuple[list[str], dict[str, Any]], ...] = (
    (
        ["train.py", "--dataset", NAME, *TINY, "--steps", "2", "--eval-every-steps", "2"],
        _flags_of(Config, ModelConfig, OptimizerConfig, EvaluationConfig, RunConfig),
    ),
    (["evaluate.py", WHOLE, "--episodes", "1", "--workers", "0"], _flags_of(EvaluateConfig)),
    (["python -m envs", "info", NAME], _flags_of(info)),
    (["python -m envs", *RECORD[:1], "mine/hopper/other-v0", *RECORD[2:]], _flags_of(record)),
    (["python -m envs", "cache"], _flags_of(show_cache)),
    (["sweep.py", "grid", "--datasets", NAME, "--seeds", "0", "--dry-run", *TINY[:-4]], _flags_of(SweepConfig)),
)
WEIGHTS = (12, 6, 3, 4, 1, 1)
"""Programs with more flags are chosen more often; sweep.py, which is slow, rarely."""


def random_command(chance: random.Random) -> list[str]:
    """A program with one to three random flags."""
    base, flags = chance.choices(PROGRAMS, WEIGHTS)[0]
    command = list(base)
    for _ in range(chance.randint(1, 3)):
        if chance.random() < 0.03:
            command.append(chance.choice(WORDS))
            continue
        name = chance.choice(list(flags))
        command += [f"--{name.replace('_', '-')}", *_values(name, flags[name], chance)]
    return command


def _values(name: str, kind: Any, chance: random.Random) -> list[str]:
    """Random values of a flag: mostly of its type."""
    pool = POOLS.get(name) or _pool(kind)
    if chance.random() < 0.1 and pool != PATHS:
        pool = chance.choice((NUMBERS, WORDS))
    return [chance.choice(pool) for _ in range(_number(kind, chance))]


def _number(kind: Any, chance: random.Random) -> int:
    """How many values: usually as many as the type takes."""
    if chance.random() < 0.03:
        return chance.randint(0, 3)
    if kind is bool:
        return 0
    text = str(kind)
    return 2 if "tuple[float, float]" in text else chance.randint(1, 3) if "tuple[" in text else 1


def _pool(kind: Any) -> tuple[str, ...]:
    """Values for a type."""
    if get_origin(kind) is Literal:
        return (*map(str, get_args(kind)), "bogus")
    choices = [each for part in get_args(kind) for each in (part, *get_args(part))]
    literals = [word for part in choices if get_origin(part) is Literal for word in get_args(part)]
    if literals:
        return (*map(str, literals), "bogus")
    if kind is str or str in choices or Path in choices:
        return WORDS
    return NUMBERS
