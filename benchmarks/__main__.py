"""Every benchmark with its data, command, rough time, and the table of the paper that it stands beside.

python -m benchmarks --list
"""

from dataclasses import dataclass

from benchmarks.catalog import listing
from benchmarks.program import run_program


@dataclass(frozen=True)
class Config:
    """What to show."""

    list: bool = True
    """List the benchmarks."""


def main(config: Config) -> None:
    """Print the list."""
    print(listing())


if __name__ == "__main__":
    run_program(main, Config, name="benchmarks", description=__doc__)
