"""Freed memory is kept."""

import subprocess
import sys

import pytest

COUNT = """
import resource, sys, torch
from primal_dt.memory import keep_freed_memory
if "keep" in sys.argv:
    assert keep_freed_memory()
torch.set_num_threads(1)
def step():
    tensors = [torch.ones(1 << 21) for _ in range(8)]  # 8 MiB each
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc is Linux's")
def test_what_a_step_frees_the_next_one_takes_without_new_pages() -> None:
    def faults(*flags: str) -> int:
        command = [sys.executable, "-c", COUNT, *flags]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    pages = 5 * 8 * (8 << 20) // 4096
    assert faults() > pages // 10  # or there would be nothing to gain; huge pages make them fewer
    assert faults("keep") < pages // 20
