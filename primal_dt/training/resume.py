"""The configuration of a run to resume, which must be that of its checkpoint."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from primal_dt.config import Config, config_from_dict
from primal_dt.training.checkpoint import CheckpointFolder
from primal_dt.training.run_folder import CONFIG, RunRecord, read_record, require_unchanged

__all__ = ["resume_config"]

MAY_DIFFER = ("trust_env", "run.resume", "run.device", "run.threads", "run.logger")
"""Settings of a resumed run that are not those of its ``config.json``. Its threads are compared with the record's."""


def resume_config(config: Config, arguments: Sequence[str]) -> tuple[Config, RunRecord]:
    """Return the configuration and the record of the run that ``--resume`` names.

    Raises:
        ValueError: if the run does not exist, if ``arguments`` change anything but the device, the trust and the
            logger, if the run's ``config.json`` differs from its checkpoint, or if it would have a module imported.
    """
    given = {word.partition("=")[0] for word in arguments if word.startswith("--")}
    if others := ", ".join(sorted(given - {"--resume", "--device", "--trust-env", "--logger"})):
        raise ValueError(
            "--resume takes all settings from the run: only --device, --trust-env and --logger can be given with it, "
            f"not {others}"
        )
    folder = Path(str(config.run.resume))
    record = read_record(folder)
    _require_same_settings(folder, record)
    require_unchanged(folder)
    device = record.config.run.device if config.run.device == "auto" else config.run.device
    logger = config.run.logger if "--logger" in given else record.config.run.logger
    if ":" in logger and "--logger" not in given:
        raise ValueError(
            f"{folder} names the logger {logger}, whose module would be imported: if you trust it, give "
            f"--logger {logger} again; or leave it out of this run with --logger tensorboard"
        )
    run = replace(record.config.run, resume=config.run.resume, device=device, threads=record.threads, logger=logger)
    return replace(record.config, run=run, trust_env=config.trust_env), record


def _require_same_settings(folder: Path, record: RunRecord) -> None:
    """Check that ``config.json`` has the settings, the threads and the data of the newest checkpoint, if there is one.

    Raises:
        ValueError: if they differ. The message lists the differences.
    """
    checkpoints = CheckpointFolder(folder / "checkpoints")
    if not checkpoints.paths():
        return
    path, checkpoint, _ = checkpoints.newest(mmap=True)
    saved, given = _flat(asdict(config_from_dict(checkpoint.config))), _flat(asdict(record.config))
    for name in MAY_DIFFER:
        del saved[name], given[name]
    if (threads := checkpoint.config["run"]["threads"]) is not None:
        saved["threads"], given["threads"] = threads, record.threads
    for name in ("fingerprint", "env_id"):
        saved[f"task.{name}"], given[f"task.{name}"] = getattr(checkpoint.task, name), getattr(record.task, name)
    if wrong := [f"{name} is {given[name]!r}, not {value!r}" for name, value in saved.items() if given[name] != value]:
        raise ValueError(
            f"{folder / CONFIG} differs from what the run was trained with, by its checkpoint {path.name}: "
            f"{'; '.join(wrong)}. Undo the changes, or start a new run"
        )


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings -> value by dotted name, such as ``optimizer.lr``."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat
