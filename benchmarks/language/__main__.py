"""Entry point of ``python -m benchmarks.language``."""

from benchmarks.language import run
from benchmarks.program import run_program

run_program(run.main, run.Config, name="benchmarks.language", description=run.__doc__)
