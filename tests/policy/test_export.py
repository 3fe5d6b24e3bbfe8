"""Exported policies take the actions of the policy in torch, and run without torch."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

from primal_dt.data.normalizer import Normalizer
from primal_dt.model.critic import TwinCritic
from primal_dt.model.transformer import ATTENTION_STACKS, ModelShape
from primal_dt.policy.export import NOT_IN_ONNX, export_policy
from primal_dt.policy.exported import ExportedPolicy
from primal_dt.policy.exported_file import FORMAT
from primal_dt.policy.inference import InferenceMode
from primal_dt.policy.onnx_runner import OnnxPolicy
from primal_dt.policy.policy import DecisionTransformerPolicy
from primal_dt.policy.torch_runner import TorchExportPolicy
from tests.conftest import SHAPE as SMALL_SHAPE
from tests.model.small import random_model
from tests.policy.eager import eager_graph, eager_policy

ROOT = Path(__file__).parent.parent.parent
SHAPE = replace(SMALL_SHAPE, max_timesteps=14)
UNITS = Normalizer(np.array([1, 2, 3], np.float32), np.array([2, 1, 4], np.float32), 100.0)
CHOICES: dict[str, Any] = {"action_low": (), "action_high": (), "categories": (3, 2)}
MODES = pytest.mark.parametrize("mode", ["window", "streaming"])


def play_both(exported: ExportedPolicy, policy: DecisionTransformerPolicy, count: int, steps: int = 12) -> float:
    """The largest difference of actions and predicted returns, each policy with its own history.

    Executed actions differ from the chosen ones in some steps, and one environment ends early.
    """
    random, largest = np.random.default_rng(0), 0.0
    is_box = not policy.limits.categories
    for one in (exported, policy):
        one.reset(np.linspace(50, 300, count))
    for step in range(steps):
        observations = random.normal(size=(len(policy.left), 3))
        actions, expected = exported.act(observations), policy.act(observations)
        assert actions.shape == expected.shape
        assert actions.dtype == expected.dtype
        largest = max(largest, np.abs(actions - expected).max())
        if policy.predicted_returns is not None:
            assert exported.predicted_returns is not None
            largest = max(largest, np.abs(exported.predicted_returns - policy.predicted_returns).max() / 100)
        executed = random.uniform(-1, 1, size=actions.shape) if step % 3 == 0 and is_box else None
        for one in (exported, policy):
            one.observe(np.full(len(policy.left), 7.5 * step), executed)
        if step == 7 and count > 1:
            for one in (exported, policy):
                one.keep(np.arange(count) != 1)
    return largest


@MODES
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention": "softmax"},
        {"attention": "primalformer"},
        {"attention": "primalformer", "num_layers": 1, "scores": "e"},
        {"conditioning": "none"},
        {"conditioning": "max-return"},
        {"context": 2},
        {"num_heads": 2},
        {"attention": "primalformer", "num_heads": 2, "conditioning": "max-return"},
        {"action_loss": "gaussian"},
        CHOICES,
        CHOICES | {"conditioning": "max-return"},
    ],
    ids=str,
)
@pytest.mark.parametrize("has_critic", [False, True])
def test_the_exported_function_is_the_policy(
    changes: dict[str, Any], count: int, mode: InferenceMode, has_critic: bool
) -> None:
    model = random_model(replace(SHAPE, **changes), 0.2)
    torch.manual_seed(0)
    critic = TwinCritic(model.shape).eval() if has_critic else None
    exported = eager_policy(model, UNITS, mode=mode, critic=critic)
    policy = DecisionTransformerPolicy(model, UNITS, mode=mode, critic=critic, reproducible=True)
    assert play_both(exported, policy, count) < 1e-5


@MODES
def test_the_exported_function_past_the_end(mode: InferenceMode) -> None:
    model = random_model(replace(SHAPE, max_timesteps=5, conditioning="max-return"), 0.2)
    policy = DecisionTransformerPolicy(model, UNITS, mode=mode, reproducible=True)
    with pytest.warns(UserWarning, match="step 5 is past the model's last timestep"):
        assert play_both(eager_policy(model, UNITS, mode=mode), policy, 2) < 1e-5


def save(path: Path, shape: ModelShape, mode: InferenceMode, *, has_critic: bool = False) -> DecisionTransformerPolicy:
    model = random_model(shape, 0.2)
    torch.manual_seed(0)
    critic = TwinCritic(shape).eval() if has_critic else None
    export_policy(path, model, UNITS, critic=critic, mode=mode, about={"license": "MIT", "targets": [3600.0]})
    return DecisionTransformerPolicy(model, UNITS, mode=mode, critic=critic, reproducible=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "changes", "has_critic"),
    [
        ("window", {"conditioning": "max-return"}, True),
        ("streaming", {"conditioning": "max-return"}, True),
        ("streaming", CHOICES, False),
        ("streaming", {"attention": "primalformer"}, False),
        *(("window", {"attention": stack}, False) for stack in ATTENTION_STACKS if stack not in NOT_IN_ONNX),
    ],
    ids=str,
)
def test_a_file_takes_the_actions_of_the_policy(
    mode: InferenceMode, changes: dict[str, Any], has_critic: bool, tmp_path: Path
) -> None:
    policy = save(tmp_path / "policy.onnx", replace(SHAPE, **changes), mode, has_critic=has_critic)
    exported = OnnxPolicy(tmp_path / "policy.onnx")
    # Attention-BN divides by the variance of the keys, which is nearly zero in short prefixes and magnifies rounding.
    tolerance = 1e-4 if policy.model.shape.attention == "attention_bn" else 1e-5
    for count in (1, 3):
        assert play_both(exported, policy, count) < tolerance
    assert exported.about == {"license": "MIT", "targets": [3600.0]}


ON_A_ROBOT = """
import sys
sys.path.append(sys.argv[1])  # with -I and -S, all that is there besides the standard library
import numpy as np
from primal_dt.policy.onnx_runner import OnnxPolicy
policy = OnnxPolicy(sys.argv[2])
policy.reset(120.0)
for step in range(6):
    print(*policy.act(np.full(3, 0.1 * step)))
    policy.observe(1.0)
