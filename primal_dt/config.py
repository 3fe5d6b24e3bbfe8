"""Settings of a training run, and the presets. Standard library only."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from primal_dt.schema import build, require_keys

__all__ = [
    "EARLIER_VALUES",
    "PRESETS",
    "SERVICES",
    "Config",
    "EvaluationConfig",
    "InferenceMode",
    "ModelConfig",
    "OptimizerConfig",
    "RunConfig",
    "check_range",
    "check_reference",
    "check_targets",
    "config_from_dict",
    "without_earlier_values",
]

LARGEST = 1e15
"""Largest size of a number in the settings. Sums of squares of such numbers are finite in single precision."""
LIMITS: Mapping[str, float] = {
    **dict.fromkeys(("seed", "eval_seed"), 2**52),  # so that seed + episode is exact in double precision
    **dict.fromkeys(("steps", "log_every_steps", "save_every_steps"), 999_999_999),  # checkpoints sort by nine digits
    **dict.fromkeys(("threads", "shards", "workers", "cpus_per_job", "num_layers"), 4096),
    **dict.fromkeys(("width", "num_heads", "context", "rank"), 2**16),
    **dict.fromkeys(("batch_size", "accumulate", "envs", "episodes", "eval_episodes", "memory_per_job"), 1_000_000),
}
"""Largest value of a setting, where it is smaller than ``LARGEST``."""


def check_range(name: str, value: float, *, low: float = 0, above: bool = False) -> None:
    """Check that a setting is at least ``low`` and at most its limit.

    Args:
        name: the setting.
        value: its value.
        low: smallest value.
        above: whether the value must be larger than ``low``.

    Raises:
        ValueError: if the value is out of range or NaN.
    """
    high = LIMITS.get(name, LARGEST)
    if not low <= value <= high or (above and value == low):
        limit = f"{high:g}" if high == LARGEST else str(high)
        raise ValueError(f"{name} ({value}) must be {'above' if above else 'at least'} {low} and at most {limit}")


def check_targets(targets: tuple[float, ...]) -> None:
    """Raise ValueError if a target return is not finite or too large for the model."""
    if wrong := [target for target in targets if not abs(target) <= LARGEST]:
        raise ValueError(f"targets ({wrong[0]}) must be from {-LARGEST:g} to {LARGEST:g}")


def check_reference(reference: tuple[float, float] | None) -> None:
    """Raise ValueError if returns for the scores 0 and 100 are not finite and in rising order."""
    if reference is not None and not -LARGEST <= reference[0] < reference[1] <= LARGEST:
        raise ValueError(
            f"reference must be two finite returns in rising order, of at most {LARGEST:g}, "
            f"not {reference[0]:g} and {reference[1]:g}"
        )


InferenceMode = Literal["window", "streaming"]
"""How a policy computes its actions: from the whole window at every step, or each token once."""

SERVICES = ("wandb", "trackio")
"""Services that ``--logger`` knows: modules with the interface of Weights & Biases."""

Attention = Literal[
    "primal-plus",
    "primalformer",
    "softmax",
    "linear",
    "performer",
    "cosformer",
    "flowformer",
    "reformer",
    "attention_bn",
    "attention_sh",
]
"""Names of the attention stacks, as in ``primal_dt.model.transformer.ATTENTION_STACKS``."""


@dataclass(frozen=True)
class ModelConfig:
    """Model architecture."""

    attention: Attention = "primal-plus"
    """Attention stack. primal-plus: Causal Primal-Attention in the top layer, softmax attention below it.
    primalformer: Causal Primal-Attention in every layer. Any other name: that attention in every layer."""
    width: int = 128
    """Model width: the number of features per token. Must be divisible by --num-heads."""
    num_heads: int = 1
    """Number of attention heads."""
    num_layers: int = 3
    """Number of transformer blocks."""
    context: int = 20
    """Context length in environment steps. Each step is three tokens: return-to-go, state and action.
    With --conditioning none it is two."""
    rank: int | None = None
    """Rank of a primal layer: directions per head.
    If not given: the published rank for the task, or 32 if there is none."""
    eta: float = 0.05
    """Weight of the KSVD penalty, which pulls a primal layer toward a singular value decomposition of its kernel.
    0: no penalty."""
    penalty: Literal["mean", "sum"] = "mean"
    """Penalty of several primal layers. mean: as in the paper's published code. sum: the paper's equation.
    They are equal for primal-plus, which has one primal layer."""
    feature_map: Literal["cosine", "exponential"] = "cosine"
    """Feature map of the primal layers. cosine: as published.
    exponential: positive random features, which estimate the softmax kernel (Remark 4.1 of the paper)."""
    scores: Literal["both", "e", "r"] = "both"
    """Scores that the output of a primal layer is made of.
    both: as published. e, r: only those on the left or on the right singular vectors."""
    data_dependent: bool = False
    """Weights of the primal layers that depend on the sequence.
    Not possible here: they are built from the whole sequence, so a causal layer would see the future."""
    dropout: float = 0.1
    """Dropout probability in training, from 0 to below 1."""
    attention_dropout: float = 0.1
    """Dropout probability of the softmax layers' attention weights. Primal layers have no such weights."""
    action_dropout: float = 0.0
    """Probability with which a training window hides its past actions, from 0 to below 1.
    They tell which policy acted: a model that sees them can copy it and need not listen to its target."""
    init: Literal["published", "small"] = "published"
    """Start of the weights. published: as in the Decision Transformer's code: normal(0.02) in the blocks,
    torch's defaults for embeddings and action head, normal(0, 1) for timesteps.
    small: normal(0.02) everywhere but in the attention layers, which have torch's defaults."""
    init_from: str | None = None
    """Run folder or checkpoint file whose weights the training starts with, for fine-tuning.
    Also a shared policy: its folder, hub:OWNER/NAME or pretrained:hopper.
    The model must have the same shape. The units of states and returns are taken from that run as well.
    If not given: new weights, by --init."""
    primal_init: Literal["unit", "orthonormal"] = "unit"
    """Start of W_e and W_r in the primal layers. unit: Frobenius norm 1 in each head, as published.
    orthonormal: orthonormal columns, a norm 5 to 8 times larger."""
    conditioning: Literal["return", "none", "max-return"] = "return"
    """What actions depend on in addition to the history. return: a target return, as published.
    none: nothing, which is behavior cloning; with --top-fraction, filtered cloning.
    max-return: the best return that the data makes likely from here, which the model predicts at every step."""
    action_loss: Literal["mse", "gaussian"] = "mse"
    """Loss of the actions. mse: mean squared error, as published. gaussian: likelihood with a predicted spread,
    so that actions which cannot be predicted count less. Policies act by its mean."""
    expectile: float = 0.99
    """Expectile of the predicted return with --conditioning max-return: 0.5 is the mean, 1 the maximum."""


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimization."""

    steps: int = 100_000
    """Number of training steps: updates of the weights."""
    batch_size: int = 64
    """Windows per training step, summed over all processes."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """Optimizer. adamw: AdamW for all parameters. muon: Muon for the blocks' weight matrices, AdamW for the rest.
    Muon orthogonalizes its updates: it learns more per step, and each step takes longer."""
    lr: float = 1e-3
    """Peak learning rate, reached at the end of the warm-up."""
    warmup_steps: int = 10_000
    """Steps over which the learning rate rises linearly to its peak. 0: no warm-up."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or a cosine decay to zero."""
    weight_decay: float = 1e-4
    """Coefficient of the decoupled weight decay, as in AdamW."""
    clip: float = 0.25
    """Maximum norm of the gradient. A larger gradient is scaled down to this norm."""
    accumulate: int = 1
    """Gradient accumulation: the number of parts in which a batch is computed, one after another.
    More parts need less memory."""
    shards: int | None = None
    """Parts of a batch that are computed in parallel on a CPU, each with its share of the CPU threads.
    Threads then wait for each other once per step, not at every operation. With several GPUs, use torchrun instead.
    If not given: the number of CPU threads, at most 4; 1 on a GPU, under torchrun or with --compile."""
    sampling: Literal["transitions", "length", "return"] = "transitions"
    """Where windows start. transitions: at a uniformly drawn transition.
    length: in an episode drawn in proportion to its length, which gives the same distribution.
    return: in an episode drawn in proportion to its return minus the lowest, plus 1% of the range."""
    top_fraction: float = 1.0
    """Train on the best episodes only: those with the highest returns that have this fraction of the steps."""
    validation: float = 0.0
    """Fraction of the episodes that is held out from training, for valid/action_mse. 0: none."""
    critic_weight: float = 0.0
    """Weight of value guidance: two critics learn the values of actions, and actions of high value are preferred.
    0: no critics."""
    bf16: bool = False
    """Compute in bfloat16 where that is safe (autocast). For GPUs."""
    compile: bool = False
    """Compile the model with torch.compile. For GPUs; takes about a minute at the start."""


