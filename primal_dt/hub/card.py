"""The model card of a shared policy: what it is, how it was measured, how to use it, and its limits.

A card is Markdown with YAML at its top, in the form that the Hugging Face hub reads.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from primal_dt.data.names import split_names
from primal_dt.evaluation.report import FEW_EPISODES
from primal_dt.evaluation.score import number_text, success_text, target_text
from primal_dt.hub.remote import VIDEO
from primal_dt.hub.results import PolicyResult
from primal_dt.system.table import format_table
from primal_dt.training.checkpoint import Checkpoint

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
    license: str
    """The license of the weights, as the hub names it."""
    checkpoint: Checkpoint
    results: Sequence[PolicyResult]
    """The results of the policy; empty if it was not evaluated."""
    provenance: Mapping[str, Any] | None
    """The command, the commit and the versions of the training; None if they are not known."""
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


def write_card(card: Card) -> str:
    """Write the card as Markdown."""
    sections = [
        f"---\n{_metadata(card)}\n---",
        f"# {card.name}",
        _introduction(card),
        "## Scores",
        *_scores(card),
        *(f"![{path.rpartition('/')[2].removesuffix('.png')}]({path})" for path in card.plots),
        *([f"[A video of one episode]({VIDEO})"] if card.has_video else []),
        "## How to use it",
        *_usage(card),
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
    """The YAML at the top. The results are those at the headline target, never the best of several."""
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
        license=card.license,
        library_name="primal-dt",
        pipeline_tag="reinforcement-learning",
        tags=tags,
        datasets=list(split_names(task.dataset)),
        model_name=card.name,
        eval_results=metrics or None,
    )
    return str(data.to_yaml()).strip()


def _introduction(card: Card) -> str:
    task = card.checkpoint.task
    return (
        f"A [Decision Transformer](https://arxiv.org/abs/2106.01345) for {card.environment}, trained offline on "
        f"`{task.dataset}` with primal-dt. Its attention stack is `{card.checkpoint.shape.attention}`; `primal` stands "
        "for [Primal-Attention](https://arxiv.org/abs/2305.19798), self-attention without an L x L matrix. The policy "
        "learned from recorded episodes alone."
    )


def _scores(card: Card) -> list[str]:
    if not card.results:
        return ["This policy has not been evaluated. Do not assume anything about its returns."]
    parts = []
    for result in card.results:
        parts += [f"In {result.environment}, inference mode `{result.mode}`:", _table(result), _reading(result)]
        if result.seeds is not None:
            parts.append(_over_seeds(result))
        if result.notes:
            parts.append("\n".join(f"* {note}" for note in result.notes))
        if card.plots and result.num_policies > 1:
            parts.append(f"The plots are those of the report, which is about {result.num_policies} policies.")
    return [*parts, _protocol(card)]


def _table(result: PolicyResult) -> str:
    summaries, is_plain = result.summaries(), result.reference is None
    has_success = any(summary.success_rate is not None for summary in summaries)
    rows = []
    for summary in summaries:
        shown = summary.returns if summary.normalized is None else summary.normalized
        interval = result.interval(summary.target)
        ends = [number_text(end, is_plain=is_plain) for end in interval or ()]
        is_headline = summary.target == result.headline
        rows.append(
            [
                f"{target_text(summary.target, summary.predicted_mean)}{'*' if is_headline else ''}",
                shown.texts(is_plain=is_plain)[0],
                f"[{', '.join(ends)}]" if ends else "",
                *([] if is_plain else [f"{summary.returns.mean:.0f} ± {summary.returns.std:.0f}"]),
                f"{summary.length_mean:.0f}",
                *([success_text(summary.success_rate)] if has_success else []),
                str(summary.num_episodes),
            ]
        )
    header = ["target", "return" if is_plain else "normalized return", "95 % interval"]
    header += ["length"] if is_plain else ["return", "length"]
    return format_table([*header, *(["success"] if has_success else []), "episodes"], rows)


def _reading(result: PolicyResult) -> str:
    """How to read the table."""
    words = "± is the standard deviation over episodes. The interval is that of the mean over episodes of this policy, "
    words += "from a bootstrap: it says nothing about other seeds of the training."
    if result.reference is not None:
        words += f" Normalized returns are {result.reference}."
    few = min(summary.num_episodes for summary in result.summaries())
    if few < FEW_EPISODES:
        words += f" **{few} {'episode is' if few == 1 else 'episodes are'} too few for a reliable result.**"
    return words


def _over_seeds(result: PolicyResult) -> str:
    """The result of the configuration, of which this policy is one seed."""
    assert result.seeds is not None
    seeds, is_plain = result.seeds, result.reference is None
    mean, std, iqm, *ends = (
        number_text(float(value), is_plain=is_plain)
        for value in (seeds["mean"], seeds["std"], seeds["iqm"], *(seeds["interval"] or ()))
    )
    interval = f", interquartile mean {iqm} [{', '.join(ends)}]" if ends else ""
    return (
        f"This policy is one of {seeds['num_seeds']} seeds of the same configuration. Over these seeds, at the "
        f"headline target: {mean} ± {std} (standard deviation over seeds){interval} (95 % interval)."
    )


def _protocol(card: Card) -> str:
    task, step, planned = card.checkpoint.task, card.checkpoint.step, card.checkpoint.config["optimizer"]["steps"]
    words = f"Protocol: the last checkpoint (step {step:,}) is evaluated, not the best one. "
    if step < planned:
        words = f"Protocol: the checkpoint of step {step:,} is evaluated; **the training has {planned:,} steps**. "
    if task.targets:
        words += (
            f"The policy is asked for a target return. The headline target (*) is {task.targets[0]:g}, from "
            f"{task.target_source}, and was fixed before the evaluation; results at other targets are shown, but none "
            "is selected."
        )
    else:
        words += "The policy follows no target return."
    seeds = sorted({episode.seed for result in card.results for episode in result.episodes})
    return f"{words} Environments are reset with the seeds {seeds[0]} to {seeds[-1]}."


def _usage(card: Card) -> list[str]:
    task, shape = card.checkpoint.task, card.checkpoint.shape
    reset = f"policy.reset({task.targets[0]!r})  # the return to aim for" if task.targets else "policy.reset()"
    is_plain = task.env_id and ":" not in task.env_id and not shape.categories
    if is_plain and (task.specification is None or not task.specification.differences):
        code = [
            "import gymnasium",
            "from primal_dt import load_policy",
            "",
            f'environment = gymnasium.make("{task.env_id}")',
            f'policy = load_policy("{card.source}")',
            "observation, _ = environment.reset(seed=0)",
            reset,
            "ended, total = False, 0.0",
            "while not ended:",
            "    observation, reward, terminated, truncated, _ = environment.step(policy.act(observation))",
            "    policy.observe(reward)",
            "    ended, total = terminated or truncated, total + reward",
            "print(total)",
        ]
    else:
        code = [
            "from primal_dt import load_policy",
            "",
            f'policy = load_policy("{card.source}")',
            reset,
            "action = policy.act(observation)  # a raw observation of the environment",
            "policy.observe(reward)",
        ]
    name = card.source.partition(":")[2]
    what = f"--pretrained {name}" if card.source.startswith("pretrained:") else card.source
    return [
        "\n".join(["```python", *code, "```"]),
        "With primal-dt's repository, this evaluates the policy and records a video:",
        f"```sh\npython evaluate.py {what} --episodes 10 --video\n```",
        "The files are numbers and plain values (`model.safetensors`, `config.json`): loading them executes no code. "
        "Observations and actions are raw; the standardization is part of the policy.",
    ]


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
    lines.append(
        "It learned from a simulator's recordings, and has no safety guarantees: do not run it on a robot unseen."
    )
    lines += list(task.notes)
    return "\n".join(f"* {line}" for line in lines)
