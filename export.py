"""Export a trained policy as one file that runs without this package's training code.

To write policy.onnx, which numpy and onnxruntime can run:
  python export.py runs/RUN --out policy.onnx

To compute each token once, at the same cost in every step:
  python export.py runs/RUN --out policy.onnx --mode streaming

To export a policy that comes with the package:
  python export.py pretrained:hopper

The file has everything inside: units, action bounds or choices, the task and its targets. Before it appears, the
program compares its actions with those of the policy in torch. How to run it: docs/deployment.md.
"""

if __name__ == "__main__":  # imports take seconds, during which Ctrl-C should end the program without a traceback
    import signal

    signal.signal(signal.SIGINT, signal.SIG_DFL)

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from primal_dt.hub.sources import find_policy
from primal_dt.policy.export import ExportFormat, export_policy, require_export
from primal_dt.policy.inference import InferenceMode
from primal_dt.policy.onnx_runner import OnnxPolicy
from primal_dt.policy.torch_runner import TorchExportPolicy
from primal_dt.system.files import check_regular, check_writable, move
from primal_dt.system.process import memory_errors
from primal_dt.system.provenance import commit, versions
from primal_dt.system.terminal import begin_program, explain
from primal_dt.training.checkpoint import Checkpoint, load_checkpoint
from primal_dt.training.policy_folder import is_policy_folder, read_settings
from primal_dt.training.run_folder import read_record

EXIT_MISTAKE, EXIT_INTERRUPTED = 1, 130
TOLERANCE = 1e-5
"""Largest difference between an action and that of the policy in torch, relative to half the action's range."""
TOLERANCE_OF: Mapping[str, float] = {"attention_bn": 1e-4}
"""Attention kind -> its tolerance. Attention-BN divides by the variance of the keys, which is nearly zero in short
prefixes and magnifies rounding."""
SUFFIXES: Mapping[ExportFormat, str] = {"onnx": ".onnx", "torch": ".pt2"}
CHECKPOINTS = "checkpoints"
HOW = "pip install -c constraints.txt -e '.[export]'"


# tyro starts a new line in --help where a field's docstring does, so each line below holds whole sentences.
@dataclass(frozen=True)
class ExportConfig:
    """The command line: what to export, and how."""

    run: Annotated[Path, tyro.conf.Positional]
    """Run folder, whose last checkpoint is exported, or checkpoint file. Also hub:OWNER/NAME or pretrained:hopper."""
    out: Path | None = None
    """File to write. An existing file is replaced. It ends in .onnx, or in .pt2 with --format torch.
    If not given: policy.onnx or policy.pt2."""
    mode: InferenceMode = "window"
    """What the file computes.
    window: exact. The last K steps go in, the action comes out.
    streaming: faster. The newest step and a state go in, the action and the next state come out.
    It is a different function after the first K steps, and all layers must be softmax or primal layers."""
    format: ExportFormat = "onnx"
    """onnx: for onnxruntime and other programs. torch: a file of torch.export, for torch.export.load."""
    license: str | None = None
    """License of the weights, such as mit. The file states it. If not given: the file states that none is known."""

    @property
    def path(self) -> Path:
        """The file to write."""
        return self.out or Path(f"policy{SUFFIXES[self.format]}")


