"""Checks of a checkpoint's file and content, before its values are used.

A file from elsewhere may state any sizes, types and values. Checks are by what the classes of this package declare, and
take no more memory than the file has.
"""

import reprlib
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from primal_dt.config import EARLIER_VALUES, ModelConfig, config_from_dict
from primal_dt.data.normalizer import Normalizer
from primal_dt.model.critic import TwinCritic
from primal_dt.model.transformer import DecisionTransformer, ModelShape
from primal_dt.schema import build, require_keys
from primal_dt.task import RunTask

__all__ = ["FORMAT", "check_archive", "checked_content"]

FORMAT = 2
KEYS = ("shape", "weights", "state_mean", "state_std", "return_scale", "step", "config", "task", "training")
"""Keys of a checkpoint, apart from ``format`` and ``OPTIONAL``."""
OPTIONAL = ("critic", "license")
"""Keys that may be missing: earlier versions wrote no critics, and only shared policies have a license."""
NOT_COMPARED = {"init", "primal_init"}
"""Settings that a trained model does not depend on. Shapes of earlier versions lack them."""
UNBOUNDED = ("return_cap",)
"""Buffers that may be infinite."""
ModelKind = type[DecisionTransformer] | type[TwinCritic]


def check_archive(path: Path) -> None:
    """Check the sizes and checksums of a file that ``torch.save`` wrote, which it does not compress.

    Raises:
        ValueError: if unpacking it would give more than the file has, or a part has changed.
    """
    with zipfile.ZipFile(path) as archive:
        parts = archive.infolist()
        if packed := [part.filename for part in parts if part.compress_type != zipfile.ZIP_STORED]:
            raise ValueError(f"{packed[0]} is compressed, which checkpoints are not")
        if (unpacked := sum(part.file_size for part in parts)) > (size := path.stat().st_size):
            raise ValueError(f"its parts have {unpacked:,} bytes, more than the file ({size:,})")
        if (damaged := archive.testzip()) is not None:  # torch does not verify checksums
            raise ValueError(f"{damaged} has changed since it was written")


def checked_content(content: object, *, size: int) -> dict[str, Any]:
    """Check the content of a checkpoint. Returns the fields of ``Checkpoint``.

    Args:
        content: the content.
        size: number of bytes in the file.

    Raises:
        ValueError: if something is missing, has another type, or does not fit the rest.
    """
    values = require_keys(content, ("format",), where="it")
    if type(values["format"]) is not int or values["format"] != FORMAT:
        raise ValueError(f"it has format {reprlib.repr(values['format'])}, but this code reads format {FORMAT}")
    require_keys(values, KEYS, where="it")
    if unknown := values.keys() - {*KEYS, *OPTIONAL, "format"}:
        raise ValueError(f"it has the unknown key {reprlib.repr(unknown.pop())}")
    largest = max((tensor.numel() * tensor.element_size() for tensor in _tensors(values)), default=0)
    if largest > size:  # tensors may share their bytes, but none repeats its own
        raise ValueError(f"it has a tensor of {largest:,} bytes, more than the file ({size:,})")
    config, step = config_from_dict(values["config"]), values["step"]
    shape = build(ModelShape, values["shape"], where="shape", optional=(*EARLIER_VALUES, "unbounded", "categories"))
    _check_shape(shape, config.model)
    _check_size(shape, size)
    critic, weights_license = (values.get(name) for name in OPTIONAL)
    if not isinstance(weights_license, str | None):
        raise ValueError(f"license must be a text, not {reprlib.repr(weights_license)}")
    _check_weights(values["weights"], shape, DecisionTransformer, where="weights")
    if critic is not None:
        _check_weights(critic, shape, TwinCritic, where="critic")
    if type(step) is not int or not 0 <= step <= config.optimizer.steps:
        raise ValueError(f"step must be from 0 to {config.optimizer.steps}, not {reprlib.repr(step)}")
    training = require_keys(values["training"], ("trainer", "pending"), where="training")
    own_step = require_keys(training["trainer"], ("step",), where="training.trainer")["step"]
    if type(own_step) is not int or own_step != step:
        raise ValueError(f"training.trainer.step must be {step}, not {reprlib.repr(own_step)}")
    needed = ("train/loss", "train/steps_per_second") if training["pending"] else ()
    for name, value in require_keys(training["pending"], needed, where="training.pending").items():
        if type(name) is not str or type(value) is not float:
            raise ValueError(f"training.pending must have numbers by name, not {name!r}: {reprlib.repr(value)}")
    return {
        "shape": shape,
        "weights": values["weights"],
        "normalizer": _normalizer(values, shape),
        "step": step,
        "config": values["config"],
        "task": RunTask.from_dict(values["task"]),
        "training": training,
        "critic": critic,
        "license": weights_license,
    }


