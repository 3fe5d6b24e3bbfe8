"""Exported policies without the export, which takes seconds: their function is run in torch."""

import json
from dataclasses import asdict
from typing import Any

from primal_dt.data.normalizer import Normalizer
from primal_dt.model.critic import TwinCritic
from primal_dt.model.transformer import DecisionTransformer
from primal_dt.policy.export import state
from primal_dt.policy.exported import ExportedPolicy
from primal_dt.policy.inference import InferenceMode
from primal_dt.policy.steps import make_step
from primal_dt.policy.torch_runner import TorchGraph


def eager_policy(
    model: DecisionTransformer,
    units: Normalizer,
    *,
    mode: InferenceMode = "window",
    critic: TwinCritic | None = None,
    **options: Any,
) -> ExportedPolicy:
    """The policy of a file that export.py would write. The options are those of ``ExportedPolicy``."""
    return ExportedPolicy(eager_graph(model, units, mode=mode, critic=critic), **options)


def eager_graph(
    model: DecisionTransformer, units: Normalizer, *, mode: InferenceMode = "window", critic: TwinCritic | None = None
) -> TorchGraph:
    """The function of a file that export.py would write."""
    step = make_step(model, units, critic, mode)
    return TorchGraph("policy.onnx", json.dumps(asdict(state(step, mode, {}))), step, step.example(2))
