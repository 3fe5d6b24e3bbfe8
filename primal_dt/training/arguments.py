"""Command line of ``train.py``: from a preset and flags, or a run to resume, to a configuration."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import tyro

from primal_dt.config import PRESETS, Config
from primal_dt.training.run_folder import RunRecord, read_record

__all__ = ["parse_config", "resume_config"]


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


def resume_config(config: Config, arguments: Sequence[str]) -> tuple[Config, RunRecord]:
    """Return the configuration and the record of the run that ``--resume`` names.

    Raises:
        ValueError: if the run does not exist, or if ``arguments`` change anything but the device and the trust.
    """
    given = {word.partition("=")[0] for word in arguments if word.startswith("--")}
    if others := ", ".join(sorted(given - {"--resume", "--device", "--trust-env"})):
        raise ValueError(
            "--resume takes all settings from the run: only --device and --trust-env can be given with it, "
            f"not {others}"
        )
    record = read_record(Path(str(config.run.resume)))
    device = record.config.run.device if config.run.device == "auto" else config.run.device
    run = replace(record.config.run, resume=config.run.resume, device=device, threads=record.threads)
    return replace(record.config, run=run, trust_env=config.trust_env), record
