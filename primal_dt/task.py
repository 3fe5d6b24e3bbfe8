"""What a run knows of its task: one frozen value, looked up by the scripts. Standard library only."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

__all__ = ["Reference", "RunTask"]


@dataclass(frozen=True)
class Reference:
    """The two returns that a normalized return is measured by: 0 is the random policy's, 100 the expert's."""

    random_return: float
    expert_return: float

    def __str__(self) -> str:
        return f"0 at a return of {self.random_return:g}, 100 at {self.expert_return:g}"


@dataclass(frozen=True)
class RunTask:
    """What a policy needs to know of its task where its data is not: part of every checkpoint."""

    env_id: str
    """The environment that it acts in, with its version."""
    tier: str | None
    """The data set's tier, such as ``medium-replay``, if it has one."""
    dataset: str
    """The data set, as it was named."""
    data_env_ids: tuple[str, ...]
    """The environments that the data was recorded in."""
    fingerprint: str
    """The digest of the data's content."""
    targets: tuple[float, ...]
    """Returns that a policy is asked for, the headline first."""
    reference: Reference

    @property
    def headline(self) -> float:
        """The target that counts: fixed before a policy is evaluated, never the best of several."""
        return self.targets[0]

    @property
    def environment(self) -> str:
        """The environment without its version, in small letters: ``hopper``."""
        return self.env_id.rpartition("-v")[0].lower()

    @property
    def unit(self) -> str:
        """What its normalized returns are measured in. They are comparable with those of the same unit only."""
        return f"{self.env_id}, {self.reference}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as ``config.json`` and checkpoints store them."""
        return {
            "env_id": self.env_id,
            "tier": self.tier,
            "dataset": self.dataset,
            "data_env_ids": list(self.data_env_ids),
            "fingerprint": self.fingerprint,
            "targets": list(self.targets),
            "random_return": self.reference.random_return,
            "expert_return": self.reference.expert_return,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of :meth:`to_dict`."""
        return cls(
            env_id=values["env_id"],
            tier=values["tier"],
            dataset=values["dataset"],
            data_env_ids=tuple(values["data_env_ids"]),
            fingerprint=values["fingerprint"],
            targets=tuple(values["targets"]),
            reference=Reference(values["random_return"], values["expert_return"]),
        )
