"""Flags that the benchmarks outside offline RL share: the stacks to train, and their primal layers."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, Literal

import torch

from benchmarks.blocks import PENALIZED, STACKS, check_stacks
from primal_dt.attention import PenaltyReduction
from primal_dt.attention.primal import FeatureMapName, PrimalInit, ScoreNames

__all__ = ["ClassifierFlags", "EncoderFlags", "Primal", "StackFlags"]


@dataclass(frozen=True)
class Primal:
    """The primal layers of a stack, and their penalty."""

    rank: int
    eta: float
    rank_multi: int = 10
    data_dependent: bool = True
    feature_map: FeatureMapName = "cosine"
    scores: ScoreNames = "both"
    init: PrimalInit = "unit"
    penalty: PenaltyReduction = "mean"

    @property
    def options(self) -> Mapping[str, Any]:
        """Arguments of ``build_attention`` for kind ``primal``."""
        values = asdict(self)
        return {name: values[name] for name in values if name not in ("eta", "penalty")}

    @property
    def changes(self) -> dict[str, Any]:
        """What differs from the published layers, except rank, eta and rank_multi."""
        own = {each.name: each.default for each in fields(self) if each.name not in ("rank", "eta", "rank_multi")}
        return {name: getattr(self, name) for name, usual in own.items() if getattr(self, name) != usual}

    @property
    def label(self) -> str:
        """A short form for folder names."""
        changes = [f"{name}-{value}" for name, value in self.changes.items()]
        return "-".join([f"r{self.rank}-eta{self.eta:g}-x{self.rank_multi}", *changes])

    def __str__(self) -> str:
        changes = [f"{name} {value}" for name, value in self.changes.items()]
        return ", ".join([f"rank {self.rank}, eta {self.eta:g}, rank_multi {self.rank_multi}", *changes])


@dataclass(frozen=True)
class StackFlags:
    """Flags of all benchmarks: which stacks to train, how often, and what their primal layers are."""

    stacks: ClassVar[tuple[str, ...]] = STACKS
    """The attention stacks to choose from."""

    attention: tuple[str, ...] = ("softmax", "primal-plus", "primalformer")
    """Attention stacks: softmax, primal-plus (primal in the last layer), primalformer (primal in all), another kind."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of weights, batches and dropout. Each stack is trained once per seed."""
    rank: int | None = None
    """Rank of Primal-Attention. If not given, the published one for the data and the stack."""
    eta: float | None = None
    """Weight of the KSVD penalty; 0: no penalty. If not given, the published one for the data and the stack."""
    data_dependent: bool = True
    """Weights of Primal-Attention that depend on the sequence, as published (Tables 8 and 9 compare the two)."""
    feature_map: FeatureMapName = "cosine"
    """Feature map of Primal-Attention. cosine: as published. exponential: positive random features (Remark 4.1)."""
    scores: ScoreNames = "both"
    """Scores that the output of Primal-Attention is made of.
    both: as published. e, r: only those on the left or on the right singular vectors."""
    primal_init: PrimalInit = "unit"
    """Start of W_e and W_r. unit: Frobenius norm 1 in each head, as published. orthonormal: orthonormal columns."""
    penalty: PenaltyReduction = "mean"
    """Penalty of several primal layers. mean: as published, and as the published eta expects. sum: the equation."""
    device: str = "cpu"
    """Torch device: cpu, cuda or mps."""
    threads: int | None = None
    """Number of CPU threads. If not given: torch's default."""
    again: bool = False
    """Train again even if a finished run has the same settings. Otherwise its result is read from its folder."""

    def __post_init__(self) -> None:
        check_stacks(self.attention, self.seeds, self.stacks)
        self.check_at_least_one("rank", "threads")
        if self.eta is not None and not 0 <= self.eta < math.inf:
            raise ValueError(f"eta ({self.eta}) must be finite and at least 0")

    def check_at_least_one(self, *names: str) -> None:
        """Raise a ValueError if one of these flags is given and below 1."""
        for name in names:
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} ({value}) must be at least 1")

    def with_flags(self, published: Primal) -> Primal:
        """The primal layers: the published settings, with the changes that the flags make."""
        return replace(
            published,
            rank=published.rank if self.rank is None else self.rank,
            eta=published.eta if self.eta is None else self.eta,
            data_dependent=self.data_dependent,
            feature_map=self.feature_map,
            scores=self.scores,
            init=self.primal_init,
            penalty=self.penalty,
        )

    def use_threads(self) -> None:
        """Set the number of CPU threads, if one is given."""
        if self.threads is not None:
            torch.set_num_threads(self.threads)


@dataclass(frozen=True)
class EncoderFlags(StackFlags):
    """Flags of the benchmarks with bidirectional layers, whose weights may depend on the data."""

    rank_multi: int | None = None
    """Rows of the data-dependent weights, divided by the rank. If not given, the published number."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_at_least_one("rank_multi")

    def with_flags(self, published: Primal) -> Primal:
        primal = super().with_flags(published)
        return primal if self.rank_multi is None else replace(primal, rank_multi=self.rank_multi)

    @staticmethod
    def primal_settings(attention: str, primal: Primal) -> dict[str, Any]:
        """The settings of the primal layers, for stacks that have some."""
        return asdict(primal) if attention in PENALIZED else {}


@dataclass(frozen=True)
class ClassifierFlags(EncoderFlags):
    """Flags of the UEA and LRA benchmarks."""

    network: Literal["published", "ours"] = "published"
    """published: the network around the attention layers, and its treatment of padding, as in the paper's code.
    ours: pre-norm blocks, padding masked everywhere, and a linear classifier of the mean over real tokens."""
