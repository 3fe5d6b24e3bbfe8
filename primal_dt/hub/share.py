"""A run -> a folder to share: the policy, its model card, the plots of its reports, and a video."""

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from primal_dt.data.names import join_names, split_names
from primal_dt.evaluation.score import target_text
from primal_dt.evaluation.trained_run import TrainedRun, open_run
from primal_dt.hub.card import Card, write_card
from primal_dt.hub.remote import CARD, PLACEHOLDER, PLOTS, VIDEO
from primal_dt.hub.results import PolicyResult, read_results
from primal_dt.system.files import atomic_write, make_folder
from primal_dt.training.checkpoint import Checkpoint, load_checkpoint, save_policy
from primal_dt.training.policy_folder import is_policy_folder
from primal_dt.training.run_folder import read_record

__all__ = ["LICENSE", "save_shared"]

LICENSE = "mit"
"""The license of shared weights, unless another one is given."""


def save_shared(
    path: Path,
    folder: Path,
    *,
    reports: Sequence[Path] = (),
    source: str = PLACEHOLDER,
    weights_license: str = LICENSE,
) -> None:
    """Write a folder to share.

    Args:
        path: a run folder, whose last checkpoint is shared, or a checkpoint file.
        folder: the folder to write. It must be empty or missing.
        reports: folders of reports about this run. If empty: the report that the training wrote, if there is one.
        source: what the card tells readers to pass to ``load_policy``.
        weights_license: the license of the weights, as the hub names it.

    Raises:
        ValueError: if the run has no readable checkpoint or is a shared policy already, a report is not about it, the
            folder has other files, or the license is not written as on the hub.
    """
    check_license(weights_license)
    if is_policy_folder(path):
        raise ValueError(
            f"{path} is a shared policy already: edit its card, {path / CARD}, or publish it with "
            f"`python -m primal_dt.hub push {path} OWNER/NAME`"
        )
    run = open_run(path)
    own_report = None if run.folder is None else run.folder / "report"
    folders = list(reports)
    if not folders and own_report is not None and (own_report / "report.json").exists():
        folders = [own_report]
    results = [result for each in folders for result in read_results(each, run)]
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty: give another --out")
    checkpoint = replace(_public(load_checkpoint(run.path)), license=weights_license)
    record = None if run.folder is None else read_record(run.folder)
    provenance = None if record is None else _public_provenance(record.provenance)
    save_policy(folder, checkpoint, provenance=provenance)
    videos = [*folders, *([own_report] if own_report else []), *([run.folder] if run.folder else [])]
    card = Card(
        source=source,
        checkpoint=checkpoint,
        results=[_public_result(result) for result in results],
        provenance=provenance,
        start=None if record is None else record.initial_weights,
        plots=_copy_plots(folders, folder),
        has_video=_copy_video(run, results, videos, folder),
    )
    with atomic_write(folder / CARD) as file:
        file.write(write_card(card).encode())


def check_license(name: str) -> None:
    """Raise ValueError if a license is not written as on the hub. The hub checks that it knows it."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", name):
        raise ValueError(f"the license {name!r} is not written as on the hub, in lower case: such as mit or apache-2.0")


def _copy_plots(reports: Sequence[Path], folder: Path) -> list[str]:
    """Copy the plots of reports. Returns their paths in the folder."""
    copied: list[str] = []
    for report in reports:
        for plot in sorted(report.glob("*.png")):
            names = (f"{PLOTS}/{plot.stem}{'' if i == 1 else f'-{i}'}.png" for i in range(1, len(copied) + 2))
            name = next(name for name in names if name not in copied)
            make_folder(folder / PLOTS)
            shutil.copyfile(plot, folder / name)
            copied.append(name)
    return copied


def _copy_video(run: TrainedRun, results: Sequence[PolicyResult], places: Sequence[Path], folder: Path) -> bool:
    """Copy the video of this checkpoint at the headline target, or at another one. Returns whether there is one.

    ``evaluate.py`` names a video by the checkpoint's digest, its mode and the target.
    """
    videos = [video for place in places for video in sorted(place.glob(f"*{run.digest}-*.mp4"))]
    headline = f"-window-target-{target_text(results[0].headline if results else run.task.headline)}.mp4"
    videos.sort(key=lambda video: not video.name.endswith(headline))
    if videos:
        shutil.copyfile(videos[0], folder / VIDEO)
    return bool(videos)


def _public(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint without the folders of this machine in its settings. They are not needed to use it."""
    config: dict[str, Any] = dict(checkpoint.config)
    origin = config["model"].get("init_from")
    config["model"] = {**config["model"], "init_from": None if origin is None else _public_name(origin)}
    config["dataset"] = _public_dataset(config["dataset"])
    config["run"] = {**config["run"], "out": "runs", "resume": None}
    own = checkpoint.task
    task = replace(own, dataset=_public_dataset(own.dataset), notes=tuple(map(_public_text, own.notes)))
    return replace(checkpoint, config=config, task=task)


def _public_result(result: PolicyResult) -> PolicyResult:
    notes = tuple(map(_public_text, result.notes))
    return replace(result, notes=notes, provenance=_public_provenance(result.provenance))


def _public_provenance(values: Mapping[str, Any]) -> dict[str, Any]:
    command = [_public_word(str(word)) for word in values.get("command") or ()]
    return {"command": command, "commit": values.get("commit"), "versions": values.get("versions")}


def _public_word(word: str) -> str:
    """A word of a command, which may be ``--flag=value``."""
    flag, equals, value = word.partition("=") if word.startswith("-") else ("", "", word)
    return f"{flag}{equals}{_public_dataset(value)}"


def _public_text(text: str) -> str:
    return " ".join(map(_public_name, text.split(" ")))


def _public_dataset(dataset: str) -> str:
    """Names of data sets, with paths shortened to their last part."""
    return join_names(map(_public_name, split_names(dataset)))


def _public_name(name: str) -> str:
    """A name, or the last part of a path that is not in the working folder."""
    is_path = os.path.isabs(name) or name.startswith((".", "~")) or name.endswith((".hdf5", ".h5", ".py"))
    return (Path(name).name if is_path else "") or name