"""


def robot_folder(root: Path) -> Path:
    """A folder with numpy, onnxruntime, and the modules that docs/deployment.md names."""
    text = (ROOT / "docs/deployment.md").read_text().split("## On a robot")[1].split("```")[0]
    for name in re.findall(r"`([\w/]+\.py)`", text):
        path = name if "/" in name else f"primal_dt/policy/{name}"
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, root / path)
    for package in (np, onnxruntime):
        folder = Path(str(package.__file__)).parent
        for part in (folder, folder.with_name(f"{folder.name}.libs")):
            if part.exists():
                (root / part.name).symlink_to(part)
    return root


@pytest.mark.slow
def test_a_file_runs_with_numpy_and_onnxruntime_alone(tmp_path: Path) -> None:
    policy = save(tmp_path / "policy.onnx", SHAPE, "streaming")
    folder = robot_folder(tmp_path / "robot")
    command = [sys.executable, "-I", "-S", "-c", ON_A_ROBOT, str(folder), str(tmp_path / "policy.onnx")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    policy.reset(120.0)
    for step, line in enumerate(done.stdout.splitlines()):
        np.testing.assert_allclose(np.fromstring(line, sep=" "), policy.act(np.full(3, 0.1 * step)), atol=1e-5)
        policy.observe(1.0)
    assert policy.timestep == 6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "changes"),
    [("window", {}), ("streaming", {}), ("window", {"feature_map": "exponential"})]
    + [("window", {"attention": kind}) for kind in NOT_IN_ONNX],
)
def test_a_file_of_torch_export_computes_the_same(mode: InferenceMode, changes: dict[str, Any], tmp_path: Path) -> None:
    model = random_model(replace(SHAPE, **changes), 0.2)
    export_policy(tmp_path / "policy.pt2", model, UNITS, mode=mode, format="torch", about={"license": "MIT"})
    exported, policy = (
        TorchExportPolicy(tmp_path / "policy.pt2"),
        DecisionTransformerPolicy(model, UNITS, mode=mode, reproducible=True),
    )
    for count in (1, 3):
        assert play_both(exported, policy, count) < 1e-5
    assert exported.about == {"license": "MIT"}


@pytest.mark.parametrize(
    ("changes", "mode", "kind", "message"),
    [
        ({"attention": "reformer"}, "window", "onnx", "reformer cannot be exported to ONNX: it sorts tokens"),
        ({"attention": "linear"}, "streaming", "onnx", "mode streaming supports only softmax and primal"),
        ({"feature_map": "exponential"}, "window", "onnx", "exponential map cannot be exported to ONNX"),
        ({"context": 1}, "streaming", "onnx", "a context of 1 step has nothing to stream"),
        ({}, "window", "pickle", "format must be onnx or torch, not 'pickle'"),
    ],
)
def test_what_cannot_be_exported_is_refused(
    changes: dict[str, Any], mode: InferenceMode, kind: Any, message: str, tmp_path: Path
) -> None:
    model = random_model(replace(SHAPE, **changes), 0.2)
    with pytest.raises(ValueError, match=message):
        export_policy(tmp_path / "policy", model, UNITS, mode=mode, format=kind, about={})
    assert not list(tmp_path.iterdir())


def test_streaming_stores_no_window() -> None:
    """But rings of what layers remember, and the newest step."""
    policy = eager_policy(random_model(replace(SHAPE, attention="primalformer"), 0.2), UNITS, mode="streaming")
    policy.reset([1.0, 2.0])
    newest = {"observation": 6, "last_action": 4, "return_to_go": 2, "timestep": 1}
    layers = {f"{name}_{i}": 2 * size for i in range(3) for name, size in (("total", 16), ("leaving", 3 * 16))}
    assert {name: values.size for name, values in policy._history.inputs.items()} == newest | layers


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "the metadata of policy.onnx cannot be used: Expecting property name"),
        ("[]", "cannot be used: it must be a mapping, not \\[\\]"),
        ('{"format": 1}', "is of another version of this package: export the policy again"),
        ("[" * 100_000, "cannot be used: "),
        (None, r"policy.onnx is not a policy that export\.py has written"),
    ],
)
def test_wrong_metadata_is_refused(text: str | None, message: str) -> None:
    graph = eager_graph(random_model(SHAPE, 0.2), UNITS, mode="streaming")
    graph.metadata = text
    with pytest.raises(ValueError, match=message):
        ExportedPolicy(graph)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (
            ("mode",),
            "window",
            r"cannot be used: mode window does not fit the layers \('softmax', 'softmax', 'primal'\)",
        ),
        (("mode",), "fast", "it.mode must be one of window, streaming, not 'fast'"),
        (("context",), 5, r"does not fit its metadata: keys_0 has shape \('rows', 12, 16\), not \('N H', 15, 'P'\)"),
        (("context",), "4", "it.context must be int, not '4'"),
        (("context",), 0, r"context \(0\), num_heads \(1\) or tokens_per_step \(3\) is too small"),
        (("tokens_per_step",), None, "it.tokens_per_step must be int, not None"),
        (("layers",), ["softmax"], "does not fit its metadata: keys_1 is unknown or missing"),
        (("layers",), ["softmax", "linear"], "layers must be of the kinds softmax, primal, not 'linear'"),
        (("predicts_returns",), True, "does not fit its metadata: followed_return is unknown or missing"),
        (("limits", "state_width"), 4, r"observation_low must have 4 entries, not 3"),
        (("limits", "action_width"), 3, r"last_action has shape \('rows', 2\), not \('E', 3\)"),
        (("limits", "largest_return"), "inf", "it.limits.largest_return must be a finite number"),
        (("limits", "candidates"), [], "candidates must have at least 1 entry"),
        (("limits",), 3, "it.limits must be a mapping, not 3"),
        (("about",), None, "it.about must be Mapping, not None"),
    ],
    ids=str,
)
def test_metadata_that_do_not_fit_are_refused(place: tuple[str, ...], value: Any, message: str) -> None:
    """When the file is loaded: an array of the wrong size would fail later, or give other actions."""
    graph = eager_graph(random_model(SHAPE, 0.2), UNITS, mode="streaming")
    metadata = json.loads(graph.metadata or "")
    inner = metadata["limits"] if len(place) > 1 else metadata
    inner[place[-1]] = value
    graph.metadata = json.dumps(metadata)
    with pytest.raises(ValueError, match=message):
        ExportedPolicy(graph)


def test_a_missing_entry_of_the_metadata_is_named() -> None:
    graph = eager_graph(random_model(SHAPE, 0.2), UNITS)
    graph.metadata = json.dumps({"format": FORMAT})
    with pytest.raises(ValueError, match="it lacks mode, context"):
        ExportedPolicy(graph)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ImportError, match="install onnxruntime, or the extra export of this package"):
        OnnxPolicy(tmp_path / "policy.onnx")


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no exported policy"):
        TorchExportPolicy(tmp_path / "policy.pt2")
    (tmp_path / "policy.pt2").write_bytes(b"not a program")
    with pytest.raises(ValueError, match=r"is not a file of torch\.export"):
        TorchExportPolicy(tmp_path / "policy.pt2")
    with pytest.raises(FileNotFoundError, match="there is no exported policy"):
        OnnxPolicy(tmp_path / "policy.onnx")
    (tmp_path / "policy.onnx").write_bytes(b"not a graph")
    with pytest.raises(ValueError, match="is not an ONNX file"):
        OnnxPolicy(tmp_path / "policy.onnx")
    with pytest.raises(ValueError, match=r"threads \(0\) must be at least 1"):
        OnnxPolicy(tmp_path / "policy.onnx", threads=0)
