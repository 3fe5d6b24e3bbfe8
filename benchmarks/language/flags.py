"""Flags of the language models, and what follows from them: shapes, settings and folders of runs."""

import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import torch

from benchmarks.blocks import CAUSAL_STACKS, PENALIZED
from benchmarks.language.data import fingerprint
from benchmarks.language.generate import STREAMING_STACKS
from benchmarks.language.model import LanguageShape
from benchmarks.settings import Primal, StackFlags
from benchmarks.trainer import Plan

__all__ = ["PUBLISHED_STEPS", "SIZES", "Config"]

PUBLISHED = Primal(30, 0.1, data_dependent=False)
"""The published layer of Primal.+. There is no published PrimalFormer: it has the same rank and eta here."""
PUBLISHED_STEPS = 150_000
SIZES = (
    "width",
    "num_layers",
    "num_heads",
    "mlp_width",
    "equal_parameters",
    "dropout",
    "tokens",
    "batch_size",
    "accumulate",
    "bf16",
    "compile",
    "device",
)
"""Flags that the cost of a step depends on."""
TRAINING = ("steps", "lr", "warmup_steps", "context_window")
"""Further flags that a result depends on."""


@dataclass(frozen=True, kw_only=True)
class Config(StackFlags):
    """Settings of the benchmark."""

    stacks: ClassVar[tuple[str, ...]] = CAUSAL_STACKS

    data: Path
    """Folder with wiki.train.tokens, wiki.valid.tokens and wiki.test.tokens."""
    attention: tuple[str, ...] = ("softmax", "flowformer", "primal-plus", "primalformer")
    """Attention stacks: softmax, primal-plus (primal in the last layer), primalformer (primal in all), another kind."""
    data_dependent: bool = False
    """Must be off: weights that are built from the whole sequence would let a causal layer see the future."""
    width: int = 512
    """Width of the model and of its embedding."""
    num_layers: int = 6
    """Number of layers."""
    num_heads: int = 8
    """Number of attention heads. Must divide the width."""
    mlp_width: int = 2048
    """Width of the MLPs' hidden layers."""
    equal_parameters: bool = False
    """Make the MLP of each block wider or narrower, so that the block has as many parameters as with softmax attention
    (to within half a hidden unit). The attention layers stay as they are."""
    dropout: float = 0.1
    """Dropout after the embedding and at the output of attention layers and MLPs."""
    tokens: int = 512
    """Tokens of a block."""
    batch_size: int = 64
    """Blocks per update."""
    accumulate: int = 16
    """Number of parts in which the blocks of an update are computed, one after another."""
    steps: int = PUBLISHED_STEPS
    """Number of updates."""
    lr: float = 1e-3
    """Learning rate at the end of the warm-up."""
    warmup_steps: int = 6_000
    """Updates in which the learning rate rises, from 1e-7. It then falls with the inverse square root of the update."""
    bf16: bool = False
    """Train in bfloat16 where that is safe. Evaluation is in single precision."""
    compile: bool = False
    """Compile the model with torch.compile."""
    context_window: int = 0
    """Tokens of a block that evaluation does not score, as they repeat the end of the block before. Each word is then
    predicted from this many words and one more, up to --tokens words."""
    eval_every_steps: int = 1_000
    """Updates between evaluations on the validation split on the way; 0: none."""
    save_every_steps: int = 500
    """Updates between checkpoints, from which an interrupted training resumes."""
    generate: str | None = None
    """A text that the trained models continue. A model that has not been trained is trained first."""
    generate_tokens: int = 50
    """For --generate: number of words."""
    temperature: float = 0.0
    """For --generate: 0 takes the most likely word; above 0, words are drawn with scores divided by the temperature."""
    generate_seed: int = 0
    """For --generate: seed of the draws."""
    cost: bool = False
    """Measure time and memory of a training step of each stack, without training."""
    cost_seconds: float = 20.0
    """For --cost: seconds to time each stack."""
    out: Path = Path("runs/language")
    """Folder for curves and results."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_at_least_one("width", "num_layers", "num_heads", "mlp_width", "tokens", "batch_size", "accumulate")
        self.check_at_least_one("steps", "warmup_steps", "save_every_steps", "generate_tokens")
        for attention in self.attention:
            self.shape(attention, 1)  # checks the width and the heads
        if self.data_dependent:
            raise ValueError(
                "data_dependent must be off: weights that are built from the whole sequence would let a causal layer "
                "see the future"
            )
        for name in ("lr", "cost_seconds"):
            if not 0 < (value := getattr(self, name)) < math.inf:
                raise ValueError(f"{name} ({value}) must be finite and above 0")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout ({self.dropout}) must be at least 0 and below 1")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature ({self.temperature}) must be finite and at least 0")
        if self.eval_every_steps < 0:
            raise ValueError(f"eval_every_steps ({self.eval_every_steps}) must be at least 0")
        if not 0 <= self.context_window < self.tokens:
            raise ValueError(
                f"context_window ({self.context_window}) must be at least 0 and below tokens ({self.tokens}): "
                "the rest of a block is scored"
            )
        if self.generate is not None and (wrong := set(self.attention) - set(STREAMING_STACKS)):
            raise ValueError(
                f"generate supports {', '.join(STREAMING_STACKS)}, not {', '.join(sorted(wrong))}: other kinds of "
                "attention have no form for single words here"
            )

    def primal(self, attention: str) -> dict[str, Any]:
        """The primal layers of a stack and their penalty; nothing for a stack without any."""
        values = asdict(self.with_flags(PUBLISHED)) if attention in PENALIZED else {}
        return {name: value for name, value in values.items() if name not in ("rank_multi", "data_dependent")}

    def settings(self, attention: str, seed: int) -> dict[str, Any]:
        """All settings that the result of a training run depends on."""
        return {
            "corpus": self.corpus_name,
            "fingerprint": fingerprint(self.data),
            **{name: getattr(self, name) for name in (*SIZES, *TRAINING)},
            "attention": attention,
            "seed": seed,
            **self.primal(attention),
            "torch": torch.__version__,
        }

    @property
    def corpus_name(self) -> str:
        """The name of the data's folder."""
        return self.data.resolve().name

    def run_folder(self, attention: str, seed: int) -> Path:
        """Folder of a training run. Different settings have different folders, so that no result is overwritten."""
        usual = {field.name: field.default for field in fields(self)}
        given = {name: getattr(self, name) for name in (*SIZES, *TRAINING)}
        changes = [f"{name}-{value}" for name, value in given.items() if value != usual[name]]
        primal, published = self.primal(attention), asdict(PUBLISHED)
        layers = [f"{name}-{primal[name]}" for name in primal if primal[name] != published[name]]
        return self.out / "__".join([self.corpus_name, attention, *layers, *changes, f"s{seed}"])

    def shape(self, attention: str, num_words: int) -> LanguageShape:
        """The shape of a stack's model."""
        layer = {name: value for name, value in self.primal(attention).items() if name not in ("eta", "penalty")}
        return LanguageShape(
            num_words=num_words,
            max_length=self.tokens,
            attention=attention,
            num_layers=self.num_layers,
            width=self.width,
            num_heads=self.num_heads,
            mlp_width=self.mlp_width,
            equal_parameters=self.equal_parameters,
            dropout=self.dropout,
            options={"primal": layer},
        )

    def plan(self, attention: str, seed: int) -> Plan:
        """How a stack is trained."""
        primal = self.with_flags(PUBLISHED)
        return Plan(
            self.steps,
            seed,
            eta=primal.eta if attention in PENALIZED else 0.0,
            penalty=primal.penalty,
            accumulate=self.accumulate,
            bf16=self.bf16,
            compile=self.compile,
            save_every_steps=self.save_every_steps,
            evaluate_every_steps=self.eval_every_steps,
        )
