"""Entry point of ``python -m benchmarks.uea``."""

from benchmarks.program import run_program
from benchmarks.uea import run

run_program(run.main, run.Config, name="benchmarks.uea", description=run.__doc__)
