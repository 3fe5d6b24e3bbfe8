"""The metrics of a run: ``metrics.jsonl``, and the same data for TensorBoard.

``metrics.jsonl`` is the primary record, with one line per logging point. TensorBoard's files are derived from it. When
a run resumes from a checkpoint, later lines are removed and TensorBoard's files are rewritten, so that no step is
duplicated or missing. Damaged lines are left out, and a copy of the file keeps them.
"""

import logging
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from primal_dt.system.files import atomic_write, check_regular, name_errors, open_regular, unused_name
from primal_dt.system.records import dump_record, parse_record

__all__ = ["MetricsLog", "curve_of", "missing_points", "read_metrics", "scan_metrics"]

log = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
FLUSH_SECONDS = 10
Line = dict[str, Any]
"""A logging point: ``step``, ``time`` and the scalars."""


def read_metrics(folder: Path) -> list[Line]:
    """Read the points in ``metrics.jsonl``. Lines that are not points are left out."""
    return scan_metrics(folder)[0]


def scan_metrics(folder: Path) -> tuple[list[Line], str]:
    """Read the points in ``metrics.jsonl``, and describe its damage.

    Returns:
        The points, and a message about the lines that are not points; ``""`` if there are none. A last line that was
        cut off while it was written is no damage.
    """
    path = folder / METRICS
    if not path.exists():
        return [], ""
    with open_regular(path, "rb") as file:
        *whole, rest = file.read().split(b"\n")
    is_cut_off = rest.startswith(b"{") and b"}" not in rest  # a point is one flat object
    texts = [*whole, rest] if rest and not is_cut_off else whole
    has_checksums = any(b'"crc32"' in text for text in texts)
    points: dict[int, Line | None] = {}
    last: Line = {"step": -1}
    for number, text in enumerate(texts, 1):
        point = _point(text, has_checksum=has_checksums)
        is_next = point is not None and point["step"] >= last["step"] and point != last  # a step may have several
        points[number] = point if is_next else None
        last = points[number] or last
    damaged = [number for number, point in points.items() if point is None]
    problem = f"damaged lines in {path}: {len(damaged)}, the first is line {damaged[0]}" if damaged else ""
    return [point for point in points.values() if point is not None], problem


def missing_points(lines: Iterable[Line], *, until_step: int, every_steps: int) -> str:
    """Describe the points that a run must have logged up to a step but that are not there; ``""`` if all are."""
    logged = {line["step"] for line in lines}
    missing = [step for step in range(every_steps, until_step + 1, every_steps) if step not in logged]
    return f"points missing in {METRICS}: {len(missing)}, the first is of step {missing[0]}" if missing else ""


def _point(text: bytes, *, has_checksum: bool) -> Line | None:
    """The logging point in a line, or None if it holds something else."""
    line = parse_record(text, has_checksum=has_checksum)
    if line is None or type(line.get("step")) is not int or line["step"] < 0:
        return None
    return line if all(map(_is_number, line.values())) else None


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < 2**63)  # what TensorBoard's files can hold


def curve_of(lines: Iterable[Line], name: str) -> tuple[tuple[int, float], ...]:
    """Return (step, value) of one scalar at every point that has it."""
    return tuple((line["step"], line[name]) for line in lines if name in line)


def _copy_aside(path: Path) -> Path:
    """Copy a file to ``*.damaged``, or ``*.damaged-2`` and so on if that is another copy. Return the copy's path."""
    content = path.read_bytes()
    copies = path.parent.glob(f"{path.name}.damaged*")
    if same := [copy for copy in copies if copy.is_file() and copy.read_bytes() == content]:
        return same[0]
    copy = unused_name(path.with_name(f"{path.name}.damaged"))
    with atomic_write(copy) as file:
        file.write(content)
    return copy


class MetricsLog:
    """Writer of a run's scalars.

    Args:
        folder: the run folder.
        texts: name -> Markdown, shown in TensorBoard.
        until_step: remove points after this step. 0 for a new run.
    """

    def __init__(self, folder: Path, *, texts: Mapping[str, str], until_step: int = 0) -> None:
        lines, problem = scan_metrics(folder)
        if problem:
            copy = _copy_aside(folder / METRICS)
            log.warning("%s. They are left out; %s is a copy of the file with them", problem, copy)
        self.lines = [line for line in lines if line["step"] <= until_step]
        with atomic_write(folder / METRICS) as file:
            file.writelines(dump_record(line) + b"\n" for line in self.lines)
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
            self._file.write(dump_record(line) + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())  # the next checkpoint must not be ahead of the metrics on disk
        self._add_to_curves(line)

    def last_values(self) -> dict[str, float]:
        """Return the last value of every scalar."""
        last = {name: value for line in self.lines for name, value in line.items()}
        return {name: value for name, value in last.items() if name not in ("step", "time")}

    def _add_to_curves(self, line: Line) -> None:
        with name_errors(self._folder):
            for name, value in line.items():
                if name not in ("step", "time"):
                    self._writer.add_scalar(name, value, line["step"], walltime=line.get("time"))

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
