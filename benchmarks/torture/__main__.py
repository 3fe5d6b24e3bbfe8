"""Attack the programs in random ways, and check what must hold: ``python -m benchmarks.torture --minutes 10``.

Each attack works on a small data set and small runs, in a temporary folder. It kills or stops a program, fails its
calls of the file system, damages one of its files, starts two at once, or gives random flags. Afterwards:

* the program has given the result that it gives undisturbed, to the last bit, at once or when it is resumed; or it
  ended with a message
* it has shown no traceback and does not hang
* no checkpoint, point, episode or data set that was saved is lost
* nothing is written outside of its folders, or through a link

An attack is determined by its number and the seed, apart from the moments of kills, which depend on the machine:
--first 17 --attacks 1 repeats attack 17.
"""

import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from benchmarks.program import run_program, save_report
from benchmarks.torture.attacks import ATTACKS
from benchmarks.torture.world import InvariantError, World
from primal_dt.system.table import format_table

OUTCOMES = ("same result", "message", "accepted", "VIOLATION")


@dataclass(frozen=True)
class Config:
    """Settings of the torture test."""

    minutes: float = 10.0
    """Minutes of attacks."""
    attacks: int | None = None
    """Maximum number of attacks. If not given: as many as there is time for."""
    seed: int = 0
    """Seed of the attacks."""
    first: int = 0
    """Number of the first attack."""
    only: str | None = None
    """Kind of attacks: the beginning of its name. If not given: all in turn."""
    out: Path = Path("runs/benchmarks")
    """Folder for torture.json, and for the files of attacks that found a violation."""

    def __post_init__(self) -> None:
        if not 0 < self.minutes < 1e6 or (self.attacks is not None and self.attacks < 1) or self.first < 0:
            raise ValueError("minutes must be above 0, attacks at least 1 and first at least 0")
        if not self.kinds:
            raise ValueError(f"only ({self.only}) must be the beginning of one of: {', '.join(ATTACKS)}")

    @property
    def kinds(self) -> list[str]:
        """The kinds of attacks."""
        return [name for name in ATTACKS if name.startswith(self.only or "")]


def main(config: Config) -> None:
    """Attack until the time is over, print what was seen, save it. Exit with 1 if something was violated."""
    seen: Counter[tuple[str, str]] = Counter()
    violations: list[str] = []
    out = config.out.absolute()
    with tempfile.TemporaryDirectory(prefix="primal-dt-torture-") as name:
        world = World(Path(name).resolve())
        start, number = time.monotonic(), config.first
        with tqdm(desc="attacks", unit=" attacks", disable=None) as bar:
            while time.monotonic() - start < 60 * config.minutes and number - config.first != config.attacks:
                kind = config.kinds[number % len(config.kinds)]
                try:
                    outcome = ATTACKS[kind](world, random.Random(f"{config.seed} {kind} {number}"))
                except InvariantError as error:
                    outcome = "VIOLATION"
                    violations.append(f"attack {number} ({kind}): {error}")
                    print(violations[-1], file=sys.stderr, flush=True)
                    with suppress(shutil.Error):  # it cannot copy pipes
                        shutil.copytree(world.root, out / f"torture-{number}", symlinks=True, dirs_exist_ok=True)
                seen[kind, outcome] += 1
                number += 1
                bar.update()
    report = summary(seen)
    print(report)
    save_report(
        out / "torture.json",
        report,
        {
            "seed": config.seed,
            "first": config.first,
            "minutes": (time.monotonic() - start) / 60,
            "seen": [[*key, times] for key, times in sorted(seen.items())],
            "violations": violations,
        },
    )
    print(f"\nSaved torture.json in {config.out}")
    if violations:
        sys.exit(1)


def summary(seen: Counter[tuple[str, str]]) -> str:
    """The table of attacks and outcomes."""
    rows = []
    for kind in ATTACKS:
        counts = [seen[kind, outcome] for outcome in OUTCOMES]
        if total := sum(counts):
            rows.append([kind, f"{total:,}", *(f"{count:,}" if count else "" for count in counts)])
    totals = [sum(count for (_, each), count in seen.items() if each == outcome) for outcome in OUTCOMES]
    rows.append(["all", f"{sum(totals):,}", *(f"{count:,}" for count in totals)])
    return format_table(["attack", "number", "same result", "message", "accepted", "violations"], rows)


if __name__ == "__main__":
    run_program(main, Config, name="benchmarks.torture", description=__doc__)
