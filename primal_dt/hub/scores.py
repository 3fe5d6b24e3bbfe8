"""The part of a model card about results: how the policy was measured, and what it achieved."""

from collections.abc import Sequence

from primal_dt.evaluation.report import FEW_EPISODES
from primal_dt.evaluation.score import number_text, success_text, target_text
from primal_dt.hub.results import PolicyResult
from primal_dt.system.table import format_table
from primal_dt.training.checkpoint import Checkpoint

__all__ = ["ignored_targets", "scores"]


def scores(results: Sequence[PolicyResult], checkpoint: Checkpoint, *, has_plots: bool) -> list[str]:
    """Write the paragraphs and tables about a policy's results, which may be none."""
    if not results:
        return ["This policy has not been evaluated. Do not assume anything about its returns."]
    parts = []
    for result in results:
        parts += [f"In {result.environment}, inference mode `{result.mode}`:", _table(result), _reading(result)]
        if result.seeds is not None:
            parts.append(_over_seeds(result))
        if result.notes:
            parts.append("\n".join(f"* {note}" for note in result.notes))
        if has_plots and result.num_policies > 1:
            parts.append(f"The plots are those of the report, which is about {result.num_policies} policies.")
    return [*parts, _protocol(results, checkpoint)]


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


def _protocol(results: Sequence[PolicyResult], checkpoint: Checkpoint) -> str:
    task, step, planned = checkpoint.task, checkpoint.step, checkpoint.config["optimizer"]["steps"]
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
    seeds = sorted({episode.seed for result in results for episode in result.episodes})
    return f"{words} Environments are reset with the seeds {seeds[0]} to {seeds[-1]}."


def ignored_targets(results: Sequence[PolicyResult]) -> list[str]:
    """Write a warning for each result in which the policy does not follow its target."""
    lines = []
    for result in results:
        if (ends := result.ignored_targets) is not None:
            is_plain = result.reference is None
            low, high = (
                number_text(end.returns.mean, is_plain=True) if is_plain else f"{end.returns.mean:.0f}" for end in ends
            )
            lines.append(
                f"**It does not follow its target** in {result.environment} (mode {result.mode}): asked for returns of "
                f"{target_text(ends[0].target)} and {target_text(ends[1].target)}, it achieves {low} and {high}."
            )
    return lines
