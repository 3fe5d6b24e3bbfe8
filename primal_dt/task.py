"""The task of a run, as one frozen value. Standard library only."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

__all__ = ["Reference", "RunTask"]


@dataclass(frozen=True)
class Reference:
    """Reference returns of the normalized return: the random policy's return is 0, the expert's is 100."""

    random_return: float
    expert_return: float

    def __str__(self) -> str:
        return f"0 at a return of {self.random_return:g}, 100 at {self.expert_return:g}"


@dataclass(frozen=True)
class RunTask:
    """The task of a run, as its policy needs it once the data set is gone. Part of every checkpoint."""

    env_id: str
    """The environment that the policy acts in, with its version."""
    tier: str | None
    """The data set's tier, such as ``medium-replay``, or None if it has none."""
    dataset: str
    """The data set's name, as the user gave it."""
    data_env_ids: tuple[str, ...]
    """The environments that the data was recorded in."""
    fingerprint: str
    """The digest of the data set's content."""
    targets: tuple[float, ...]
    """Target returns for evaluation, the headline target first. Empty if the policy follows no target."""
    reference: Reference
    data_returns: tuple[float, ...] = ()
    """Percentiles 0, 1, ..., 100 of the returns of the data's episodes. Empty if they are not known."""

    @property
    def headline(self) -> float | None:
        """The target return of the headline result: fixed before the evaluation, never the best of several.

        None if the policy follows no target.
        """
        return self.targets[0] if self.targets else None

    def spread_targets(self, count: int = 8) -> tuple[float, ...]:
        """Targets at equal distances, from the data's lowest return to a tenth of the range above its highest.

        Raises:
            ValueError: if the data's returns are not known.
        """
        if not self.data_returns:
            raise ValueError(
                f"the returns of {self.dataset} are not known, because an earlier version trained the run: "
                "give targets as numbers"
            )
        low, high = self.data_returns[0], self.data_returns[-1]
        distance = 1.1 * (high - low) / (count - 1)
        digits = 2 - math.floor(math.log10(distance)) if distance else 6  # a hundredth of the distance
        return tuple(round(low + i * distance, digits) for i in range(count))

    @property
    def environment(self) -> str:
        """The environment's name without its version, in lower case: ``hopper``."""
        return self.env_id.rpartition("-v")[0].lower()

    @property
    def unit(self) -> str:
        """The unit of normalized returns: environment and references. Only returns of the same unit are comparable."""
        return f"{self.env_id}, {self.reference}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as ``config.json`` and checkpoints store them, with the reference's two returns among them."""
        values = asdict(self)
        reference = values.pop("reference")
        return values | reference

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of :meth:`to_dict`."""
        own: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        reference = Reference(own.pop("random_return"), own.pop("expert_return"))
        return cls(**own, reference=reference)
