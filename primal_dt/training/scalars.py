"""Names of the logged scalars: the same in ``metrics.jsonl``, in TensorBoard and in the docs."""

from collections.abc import Mapping

import torch

from primal_dt.attention import PrimalAttention, model_spectra
from primal_dt.data.sampler import Batch
from primal_dt.model.transformer import DecisionTransformer
from primal_dt.training.trainer import TrainMetrics

__all__ = ["ABOUT", "HEADLINE", "metrics_from_scalars", "spectrum_scalars", "training_scalars"]

HEADLINE = "eval/normalized_return"
OBJECTIVE = "train/J/layer_"

ABOUT = """
| curve | what it is |
|---|---|
| `train/loss` | training loss, `train/action_mse + eta * train/penalty`: mean over the steps between two points |
| `train/action_mse` | mean squared error of the actions |
| `train/penalty` | KSVD penalty: sum over primal layers of the mean of J squared |
| `train/J/layer_i` | KSVD objective of a primal layer: zero at a singular value decomposition |
| `train/gradient_norm` | norm of the gradient before clipping |
| `train/learning_rate` | learning rate of the last step |
| `train/steps_per_second` | training speed: mean over the steps between two points |
| `spectrum/effective_rank/layer_i` | exponential of the entropy of the kernel's normalized singular values |
| `spectrum/lambda_mean/layer_i`, `lambda_max` | mean and maximum of Lambda of a primal layer |
| `eval/normalized_return` | score at the headline target, which the task table fixes: 0 = random policy, 100 = expert |
| `eval/normalized_return/target_R`, `eval/return/target_R`, `eval/length/target_R` | at a target return of R |
"""


def training_scalars(metrics: TrainMetrics) -> dict[str, float]:
    """Return the scalars of a logging point, by name."""
    scalars = {
        "train/loss": metrics.loss,
        "train/action_mse": metrics.action_mse,
        "train/penalty": metrics.penalty,
        "train/gradient_norm": metrics.gradient_norm,
        "train/learning_rate": metrics.learning_rate,
        "train/steps_per_second": metrics.steps_per_second,
    }
    return scalars | {f"{OBJECTIVE}{layer}": value for layer, value in metrics.objectives.items()}


def metrics_from_scalars(step: int, scalars: Mapping[str, float]) -> TrainMetrics:
    """The inverse of :func:`training_scalars`."""
    layers = {name.rpartition("_")[2]: value for name, value in scalars.items() if name.startswith(OBJECTIVE)}
    return TrainMetrics(
        step=step,
        loss=scalars["train/loss"],
        action_mse=scalars["train/action_mse"],
        penalty=scalars["train/penalty"],
        gradient_norm=scalars["train/gradient_norm"],
        objectives={int(layer): value for layer, value in layers.items()},
        learning_rate=scalars["train/learning_rate"],
        steps_per_second=scalars["train/steps_per_second"],
    )


def spectrum_scalars(model: DecisionTransformer, batch: Batch) -> dict[str, float]:
    """Return the scalars of the spectra of all layers' kernels on a batch, by name."""
    was_training = model.training
    model.eval()
    spectra = list(model_spectra(model, batch).values())
    model.train(was_training)
    scalars = {
        f"spectrum/effective_rank/layer_{layer}": float(spectrum.effective_rank.mean())
        for layer, spectrum in enumerate(spectra)
    }
    layers = [module for module in model.modules() if isinstance(module, PrimalAttention)]
    numbers = [number for number, kind in enumerate(model.shape.layer_kinds) if kind == "primal"]
    with torch.no_grad():
        for number, layer in zip(numbers, layers, strict=True):
            scalars[f"spectrum/lambda_mean/layer_{number}"] = float(layer.lambda_.mean())
            scalars[f"spectrum/lambda_max/layer_{number}"] = float(layer.lambda_.max())
    return scalars