@dataclass(frozen=True)
class EvaluationConfig:
    """Evaluation during training."""

    eval_every_steps: int = 10_000
    """Steps between evaluations, a multiple of --log-every-steps. The last step is evaluated too.
    0: no evaluation."""
    eval_episodes: int = 10
    """Episodes per target return and evaluation."""
    eval_seed: int = 1_000_000
    """Seed of the evaluation. Episode i of each target return is seeded with this plus i."""
    targets: tuple[float, ...] | None = None
    """Target returns to evaluate in addition to the task's headline target, which always comes first.
    If not given: the task's targets."""


@dataclass(frozen=True)
class RunConfig:
    """Seed, device and output."""

    seed: int = 0
    """Random seed of the weights, the batches and dropout."""
    device: str = "auto"
    """Torch device, such as cpu, cuda, cuda:1 or mps. auto: CUDA if available, else MPS, else the CPU."""
    threads: int | None = None
    """Number of CPU threads. If not given: torch's default."""
    resume: str | None = None
    """Run folder to resume. All settings come from that run; only --device, --trust-env and --logger
    can be given as well."""
    out: str = "runs"
    """Folder in which the run folder is created."""
    name: str | None = None
    """Name of the run folder. If not given: <dataset>__<attention>__s<seed>__<time>."""
    log_every_steps: int = 100
    """Steps between logging points, the points of the curves."""
    save_every_steps: int = 1_000
    """Steps between checkpoints, a multiple of --log-every-steps.
    A checkpoint is also saved at the end, and when the run is stopped."""
    spectrum_every_steps: int = 2_000
    """Steps between spectra of the attention layers, a multiple of --log-every-steps. 0: no spectra."""
    logger: str = "tensorboard"
    """Where curves go, in addition to metrics.jsonl and TensorBoard's files, which are always written.
    tensorboard: nowhere else. wandb, trackio: that service; needs the extra of that name.
    module:Name: your own class, whose module is imported."""


