"""How a benchmark starts and ends."""

import sys
from collections.abc import Callable
from typing import TypeVar

import torch
import tyro

from primal_dt.system.terminal import begin_program, explain

__all__ = ["check_device", "run_program"]

ConfigT = TypeVar("ConfigT")


def run_program(main: Callable[[ConfigT], None], config: type[ConfigT], *, name: str, description: str | None) -> None:
    """Parse the flags and run; a user's mistake ends in a message, Ctrl-C without a traceback.

    Args:
        main: what to do with the configuration.
        config: a dataclass, whose fields are the flags.
        name: of the module.
        description: shown by ``--help``.
    """
    begin_program()
    try:
        main(tyro.cli(config, prog=f"python -m {name}", description=description))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {explain(error)}")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


def check_device(device: str) -> None:
    """Find out now whether a device can be used.

    Raises:
        ValueError: if not.
    """
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {device} cannot be used: {str(error).splitlines()[0]}") from error
