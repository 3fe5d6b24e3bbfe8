"""A run -> a folder to share: the policy, its model card, the plots of its reports, and a video."""

import os
import shutil
from collections.abc import Sequence
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
from primal_dt.training.run_folder import read_record

__all__ = ["save_shared"]


def save_shared(
    path: Path, folder: Path, *, reports: Sequence[Path] = (), source: str = PLACEHOLDER, weights_license: str = "mit"
) -> None:
    """Write a folder to share.

    Args:
        path: a run folder, whose last checkpoint is shared, or a checkpoint file.
        folder: the folder to write. It must be empty or missing.
        reports: folders of reports about this run. If empty: the report that the training wrote, if there is one.
        source: what the card tells readers to pass to ``load_policy``.
        weights_license: the license of the weights, as the hub names it.

    Raises:
        ValueError: if the run has no readable checkpoint, a report is not about it, or the folder has other files.
    """
    run = open_run(path)
    own_report = None if run.folder is None else run.folder / "report"
    folders = list(reports)
    if not folders and own_report is not None and (own_report / "report.json").exists():
        folders = [own_report]
    results = [result for each in folders for result in read_results(each, run)]
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty: give another --out")
    checkpoint = _public(load_checkpoint(run.path))
    provenance = _provenance(run)
    save_policy(folder, checkpoint, provenance=provenance)
    videos = [*folders, *([own_report] if own_report else []), *([run.folder] if run.folder else [])]
    card = Card(
        source=source,
        license=weights_license,
        checkpoint=checkpoint,
        results=[replace(result, provenance=_public_provenance(result.provenance)) for result in results],
        provenance=provenance,
        plots=_copy_plots(folders, folder),
        has_video=_copy_video(run, results, videos, folder),
    )
    with atomic_write(folder / CARD) as file:
        file.write(write_card(card).encode())


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
    config["dataset"] = _public_dataset(config["dataset"])
    config["run"] = {**config["run"], "out": "runs", "resume": None}
    task = replace(checkpoint.task, dataset=_public_dataset(checkpoint.task.dataset))
    return replace(checkpoint, config=config, task=task)


def _provenance(run: TrainedRun) -> dict[str, Any] | None:
    """The provenance of a run's training; None for a checkpoint outside a run folder."""
    return None if run.folder is None else _public_provenance(read_record(run.folder).provenance)


def _public_provenance(values: Any) -> dict[str, Any]:
    command = [_public_dataset(str(word)) for word in values.get("command") or ()]
    return {"command": command, "commit": values.get("commit"), "versions": values.get("versions")}


def _public_dataset(dataset: str) -> str:
    """Names of data sets, with paths shortened to their last part."""
    return join_names(map(_public_name, split_names(dataset)))


def _public_name(name: str) -> str:
    is_path = os.path.isabs(name) or name.startswith((".", "~")) or name.endswith((".hdf5", ".h5", ".py"))
    return Path(name).name if is_path else name
