"""The benchmark of spectra: what it reads off layers, and that it finds the runs of both kinds."""

import json
import sys
from pathlib import Path

import pytest
import torch

import train
from benchmarks.spectrum import Config, explained_at, main, names_of, numbers, spectra_of
from benchmarks.uea import run as uea
from primal_dt.attention import Spectrum
from tests.envs.files import d4rl_arrays, write_d4rl


def spectrum(*values: tuple[float, ...]) -> Spectrum:
    """Of one head, a row for each sequence; zeros at the end are padding."""
    singular = torch.tensor(values)[:, None]  # (B, 1, L)
    variance = singular.square().cumsum(-1) / singular.square().sum(-1, keepdim=True)
    return Spectrum(singular, variance, torch.full((len(values), 1), 2.0), (singular[:, 0] > 0).sum(-1))


def test_sequences_are_read_by_the_share_of_their_own_tokens() -> None:
    own = spectrum((3.0, 1.0, 1.0, 1.0), (2.0, 2.0, 0.0, 0.0))
    assert explained_at(own, 50) == pytest.approx(100 * (10 / 12 + 1 / 2) / 2)  # two of four, one of two
    assert explained_at(own, 25) == pytest.approx(100 * (9 / 12 + 1 / 2) / 2)
    assert explained_at(own, 100) == pytest.approx(100)
    share, relative, rank = numbers(own, 0.9)
    assert share == pytest.approx(100 * (3 / 4 + 2 / 2) / 2)  # (9 + 1 + 1) / 12 is above 0.9
    assert numbers(own, 0.7)[0] == pytest.approx(100 * (1 / 4 + 2 / 2) / 2)
    assert relative == pytest.approx(100 * (2 / 4 + 2 / 2) / 2)
    assert rank == 2.0


def test_the_runs_of_a_decision_transformer_are_found_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRIMAL_DT_CACHE", str(tmp_path / "cache"))
    data = str(write_d4rl(tmp_path / "hopper.hdf5", d4rl_arrays((30,) * 20), env_id="Hopper-v5"))
    small = "--width 16 --num-heads 4 --context 4 --rank 4 --num-layers 2 --batch-size 8 --warmup-steps 0 --steps 2"
    rest = "--eval-every-steps 0 --spectrum-every-steps 0 --threads 1 --device cpu --log-every-steps 2"
    flags = ["--dataset", data, "--out", str(tmp_path / "runs"), *small.split(), *rest.split()]
    monkeypatch.setattr(sys, "argv", ["train.py", *flags])
    assert train.main() == 0
    (folder,) = (tmp_path / "runs").iterdir()
    main(Config(runs=(folder,), sequences=5, out=tmp_path / "out"))
    content = json.loads((tmp_path / "out" / "spectrum.json").read_text())
    assert list(content["runs"][folder.name]) == ["layer 1", "layer 2"]
    assert (tmp_path / "out" / "spectrum.png").stat().st_size > 1000
    found = spectra_of(folder, 5)
    assert found["layer 2"].num_tokens.tolist() == [12] * 5  # windows of four steps
    # softmax attention has full rank; the kernel of four features per head has at most four singular values
    assert bool((found["layer 1"].singular_values[..., -1] > 1e-3).all())
    assert bool((found["layer 2"].singular_values[..., 4:] < 1e-5).all())
    assert max(content["runs"][folder.name]["layer 2"][:2]) <= 100 * 4 / 12


def test_encoders_of_time_series_are_found_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("aeon")
    folders = []
    for schedule in ("cosine", "constant"):
        config = uea.Config(epochs=1, attention=("primal-plus",), seeds=(0,), schedule=schedule, out=tmp_path)
        uea.main(config)
        folders.append(config.run_folder("primal-plus", 0))
    main(Config(runs=(*folders, tmp_path), sequences=3, out=tmp_path / "out"))
    assert f"{tmp_path} is left out" in capsys.readouterr().err
    content = json.loads((tmp_path / "out" / "spectrum.json").read_text())["runs"]
    assert list(content) == [folder.name for folder in folders]
    _, test = uea.load("JapaneseVowels", None)
    assert spectra_of(folders[0], 3)["layer 2"].num_tokens.tolist() == [len(own) for own in test.tokens[:3]]


def test_runs_of_one_name_are_told_apart_by_their_paths() -> None:
    assert names_of([Path("a/run"), Path("a/other")]) == ["run", "other"]
    assert names_of([Path("a/run"), Path("b/run")]) == ["a/run", "b/run"]


def test_what_is_no_run_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give at least one folder"):
        Config(runs=())
    with pytest.raises(ValueError, match=rf"{tmp_path} is not a run"):
        main(Config(runs=(tmp_path,), out=tmp_path))
    with pytest.raises(ValueError, match="none of these is a run"):
        main(Config(runs=(tmp_path, tmp_path / "other"), out=tmp_path))
