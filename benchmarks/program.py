"""Entry point shared by all benchmark programs."""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import tyro

from primal_dt.system.files import atomic_write
from primal_dt.system.provenance import commit
from primal_dt.system.terminal import begin_program, explain

__all__ = ["run_program", "save_report"]

ConfigT = TypeVar("ConfigT")


def run_program(main: Callable[[ConfigT], None], config: type[ConfigT], *, name: str, description: str | None) -> None:
    """Parse the flags and run a benchmark.

    A ``ValueError`` or ``OSError`` ends the program with a message; Ctrl-C ends it without a traceback.

    Args:
        main: called with the parsed configuration.
        config: a dataclass whose fields are the flags.
        name: the module's name, shown in the usage line.
        description: the text that ``--help`` shows.
    """
    begin_program()
    try:
        main(tyro.cli(config, prog=f"python -m {name}", description=description))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {explain(error)}")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


def save_report(path: Path, report: str, raw: Mapping[str, Any]) -> None:
    """Save a report and the raw results behind it as JSON, with the commit and the machine.

    ``benchmarks.publish`` copies such a file to benchmarks/results, and a page of the docs shows its report.
    """
    content = {
        "commit": commit(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        **raw,
        "report": report.splitlines(),
    }
    with atomic_write(path) as file:
        file.write(json.dumps(content, indent=1).encode() + b"\n")
