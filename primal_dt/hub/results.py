"""The results of one policy, read from reports: ``report.json`` of ``train.py`` or of ``evaluate.py``."""

import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from primal_dt.evaluation.report import BOOTSTRAP_SEED
from primal_dt.evaluation.rollout import Episode
from primal_dt.evaluation.score import TargetSummary, normalized, summarize
from primal_dt.evaluation.statistics import Interval, mean_interval
from primal_dt.evaluation.trained_run import TrainedRun
from primal_dt.schema import build, require_keys
from primal_dt.system.files import read_text
from primal_dt.task import Reference

__all__ = ["PolicyResult", "read_results"]

FOLLOWS = 0.1
"""A policy follows its target if the achieved return rises by this part of a difference between targets."""
OPTIONAL = [item.name for item in fields(Episode) if item.default is not MISSING]


@dataclass(frozen=True)
class PolicyResult:
    """A policy's episodes in one report."""

    folder: Path
    """The report's folder."""
    mode: str
    """The inference mode."""
    environment: str
    """The environment in which the policy acted, for readers."""
    reference: Reference | None
    """The reference returns; None if results are plain returns."""
    headline: float | None
    """The target return that was fixed before the evaluation; None if the policy follows none."""
    episodes: tuple[Episode, ...]
    notes: tuple[str, ...]
    """Caveats for the reader."""
    num_policies: int
    """Number of policies in the report."""
    seeds: Mapping[str, Any] | None
    """The result at the headline target over all seeds of this configuration; None if the report has one seed."""
    provenance: Mapping[str, Any]
    """The command, the commit and the versions of the evaluation."""

    def summaries(self) -> list[TargetSummary]:
        """One summary for each target, the headline target first."""
        return sorted(summarize(self.episodes, self.reference), key=lambda each: each.target != self.headline)

    @property
    def ignored_targets(self) -> tuple[TargetSummary, TargetSummary] | None:
        """The results at the lowest and the highest target, if the return hardly rises between them, else None."""
        found = {each.target: each for each in self.summaries() if each.target is not None}
        if not found:
            return None
        low, high = min(found), max(found)
        rise = found[high].returns.mean - found[low].returns.mean
        return (found[low], found[high]) if rise < FOLLOWS * (high - low) else None

    def interval(self, target: float | None) -> Interval | None:
        """The 95 % interval of the mean over episodes at one target, in the unit of the results."""
        returns = [episode.total_reward for episode in self.episodes if episode.target == target]
        return mean_interval(normalized(returns, self.reference), random=np.random.default_rng(BOOTSTRAP_SEED))


def read_results(folder: Path, run: TrainedRun) -> list[PolicyResult]:
    """Read what a report says about a policy: one result for each inference mode and environment.

    Raises:
        ValueError: if the folder is not a report, or has nothing about this policy.
    """
    path = folder / "report.json"
    try:
        content = require_keys(json.loads(read_text(path)), ("groups", "provenance"), where="it")
        found = [
            _result(folder, content, group, own)
            for group in content["groups"]
            for own in group["runs"]
            if (group["configuration"], own["seed"], own["step"]) == (run.configuration, run.seed, run.checkpoint.step)
        ]
    except FileNotFoundError as error:
        raise ValueError(f"{folder} is not a report: report.json is missing") from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read by this version: {error!r}") from error
    if not found:
        raise ValueError(
            f"{folder} is not a report about {run.path}: no run in it has these settings, seed {run.seed} and step "
            f"{run.checkpoint.step}"
        )
    return found


def _result(folder: Path, content: Any, group: Any, own: Any) -> PolicyResult:
    returns = (group["random_return"], group["expert_return"])
    headline = group["headline"]
    over_seeds = [result for result in group["results"] if result["target"] == headline and result["num_seeds"] > 1]
    episodes = [build(Episode, values, where="episode", optional=OPTIONAL) for values in own["episodes"]]
    if not episodes:
        raise ValueError("there are no episodes")
    return PolicyResult(
        folder=folder,
        mode=str(group["mode"]),
        environment=str(group["environment_text"]),
        reference=None
        if returns[0] is None
        else build(Reference, dict(zip(("random_return", "expert_return"), returns, strict=True)), where="group"),
        headline=headline,
        episodes=tuple(episodes),
        notes=tuple(map(str, own["notes"])),
        num_policies=sum(len(each["runs"]) for each in content["groups"]),
        seeds=over_seeds[0] if over_seeds else None,
        provenance=require_keys(content["provenance"], (), where="provenance"),
    )
