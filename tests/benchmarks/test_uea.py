"""The UEA benchmark: what it reads, what it trains, what it says."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.classify import Losses, kept_scores, update
from benchmarks.encoder import Encoder
from benchmarks.uea import run as uea
from benchmarks.uea import schedule as uea_schedule
from benchmarks.uea.run import Config, Penalized, findings, load, load_encoder, main, read_split, table, train
from primal_dt.training.metrics_log import read_metrics

pytest.importorskip("aeon")
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
    """Series of two channels and several lengths: rising ones are of class a, falling ones of class b."""
    random = np.random.default_rng(seed)
    lines, series = [], []
    for row in range(number):
        length, slope = random.integers(5, 12), 1 if row % 2 == 0 else -1
        values = np.stack([slope * np.arange(length) + random.normal(size=length), 7 + 3 * random.normal(size=length)])
        series.append(values)
        channels = (",".join(f"{value:.6f}" for value in channel) for channel in values)
        lines.append(":".join(channels) + (":a" if slope > 0 else ":b"))
    (folder / f"Toy_{split}.ts").write_text(HEADER + "\n".join(lines) + "\n")
    return series


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    write(tmp_path, "TRAIN", 40, 0)
    write(tmp_path, "TEST", 30, 1)
    return tmp_path


def test_series_keep_their_lengths_and_are_standardized_with_the_training_split(tmp_path: Path) -> None:
    written = write(tmp_path, "TRAIN", 40, 0)
    test_written = write(tmp_path, "TEST", 30, 1)
    training, test = load("Toy", tmp_path)
    every = np.concatenate(written, axis=1)
    expected = (test_written[3].T - every.mean(1)) / every.std(1)
    np.testing.assert_allclose(test.tokens[3].numpy(), expected, atol=1e-4)
    together = torch.cat(list(training.tokens))
    torch.testing.assert_close(together.mean(0), torch.zeros(2), atol=1e-5, rtol=0)
    torch.testing.assert_close(together.std(0, correction=0), torch.ones(2), atol=1e-4, rtol=0)
    assert training.labels.tolist() == [0, 1] * 20
    batch = test.batch([0, 3], torch.device("cpu"))
    assert batch.valid is not None
    assert batch.valid.sum(1).tolist() == [len(test.tokens[0]), len(test.tokens[3])]
    assert [len(part.labels) for part in test.batches(8, torch.device("cpu"))] == [8, 8, 8, 6]


def test_japanese_vowels_come_with_aeon() -> None:
    training, test = load("JapaneseVowels", None)
    assert (len(training.tokens), len(test.tokens)) == (270, 370)
    assert training.tokens[0].shape[1] == 12
    assert {len(series) for series in (*training.tokens, *test.tokens)} <= set(range(7, 30))
    assert int(training.labels.max()) == 8


def test_what_is_missing_is_told(toy: Path) -> None:
    with pytest.raises(ValueError, match="Handwriting does not come with aeon: give --folder"):
        load("Handwriting", None)
    with pytest.raises(ValueError, match=r"there is no .*Other_TRAIN\.ts"):
        load("Other", toy)
    with pytest.raises(ValueError, match="attention can be softmax"):
        Config(attention=("magic",))
    with pytest.raises(ValueError, match="attention must name at least one, and each once"):
        Config(attention=("softmax", "softmax"))
    with pytest.raises(ValueError, match="seeds must name at least one"):
        Config(seeds=())
    with pytest.raises(ValueError, match="eta"):
        Config(eta=-1.0)
    with pytest.raises(ValueError, match="--device nonsense cannot be used"):
        main(Config(device="nonsense", out=toy / "out"))


def test_settings_are_the_papers_unless_given_and_keep_their_folders_apart() -> None:
    config = Config(dataset="JapaneseVowels", eta=0.0)
    assert config.penalized("primal-plus") == Penalized(30, 0.0, 5)
    assert config.penalized("primalformer") == Penalized(40, 0.0, 5)
    assert config.run_folder("primal-plus", 0) != Config(dataset="JapaneseVowels").run_folder("primal-plus", 0)
    assert Config(dataset="Toy", rank=7).penalized("primal-plus") == Penalized(7, 0.1, 10)
    assert (Config(dataset="PEMS-SF").num_epochs(), Config().num_epochs(), Config(epochs=3).num_epochs()) == (
        400,
        100,
        3,
    )


@pytest.mark.parametrize("attention", ["softmax", "primal-plus"])
def test_a_toy_is_learned_and_what_is_saved_says_the_same(toy: Path, attention: str) -> None:
    config = Config(dataset="Toy", folder=toy, epochs=8, rank=8, rank_multi=1, out=toy / "out")
    splits = load("Toy", toy)
    score = train(config, attention, 0, splits)
    assert score > 90
    assert train(config, attention, 0, splits) == score
    folder = config.run_folder(attention, 0)
    encoder, batch = load_encoder(folder, 30)
    correct = (encoder(batch.x, batch.valid).logits.argmax(-1) == batch.labels).float().mean()
    assert 100 * float(correct) == pytest.approx(score)
    assert len(list(folder.glob("events.out.tfevents.*"))) == 1  # the second training did not add to the first's curves
    lines = read_metrics(folder)
    assert [line["step"] for line in lines] == [*range(1, 9), 8]
    assert lines[-1]["test/accuracy"] == score
    assert lines[-2]["train/accuracy"] > lines[0]["train/accuracy"]
    assert kept_scores(folder, config.facts(attention, 0)) == {"test": score}
    for other in (replace(config, lr=2e-3), replace(config, folder=toy.parent), replace(config, schedule="cosine")):
        assert kept_scores(folder, other.facts(attention, 0)) is None
    assert kept_scores(folder, config.facts(attention, 1)) is None


@pytest.mark.parametrize("last_loss", [50.0, math.nan])
def test_a_training_that_came_apart_goes_back_to_its_best_epoch(
    toy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], last_loss: float
) -> None:
    config = Config(dataset="Toy", folder=toy, epochs=3, out=toy / "out")
    calls = 0
    good: dict[str, torch.Tensor] = {}

    def apart_in_the_last_epoch(model: Encoder, *arguments: Any, **options: Any) -> Losses:
        nonlocal calls
        calls += 1
        losses = update(model, *arguments, **options)
        if calls == 6:  # 40 series in batches of 16 are 3 an epoch
            good.update({name: value.clone() for name, value in model.state_dict().items()})
        if calls <= 6:
            return losses
        with torch.no_grad():
            model.head.weight.fill_(torch.nan)
        return losses._replace(total=torch.tensor(last_loss))

    monkeypatch.setattr(uea, "update", apart_in_the_last_epoch)
    train(config, "softmax", 0, load("Toy", toy))
    kept, _ = load_encoder(config.run_folder("softmax", 0), 1)
    assert all(torch.equal(value, good[name]) for name, value in kept.state_dict().items())
    assert "in epoch 2" in capsys.readouterr().out


def test_what_was_trained_is_not_trained_again(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = Config(
        dataset="Toy", folder=toy, epochs=1, rank=8, rank_multi=1, attention=("primal-plus",), out=toy / "out"
    )
    main(replace(config, seeds=(0,)))
    weights = config.run_folder("primal-plus", 0) / "weights.pt"
    stamp = weights.stat().st_mtime_ns
    main(replace(config, seeds=(0, 1)))
    assert weights.stat().st_mtime_ns == stamp
    printed = capsys.readouterr().out
    assert f"(from {weights.parent}; --again to train anew)" in printed
    assert [entry["seed"] for entry in json.loads((toy / "out" / "Toy.json").read_text())] == [0, 1]
    main(replace(config, seeds=(0,), again=True))
    assert weights.stat().st_mtime_ns > stamp


def test_labels_that_no_one_has_seen_are_told(toy: Path) -> None:
    path = toy / "Toy_TEST.ts"
    path.write_text(path.read_text().replace("true a b", "true a b c").replace(":b\n", ":c\n", 1))
    with pytest.raises(ValueError, match="has classes that the training split has not"):
        load("Toy", toy)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is not in the archive's format|has 0 series"),
        ("nonsense\n", "is not in the archive's format|has 0 series"),
        (HEADER.replace("@missing false", "@missing true") + "1.0,?,2.0:3.0,4.0,5.0:a\n", "has missing values, in 1"),
        (
            HEADER.replace("@classLabel true a b", "@classLabel false") + "1.0,2.0:3.0,4.0\n",
            "not in the archive's|classes",
        ),
    ],
)
def test_files_that_cannot_be_used_are_told(toy: Path, content: str, message: str) -> None:
    (toy / "Toy_TRAIN.ts").write_text(content)
    with pytest.raises(ValueError, match=rf"(?s){toy}.*({message})"):
        load("Toy", toy)


def test_the_table_has_the_paper_beside_ours() -> None:
    config = Config(dataset="JapaneseVowels", attention=("softmax", "primal-plus"), seeds=(0, 1))
    scores = {"softmax": [98.0, 99.0], "primal-plus": [97.0, 97.0]}
    text = table(config, scores)
    assert "| softmax        |       98.5 ± 0.7 | 98.0 to 99.0 |  98.7 |" in text
    assert "rank 30, eta 0.2, rank_multi 5" in text
    assert list(findings(config, scores)) == ["* [MISSED] primal-plus: 97.0 % (bar: at least 98.0 %)"]
    assert list(findings(Config(dataset="Other"), scores)) == []


def test_folds_are_a_partition_with_their_share_of_each_class() -> None:
    labels = ["a"] * 7 + ["b"] * 11 + ["c"] * 2
    folds = uea_schedule.deal(labels, 3, seed=0)
    assert sorted(row for fold in folds for row in fold) == list(range(20))
    for name in "abc":
        counts = [sum(labels[row] == name for row in fold) for fold in folds]
        assert max(counts) - min(counts) <= 1
    assert uea_schedule.deal(labels, 3, seed=0) == folds != uea_schedule.deal(labels, 3, seed=1)


def test_a_fold_that_is_held_out_has_no_part_in_the_scale(toy: Path) -> None:
    training = read_split("Toy", toy, "train")
    training.values[5][:] += 1e6
    others, held = uea_schedule.hold_out(training, [5, 8])
    together = torch.cat(list(others.tokens))
    assert (len(others.tokens), len(held.tokens)) == (38, 2)
    torch.testing.assert_close(together.mean(0), torch.zeros(2), atol=1e-5, rtol=0)
    torch.testing.assert_close(together.std(0, correction=0), torch.ones(2), atol=1e-4, rtol=0)
    assert float(held.tokens[0].min()) > 1e4
    assert held.labels.tolist() == [1, 0]


def test_a_schedule_is_chosen_by_all_stacks_and_a_draw_goes_to_the_papers() -> None:
    scores: uea_schedule.Scores = {("softmax", "constant"): [90.0, 92.0], ("softmax", "cosine"): [80.0, 80.0]}
    scores |= {("primal-plus", "constant"): [50.0, 50.0], ("primal-plus", "cosine"): [61.0, 61.0]}
    assert uea_schedule.choice(scores) == "constant"  # 70.5 both
    scores["primal-plus", "cosine"] = [61.0, 61.1]
    assert uea_schedule.choice(scores) == "cosine"
    assert "| mean of all      |      70.50 |      70.53 |" in uea_schedule.table(
        uea_schedule.Search(dataset="Toy", attention=("softmax", "primal-plus")), scores
    )


def test_schedules_are_compared_without_the_test_split(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (toy / "Toy_TEST.ts").unlink()
    search = uea_schedule.Search(
        dataset="Toy", folder=toy, attention=("softmax",), seeds=(3,), folds=2, epochs=3, out=toy / "out"
    )
    uea_schedule.main(search)
    printed = capsys.readouterr().out
    losses = {}
    for schedule in ("constant", "cosine"):
        lines = read_metrics(toy / "out" / f"Toy__softmax__{schedule}__fold1of2__s3")
        losses[schedule] = [line["train/loss"] for line in lines if "train/loss" in line]
        assert f"softmax, {schedule}, seed 3, fold 1 of 2: {lines[-1]['held-out/accuracy']:.1f} %" in printed
    assert losses["constant"][0] == losses["cosine"][0]  # the rate falls after the first epoch
    assert losses["constant"][1] != losses["cosine"][1]
    saved = json.loads((toy / "out" / "Toy.json").read_text())
    assert [len(entry["scores"]) for entry in saved["held_out_accuracy"]] == [2, 2]
    stamps = {path: path.stat().st_mtime_ns for path in toy.glob("out/*/metrics.jsonl")}
    assert len(stamps) == 4
    uea_schedule.main(search)
    assert capsys.readouterr().out == printed
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps


def test_folds_that_cannot_be_dealt_are_told(toy: Path) -> None:
    with pytest.raises(ValueError, match=r"folds \(1\) must be at least 2"):
        uea_schedule.Search(folds=1)
    with pytest.raises(ValueError, match=r"folds \(41\) must not be more than the 40 training series"):
        uea_schedule.main(uea_schedule.Search(dataset="Toy", folder=toy, folds=41, out=toy / "out"))
