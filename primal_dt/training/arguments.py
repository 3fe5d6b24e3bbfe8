"""Command line of ``train.py``: from a preset and flags to a configuration. It must not import torch."""

from collections.abc import Sequence

import tyro

from primal_dt.config import PRESETS, Config

__all__ = ["parse_config"]


def parse_config(arguments: Sequence[str], *, description: str | None = None, program: str | None = None) -> Config:
    """Parse a preset, ``quick`` if none is named, and the flags that change it.

    Args:
        arguments: command line, as in ``sys.argv[1:]``.
        description: text at the top of ``--help``.
        program: program name in messages. If not given: the name by which the program was called.
    """
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help")):
        arguments = ["quick", *arguments]
    return tyro.extras.overridable_config_cli(
        PRESETS, prog=program, args=list(arguments), description=description, config=(tyro.conf.OmitArgPrefixes,)
    )
