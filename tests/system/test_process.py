"""Freed memory is kept."""

import subprocess
import sys

import pytest

COUNT = """
import resource, torch
from primal_dt.system.process import keep_freed_memory
assert keep_freed_memory()
torch.set_num_threads(1)
def step():
    tensors = [torch.ones(1 << 23) for _ in range(2)]  # 32 MiB each: left alone, glibc never keeps these
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc is Linux's")
def test_what_a_step_frees_the_next_one_takes_without_new_pages() -> None:
    command = [sys.executable, "-c", COUNT]
    faults = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert faults < 5 * 2 * (32 << 20) // 4096 // 20
