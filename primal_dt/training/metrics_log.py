"""The metrics of a run: ``metrics.jsonl``, and the same data for TensorBoard.

``metrics.jsonl`` is the primary record, with one line per logging point. TensorBoard's files are derived from it. When
a run resumes from a checkpoint, later lines are removed and TensorBoard's files are rewritten, so that no step is
duplicated or missing.
"""

import json
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from primal_dt.system.files import atomic_write, check_regular, name_errors, open_regular, read_text

__all__ = ["MetricsLog", "curve_of", "read_metrics"]

METRICS = "metrics.jsonl"
FLUSH_SECONDS = 10
Line = dict[str, Any]
"""A logging point: ``step``, ``time`` and the scalars."""


def read_metrics(folder: Path) -> list[Line]:
    """Read the lines of ``metrics.jsonl``, up to the first invalid one, such as a truncated last line."""
    path = folder / METRICS
    if not path.exists():
        return []
    lines = []
    for line in read_text(path).splitlines():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return lines


def curve_of(lines: Iterable[Line], name: str) -> tuple[tuple[int, float], ...]:
    """Return (step, value) of one scalar at every point that has it."""
    return tuple((line["step"], line[name]) for line in lines if name in line)


class MetricsLog:
    """Writer of a run's scalars.

    Args:
        folder: the run folder.
        texts: name -> Markdown, shown in TensorBoard.
        until_step: remove points after this step. 0 for a new run.
    """

    def __init__(self, folder: Path, *, texts: Mapping[str, str], until_step: int = 0) -> None:
        self.lines = [line for line in read_metrics(folder) if line["step"] <= until_step]
        with atomic_write(folder / METRICS) as file:
            file.writelines(json.dumps(line).encode() + b"\n" for line in self.lines)
        for old in folder.glob("events.out.tfevents.*"):
            check_regular(old)
            old.unlink()
        self._folder = folder
        self._file = open_regular(folder / METRICS, "ab")
        self._writer = SummaryWriter(str(folder), flush_secs=FLUSH_SECONDS)
        for name, text in texts.items():
            self._writer.add_text(name, text, 0)
        for line in self.lines:
            self._add_to_curves(line)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Append a point, and flush it to disk."""
        line = {"step": step, "time": time.time(), **scalars}
        self.lines.append(line)
        with name_errors(self._folder / METRICS):
            self._file.write(json.dumps(line).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())  # the next checkpoint must not be ahead of the metrics on disk
        self._add_to_curves(line)

    def _add_to_curves(self, line: Line) -> None:
        with name_errors(self._folder):
            for name, value in line.items():
                if name not in ("step", "time"):
                    self._writer.add_scalar(name, value, line["step"], walltime=line["time"])

    def finish(
        self, hyper_parameters: Mapping[str, str | float | bool], scores: Iterable[str], *, first: Iterable[str] = ()
    ) -> None:
        """Fill TensorBoard's table of hyperparameters.

        Args:
            hyper_parameters: name -> value.
            scores: names of the curves whose last values the table shows.
            first: names of the hyperparameters to show first.
        """
        # SummaryWriter.add_hparams would also add the scores to the curves, at step 0. The table finds curves by name.
        experiment, *session = hparams(dict(hyper_parameters), dict.fromkeys(scores, 0.0))
        plugin = experiment.value[0].metadata.plugin_data
        content = HParamsPluginData.FromString(plugin.content)
        leading = set(first)
        for info in content.experiment.hparam_infos:
            info.differs = info.name in leading  # TensorBoard sorts by this, then by name
        plugin.content = content.SerializeToString()
        writer = self._writer._get_file_writer()
        for summary in (experiment, *session):
            writer.add_summary(summary)

    def close(self) -> None:
        """Flush and close all files."""
        with name_errors(self._folder), closing(self._writer), name_errors(self._folder / METRICS):
            self._file.close()
