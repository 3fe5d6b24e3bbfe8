"""What there is to run: every benchmark with its data, command, rough time, and the table of the paper beside it."""

import shutil
import textwrap
from dataclasses import dataclass

__all__ = ["CATALOG", "Entry", "listing"]

GENERATED = "none, it is made by the program"
BUILT_IN = "built-in data, recorded when it is first used"


@dataclass(frozen=True)
class Entry:
    """A benchmark."""

    command: str
    what: str
    data: str
    here: str
    """Rough time on two CPU cores."""
    gpu: str = ""
    """Rough time on a GPU, if it is worth one."""
    table: str = ""
    """The table or figure of the paper that it stands beside."""

    @property
    def name(self) -> str:
        """The module's name: ``uea`` for ``python -m benchmarks.uea``."""
        return self.command.split()[2].removeprefix("benchmarks.")


CATALOG: dict[str, tuple[Entry, ...]] = {
    "The paper's fields": (
        Entry(
            "python -m benchmarks.uea --dataset Handwriting --folder PATH",
            "time series: UEA, ten data sets with their published settings",
            "NAME_TRAIN.ts and NAME_TEST.ts of the archive; JapaneseVowels comes with aeon",
            "7 minutes for one training on JapaneseVowels, on one core; 10 on Handwriting",
            "minutes for one training",
            "Table 1",
        ),
        Entry(
            "python -m benchmarks.lra --task listops --attention primal-plus",
            "long sequences: the Long-Range Arena's five tasks",
            "ListOps is generated; the standard files of the others, and folders of pictures for image",
            "hours to days for one training; --steps N for less",
            "0.3 to 11 hours for one training at the published speed, on a V100",
            "Table 2; Table 3 with --efficiency",
        ),
        Entry(
            "python -m benchmarks.images --data PATH/imagenet100 --attention primal-plus",
            "images: DeiT-Small/16 with DeiT's recipe, or small models",
            "PATH/train/CLASS/*.jpeg and PATH/val/CLASS/*.jpeg",
            "months for 300 epochs of ImageNet-100; --model small on 10,000 small images: minutes",
            "1 day for 300 epochs of ImageNet-100 at the published speed",
            "Table 5",
        ),
        Entry(
            "python -m benchmarks.language --data PATH/wikitext-103 --attention primal-plus",
            "text: a word-level language model, and its continuations with --generate",
            "wiki.train.tokens, wiki.valid.tokens and wiki.test.tokens",
            "months for the published training; small models on WikiText-2: 20 minutes on one core",
            "5 days at the published speed",
            "WikiText-103, beside the paper's code",
        ),
        Entry(
            "python -m benchmarks.tables table6 --datasets JapaneseVowels",
            "ablations: rank and eta on UEA; table8, table9: data-dependent weights on UEA and the arena",
            "as for uea and lra",
            "40 minutes for JapaneseVowels, one seed for each cell",
            "an hour for each data set",
            "Tables 6, 8, 9",
        ),
        Entry(
            "python -m benchmarks.spectrum RUN...",
            "singular values of the attention layers of trained models, and the distance between heads",
            "runs of train.py, benchmarks.uea and benchmarks.images",
            "a minute",
            table="Figure 1",
        ),
    ),
    "Policies": (
        Entry(
            "python -m benchmarks.quick_search",
            "search for the preset quick over six tasks, by successive halving",
            BUILT_IN,
            "5 hours",
        ),
        Entry(
            "python -m benchmarks.classic_control",
            "quick on data of mixed quality from classic control",
            "recorded by the program",
            "10 minutes",
        ),
    ),
    "Speed": (
        Entry("python -m benchmarks.train", "a training step beside d3rlpy and transformers", GENERATED, "15 minutes"),
        Entry("python -m benchmarks.busy", "training and evaluation beside busy processes", GENERATED, "10 minutes"),
        Entry("python -m benchmarks.ablation", "what each optimization brings", GENERATED, "10 minutes"),
        Entry("python -m benchmarks.attention", "all kinds of attention against length", GENERATED, "15 minutes"),
        Entry("python -m benchmarks.rollout", "rollouts, and policies alone", GENERATED, "15 minutes"),
        Entry("python -m benchmarks.data", "recording, loading and sampling data", GENERATED, "10 minutes"),
        Entry("python -m benchmarks.startup", "from the command to the first step", GENERATED, "5 minutes"),
        Entry("python -m benchmarks.sweep_overhead", "sweep.py against the same jobs by hand", BUILT_IN, "5 minutes"),
        Entry("python -m benchmarks.roofline", "ESTIMATE of a training step on GPUs", "none", "seconds"),
        Entry("python -m benchmarks.scale", "ESTIMATE of a sweep on GPUs", "none", "a minute"),
    ),
    "Reliability and results": (
        Entry(
            "python -m benchmarks.torture --minutes 10", "random attacks on the programs", GENERATED, "as long as said"
        ),
        Entry("python -m benchmarks.publish RUN...", "raw results and tables of the docs", "finished runs", "seconds"),
    ),
}
"""Group -> its benchmarks. The times are for planning; measured ones are in docs/results.md and docs/performance.md."""


def listing(width: int | None = None) -> str:
    """The catalog as text.

    Args:
        width: characters in a line. If not given: those of the terminal, at most 100.
    """
    width = min(shutil.get_terminal_size().columns, 100) if width is None else width

    def field(name: str, text: str) -> str:
        indent = " " * 10
        return textwrap.fill(text, width, initial_indent=f"    {name:<6}", subsequent_indent=indent) if text else ""

    lines: list[str] = []
    for group, entries in CATALOG.items():
        lines += [group, ""]
        for entry in entries:
            lines.append(f"  {entry.command}")
            fields = (
                ("", entry.what),
                ("paper", entry.table),
                ("data", entry.data),
                ("here", entry.here),
                ("GPU", entry.gpu),
            )
            lines += [text for text in (field(*pair) for pair in fields) if text]
            lines.append("")
    return "\n".join([*lines, "PATH, RUN: your own. --help of each command explains its flags."])