def _tensors(value: object) -> Iterator[Tensor]:
    """Every tensor in nested values, once."""
    seen, waiting = set(), [value]
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, Mapping):
            waiting += each.values()
        elif isinstance(each, list | tuple):
            waiting += each


def _normalizer(values: Mapping[str, Any], shape: ModelShape) -> Normalizer:
    """Build the normalizer, whose vectors must fit the model's states."""
    for name in ("state_mean", "state_std"):
        vector = values[name]
        if not isinstance(vector, Tensor) or vector.dtype != torch.float32 or vector.shape != (shape.state_width,):
            raise ValueError(f"{name} must be a tensor of {shape.state_width} float32 numbers")
    if type(values["return_scale"]) not in (int, float):
        raise ValueError(f"return_scale must be a number, not {reprlib.repr(values['return_scale'])}")
    return Normalizer(values["state_mean"].cpu().numpy(), values["state_std"].cpu().numpy(), values["return_scale"])


def _check_shape(shape: ModelShape, config: ModelConfig) -> None:
    """Check that the model's shape has the settings of the configuration."""
    for name in {item.name for item in fields(ModelConfig)} & {item.name for item in fields(ModelShape)} - NOT_COMPARED:
        stated, own = getattr(config, name), getattr(shape, name)
        if stated is not None and own != stated:
            raise ValueError(f"shape.{name} is {own!r}, but config.model.{name} is {stated!r}")


def _check_size(shape: ModelShape, size: int) -> None:
    """Check that the model's matrices are not larger than the file, so that building the model takes no more memory."""
    inputs = shape.state_width + sum(shape.categories or (shape.action_width,))
    columns = inputs + shape.max_timesteps + shape.num_layers * shape.width
    columns += shape.rank * shape.layer_kinds.count("primal")
    if columns * shape.width > size:
        raise ValueError(f"shape describes a larger model than the file has ({size:,} bytes)")


def _check_weights(weights: object, shape: ModelShape, kind: ModelKind, *, where: str) -> None:
    """Check that weights are those of a model of this shape."""
    own = require_keys(weights, (), where=where)
    if wrong := [name for name, value in own.items() if type(value) is not Tensor or value.layout != torch.strided]:
        raise ValueError(f"{where}: {reprlib.repr(wrong[0])} is not a tensor")
    expected = _weights_of(shape, kind)  # type: ignore[arg-type]
    if missing := [name for name in expected if name not in own]:
        raise ValueError(f"{where} lacks {missing[0]}")
    if unknown := [name for name in own if name not in expected]:
        raise ValueError(f"{where} has the unknown key {reprlib.repr(unknown[0])}")
    for name, (size, dtype) in expected.items():
        if (own[name].shape, own[name].dtype) != (size, dtype):
            stated = f"{tuple(own[name].shape)} {own[name].dtype}"
            raise ValueError(f"{where}: {name} is {stated}, but the shape needs {tuple(size)} {dtype}")
        if dtype.is_floating_point and not own[name].isfinite().all() and name not in UNBOUNDED:
            raise ValueError(f"{where}: {name} must be finite")


@lru_cache(maxsize=8)
def _weights_of(shape: ModelShape, kind: ModelKind) -> Mapping[str, tuple[torch.Size, torch.dtype]]:
    """Name -> shape and type of the weights of a model."""
    with torch.random.fork_rng(devices=[]):
        return {name: (value.shape, value.dtype) for name, value in kind(shape).state_dict().items()}
