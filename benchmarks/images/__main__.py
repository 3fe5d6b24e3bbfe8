"""Entry point of ``python -m benchmarks.images``."""

from benchmarks.images import run
from benchmarks.program import run_program

if __name__ == "__main__":
    run_program(run.main, run.Config, name="benchmarks.images", description=run.__doc__)
