"""The UEA benchmark: what it reads, trains and reports."""

import json
import math
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import trainer
from benchmarks.batches import Sequences
from benchmarks.published_encoder import build_encoder
from benchmarks.runs import RESULT, SavedRun, saved_run
from benchmarks.settings import Primal
from benchmarks.step import ONE_PROCESS, Losses, update
from benchmarks.uea import run as uea
from benchmarks.uea.data import load
from benchmarks.uea.run import CLIP, Config, findings, load_encoder, main, table
from primal_dt.attention import PrimalAttention
from primal_dt.attention.feature_maps import ExponentialMap
from primal_dt.training.metrics_log import read_metrics

pytest.importorskip("aeon")
CPU = torch.device("cpu")
HEADER = """@problemName Toy
@timeStamps false
@missing false
@univariate false
@dimension 2
@equalLength false
@classLabel true a b
@data
"""


def write(folder: Path, split: str, number: int, seed: int) -> list[np.ndarray]:
    """Write series of two channels and several lengths. Rising series have class a, falling ones class b."""
    random = np.random.default_rng(seed)
    lines, series = [], []
    for row in range(number):
        length, (slope, label) = random.integers(5, 12), [(1, "a"), (-1, "b")][row % 2]
        series.append([[slope], [0]] * np.arange(length) + random.normal([[0], [7]], [[1], [3]], (2, length)))
        lines.append(":".join([*(",".join(map(str, channel)) for channel in series[-1]), label]))
    (folder / f"Toy_{split}.ts").write_text(HEADER + "\n".join(lines) + "\n")
    return series


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    write(folder, "TRAIN", 40, 0)
    write(folder, "TEST", 30, 1)
    return folder


def check_standardized(split: Sequences) -> None:
    steps = torch.cat(list(split.tokens))
    torch.testing.assert_close(steps.mean(0), torch.zeros(2), atol=1e-5, rtol=0)
    torch.testing.assert_close(steps.std(0, correction=0), torch.ones(2), atol=1e-4, rtol=0)


def test_series_are_standardized_with_the_training_split(tmp_path: Path) -> None:
    every = np.concatenate(write(tmp_path, "TRAIN", 40, 0), axis=1)
    written = write(tmp_path, "TEST", 30, 1)
    training, test = load("Toy", tmp_path)
    check_standardized(training)
    np.testing.assert_allclose(test.tokens[3], (written[3].T - every.mean(1)) / every.std(1), atol=1e-4)
    assert training.labels.tolist() == [0, 1] * 20
    batch = test.batch([0, 3], CPU)
    assert batch.valid is not None
    assert batch.valid.sum(1).tolist() == [len(test.tokens[0]), len(test.tokens[3])]
    assert [len(part.labels) for part in test.batches(8, CPU)] == [8, 8, 8, 6]