def main() -> int:
    """Parse the command line, export and compare. A user's mistake ends in a message, not in a traceback."""
    begin_program()
    try:
        config = tyro.cli(ExportConfig, description=__doc__)
        with memory_errors():
            export(config)
    except (ValueError, OSError, MemoryError) as error:
        print(f"error: {explain(error)}", file=sys.stderr)
        return EXIT_MISTAKE
    except KeyboardInterrupt:
        print("stopped; nothing was written", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0


def export(config: ExportConfig) -> None:
    """Check everything that can be checked before the work. The file appears only after it was compared."""
    path, source = config.path, find_policy(config.run)
    check_out(path, source, config.format)
    needed = ("onnx", "onnxscript", "onnxruntime") if config.format == "onnx" else ()
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        raise ValueError(f"{missing[0]} is not installed: {HOW}")
    checkpoint = load_checkpoint(source)
    model = checkpoint.model()
    require_export(model, config.mode, config.format)
    partial = path.with_name(f".{path.stem}.partial{path.suffix}")  # torch warns of other suffixes
    try:
        export_policy(
            partial,
            model,
            checkpoint.normalizer,
            critic=checkpoint.twin_critic(),
            mode=config.mode,
            format=config.format,
            # A license that the source itself states would be the default here.
            about=describe(checkpoint, training=training_of(source), license_name=config.license),
        )
        checked = compare(partial, checkpoint, config.format)
        move(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    task = checkpoint.task
    print(f"{path}: {config.mode}, {config.format}, {path.stat().st_size / 1e6:.1f} MB")
    print(f"task:    {task.environment_text or task.dataset}, trained on {task.dataset}, step {checkpoint.step:,}")
    if task.targets:
        print(f"targets: {', '.join(f'{target:g}' for target in task.targets)}")
    print(f"checked: {checked}")


def check_out(path: Path, source: Path, format_name: ExportFormat) -> None:
    """Check that the file can be written, and that it is nothing that training or evaluation reads.

    Raises:
        ValueError: if it is the source, in the checkpoints of a run, a folder, or has the suffix of something else.
    """
    suffix = SUFFIXES[format_name]
    better = Path(path.name).with_suffix(suffix)
    if path.is_dir():
        raise ValueError(f"--out {path} is a folder: give the name of a file, such as {path / f'policy{suffix}'}")
    if path.resolve() == source.resolve():
        raise ValueError(f"--out {path} is the policy itself, which would be lost: give another name, such as {better}")
    if path.resolve().parent.name == CHECKPOINTS:
        raise ValueError(f"--out {path} is among the checkpoints of a run: give another folder, such as {better}")
    if path.suffix != suffix:
        raise ValueError(f"--out {path} must end in {suffix} for --format {format_name}: {better}, for example")
    check_writable(path.absolute().parent)
    check_regular(path)


def training_of(source: Path) -> dict[str, Any] | None:
    """The commit and the versions of the training; None if they are not known."""
    if is_policy_folder(source):
        values = read_settings(source).get("provenance")
    else:
        try:
            values = read_record(source.parent.parent if source.parent.name == CHECKPOINTS else source).provenance
        except ValueError:  # a checkpoint outside a run
            return None
    return None if values is None else {name: values.get(name) for name in ("commit", "versions")}


def describe(checkpoint: Checkpoint, *, training: dict[str, Any] | None, license_name: str | None) -> dict[str, Any]:
    """What the file says of itself, as plain values."""
    task, shape = checkpoint.task, checkpoint.shape
    return {
        "task": task.environment_text,
        "dataset": task.dataset,
        "targets": list(task.targets),
        "unit": task.unit,
        "attention": shape.attention,
        "conditioning": shape.conditioning,
        "action_low": list(shape.action_low),
        "action_high": list(shape.action_high),
        "step": checkpoint.step,
        "training": training,
        "export": {"commit": commit(), "versions": versions()},
        "license": license_name,
    }


def compare(path: Path, checkpoint: Checkpoint, format_name: ExportFormat) -> str:
    """Run the file beside the policy in torch on random observations, until the window has slid.

    Raises:
        ValueError: if an action differs by more than the tolerance.
    """
    exported = OnnxPolicy(path) if format_name == "onnx" else TorchExportPolicy(path)
    policy = checkpoint.policy(mode=exported.mode, reproducible=True)  # by the model's own layers
    random, shape, normalizer = np.random.default_rng(0), checkpoint.shape, checkpoint.normalizer
    steps = min(2 * shape.context, shape.max_timesteps)
    target = checkpoint.task.headline or 0.0
    exported.reset(target)
    policy.reset(target)
    size = np.array([1.0]) if shape.categories else np.subtract(shape.action_high, shape.action_low) / 2
    largest = 0.0
    for _ in range(steps):
        observation = normalizer.state_mean + normalizer.state_std * random.normal(size=shape.state_width)
        action, expected = exported.act(observation), policy.act(observation)
        largest = max(largest, float((np.abs(action - expected) / size).max()))
        exported.observe(0.0, actions=expected)
        policy.observe(0.0)
    tolerance = max(TOLERANCE_OF.get(kind, TOLERANCE) for kind in shape.layer_kinds)
    if largest > tolerance:
        raise ValueError(
            f"the exported actions differ from those of the policy in torch by {largest:.1e}, more than "
            f"{tolerance:.0e}: nothing is saved"
        )
    return f"actions within {largest:.1e} of the policy in torch, {steps} steps"


if __name__ == "__main__":
    sys.exit(main())
