"""The command line of ``train.py``: a preset and flags, or a run to resume -> a configuration."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import tyro

from primal_dt.config import PRESETS, Config
from primal_dt.training.run_folder import RunRecord, read_record

__all__ = ["parse_config", "resume_config"]


def parse_config(arguments: Sequence[str], *, description: str | None = None, program: str | None = None) -> Config:
    """The configuration that flags ask for: a preset, ``quick`` if none is named, with changes.

    Args:
        arguments: as in ``sys.argv[1:]``.
        description: shown by ``--help``.
        program: the name in messages. If not given: as the program was called.
    """
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help")):
        arguments = ["quick", *arguments]
    return tyro.extras.overridable_config_cli(
        PRESETS, prog=program, args=list(arguments), description=description, config=(tyro.conf.OmitArgPrefixes,)
    )


def resume_config(config: Config, arguments: Sequence[str]) -> tuple[Config, RunRecord]:
    """The configuration of the run that ``--resume`` names, and what that run wrote down when it began.

    Raises:
        ValueError: if there is no such run, or if ``arguments`` change more than the device.
    """
    given = {word.partition("=")[0] for word in arguments if word.startswith("--")}
    if given - {"--resume", "--device"}:
        raise ValueError("--resume takes all settings from the run: only --device can be given with it")
    record = read_record(Path(str(config.run.resume)))
    device = record.config.run.device if config.run.device == "auto" else config.run.device
    run = replace(record.config.run, resume=config.run.resume, device=device, threads=record.threads)
    return replace(record.config, run=run), record
