"""What must hold in the world after every attack: nothing is lost, and nothing outside is written."""

import json
import os
import re
import stat
from pathlib import Path

from benchmarks.torture.world import NAME, OWN, InvariantError

__all__ = ["check_files", "check_leftovers", "state_of"]

State = dict[str, bytes | str]
"""Path -> content of a file, or what else is there."""


def state_of(root: Path) -> State:
    """All that is below a folder, apart from folders. Links are not followed."""
    return {str(path.relative_to(root)): _content(path) for path in sorted(root.rglob("*")) if not _is_folder(path)}


def _is_folder(path: Path) -> bool:
    return stat.S_ISDIR(path.lstat().st_mode)


def _content(path: Path) -> bytes | str:
    mode = path.lstat().st_mode
    if stat.S_ISREG(mode):
        return path.read_bytes()
    return f"link to {os.readlink(path)}" if stat.S_ISLNK(mode) else stat.filemode(mode)


def check_files(before: State, after: State, *, program: str) -> None:
    """Check that a program lost nothing and wrote nothing where it does not belong.

    Args:
        before: the state before the program.
        after: the state after it.
        program: its name. Only ``record`` may replace the data set.

    Raises:
        InvariantError: if it did.
    """
    for name in before.keys() | after.keys():
        old, new = before.get(name), after.get(name)
        is_data = name.startswith(f"minari/{NAME}/") and program != "record"
        is_record = name.endswith("/config.json") and old is not None
        if (Path(name).parts[0] not in OWN or is_data or is_record) and old != new:
            raise InvariantError(f"{name} was changed")
        is_grown = isinstance(old, bytes) and isinstance(new, bytes) and new.startswith(old)
        if "/evaluations/" in name and isinstance(old, bytes) and not is_grown:
            raise InvariantError(f"{name} lost episodes")
    for run in sorted({"/".join(Path(name).parts[:2]) for name in before if name.startswith("runs/")}):
        _check_run(run, before, after)


def check_leftovers(root: Path) -> None:
    """Check that a program which succeeded left nothing of an earlier one that was killed.

    Raises:
        InvariantError: if a run or the data sets have partial files.
    """
    for name in ("runs", "minari"):
        if left := [path for path in (root / name).glob("**/*partial*") if "report" not in path.parts]:
            raise InvariantError(f"{left[0]} is left")


def _check_run(run: str, before: State, after: State) -> None:
    """Check that a run has lost no checkpoint and no point.

    Checkpoints may be removed if there are two newer ones, renamed if they are damaged, and replaced if the
    evaluation at their step was interrupted. Points after the newest
    checkpoint may be removed.
    """
    contents = {content for name, content in after.items() if name.startswith(f"{run}/checkpoints/")}
    steps = sorted(_checkpoints(run, after))
    for step, content in _checkpoints(run, before).items():
        if content not in contents and step not in steps and not (len(steps) > 1 and step < steps[-2]):
            raise InvariantError(f"{run} lost its checkpoint of step {step}; it has {steps}")
    points: set[int] = _points(before.get(f"{run}/metrics.jsonl"))
    copies = [content for name, content in after.items() if name.startswith(f"{run}/metrics.jsonl")]  # also damaged
    left = set().union(*map(_points, copies))
    newest = max(steps, default=0)
    if lost := sorted(step for step in points - left if step <= newest):
        raise InvariantError(f"{run}/metrics.jsonl lost the points of steps {lost}")


def _checkpoints(run: str, state: State) -> dict[int, bytes]:
    """Step -> content of the checkpoints that are regular files."""
    found = {name: re.fullmatch(rf"{re.escape(run)}/checkpoints/step-(\d{{9}})\.pt", name) for name in state}
    steps = {name: int(match[1]) for name, match in found.items() if match is not None}
    return {step: content for name, step in steps.items() if isinstance(content := state[name], bytes)}


def _points(content: bytes | str | None) -> set[int]:
    """Steps of the whole lines."""
    steps = set()
    for line in content.split(b"\n") if isinstance(content, bytes) else ():
        try:
            steps.add(json.loads(line)["step"])
        except (ValueError, TypeError, KeyError):
            continue
    return steps
