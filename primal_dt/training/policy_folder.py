"""A policy as a folder to share: ``model.safetensors`` with the weights, ``config.json`` with everything else.

Both files are plain data: reading them executes no code, whoever wrote them. ``config.json`` has the model's shape, the
normalizer, the task, the settings of the training and its provenance, the license and the digest of the weights.

This module knows the files. What is in them is checked like a checkpoint's content, by ``checkpoint_schema``.
"""

import hashlib
import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from primal_dt.schema import build, require_keys
from primal_dt.system.files import atomic_write, check_regular
from primal_dt.system.records import CHECKSUM, checksum
from primal_dt.training.checkpoint_schema import FORMAT

__all__ = [
    "LIBRARY",
    "POLICY_CONFIG",
    "WEIGHTS",
    "DamagedError",
    "is_policy_folder",
    "read_policy",
    "read_settings",
    "read_weights",
    "write_policy",
]

LIBRARY = "primal-dt"
"""Marks a ``config.json`` as a policy's: other libraries have files of that name too."""
POLICY_FORMAT = 1
POLICY_CONFIG, WEIGHTS = "config.json", "model.safetensors"
MAX_CONFIG_BYTES = 10_000_000
PREFIXES = {"weights": "model.", "critic": "critic."}
"""Part of a checkpoint -> how the names of its tensors begin in ``model.safetensors``."""


class DamagedError(ValueError):
    """A file has changed since it was written."""


@dataclass(frozen=True)
class _Units:
    """The normalizer as plain values."""

    state_mean: tuple[float, ...]
    state_std: tuple[float, ...]
    return_scale: float


def is_policy_folder(path: Path) -> bool:
    """Whether a path looks like a folder that :func:`write_policy` wrote, if one of its files may be missing."""
    if (path / "checkpoints").exists():  # a run
        return False
    try:
        return (path / WEIGHTS).is_file() or read_settings(path)["library"] == LIBRARY
    except (ValueError, OSError):
        return False


def write_policy(folder: Path, content: Mapping[str, Any], *, provenance: Mapping[str, Any] | None) -> None:
    """Write both files.

    Args:
        folder: the folder. It is created if it does not exist.
        content: the content of a checkpoint, and the license of its weights. The state of its training is not written.
        provenance: the command, the commit and the versions of the training; None if they are not known.
    """
    tensors = {
        f"{prefix}{name}": tensor.detach().cpu().contiguous().clone()  # safetensors refuses views and shared memory
        for part, prefix in PREFIXES.items()
        for name, tensor in (content[part] or {}).items()
    }
    weights = safetensors.torch.save(tensors, metadata={"format": "pt"})
    values = {
        "library": LIBRARY,
        "format": POLICY_FORMAT,
        **{name: content[name] for name in ("shape", "step", "task", "config", "license")},
        "normalizer": {
            "state_mean": content["state_mean"].tolist(),  # a double has every value of single precision
            "state_std": content["state_std"].tolist(),
            "return_scale": content["return_scale"],
        },
        "provenance": None if provenance is None else dict(provenance),
        "weights_sha256": hashlib.sha256(weights).hexdigest(),
    }
    values = json.loads(json.dumps(values, allow_nan=False))
    with atomic_write(folder / WEIGHTS) as file:
        file.write(weights)
    with atomic_write(folder / POLICY_CONFIG) as file:
        file.write(json.dumps({**values, CHECKSUM: checksum(values)}, indent=2).encode() + b"\n")


def read_settings(folder: Path) -> dict[str, Any]:
    """Read ``config.json``, and check that it is a policy's and unchanged.

    Raises:
        DamagedError: if it has changed since it was written.
        ValueError: if it is missing, or another's.
    """
    raw = _read(folder / POLICY_CONFIG, limit=MAX_CONFIG_BYTES)
    try:
        values = json.loads(raw)
    except (ValueError, RecursionError) as error:  # not UTF-8, cut off, or too deep
        raise DamagedError(f"{POLICY_CONFIG} is not JSON ({error})") from error
    if not isinstance(values, dict) or values.get("library") != LIBRARY:
        raise ValueError(f"{POLICY_CONFIG} is not that of a {LIBRARY} policy")
    if type(values.get("format")) is not int or values["format"] != POLICY_FORMAT:
        stated = reprlib.repr(values.get("format"))
        raise ValueError(f"{POLICY_CONFIG} has format {stated}, but this code reads format {POLICY_FORMAT}")
    stated = values.pop(CHECKSUM, None)
    if stated != checksum(values):
        raise DamagedError(f"{POLICY_CONFIG} has changed since it was written (it has another checksum)")
    return values


def read_weights(folder: Path, settings: Mapping[str, Any]) -> bytes:
    """Read ``model.safetensors``, and check that it is the file that the settings of its folder belong to.

    Raises:
        DamagedError: if it is not.
        ValueError: if it is missing.
    """
    expected = require_keys(settings, ("weights_sha256",), where=POLICY_CONFIG)["weights_sha256"]
    raw = _read(folder / WEIGHTS)
    if hashlib.sha256(raw).hexdigest() != expected:
        raise DamagedError(f"{WEIGHTS} is not the file that {POLICY_CONFIG} belongs to (it has another SHA-256)")
    return raw


def read_policy(folder: Path, device: torch.device | str = "cpu") -> tuple[dict[str, Any], int]:
    """Read both files.

    Returns:
        The content as that of a checkpoint, for ``checked_content``, and the number of bytes of the weights' file.

    Raises:
        ValueError: if a file is missing, damaged or another's.
        OSError: if a file may not be read.
    """
    values = read_settings(folder)
    require_keys(values, ("shape", "step", "task", "config", "normalizer"), where=POLICY_CONFIG)
    units = build(_Units, values["normalizer"], where="normalizer")
    raw = read_weights(folder, values)
    try:
        tensors = safetensors.torch.load(raw)
    except Exception as error:  # of safetensors, and of torch for types and sizes
        raise ValueError(f"{WEIGHTS} is not a safetensors file ({error})") from error
    parts: dict[str, dict[str, Tensor]] = {part: {} for part in PREFIXES}
    for name, tensor in tensors.items():
        part = next((part for part, prefix in PREFIXES.items() if name.startswith(prefix)), None)
        if part is None:
            raise ValueError(f"{WEIGHTS} has the unknown key {reprlib.repr(name)}")
        parts[part][name.removeprefix(PREFIXES[part])] = tensor.to(device)
    step = values["step"]
    content = {
        "format": FORMAT,
        **{name: values[name] for name in ("shape", "step", "task", "config")},
        "weights": parts["weights"],
        "critic": parts["critic"] or None,
        "state_mean": torch.tensor(units.state_mean, dtype=torch.float32),
        "state_std": torch.tensor(units.state_std, dtype=torch.float32),
        "return_scale": units.return_scale,
        "license": values.get("license"),  # earlier versions did not write it
        "training": {"trainer": {"step": step}, "pending": {}},  # not shared
    }
    return content, len(raw)


def _read(path: Path, *, limit: int | None = None) -> bytes:
    """Read a file. The hub's cache consists of links, so they are followed, but only to regular files."""
    file = path.resolve()
    check_regular(file)
    if not file.exists():
        raise ValueError(f"{path.name} is missing")
    if limit is not None and (size := file.stat().st_size) > limit:
        raise ValueError(f"{path.name} has {size:,} bytes, more than {limit:,}")
    return file.read_bytes()
