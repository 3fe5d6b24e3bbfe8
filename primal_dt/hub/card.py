"""The model card of a shared policy: what it is, how it was measured, how to use it, and its limits.

A card is Markdown with YAML at its top, in the form that the Hugging Face hub reads.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from primal_dt.hub.remote import HUB, VIDEO
from primal_dt.hub.results import PolicyResult
from primal_dt.hub.scores import ignored_targets, scores
from primal_dt.hub.usage import usage
from primal_dt.system.table import format_table
from primal_dt.training.checkpoint import Checkpoint
from primal_dt.training.run_folder import InitialWeights

__all__ = ["Card", "write_card"]

TAGS = ("reinforcement-learning", "offline-reinforcement-learning", "decision-transformer", "primal-attention")
SETTINGS = {
    "model": ("attention", "width", "num_layers", "num_heads", "context", "rank", "conditioning", "action_loss"),
    "optimizer": ("batch_size", "optimizer", "lr", "schedule", "weight_decay", "top_fraction", "critic_weight"),
}
"""Settings that the card shows. ``config.json`` has all."""


@dataclass(frozen=True)
class Card:
    """What a model card is written from."""

    source: str
    """What a reader passes to ``load_policy``."""
    checkpoint: Checkpoint
    results: Sequence[PolicyResult]
    """The results of the policy; empty if it was not evaluated."""
    provenance: Mapping[str, Any] | None
    """The command, the commit and the versions of the training; None if they are not known."""
    start: InitialWeights | None
    """The checkpoint that the training started with; None if its weights were new, or if it is not known."""
    plots: Sequence[str]
    """Paths of plots, relative to the card."""
    has_video: bool

    @property
    def name(self) -> str:
        """The model's name."""
        task = self.checkpoint.task
        return f"{self.checkpoint.shape.attention}-{task.environment or 'policy'}"

    @property
    def environment(self) -> str:
        """The environment for readers, or the data set if there is no environment."""
        task = self.checkpoint.task
        return task.environment_text or task.dataset

    @property
    def origin(self) -> str | None:
        """The policy or run that the training started with, as its user named it; None if its weights were new."""
        name = self.checkpoint.config["model"].get("init_from")
        return None if name is None else str(name)

    @property
    def base_model(self) -> str | None:
        """The repository of the policy that the training started with; None if that is not on the hub."""
        origin = self.origin or ""
        return origin.removeprefix(HUB).partition("@")[0] if origin.startswith(HUB) else None


def write_card(card: Card) -> str:
    """Write the card as Markdown."""
    sections = [
        f"---\n{_metadata(card)}\n---",
        f"# {card.name}",
        _introduction(card),
        "## Scores",
        *scores(card.results, card.checkpoint, has_plots=bool(card.plots)),
        *(f"![{path.rpartition('/')[2].removesuffix('.png')}]({path})" for path in card.plots),
        *([f"[A video of one episode]({VIDEO})"] if card.has_video else []),
        "## How to use it",
        *usage(card.checkpoint.task, source=card.source, has_choices=bool(card.checkpoint.shape.categories)),
        "## Task and data",
        _task(card),
        "## Training",
        _training(card),
        "## Provenance",
        _provenance(card),
        "## Limits",
        _limits(card),
    ]
    return "\n\n".join(sections) + "\n"


def _metadata(card: Card) -> str:
    """The YAML at the top. The results are those at the headline target, never the best of several.

    Data sets are left out: the hub refuses names that are not those of its own data sets.
    """
    from huggingface_hub import EvalResult, ModelCardData

    task = card.checkpoint.task
    tags = [*TAGS, *([task.env_id.rpartition(":")[2]] if task.env_id else [])]
    metrics = []
    for result in [each for each in card.results if each.mode == "window"][:1]:
        summary = result.summaries()[0]
        values: dict[str, Any] = {"mean_reward": f"{summary.returns.mean:.2f} +/- {summary.returns.std:.2f}"}
        if summary.normalized is not None:
            values["normalized_return"] = round(summary.normalized.mean, 2)
        if summary.success_rate is not None:
            values["success_rate"] = round(summary.success_rate, 4)
        metrics = [
            EvalResult(
                task_type="reinforcement-learning",
                task_name="reinforcement-learning",
                dataset_type=result.environment.split()[0],
                dataset_name=result.environment,
                metric_type=name,
                metric_name=name,
                metric_value=value,
            )
            for name, value in values.items()
        ]
    data = ModelCardData(
        license=card.checkpoint.license,
        library_name="primal-dt",
        pipeline_tag="reinforcement-learning",
        tags=tags,
        base_model=card.base_model,
        model_name=card.name if metrics else None,
        eval_results=metrics or None,
    )
    return str(data.to_yaml()).strip()


