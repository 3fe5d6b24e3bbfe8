"""Entry point of ``python -m benchmarks.lra``."""

from benchmarks.lra import run
from benchmarks.program import run_program

run_program(run.main, run.Config, name="benchmarks.lra", description=run.__doc__)
