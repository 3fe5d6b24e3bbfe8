"""The table of language models, beside the published results."""

from collections.abc import Mapping, Sequence

from benchmarks.language.cost import STEPS, Cell
from benchmarks.published import WIKITEXT_103
from benchmarks.runs import SavedRun, spread
from primal_dt.system.table import format_table

__all__ = ["results_table"]


def results_table(corpus: str, runs: Mapping[str, Sequence[SavedRun]], cells: Mapping[str, Cell]) -> str:
    """Perplexities with their spread over seeds, parameters, and the cost of a step where it has been measured.

    Args:
        corpus: the name of the data.
        runs: stack -> its runs.
        cells: stack -> the cost of its training step.
    """
    rows = []
    for attention, seen in runs.items():
        published = WIKITEXT_103.get(attention)
        cell = cells.get(attention)
        rows.append(
            [
                attention,
                *(spread([run.scores[split] for run in seen]) for split in ("valid", "test")),
                str(len(seen)),
                "" if published is None else f"{published['perplexity']:.1f}",
                f"{seen[0].num_parameters:,}",
                "" if cell is None else f"{STEPS * cell.seconds:,.0f}",
                "" if cell is None else f"{cell.memory_mib:,.0f}",
            ]
        )
    header = ["valid perplexity", "test perplexity", "seeds", "published, WikiText-103", "parameters"]
    return format_table([corpus, *header, f"s per {STEPS:,} steps", "peak MiB"], rows)
