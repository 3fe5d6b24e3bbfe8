"""What a run writes down about itself: ``metrics.jsonl``, and the same for TensorBoard.

``metrics.jsonl`` is the record, a line for each logging point. TensorBoard's files are made from it: when a run goes on
from a checkpoint, what came after that is cut off the record, and the curves are written anew, so that no step is there
twice and none is missing.
"""

import json
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from primal_dt.system.files import atomic_write

__all__ = ["Logbook", "read_metrics"]

METRICS = "metrics.jsonl"
FLUSH_SECONDS = 10


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's record. A last line that was cut off in the middle is left out."""
    path = folder / METRICS
    if not path.exists():
        return []
    lines = []
    for line in path.read_text().splitlines():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return lines


class Logbook:
    """Writes scalars of a run.

    Args:
        folder: the run's.
        texts: name -> Markdown, shown beside the curves.
        until_step: forget what was written after this step. 0 for a new run.
    """

    def __init__(self, folder: Path, *, texts: Mapping[str, str], until_step: int = 0) -> None:
        kept = [line for line in read_metrics(folder) if line["step"] <= until_step]
        with atomic_write(folder / METRICS) as file:
            file.writelines(json.dumps(line).encode() + b"\n" for line in kept)
        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
        self._file = (folder / METRICS).open("a")
        self._writer = SummaryWriter(str(folder), flush_secs=FLUSH_SECONDS)
        for name, text in texts.items():
            self._writer.add_text(name, text, 0)
        for line in kept:
            self._curve(line)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add a point to the curves, and have it on disk."""
        line = {"step": step, "time": time.time(), **scalars}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())  # a checkpoint that follows is on disk too, and must not be ahead of the record
        self._curve(line)

    def _curve(self, line: Mapping[str, Any]) -> None:
        for name, value in line.items():
            if name not in ("step", "time"):
                self._writer.add_scalar(name, value, line["step"], walltime=line["time"])

    def finish(
        self, hyper_parameters: Mapping[str, str | float | bool], scores: Iterable[str], *, first: Iterable[str] = ()
    ) -> None:
        """Fill the table of hyper-parameters.

        Args:
            hyper_parameters: name -> value.
            scores: the names of the curves whose ends it shows.
            first: the names of the hyper-parameters that it shows before the others.
        """
        # SummaryWriter.add_hparams would add the scores to the curves, at step 0. The table finds them by their names.
        experiment, *session = hparams(dict(hyper_parameters), dict.fromkeys(scores, 0.0))
        plugin = experiment.value[0].metadata.plugin_data
        content = HParamsPluginData.FromString(plugin.content)
        leading = set(first)
        for info in content.experiment.hparam_infos:
            info.differs = info.name in leading  # TensorBoard sorts by this, then by the name
        plugin.content = content.SerializeToString()
        writer = self._writer._get_file_writer()
        for summary in (experiment, *session):
            writer.add_summary(summary)

    def close(self) -> None:
        """Flush and close all files."""
        self._file.close()
        self._writer.close()