@dataclass(frozen=True)
class Config:
    """A training run."""

    dataset: str = "primal/hopper/medium-expert-v0"
    """Data set: a name (see python -m envs list), the path of a D4RL file or Minari folder, or several joined by +."""
    env_id: str | None = None
    """Environment to act in, such as Hopper-v5, or module:Id for your own.
    If not given: the data set's environment. If the data set names none, it is required for evaluations."""
    mix_versions: bool = False
    """Allow data that was recorded in another version or variant of the environment. Results are marked."""
    trust_env: bool = False
    """Allow importing the module that the data set names for its environment or a wrapper. It executes its code."""
    clip_actions: bool = False
    """Clip actions that are out of the environment's bounds. If not given: they are an error."""
    reference: tuple[float, float] | None = None
    """Returns that scores 0 and 100 stand for.
    If not given: those of the table of tasks, else of the data set's metadata. If there are none, plain returns are
    reported."""
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        model, optimizer, evaluation, run = self.model, self.optimizer, self.evaluation, self.run
        at_least_1 = {
            "width": model.width,
            "num_heads": model.num_heads,
            "num_layers": model.num_layers,
            "context": model.context,
            "rank": 1 if model.rank is None else model.rank,
            "steps": optimizer.steps,
            "batch_size": optimizer.batch_size,
            "accumulate": optimizer.accumulate,
            "shards": 1 if optimizer.shards is None else optimizer.shards,
            "eval_episodes": evaluation.eval_episodes if evaluation.eval_every_steps else 1,
            "log_every_steps": run.log_every_steps,
            "save_every_steps": run.save_every_steps,
            "threads": 1 if run.threads is None else run.threads,
        }
        at_least_0 = {
            "eta": model.eta,
            "critic_weight": optimizer.critic_weight,
            "weight_decay": optimizer.weight_decay,
            "warmup_steps": optimizer.warmup_steps,
            "eval_every_steps": evaluation.eval_every_steps,
            "spectrum_every_steps": run.spectrum_every_steps,
            "seed": run.seed,
            "eval_seed": evaluation.eval_seed,
        }
        for name, count in at_least_1.items():
            check_range(name, count, low=1)
        for name, number in at_least_0.items():
            check_range(name, number)
        check_range("lr", optimizer.lr, above=True)
        check_range("clip", optimizer.clip, above=True)
        if model.width % model.num_heads:
            raise ValueError(f"width ({model.width}) must be divisible by num_heads ({model.num_heads})")
        for name in ("dropout", "attention_dropout", "action_dropout"):
            if not 0 <= getattr(model, name) < 1:
                raise ValueError(f"{name} ({getattr(model, name)}) must be at least 0 and below 1")
        if model.data_dependent:
            raise ValueError(
                "data_dependent must be off: data-dependent weights are built from the whole sequence, "
                "so the Decision Transformer's causal layers would see the future"
            )
        if not 0 < optimizer.top_fraction <= 1:
            raise ValueError(f"top_fraction ({optimizer.top_fraction}) must be above 0 and at most 1")
        if not 0 <= optimizer.validation < 1:
            raise ValueError(f"validation ({optimizer.validation}) must be at least 0 and below 1")
        if not 0 < model.expectile < 1:
            raise ValueError(f"expectile ({model.expectile}) must be above 0 and below 1")
        check_reference(self.reference)
        check_targets(evaluation.targets or ())
        if evaluation.targets and model.conditioning != "return":
            raise ValueError(f"targets have no effect with conditioning {model.conditioning}: it follows no target")
        every = {
            "eval_every_steps": evaluation.eval_every_steps,
            "save_every_steps": run.save_every_steps,
            "spectrum_every_steps": run.spectrum_every_steps,
        }
        if wrong := [name for name, value in every.items() if value % run.log_every_steps]:
            raise ValueError(
                f"{wrong[0]} ({every[wrong[0]]}) must be a multiple of log_every_steps ({run.log_every_steps})"
            )
        if run.name is not None and ("/" in run.name or run.name in ("", ".", "..")):
            raise ValueError(f"name ({run.name!r}) must be a folder name without '/', and not '', '.' or '..'")
        if run.logger not in ("tensorboard", *SERVICES) and not all(run.logger.partition(":")):
            raise ValueError(
                f"logger ({run.logger!r}) must be tensorboard, {', '.join(SERVICES)}, or your own as module:Name"
            )


