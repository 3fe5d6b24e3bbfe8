"""Freed memory is reused, and its shortage has one error."""

import subprocess
import sys

import pytest
import torch

from primal_dt.system.process import memory_errors
from primal_dt.system.terminal import explain

COUNT = """
import resource, torch
from primal_dt.system.process import keep_freed_memory
assert keep_freed_memory()
torch.set_num_threads(1)
def step():
    tensors = [torch.ones(1 << 23) for _ in range(2)]  # 32 MiB each: by default, glibc always returns these
for _ in range(10):  # gaps between the first tensors may be too small for the next ones
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs glibc's malloc")
def test_freed_memory_is_reused() -> None:
    done = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 5 * 2 * (32 << 20) // 4096 // 20  # page faults: 5 % of those for new memory


def test_memory_shortage_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match="2305843009213693952 bytes") as caught, memory_errors():
        torch.empty(2**61, dtype=torch.uint8)
    assert explain(caught.value).startswith("there is not enough memory")
    assert "--accumulate 2" in explain(caught.value)
    with pytest.raises(RuntimeError, match="tensor size"), memory_errors():
        torch.ones(2) @ torch.ones(3)
