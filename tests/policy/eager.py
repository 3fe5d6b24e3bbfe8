"""Exported policies without the export, which takes seconds: their function is run in torch."""

import json
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import onnxruntime
import torch

from primal_dt.data.normalizer import Normalizer
from primal_dt.model.critic import TwinCritic
from primal_dt.model.transformer import DecisionTransformer
from primal_dt.policy.export import StreamingStep, make_step
from primal_dt.policy.inference import InferenceMode
from primal_dt.policy.onnx_runner import ENTERING, FORMAT, KEY, LEAVING, STATE, OnnxPolicy


def eager_policy(
    model: DecisionTransformer,
    units: Normalizer,
    *,
    mode: InferenceMode = "window",
    critic: TwinCritic | None = None,
    **options: Any,
) -> OnnxPolicy:
    """The policy of a file that export.py would write. The options are those of ``OnnxPolicy``."""
    session = EagerSession(model, units, critic, mode)
    with patch.object(onnxruntime, "InferenceSession", lambda *_, **__: session):
        return OnnxPolicy(__file__, **options)


class EagerSession:
    """Runs the function of a policy in torch, with the interface of an onnxruntime session."""

    def __init__(
        self, model: DecisionTransformer, units: Normalizer, critic: TwinCritic | None, mode: InferenceMode
    ) -> None:
        self.step = make_step(model, units, critic, mode)
        limits = asdict(self.step.limits)
        example: dict[str, Any] = self.step.example(2)
        metadata = {"format": FORMAT, "mode": mode, "context": model.shape.context, "limits": limits, "about": {}}
        self.metadata = metadata | {"predicts_returns": model.shape.conditioning == "max-return"}
        state, leaving = example.pop("state", []), example.pop("leaving", [])
        self.states = [f"{STATE}{i}" for i in range(len(state))]
        self.leaving = [f"{LEAVING}{i}" for i in range(len(leaving))]
        inputs = example | dict(zip(self.states + self.leaving, state + leaving, strict=True))
        self.inputs = [SimpleNamespace(name=name, shape=["batch", *value.shape[1:]]) for name, value in inputs.items()]

    def get_modelmeta(self) -> Any:
        return SimpleNamespace(custom_metadata_map={KEY: json.dumps(self.metadata)})

    def get_inputs(self) -> list[Any]:
        return self.inputs

    def get_outputs(self) -> list[Any]:
        names = ["action", "followed_return", "returns", *(f"next_{name}" for name in self.states)]
        names += [name.replace(LEAVING, ENTERING) for name in self.leaving]
        return [SimpleNamespace(name=name) for name in names]

    @torch.inference_mode()
    def run(self, _: None, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
        values: dict[str, Any] = {name: torch.from_numpy(np.array(value)) for name, value in inputs.items()}
        state, leaving = ([values.pop(name) for name in names] for names in (self.states, self.leaving))
        if isinstance(self.step, StreamingStep):
            *results, after, entering = self.step(**values, state=state, leaving=leaving)
            return [result.numpy() for result in (*results, *after, *entering)]
        return [result.numpy() for result in self.step(**values)]
