"""Everything that a training run can be told, and the presets. Standard library only."""

import math
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["PRESETS", "Config", "EvaluationConfig", "ModelConfig", "OptimizerConfig", "RunConfig"]


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
"""The attention stacks of the model, ``primal_dt.model.ATTENTION_STACKS``."""


@dataclass(frozen=True)
class ModelConfig:
    """The network."""

    attention: Attention = "primal-plus"
    """primal-plus: Causal Primal-Attention on top of softmax; primalformer: in all layers; else: one kind in all."""
    width: int = 128
    """Features of a token."""
    num_heads: int = 1
    """Attention heads; divides the width."""
    num_layers: int = 3
    """Transformer blocks."""
    context: int = 20
    """Steps that the model sees: a return, a state and an action each."""
    rank: int | None = None
    """Directions of a primal layer. If not given: the paper's for the task, or 32."""
    eta: float = 0.05
    """Weight of the KSVD penalty, which pulls a primal layer towards a singular value decomposition of its kernel."""
    dropout: float = 0.1
    """Share of features that are dropped in training."""


@dataclass(frozen=True)
class OptimizerConfig:
    """How it learns."""

    steps: int = 100_000
    """Updates of the weights."""
    batch_size: int = 64
    """Windows of one update, of all processes together."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon makes the updates of the blocks' weight matrices orthogonal: more per step, and a step costs more."""
    lr: float = 1e-3
    """Learning rate after the warm-up."""
    warmup_steps: int = 10_000
    """Steps in which the learning rate rises linearly to its full value."""
    schedule: Literal["constant", "cosine"] = "constant"
    """What the learning rate does then: stay, or fall to zero along a cosine."""
    weight_decay: float = 1e-4
    """Decoupled, as in AdamW."""
    clip: float = 0.25
    """The gradient's norm is kept at or below it."""
    accumulate: int = 1
    """Parts that a batch is computed in, one after the other: more parts take less memory."""
    shards: int | None = None
    """Parts of a batch that are computed side by side on a CPU, each on its share of the threads: they need not wait
    for one another at every operation. If not given: as many as there are threads, at most 4. (On GPUs: processes.)"""
    sampling: Literal["transitions", "length", "return"] = "transitions"
    """Where windows begin: at any transition; in an episode drawn by its length; in an episode drawn by its return."""
    bf16: bool = False
    """Compute in bfloat16 where that is safe: for GPUs."""
    compile: bool = False
    """Have torch compile the model: for GPUs; takes a minute at the start."""


@dataclass(frozen=True)
class EvaluationConfig:
    """Rollouts while training."""

    eval_every_steps: int = 10_000
    """Steps between evaluations; one follows the last step. 0: never."""
    eval_episodes: int = 10
    """Episodes for each target return."""
    eval_seed: int = 1_000_000
    """Episode i is seeded with this plus i."""
    targets: tuple[float, ...] | None = None
    """Returns to ask for besides the task's headline, which always comes first. If not given: the task's."""


@dataclass(frozen=True)
class RunConfig:
    """Where it runs, and what it leaves behind."""

    seed: int = 0
    """Of weights, batches and dropout."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps."""
    threads: int | None = None
    """CPU threads; torch's own choice if not given."""
    resume: str | None = None
    """Folder of a run to continue. All else is as that run had it; only --device can be given besides."""
    out: str = "runs"
    """Folder in which the run makes its own."""
    name: str | None = None
    """Name of the run's own folder. If not given: data set, attention, seed and time."""
    log_every_steps: int = 100
    """Steps between two points of the curves."""
    save_every_steps: int = 1_000
    """Steps between checkpoints. One is also written at the end, and when the run is stopped."""
    spectrum_every_steps: int = 2_000
    """Steps between looks at the spectra of the layers. 0: never."""


@dataclass(frozen=True)
class Config:
    """A training run."""

    dataset: str = "primal/hopper/medium-expert-v0"
    """A name (python -m envs list), a path to a D4RL file or to a Minari folder, or several joined by +."""
    env_id: str | None = None
    """The environment, such as Hopper-v5, if the data does not say."""
    mix_versions: bool = False
    """Allow data of another version of the environment."""
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        model, optimizer, evaluation, run = self.model, self.optimizer, self.evaluation, self.run
        positive = {
            "width": model.width,
            "num_heads": model.num_heads,
            "num_layers": model.num_layers,
            "context": model.context,
            "rank": 1 if model.rank is None else model.rank,
            "steps": optimizer.steps,
            "batch_size": optimizer.batch_size,
            "accumulate": optimizer.accumulate,
            "shards": 1 if optimizer.shards is None else optimizer.shards,
            "lr": optimizer.lr,
            "clip": optimizer.clip,
            "log_every_steps": run.log_every_steps,
            "save_every_steps": run.save_every_steps,
            "threads": 1 if run.threads is None else run.threads,
        }
        if wrong := [name for name, value in positive.items() if not 0 < value < math.inf]:
            raise ValueError(f"{wrong[0]} ({positive[wrong[0]]}) must be above 0 and finite")
        if model.width % model.num_heads:
            raise ValueError(f"width ({model.width}) must be divisible by num_heads ({model.num_heads})")
        if not 0 <= model.dropout < 1:
            raise ValueError(f"dropout ({model.dropout}) must be at least 0 and below 1")
        not_negative = {
            "eta": model.eta,
            "weight_decay": optimizer.weight_decay,
            "warmup_steps": optimizer.warmup_steps,
            "eval_every_steps": evaluation.eval_every_steps,
            "spectrum_every_steps": run.spectrum_every_steps,
            "seed": run.seed,
            "eval_seed": evaluation.eval_seed,
        }
        if wrong := [name for name, value in not_negative.items() if not 0 <= value < math.inf]:
            raise ValueError(f"{wrong[0]} ({not_negative[wrong[0]]}) must not be negative, and finite")
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
            raise ValueError(f"name ({run.name!r}) must be the name of a folder, without others before it")
        if evaluation.eval_every_steps and evaluation.eval_episodes < 1:
            raise ValueError(f"eval_episodes ({evaluation.eval_episodes}) must be at least 1")


PRESETS: dict[str, tuple[str, Config]] = {
    "quick": (
        "For a laptop: a policy in at most ten minutes on two cores.",
        Config(
            model=ModelConfig(context=10, dropout=0.0),
            optimizer=OptimizerConfig(optimizer="muon", steps=5_000, lr=3e-3, warmup_steps=200, schedule="cosine"),
            evaluation=EvaluationConfig(eval_every_steps=1_000),
        ),
    ),
    "paper": (
        "The settings of the Primal-Attention paper: for a GPU.",
        Config(model=ModelConfig(width=256, num_heads=4)),
    ),
}
"""Name -> what it is for, and its values."""