PRESETS: dict[str, tuple[str, Config]] = {
    "quick": (
        "For a laptop: trains in at most ten minutes on two CPU cores.",
        Config(
            model=ModelConfig(context=10, dropout=0.0, attention_dropout=0.0, init="small"),
            optimizer=OptimizerConfig(optimizer="muon", steps=5_000, lr=3e-3, warmup_steps=200, schedule="cosine"),
            evaluation=EvaluationConfig(eval_every_steps=1_000),
        ),
    ),
    "paper": (
        "For a GPU: the settings of the Primal-Attention paper.",
        Config(model=ModelConfig(width=256, num_heads=4)),
    ),
}
"""Name -> description in ``--help``, and the settings."""


EARLIER_VALUES: Mapping[str, Any] = {
    "penalty": "sum",
    "feature_map": "cosine",
    "scores": "both",
    "data_dependent": False,
    "attention_dropout": 0.0,
    "action_dropout": 0.0,
    "init": "small",
    "init_from": None,
    "primal_init": "orthonormal",
    "conditioning": "return",
    "action_loss": "mse",
    "expectile": 0.99,
    "top_fraction": 1.0,
    "validation": 0.0,
    "critic_weight": 0.0,
}
"""Field of ``ModelConfig`` or ``OptimizerConfig`` -> what versions did that did not have the field. A run that lacks
the field is resumed with this value, and digests leave the field out while it has this value, so that digests of
earlier runs stay the same."""


LATER_FIELDS = (*EARLIER_VALUES, "shards", "clip_actions", "reference", "trust_env", "logger")
"""Fields that runs of earlier versions may lack. Those without an earlier value have their defaults."""


def config_from_dict(values: object) -> Config:
    """Rebuild a configuration from the output of ``asdict``, by this or an earlier version.

    Raises:
        ValueError: if a field is missing or unknown, or has an impossible value.
    """
    own = dict(require_keys(values, ("model", "optimizer"), where="config"))
    for part, kind in (("model", ModelConfig), ("optimizer", OptimizerConfig)):
        earlier = {field.name: EARLIER_VALUES[field.name] for field in fields(kind) if field.name in EARLIER_VALUES}
        own[part] = earlier | dict(require_keys(own[part], (), where=f"config.{part}"))
    return build(Config, own, where="config", optional=LATER_FIELDS)


def without_earlier_values(part: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the model or the optimizer that earlier versions did not have by default, for digests."""
    return {name: value for name, value in part.items() if name not in EARLIER_VALUES or value != EARLIER_VALUES[name]}
