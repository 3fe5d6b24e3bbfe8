"""A policy as one file: the model with its units, action bounds or choices, and the handling of its history.

All inputs and outputs are in raw units. :mod:`primal_dt.policy.steps` describes them. Such a file is run by
:mod:`primal_dt.policy.onnx_runner`, with numpy and onnxruntime alone, or by :mod:`primal_dt.policy.torch_runner`.
"""

import json
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch

from primal_dt.data.normalizer import Normalizer
from primal_dt.model.critic import TwinCritic
from primal_dt.model.transformer import DecisionTransformer
from primal_dt.policy.exported_file import FORMAT, KEY, Stated
from primal_dt.policy.inference import InferenceMode, require_mode
from primal_dt.policy.steps import StreamingStep, WindowStep, make_step
from primal_dt.policy.torch_runner import MEMORY
from primal_dt.system.files import atomic_write

__all__ = ["ExportFormat", "export_policy", "require_export", "state"]

ExportFormat = Literal["onnx", "torch"]
OPSET = 20
NOT_IN_ONNX: Mapping[str, str] = {
    "reformer": "it sorts tokens, and ONNX has no sort that keeps the order of equal ones",
    "attention_sh": "it sorts real tokens before padding, and ONNX has no sort that keeps the order of equal ones",
}
"""Attention kind -> why it cannot be exported to ONNX."""


def require_export(model: DecisionTransformer, mode: InferenceMode, kind: ExportFormat) -> None:
    """Check that a model can be exported.

    Raises:
        ValueError: with the reason, if it cannot.
    """
    shape = model.shape
    if kind not in ("onnx", "torch"):
        raise ValueError(f"format must be onnx or torch, not {kind!r}")
    require_mode(mode, shape)
    for layer in shape.layer_kinds if kind == "onnx" else ():
        if layer in NOT_IN_ONNX:
            raise ValueError(f"{layer} cannot be exported to ONNX: {NOT_IN_ONNX[layer]}. Use the format torch")
    if kind == "onnx" and "primal" in shape.layer_kinds and shape.feature_map != "cosine":
        raise ValueError(
            f"the {shape.feature_map} map cannot be exported to ONNX, which has no cumulative log-sum-exp. "
            "Use the format torch"
        )
    if mode == "streaming" and shape.context == 1:
        raise ValueError("a context of 1 step has nothing to stream: use mode window")


def export_policy(
    path: Path,
    model: DecisionTransformer,
    normalizer: Normalizer,
    *,
    critic: TwinCritic | None = None,
    mode: InferenceMode = "window",
    format: ExportFormat = "onnx",  # noqa: A002 - the flag's name
    about: Mapping[str, Any],
) -> None:
    """Write a policy as one file, atomically.

    Args:
        path: the file.
        model: the trained model.
        normalizer: the normalizer that it was trained with.
        critic: critics that choose among actions, if there are any.
        mode: ``window`` or ``streaming``.
        format: ``onnx``, or ``torch`` for a file of ``torch.export``.
        about: what the file says of itself in addition to what a runner needs: plain values.

    Raises:
        ValueError: if the model cannot be exported.
        ImportError: if the extra ``export`` is not installed.
    """
    require_export(model, mode, format)
    step = make_step(model, normalizer, critic, mode)
    stated = state(step, mode, about)
    example: dict[str, Any] = step.example(2)  # torch would take a batch of 1 for a constant
    batch = torch.export.Dim("batch")
    shapes = {
        name: [{0: _times(len(each) // 2, batch)} for each in value]
        if isinstance(value, list)
        else ({0: batch} if value.dim() else {})
        for name, value in example.items()
    }
    with torch.no_grad():
        program = torch.export.export(step, (), example, dynamic_shapes=shapes)
    with atomic_write(path) as file:
        if format == "torch":
            torch.export.save(program, file, extra_files={f"{KEY}.json": json.dumps(asdict(stated))})
        else:
            file.write(_onnx_bytes(program, example, stated))


def state(step: WindowStep | StreamingStep, mode: InferenceMode, about: Mapping[str, Any]) -> Stated:
    """What the file of a function states of itself."""
    shape = step.shape
    return Stated(
        format=FORMAT,
        mode=mode,
        context=shape.context,
        tokens_per_step=shape.tokens_per_step,
        num_heads=shape.num_heads,
        layers=shape.layer_kinds if mode == "streaming" else (),
        predicts_returns=step.predicts,
        limits=step.limits,
        about=dict(about),
    )


def _times(number: int, batch: Any) -> Any:
    """A multiple of the number of environments, as torch.export accepts it."""
    return number * batch if number > 1 else batch


@contextmanager
def _quiet_exporter() -> Iterator[None]:
    """Hide what the exporter says of its own parts: deprecated functions, optional packages, skipped optimizations."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _onnx_bytes(program: Any, example: Mapping[str, Any], stated: Stated) -> bytes:
    names = [name for name in example if name != MEMORY]  # in the order of the function's arguments
    names += [name for name, shape in stated.inputs.items() if shape and shape[0] != "E"]
    with _quiet_exporter():
        exported = torch.onnx.export(
            program,
            input_names=names,
            output_names=list(stated.outputs),
            opset_version=OPSET,
            dynamo=True,
            optimize=True,
            verbose=False,
        )
    assert exported is not None
    proto = exported.model_proto
    proto.producer_name = "primal-dt"
    proto.doc_string = "A policy of primal-dt; how to run it: primal_dt/policy/onnx_runner.py"
    entry = proto.metadata_props.add()
    entry.key, entry.value = KEY, json.dumps(asdict(stated))
    return proto.SerializeToString()
