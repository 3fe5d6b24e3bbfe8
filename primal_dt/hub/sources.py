"""A policy by its name or path: ``hub:OWNER/NAME``, ``pretrained:NAME``, a run, a checkpoint or a policy folder."""

import re
from pathlib import Path

import torch

from primal_dt.hub.remote import HUB, download_policy
from primal_dt.policy.inference import InferenceMode
from primal_dt.policy.policy import DecisionTransformerPolicy
from primal_dt.policy.stepwise import OnBad, PastEnd
from primal_dt.training.checkpoint import load_checkpoint
from primal_dt.training.policy_folder import is_policy_folder

__all__ = ["HUB", "PRETRAINED", "find_policy", "load_policy", "policy_label", "pretrained_names"]

PRETRAINED = "pretrained:"
PRETRAINED_FOLDER = Path(__file__).parent.parent / "pretrained"
"""Policies that come with the package, one folder each."""


def load_policy(
    source: str | Path,
    device: torch.device | str = "cpu",
    *,
    mode: InferenceMode = "window",
    reproducible: bool = False,
    on_bad: OnBad = "error",
    past_end: PastEnd = "clamp",
) -> DecisionTransformerPolicy:
    """Load a policy, ready to act.

    For example::

        policy = load_policy("hub:OWNER/NAME")  # or "hub:OWNER/NAME@REVISION", "pretrained:hopper", "runs/RUN"
        policy.reset(3600.0)  # then policy.act(observation), policy.observe(reward)

    Nothing that is loaded is executed: the files are numbers and plain values.

    Args:
        source: ``hub:OWNER/NAME`` for a policy of the Hugging Face hub, with ``@REVISION`` for a branch, a tag or a
            commit; ``pretrained:NAME`` for one of the package; else the path of a run folder, a checkpoint file or a
            policy folder.
        device: device of the model.
        mode: how the model is run, as the other options in :class:`DecisionTransformerPolicy`.
        reproducible: whether actions have the same bits for any number of environments.
        on_bad: what happens if a reading is not finite.
        past_end: what happens after the last timestep that the model knows.

    Raises:
        ValueError: if there is no such policy, it cannot be downloaded, or its files are damaged.
    """
    checkpoint = load_checkpoint(find_policy(source), device)
    return checkpoint.policy(device, mode=mode, reproducible=reproducible, on_bad=on_bad, past_end=past_end)


def find_policy(source: str | Path) -> Path:
    """The path of a policy, which is downloaded if it is on the hub and not cached.

    Raises:
        ValueError: if there is no such policy on the hub or in the package, or if the name is empty.
    """
    name = str(source)
    if not name:
        raise ValueError("the path of the policy is empty")
    if name.startswith(HUB):
        repository, at, revision = name.removeprefix(HUB).partition("@")
        if at and not revision:
            raise ValueError(f"{name} names no revision: give one after the @, or leave the @ out")
        return download_policy(repository, revision or None)
    if name.startswith(PRETRAINED):
        return _pretrained(name.removeprefix(PRETRAINED))
    return Path(source)


def policy_label(source: str | Path) -> str | None:
    """A name for file names and progress bars: ``hub-OWNER-NAME``; None for a path, which has a name of its own."""
    is_named = str(source).startswith((HUB, PRETRAINED))
    return re.sub(r"[^\w.-]+", "-", str(source)) if is_named else None


def pretrained_names() -> list[str]:
    """The names of the policies that come with the package."""
    return sorted(path.name for path in PRETRAINED_FOLDER.glob("*") if is_policy_folder(path))


def _pretrained(name: str) -> Path:
    if name not in (known := pretrained_names()):
        choices = f"choose from {', '.join(known)}" if known else "this copy of the package has none"
        raise ValueError(f"there is no pretrained policy {name!r}: {choices}")
    return PRETRAINED_FOLDER / name
