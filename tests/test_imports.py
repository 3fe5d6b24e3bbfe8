"""What an import brings along, seen from a process of its own."""

import subprocess
import sys

HEAVY = ("gymnasium", "minari", "mujoco", "matplotlib", "transformers", "tensorboard", "tyro", "envs", "benchmarks")


def modules_after(statement: str) -> set[str]:
    """The top-level modules that a statement adds to what importing torch has loaded."""
    code = f"import torch, sys; before = set(sys.modules); {statement}; print(*(set(sys.modules) - before))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in result.stdout.split()}


def test_the_attention_library_needs_torch_alone() -> None:
    added = modules_after("import primal_dt.attention")
    assert "primal_dt" in added
    assert not added & set(HEAVY)
    assert not added - {"primal_dt"} - set(sys.stdlib_module_names)


def test_the_package_itself_is_as_light() -> None:
    added = modules_after("from primal_dt import PrimalAttention, CausalPrimalAttention, build_attention")
    assert not added - {"primal_dt"} - set(sys.stdlib_module_names)
