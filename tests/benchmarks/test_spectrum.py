"""The benchmark of spectra: its summaries, and the two kinds of runs that it reads."""

import json
from pathlib import Path

import pytest
import torch

import train
from benchmarks.spectrum import Config, explained_at, main, names_of, numbers, spectra_of
from benchmarks.uea import data
from benchmarks.uea import run as uea
from primal_dt.attention import Spectrum
from tests.conftest import ON_ONE_CORE, SMALL, run_program, small_data


def test_summaries_are_means_over_sequence_lengths() -> None:
    """One head, and two sequences of four and two tokens."""
    singular = torch.tensor([[[3.0, 1.0, 1.0, 1.0]], [[2.0, 2.0, 0.0, 0.0]]])  # (B, 1, L)
    variance = singular.square().cumsum(-1) / singular.square().sum(-1, keepdim=True)
    spectrum = Spectrum(singular, variance, torch.full((2, 1), 2.0), torch.tensor([4, 2]))
    assert explained_at(spectrum, 50) == pytest.approx(100 * (10 / 12 + 1 / 2) / 2)  # two of four, one of two
    assert explained_at(spectrum, 25) == pytest.approx(100 * (9 / 12 + 1 / 2) / 2)
    assert explained_at(spectrum, 100) == pytest.approx(100)
    relative_rank = 100 * (2 / 4 + 2 / 2) / 2
    assert numbers(spectrum, 0.9) == pytest.approx((100 * (3 / 4 + 2 / 2) / 2, relative_rank, 2.0))  # 11 / 12 > 0.9
    assert numbers(spectrum, 0.7) == pytest.approx((100 * (1 / 4 + 2 / 2) / 2, relative_rank, 2.0))


def test_decision_transformers_are_analyzed(own_folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = [*SMALL, *ON_ONE_CORE, "--dataset", small_data(own_folders / "hopper.hdf5"), "--eval-every-steps", "0"]
    assert run_program(train, monkeypatch, *flags, "--num-heads", "4", "--steps", "10") == 0
    (folder,) = (own_folders / "runs").iterdir()
    main(Config(runs=(folder,), sequences=5, out=own_folders / "out"))
    layers = json.loads((own_folders / "out" / "spectrum.json").read_text())["runs"][folder.name]
    assert list(layers) == ["layer 1", "layer 2"]
    assert (own_folders / "out" / "spectrum.png").stat().st_size > 1000
    found = spectra_of(folder, 5)
    assert found["layer 2"].num_tokens.tolist() == [12] * 5  # windows of four steps
    # softmax attention has full rank; the kernel of four features per head has at most four singular values
    assert bool((found["layer 1"].singular_values[..., -1] > 1e-3).all())
    assert bool((found["layer 2"].singular_values[..., 4:] < 1e-5).all())
    assert max(layers["layer 2"][:2]) <= 100 * 4 / 12


@pytest.mark.slow
def test_time_series_encoders_are_analyzed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("aeon")
    every = {split: data.read_split("JapaneseVowels", None, split) for split in ("train", "test")}
    few = {split: data.Series(series.values[::18], series.labels[::18]) for split, series in every.items()}
    monkeypatch.setattr(data, "read_split", lambda dataset, folder, split: few[split])
    folders = []
    for schedule in ("cosine", "constant"):
        config = uea.Config(
            epochs=1, attention=("primal-plus",), seeds=(0,), network="ours", schedule=schedule, out=tmp_path
        )
        uea.main(config)
        folders.append(config.run_folder("primal-plus", 0))
    main(Config(runs=(*folders, tmp_path), sequences=3, out=tmp_path / "out"))
    assert f"{tmp_path} is skipped" in capsys.readouterr().err
    content = json.loads((tmp_path / "out" / "spectrum.json").read_text())["runs"]
    assert list(content) == [folder.name for folder in folders]
    lengths = [series.shape[1] for series in few["test"].values[:3]]
    assert spectra_of(folders[0], 3)["layer 2"].num_tokens.tolist() == lengths


def test_equal_run_names_are_replaced_by_paths() -> None:
    assert names_of([Path("a/run"), Path("a/other")]) == ["run", "other"]
    assert names_of([Path("a/run"), Path("b/run")]) == ["a/run", "b/run"]


def test_at_least_one_run_is_required(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give at least one run folder"):
        Config(runs=())
    with pytest.raises(ValueError, match=rf"{tmp_path} is not a run"):
        main(Config(runs=(tmp_path,), out=tmp_path))
    with pytest.raises(ValueError, match="none of these is a run"):
        main(Config(runs=(tmp_path, tmp_path / "other"), out=tmp_path))
