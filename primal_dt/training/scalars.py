"""Names of the logged scalars: the same in ``metrics.jsonl``, in TensorBoard and in the docs."""

import torch

from primal_dt.attention import PrimalAttention, model_spectra
from primal_dt.data.sampler import Batch
from primal_dt.model.transformer import DecisionTransformer
from primal_dt.task import Reference

__all__ = ["ABOUT", "HEADLINE", "PLAIN_HEADLINE", "headline_name", "score_text", "spectrum_scalars"]

HEADLINE = "eval/normalized_return"
PLAIN_HEADLINE = "eval/return"
"""The headline result of a task without reference returns."""

ABOUT = """
| curve | what it is |
|---|---|
| `train/loss` | training loss, the sum of its terms; by default `train/action_mse + eta * train/penalty`. Like all \
`train/` curves, a mean over the steps between two points |
| `train/action_mse` | mean squared error of the actions |
| `train/action_nll` | with `--action-loss gaussian`: negative log-likelihood of the actions, without its constant |
| `train/return_loss` | with `--conditioning max-return`: expectile loss of the predicted returns-to-go |
| `train/penalty` | KSVD penalty: mean over primal layers (or sum, with `--penalty sum`) of the mean of J squared |
| `train/J/layer_i` | KSVD objective of a primal layer: zero at a singular value decomposition |
| `train/gradient_norm` | norm of the gradient before clipping |
| `train/learning_rate` | learning rate of the last step |
| `train/steps_per_second` | training speed: mean over the steps between two points |
| `train/return_sensitivity` | change of the predicted action when the return-to-go moves from the data's 10th to its \
90th percentile, divided by the spread of the data's actions: 0 = the policy ignores its target |
| `train/guidance` | with `--critic-weight`: term of value guidance in the loss |
| `critic/value`, `critic/value_std` | mean and standard deviation of the values of the data's actions |
| `critic/policy_value` | mean value of the policy's actions: outside the data's discounted returns, the critics have \
diverged |
| `critic/loss`, `critic/disagreement` | squared error of the critics, and mean difference between the two |
| `valid/action_mse`, `valid/action_mse_best` | mean squared error of the actions in episodes that are held out from \
training (`--validation`), and in the best tenth of them |
| `spectrum/effective_rank/layer_i` | exponential of the entropy of the kernel's normalized singular values |
| `spectrum/lambda_mean/layer_i`, `lambda_max` | mean and maximum of Lambda of a primal layer |
| `eval/normalized_return` | score at the headline target, which is fixed before training: 0 = random policy, \
100 = expert |
| `eval/return` | return at the headline target, if the task has no reference returns, so no normalized return |
| `eval/success_rate` | share of episodes with success at the headline target, if the environment reports success |
| `eval/normalized_return/target_R`, `eval/return/target_R`, `eval/length/target_R`, `eval/success_rate/target_R` | \
at a target return of R |
| `eval/return`, `eval/length` | of a policy that follows no given target |
| `eval/predicted_return` | with `--conditioning max-return`: predicted return at the first step |
"""


def headline_name(reference: Reference | None) -> str:
    """The name of the headline scalar: a normalized return, or a return if there are no reference returns."""
    return PLAIN_HEADLINE if reference is None else HEADLINE


def score_text(value: float, *, is_plain: bool) -> str:
    """A headline result for displays: ``score 42.5``, or ``return 0.63`` if there are no reference returns."""
    return f"return {value:.2f}" if is_plain else f"score {value:.1f}"


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