@pytest.mark.slow
def test_japanese_vowels_come_with_aeon() -> None:
    training, test = load("JapaneseVowels", None)
    assert (len(training.tokens), len(test.tokens)) == (270, 370)
    assert training.tokens[0].shape[1] == 12
    assert {len(series) for series in (*training.tokens, *test.tokens)} <= set(range(7, 30))
    assert int(training.labels.max()) == 8


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dataset": "Handwriting"}, "Handwriting does not come with aeon: give --folder"),
        ({"dataset": "Other", "folder": Path()}, r"Other_TRAIN\.ts is missing"),
        ({"attention": ("magic",)}, "attention must be among softmax"),
        ({"attention": ("softmax", "softmax")}, "attention must have at least one entry and no duplicates"),
        ({"seeds": ()}, "seeds must have at least one entry"),
        ({"eta": -1.0}, r"eta \(-1\.0\) must be finite and at least 0"),
        ({"eta": math.nan}, r"eta \(nan\) must be finite and at least 0"),
        ({"test_every_epochs": -1}, r"test_every_epochs \(-1\) must be at least 0"),
        ({"lr": math.nan}, r"lr \(nan\) must be finite and above 0"),
        ({"device": "nonsense"}, "the device 'nonsense' cannot be used"),
    ],
)
def test_invalid_settings_are_rejected(own_folders: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        main(Config(**settings))


def test_settings_default_to_the_papers() -> None:
    config = Config(dataset="JapaneseVowels", eta=0.0)
    assert config.primal("primal-plus") == Primal(30, 0.0, 5)
    assert config.primal("primalformer") == Primal(40, 0.0, 5)
    assert config.run_folder("primal-plus", 0) != Config(dataset="JapaneseVowels").run_folder("primal-plus", 0)
    assert Config(dataset="Toy", rank=7).primal("primal-plus") == Primal(7, 0.1, 10)
    epochs = [config.num_epochs for config in (Config(dataset="PEMS-SF"), Config(), Config(epochs=3))]
    assert epochs == [400, 100, 3]


def test_flags_reach_the_primal_layers() -> None:
    flags = Config(data_dependent=False, feature_map="exponential", scores="e", primal_init="orthonormal")
    splits = (Sequences([torch.zeros(5, 2)], torch.tensor([0])), Sequences([torch.zeros(7, 2)], torch.tensor([1])))
    encoder = build_encoder(torch.nn.Linear(2, 512), flags.shape("primal-plus", splits))
    (layer,) = (module for module in encoder.modules() if isinstance(module, PrimalAttention))
    assert (layer.data_dependent, layer.scores, layer.init) == (False, "e", "orthonormal")
    assert isinstance(layer.feature_map, ExponentialMap)
    assert flags.run_folder("primal-plus", 0) != Config().run_folder("primal-plus", 0)
    assert flags.run_folder("softmax", 0) == Config().run_folder("softmax", 0)


def test_the_published_run_is_the_published_one() -> None:
    """Sizes, dropout and length of the network, and the data set's optimizer."""
    splits = (Sequences([torch.zeros(5, 2)], torch.tensor([0])), Sequences([torch.zeros(7, 2)], torch.tensor([1])))
    published, ours = (Config(network=name).shape("softmax", splits) for name in ("published", "ours"))
    assert (published.network, published.width, published.mlp_width, published.max_length) == ("uea", 512, 2048, 5)
    assert (published.num_layers, published.num_heads, published.dropout) == (2, 8, 0.1)
    assert published.options["softmax"] == {"attention_dropout": 0.1}
    assert (ours.network, ours.mlp_width, ours.max_length) == ("ours", 512, 7)
    assert (Config().network, Config().batch_size, Config().lr, CLIP) == ("published", 16, 1e-3, 4.0)
    optimizers = [Config(dataset=name).published.optimizer for name in ("JapaneseVowels", "SpokenArabicDigits")]
    assert optimizers == ["radam", "adam"]


def test_runs_of_an_earlier_version_are_not_reused(tmp_path: Path) -> None:
    (tmp_path / RESULT).write_text('{"facts": {}, "scores": {"test": 1.0}}')
    assert saved_run(tmp_path, Config().settings("softmax", 0)) is None
    with pytest.raises(ValueError, match="is from an earlier version: train it again"):
        load_encoder(tmp_path, 1)


def train(config: Config, attention: str, folder: Path) -> SavedRun:
    return uea.train(config, attention, 0, load("Toy", folder), ONE_PROCESS)


Trained = tuple[Config, str, Path, float]


@pytest.fixture(scope="module", params=["softmax", "primal-plus"])
def trained(request: pytest.FixtureRequest, toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A finished run: its settings, attention stack, folder and test accuracy."""
    config = Config(dataset="Toy", folder=toy, epochs=4, rank=8, rank_multi=1, out=tmp_path_factory.mktemp("out"))
    run = train(config, request.param, toy)
    return config, request.param, config.run_folder(request.param, 0), run.scores["test"]


@pytest.mark.slow
def test_training_learns_and_is_reproducible(trained: Trained, toy: Path) -> None:
    config, attention, folder, score = trained
    assert score > 90
    assert train(config, attention, toy).scores == {"test": score}
    assert len(list(folder.glob("events.out.tfevents.*"))) == 1  # the second run replaced the curves of the first
    lines = read_metrics(folder)
    assert [line["step"] for line in lines] == [3, 6, 9, 12, 12]  # 40 series in batches of 16 are 3 updates an epoch
    assert lines[-1]["test/accuracy"] == score
    assert lines[-2]["train/accuracy"] > lines[0]["train/accuracy"]


@pytest.mark.slow
def test_tests_on_the_way_change_nothing(trained: Trained, toy: Path, tmp_path: Path) -> None:
    """The result and the weights are the same. The best test is shown beside the result."""
    config, attention, folder, score = trained
    tested = replace(config, test_every_epochs=1, out=tmp_path, seeds=(0,))
    run = train(tested, attention, toy)
    curve = [line["test/accuracy"] for line in read_metrics(tested.run_folder(attention, 0)) if "test/accuracy" in line]
    assert len(curve) == 5
    assert run.scores == {"test": score, "best_test": max(curve)}
    weights, same = (torch.load(path / "weights.pt") for path in (folder, tested.run_folder(attention, 0)))
    assert all(torch.equal(value, same[name]) for name, value in weights.items())
    assert f"{max(curve):.1f}" in table(tested, {attention: [run]})


@pytest.mark.slow
def test_saved_encoder_has_the_reported_accuracy(trained: Trained) -> None:
    *_, folder, score = trained
    encoder, batch = load_encoder(folder, 30)
    correct = (encoder(batch.x, batch.valid).logits.argmax(-1) == batch.labels).float().mean()
    assert 100 * float(correct) == pytest.approx(score)


@pytest.mark.slow
def test_saved_scores_are_used_for_equal_settings_only(trained: Trained) -> None:
    config, attention, folder, score = trained
    saved = saved_run(folder, config.settings(attention, 0))
    assert saved is not None
    assert saved.scores == {"test": score}
    assert saved_run(folder, config.settings(attention, 1)) is None
    others: list[dict[str, Any]] = [{"lr": 2e-3}, {"folder": folder}, {"schedule": "cosine"}, {"network": "ours"}]
    for other in others:
        assert saved_run(folder, replace(config, **other).settings(attention, 0)) is None


@pytest.mark.slow
@pytest.mark.parametrize("last_loss", [50.0, math.nan])
def test_recover_returns_to_the_best_epoch(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], last_loss: float
) -> None:
    weights: list[dict[str, torch.Tensor]] = []  # after each update

    def diverge_in_epoch_3(model: Any, *arguments: Any, **options: Any) -> Losses:
        losses = update(model, *arguments, **options)
        weights.append(deepcopy(model.state_dict()))
        if len(weights) <= 6:
            return losses
        torch.nn.init.constant_(model.positions, math.nan)
        return losses._replace(total=torch.tensor(last_loss))

    monkeypatch.setattr(trainer, "update", diverge_in_epoch_3)
    config = Config(dataset="Toy", folder=toy, epochs=3, recover=True, out=tmp_path)
    run = train(config, "softmax", toy)
    saved, _ = load_encoder(config.run_folder("softmax", 0), 1)
    assert all(torch.equal(value, weights[5][name]) for name, value in saved.state_dict().items())
    assert "in epoch 2" in capsys.readouterr().out
    assert run.epoch == 2
    assert "*" in table(replace(config, seeds=(0,)), {"softmax": [run]})  # the table says so


@pytest.mark.slow
def test_finished_training_is_not_repeated(toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes: dict[str, Any] = {"epochs": 1, "rank": 8, "rank_multi": 1, "network": "ours"}
    config = Config(("primal-plus",), (0,), dataset="Toy", folder=toy, **sizes, out=tmp_path)
    main(config)
    weights = config.run_folder("primal-plus", 0) / "weights.pt"
    stamp = weights.stat().st_mtime_ns
    main(replace(config, seeds=(0, 1)))
    assert weights.stat().st_mtime_ns == stamp
    assert f"(from {weights.parent}; --again to retrain)" in capsys.readouterr().out
    assert [entry["seed"] for entry in json.loads((tmp_path / "Toy.json").read_text())] == [0, 1]
    main(replace(config, again=True))
    assert weights.stat().st_mtime_ns > stamp


def test_unknown_test_classes_are_rejected(tmp_path: Path) -> None:
    write(tmp_path, "TRAIN", 4, 0)
    (tmp_path / "Toy_TEST.ts").write_text(HEADER.replace("true a b", "true a b c") + "1.0,2.0:3.0,4.0:c\n")
    with pytest.raises(ValueError, match="has classes that the training split lacks"):
        load("Toy", tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is not in the archive's format|has 0 series"),
        ("nonsense\n", "is not in the archive's format|has 0 series"),
        (HEADER.replace("@missing false", "@missing true") + "1.0,?,2.0:3.0,4.0,5.0:a\n", "has missing values in 1"),
        (HEADER.replace("true a b", "false") + "1.0,2.0:3.0,4.0\n", "not in the archive's|class labels"),
    ],
)
def test_unusable_files_are_rejected(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "Toy_TRAIN.ts").write_text(content)
    with pytest.raises(ValueError, match=rf"(?s){tmp_path}.*({message})"):
        load("Toy", tmp_path)


def test_table_has_the_paper_beside_ours() -> None:
    config = Config(dataset="JapaneseVowels", attention=("softmax", "primal-plus"), seeds=(0, 1))
    scores = {"softmax": [98.0, 99.0], "primal-plus": [97.0, 97.0]}
    runs = {name: [SavedRun({"test": score}, None, 1000) for score in seen] for name, seen in scores.items()}
    text = table(config, runs)
    assert "| softmax        |       98.5 ± 0.7 | 98.0 to 99.0 |  98.7 |      1,000 |" in text
    assert "rank 30, eta 0.2, rank_multi 5" in text
    assert list(findings(config, runs)) == ["* [MISSED] primal-plus: 97.0 % (bar: at least 98.0 %)"]
    assert list(findings(Config(dataset="Other", seeds=(0, 1)), runs)) == []