def _introduction(card: Card) -> str:
    task = card.checkpoint.task
    fine_tuned = ""
    if card.origin is not None:
        fine_tuned = f" It is fine-tuned: its training started with the weights of {_origin(card)}."
    return (
        f"A [Decision Transformer](https://arxiv.org/abs/2106.01345) for {card.environment}, trained offline on "
        f"`{task.dataset}` with primal-dt. Its attention stack is `{card.checkpoint.shape.attention}`; `primal` stands "
        "for [Primal-Attention](https://arxiv.org/abs/2305.19798), self-attention without an L x L matrix. The policy "
        f"learned from recorded episodes alone.{fine_tuned}"
    )


def _origin(card: Card) -> str:
    return f"`{card.origin}`" if card.start is None else f"`{card.origin}`, step {card.start.step:,}"


def _task(card: Card) -> str:
    task, shape = card.checkpoint.task, card.checkpoint.shape
    actions = (
        f"choices {', '.join(map(str, shape.categories))}" if shape.categories else f"{len(shape.action_low)} entries"
    )
    rows = [["environment", task.environment_text or "none, only data"], ["data set", f"`{task.dataset}`"]]
    rows += [["recorded in", ", ".join(task.data_env_ids)]] if task.data_env_ids else []
    if task.data_returns:
        low, middle, high = task.data_returns[0], task.data_returns[50], task.data_returns[-1]
        rows.append(["returns of the data", f"{low:.0f} to {high:.0f}, median {middle:.0f}"])
    rows += [["fingerprint of the data", f"`{task.fingerprint}`"], ["observation", f"{shape.state_width} entries"]]
    rows += [["action", actions], ["target returns", ", ".join(f"{target:g}" for target in task.targets) or "none"]]
    if task.reference is not None:
        rows.append(["normalized return", f"{task.reference} ({task.reference_source})"])
    return format_table(["what", "value"], rows)


def _training(card: Card) -> str:
    checkpoint = card.checkpoint
    settings = {name: checkpoint.config[part].get(name) for part, names in SETTINGS.items() for name in names}
    settings["rank"] = checkpoint.shape.rank
    rows = [["updates", f"{checkpoint.step:,} of {checkpoint.config['optimizer']['steps']:,}"]]
    if card.origin is not None:
        digest = "" if card.start is None else f", digest `{card.start.digest}`"
        rows.append(["started with", f"{_origin(card)}{digest}"])
    rows += [
        ["seed", str(checkpoint.config["run"]["seed"])],
        ["parameters", f"{checkpoint.model().num_parameters():,}"],
    ]
    rows += [[name, str(value)] for name, value in settings.items() if value is not None]
    return format_table(["setting", "value"], rows)


def _provenance(card: Card) -> str:
    about = [("Trained", card.provenance)]
    about += [(f"Evaluated (mode {result.mode})", result.provenance) for result in card.results]
    lines = []
    for name, values in about:
        if values and name != "Trained" and values == card.provenance:
            lines.append(f"* {name} at the end of the training.")
            continue
        if not values:
            lines.append(f"* {name}: not recorded.")
            continue
        versions = ", ".join(f"{package} {version}" for package, version in (values.get("versions") or {}).items())
        command = shlex.join(map(str, values.get("command") or ()))
        lines.append(f"* {name} by `{command}`, commit `{values.get('commit') or 'unknown'}`; {versions}.")
    return "\n".join(lines)


def _limits(card: Card) -> str:
    task = card.checkpoint.task
    lines = ["This is one seed of one training. Other seeds give other returns."]
    if task.environment_text:
        lines.append(
            f"It is trained for {task.environment_text}. Other versions of the environment differ in physics or reward."
        )
    if task.targets and task.data_returns:
        lines.append(
            f"The best episode of its data has a return of {task.data_returns[-1]:.0f}. Targets above it are not "
            "covered by the data, and the achieved return need not follow them."
        )
    lines += ignored_targets(card.results)
    recordings = "a simulator's recordings" if task.env_id else "recordings"
    lines.append(f"It learned from {recordings}, and has no safety guarantees: do not run it on a robot unseen.")
    lines += list(task.notes)
    return "\n".join(f"* {line}" for line in lines)
