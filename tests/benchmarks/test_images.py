"""The image benchmark: folders, augmentations, DeiT's network, recipe and training."""

import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks import spectrum
from benchmarks.batches import EpochOrder, LabeledBatch
from benchmarks.images.augment import Augmentation, AugmentationSettings
from benchmarks.images.cost import Step
from benchmarks.images.data import (
    MEAN,
    STD,
    ImageFolder,
    central_view,
    load_splits,
    random_box,
    standardized,
    training_batches,
    training_view,
    whole_batches,
)
from benchmarks.images.model import DropPath, VisionTransformer, build_model
from benchmarks.images.run import Config, load_encoder, main, rate_at, table
from benchmarks.lra.files import load_image
from benchmarks.runs import SavedRun, num_parameters
from benchmarks.step import ONE_PROCESS, top_accuracies
from primal_dt.attention import PrimalAttention
from primal_dt.training.metrics_log import read_metrics

CPU = torch.device("cpu")
PLAIN = AugmentationSettings(operations=0, erasing=0.0, mixup=0.0, cutmix=0.0, smoothing=0.0)
SMALL: dict[str, Any] = {
    "model": "small",
    "image_size": 8,
    "patch": 4,
    "rank": 2,
    "rank_multi": 2,
    "batch_size": 8,
    "lr": 3e-3,
    "epochs": 4,
    "warmup_epochs": 1,
    "seeds": (0,),
    "drop_path": 0.0,
}
UNCHANGED: dict[str, Any] = {"operations": 0, "erasing": 0.0, "mixup": 0.0, "cutmix": 0.0, "smoothing": 0.0}


def write_images(folder: Path, number: int = 8, *, side: int = 8, test: str = "val", suffix: str = ".png") -> Path:
    """Write images of two classes: bright ones of class a, dark ones of class b."""
    random = np.random.default_rng(0)
    for split, count in (("train", number), (test, 4)):
        for name, level in (("a", 200), ("b", 20)):
            (folder / split / name).mkdir(parents=True)
            for image in range(count):
                pixels = (level + random.integers(0, 30, (side, side, 3))).astype(np.uint8)
                Image.fromarray(pixels).save(folder / split / name / f"{image}{suffix}")
    return folder


def published(attention: str = "softmax", num_classes: int = 1000) -> VisionTransformer:
    return build_model(Config(data=Path(), attention=(attention,)).shape(attention, num_classes), patch=16)


def test_deit_small_has_its_published_size() -> None:
    transformers = pytest.importorskip("transformers")
    size = {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6, "intermediate_size": 1536}
    reference = transformers.ViTForImageClassification(transformers.ViTConfig(**size, num_labels=1000))
    assert num_parameters(published()) == num_parameters(reference) == 22_050_664
    assert published().positions.shape == (197, 384)


def test_the_last_layer_of_primal_plus_is_published() -> None:
    names = [name for name, layer in published("primal-plus").named_modules() if isinstance(layer, PrimalAttention)]
    assert names == ["blocks.11.attention"]
    layer = published("primal-plus").get_submodule(names[0])
    assert isinstance(layer, PrimalAttention)
    assert (layer.rank, layer.num_rows, layer.data_dependent, layer.num_heads) == (
        96,
        197,
        True,
        6,
    )  # rank_multi 10 is more rows than tokens


RENAMED = {
    "embeddings.cls_token": "embed.class_token",
    "embeddings.position_embeddings": "positions",
    "embeddings.patch_embeddings.projection": "embed.project",
    "layers.": "blocks.",
    "q_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "o_proj": "output",
    "layernorm_before": "attention_norm",
    "layernorm_after": "mlp_norm",
    "mlp.fc1": "mlp.0",
    "mlp.fc2": "mlp.3",
    "layernorm": "final_norm",
    "classifier": "head",
}


def test_the_network_is_the_vit_of_transformers() -> None:
    """With the same weights, the class scores are the same."""
    transformers = pytest.importorskip("transformers")
    own: dict[str, Any] = {"hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 3, "num_labels": 5}
    config = transformers.ViTConfig(intermediate_size=384, image_size=16, patch_size=8, layer_norm_eps=1e-6, **own)
    reference = transformers.ViTForImageClassification(config).eval()
    model = build_model(Config(data=Path(), model="small", image_size=16, patch=8).shape("softmax", 5), patch=8).eval()
    weights = {}
    for theirs, value in reference.state_dict().items():
        name = theirs.removeprefix("vit.")
        for old, new in RENAMED.items():
            name = name.replace(old, new)
        weights[name] = torch.randn_like(value) / 10
        value.copy_(weights[name])
    weights["positions"] = weights["positions"][0]
    model.load_state_dict(weights)
    x = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(model(x).logits, reference(pixel_values=x).logits, atol=1e-4, rtol=1e-4)


def test_stochastic_depth_keeps_the_mean() -> None:
    model = build_model(Config(data=Path(), **SMALL).shape("softmax", 3), patch=4, drop_path=0.5)
    drops = [module for module in model.modules() if isinstance(module, DropPath)]
    assert [drop.rate for drop in drops] == pytest.approx([0.0, 1 / 6, 1 / 3, 0.5])
    branch = torch.ones(20_000, 1, 1)
    torch.manual_seed(0)
    found = drops[-1](branch)
    assert set(found.unique().tolist()) == {0.0, 2.0}
    assert float(found.mean()) == pytest.approx(1.0, abs=0.03)
    assert drops[-1].eval()(branch) is branch


def test_only_matrices_decay() -> None:
    model = published("primal-plus", 10)
    decayed, others = (group["params"] for group in model.weight_groups(0.05))
    assert [group["weight_decay"] for group in model.weight_groups(0.05)] == [0.05, 0.0]
    names = {id(value): name for name, value in model.named_parameters()}
    kept = {names[id(value)].rpartition(".")[2] for value in others}
    assert kept == {"bias", "positions", "class_token", "lam", "weight"}
    assert all(value.dim() == 1 for value in others if names[id(value)].endswith("weight"))  # of norms
    assert len(decayed) + len(others) == len(names)


def test_the_rate_is_deits() -> None:
    """5e-4 for 512 images, from 1e-6 up to it in 5 epochs, then a cosine down to 1e-5."""
    config = Config(data=Path(), batch_size=1024, epochs=300)
    rates = [config.rate * rate_at(step, config, 10) for step in (0, 25, 50, 50 + 1475, 3000)]
    assert config.rate == pytest.approx(1e-3)
    assert rates == pytest.approx([1e-6, (1e-6 + 1e-3) / 2, 1e-3, (1e-3 + 1e-5) / 2, 1e-5])


@pytest.mark.parametrize("test", ["val", "test"])
def test_folders_are_splits_and_classes(tmp_path: Path, test: str) -> None:
    training, tests = load_splits(write_images(tmp_path, test=test))
    assert training.classes == tests.classes == ["a", "b"]
    assert training.labels.tolist() == [0] * 8 + [1] * 8
    assert [path.parent.name for path in tests.paths] == ["a"] * 4 + ["b"] * 4


def remove(path: Path) -> None:
    for inner in sorted(path.rglob("*"), reverse=True):
        inner.unlink() if inner.is_file() else inner.rmdir()
    path.rmdir()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove, r"is not a folder: images must be in FOLDER/train/CLASS/ and FOLDER/val/CLASS/ \(or test/\)"),
        (lambda folder: remove(folder / "train"), "has no folder train: images must be in"),
        (lambda folder: remove(folder / "val"), "has no folder val: images must be in"),
        (lambda folder: remove(folder / "train" / "a"), "must have a folder for each of at least 2 classes, not 1"),
        (lambda folder: (folder / "val" / "c").mkdir(), "c has no image: files must end in .jpeg, .jpg"),
        (lambda folder: (folder / "val" / "a").rename(folder / "val" / "c"), "must have the same classes: a is in one"),
    ],
)
def test_other_folders_are_refused(tmp_path: Path, damage: Callable[[Path], Any], message: str) -> None:
    damage(write_images(tmp_path / "data"))
    with pytest.raises(ValueError, match=message):
        load_splits(tmp_path / "data")


def test_a_packed_folder_must_be_unpacked(tmp_path: Path) -> None:
    (tmp_path / "data.tar").write_bytes(b"")
    with pytest.raises(ValueError, match="Unpack it first"):
        load_splits(tmp_path / "data.tar")


@pytest.mark.parametrize("content", [b"", b"nonsense", b"\x89PNG\r\n\x1a\n"])
def test_a_damaged_image_is_named(tmp_path: Path, content: bytes) -> None:
    training, _ = load_splits(write_images(tmp_path))
    Path(training.paths[3]).write_bytes(content)
    with pytest.raises(ValueError, match=r"train/a/3\.png is not an image that can be read"):
        training.image(3)


def test_small_images_are_shifted_and_flipped() -> None:
    pixels = np.random.default_rng(0).integers(1, 255, (8, 8, 3)).astype(np.uint8)
    image, padded = Image.fromarray(pixels), np.pad(pixels, ((4, 4), (4, 4), (0, 0)))
    shifts = {(top, left, flip): padded[top : top + 8, left : left + 8][:, :: -1 if flip else 1]
              for top in range(9) for left in range(9) for flip in (False, True)}  # fmt: skip
    seen = set()
    for seed in range(400):
        view = training_view(image, 8, seed)
        seen |= {key for key, shifted in shifts.items() if np.array_equal(view, shifted)}
        np.testing.assert_array_equal(view, training_view(image, 8, seed))
    assert len(seen) > 120  # of 162
    np.testing.assert_array_equal(central_view(image, 8), pixels)


def test_random_boxes_have_deits_sizes() -> None:
    import random

    draw = random.Random(0)
    boxes = np.array([random_box((200, 100), draw) for _ in range(3000)])
    width, height = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    assert boxes.min() >= 0
    assert boxes[:, 2].max() <= 200
    assert boxes[:, 3].max() <= 100
    area = width * height / 20_000
    assert 0.07 < area.min() < 0.1
    assert area.max() > 0.6
    assert (width / height).min() == pytest.approx(3 / 4, abs=0.02)
    assert (width / height).max() == pytest.approx(4 / 3, abs=0.02)


def test_a_test_image_is_its_center() -> None:
    """Seven eighths of the shorter side: the border of a large image is not seen."""
    pixels = np.zeros((128, 256, 3), np.uint8)
    pixels[12:116, 76:180] = 200
    view = central_view(Image.fromarray(pixels), 64)
    assert view[3:-3, 3:-3].min() == 200


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_batches_are_a_function_of_the_step(tmp_path: Path, workers: int) -> None:
    training, _ = load_splits(write_images(tmp_path))

    def batches(steps: range, **options: Any) -> list[LabeledBatch]:
        return list(training_batches(training, EpochOrder(16, 4, 0), side=8, steps=steps, device=CPU, **options))

    whole, rest = batches(range(10)), batches(range(6, 10), workers=workers)
    for one, other in zip(whole[6:], rest, strict=True):
        assert torch.equal(one.x, other.x)
        assert torch.equal(one.labels, other.labels)
    assert not torch.equal(whole[0].x, whole[4].x)  # the next epoch has other views
    shares = [batches(range(1), rank=rank, count=2)[0] for rank in (0, 1)]
    assert torch.equal(torch.cat([share.x for share in shares]).sum(0), whole[0].x.sum(0))


def test_colors_are_standardized(tmp_path: Path) -> None:
    _, test = load_splits(write_images(tmp_path))
    (batch,) = whole_batches(test, side=8, size=100, device=CPU)
    pixels = np.stack([np.asarray(Image.open(path)) for path in test.paths]) / 255
    np.testing.assert_allclose(batch.x.permute(0, 2, 3, 1), (pixels - MEAN) / STD, atol=1e-5)


def pixels_of(number: int = 32, side: int = 16) -> LabeledBatch:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (number, 3, side, side), generator=generator, dtype=torch.uint8)
    return LabeledBatch(x, None, torch.arange(number) % 4)


def augmented(settings: AugmentationSettings, batch: LabeledBatch, seed: int = 0) -> LabeledBatch:
    torch.manual_seed(seed)
    return Augmentation(settings, 4)(batch)


def test_without_augmentation_only_colors_change() -> None:
    batch = pixels_of()
    found = augmented(PLAIN, batch)
    assert torch.equal(found.x, standardized(batch.x))
    assert torch.equal(found.labels.argmax(1), batch.labels)
    assert torch.equal(found.labels.sum(1), torch.ones(32))


def test_labels_are_smoothed() -> None:
    found = augmented(replace(PLAIN, smoothing=0.1), pixels_of())
    assert found.labels.max() == pytest.approx(0.925)
    assert found.labels.min() == pytest.approx(0.025)


def test_mixup_mixes_images_and_labels_alike() -> None:
    batch = pixels_of()
    x = standardized(batch.x)
    found = augmented(replace(PLAIN, mixup=0.8), batch)
    own = float(found.labels[0].max().clamp(min=0)) if batch.labels[0] != batch.labels[-1] else 1.0
    share = float(found.labels[0, batch.labels[0]])
    torch.testing.assert_close(found.x, share * x + (1 - share) * x.flip(0))
    assert 0 < own <= 1


def test_cutmix_labels_are_the_shares_of_pixels() -> None:
    batch = pixels_of()
    x = standardized(batch.x)
    for seed in range(20):
        found = augmented(replace(PLAIN, cutmix=1.0), batch, seed)
        is_own = (found.x == x).all(1)
        assert bool((is_own | (found.x == x.flip(0)).all(1)).all())
        share = float(found.labels[0, batch.labels[0]])
        assert float(is_own[0].float().mean()) == pytest.approx(share, abs=1e-6)


def test_erased_rectangles_are_noise() -> None:
    pytest.importorskip("kornia")
    batch = pixels_of(200)
    found = augmented(replace(PLAIN, erasing=0.25), batch).x
    changed = (found != standardized(batch.x)).all(1)
    is_erased = changed.flatten(1).any(1)
    assert 0.15 < float(is_erased.float().mean()) < 0.35
    noise = found.permute(1, 0, 2, 3)[:, changed]
    assert abs(float(noise.mean())) < 0.05
    assert abs(float(noise.std()) - 1) < 0.05


def test_randaugment_changes_groups_and_stays_in_range() -> None:
    pytest.importorskip("kornia")
    batch = pixels_of(64)
    settings = replace(PLAIN, operations=2)
    found = augmented(settings, batch).x
    low, high = standardized(torch.zeros(1, 3, 1, 1)), standardized(torch.ones(1, 3, 1, 1))
    assert bool(((found >= low - 1e-4) & (found <= high + 1e-4)).all())
    assert float((found != standardized(batch.x)).any(1).flatten(1).any(1).float().mean()) > 0.5
    assert torch.equal(augmented(settings, batch).x, found)
    assert not torch.equal(augmented(settings, batch, seed=1).x, found)


def test_missing_kornia_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kornia.augmentation", None)
    with pytest.raises(ValueError, match=r"augmentations need kornia: pip install .*\[images\]"):
        Augmentation(AugmentationSettings(), 3)
    Augmentation(PLAIN, 3)


def test_top_accuracies_count_the_highest_scores() -> None:
    class Fixed(torch.nn.Module):
        def forward(self, x: torch.Tensor, valid: None) -> Any:
            return type("Output", (), {"logits": x})

    scores = torch.tensor([[3.0, 2, 1], [3, 2, 1], [3, 2, 1], [1, 2, 3]])
    batch = LabeledBatch(scores, None, torch.tensor([0, 1, 2, 1]))
    assert top_accuracies(Fixed(), [batch, batch], ONE_PROCESS, tops=(1, 2, 3)) == [25.0, 75.0, 100.0]


@pytest.mark.slow
def test_training_learns_saves_and_resumes_nothing_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_images(tmp_path / "pictures")
    config = Config(("primal-plus",), data=data, **SMALL, **UNCHANGED, evaluate_every=2, out=tmp_path / "out")
    main(config)
    printed = capsys.readouterr().out
    assert "primal-plus, seed 0: top-1 100.00 %" in printed
    assert "75.7 | 92.8" in " ".join(printed.split())
    folder = config.run_folder("primal-plus", 0)
    lines = read_metrics(folder)
    assert [line["step"] for line in lines if "test/top1" in line] == [4, 8, 8]
    assert lines[0]["train/penalty"] > 0
    main(config)
    assert f"(from {folder}; --again to retrain)" in capsys.readouterr().out
    model, batch = load_encoder(folder, 4)
    assert batch.labels.tolist() == [0, 0, 1, 1]
    assert torch.equal(model(batch.x, None).logits.argmax(1), batch.labels)
    spectrum.main(spectrum.Config(runs=(folder,), sequences=4, out=tmp_path / "spectra"))
    layers = json.loads((tmp_path / "spectra" / "spectrum.json").read_text())["runs"][folder.name]
    assert list(layers) == [f"layer {number}" for number in range(1, 5)]


@pytest.mark.slow
def test_the_whole_recipe_trains(tmp_path: Path) -> None:
    pytest.importorskip("kornia")
    data = write_images(tmp_path / "pictures", 4, side=40, suffix=".jpeg")
    own = SMALL | {"image_size": 40, "patch": 8, "epochs": 1, "batch_size": 4}
    config = Config(("softmax",), data=data, **own, accumulate=2, workers=1, out=tmp_path / "out")
    main(config)
    assert math.isfinite(read_metrics(config.run_folder("softmax", 0))[0]["train/loss"])


@pytest.mark.slow
def test_cost_is_measured_for_each_stack(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = {"model": "small", "image_size": 8, "patch": 4, "rank": 2, "cost_batch": 2, "cost_seconds": 0.01}
    main(Config(("softmax", "primal-plus"), cost=True, **own, out=tmp_path))  # type: ignore[arg-type]
    assert "small/4, 8 pixels, 2 images" in capsys.readouterr().out
    content = json.loads((tmp_path / "images_cost.json").read_text())
    assert content["memory_mib"].keys() == content["seconds"].keys() == {"softmax", "primal-plus"}
    assert content["parameters"]["softmax"] == num_parameters(
        build_model(Config(data=Path(), **SMALL).shape("softmax", 100), patch=4)
    )


def test_a_step_of_cost_is_a_training_step() -> None:
    shape = Config(data=Path(), **SMALL).shape("primal-plus", 5)
    losses: Any = Step("small", 8, 4, 2, 5, bf16=False).of(shape, 0.1, CPU, batch_size=3)()
    assert float(losses.penalty) > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "deit_huge"}, "model must be one of deit_tiny, deit_small, deit_base, small, not 'deit_huge'"),
        ({"patch": 15}, r"image_size \(224\) must be divisible by patch \(15\)"),
        ({"epochs": 0}, r"epochs \(0\) must be at least 1"),
        ({"smoothing": 1.0}, r"smoothing \(1\.0\) must be at least 0 and below 1"),
        ({"mixup": math.inf}, r"mixup \(inf\) must be finite and at least 0"),
        ({"magnitude": 11.0}, r"magnitude \(11\.0\) must be above 0 and at most 10"),
        ({"lr": math.nan}, "lr and cost_seconds must be finite and above 0"),
        ({"data": None}, "--data must name a folder with the folders train and val"),
        ({"attention": ("magic",)}, "attention must be among softmax"),
    ],
)
def test_invalid_settings_are_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config(**({"data": Path()} | settings))


def test_other_settings_have_other_folders() -> None:
    config = Config(data=Path("data"))
    changes: list[dict[str, Any]] = [
        {"mixup": 0.0},
        {"epochs": 2},
        {"patch": 32},
        {"eta": 0.0},
        {"drop_path": 0.0},
        {"lr": 0.1},
    ]
    folders = [replace(config, **change).run_folder("primal-plus", 0) for change in changes]
    assert len({config.run_folder("primal-plus", 0), *folders}) == 1 + len(changes)


def test_the_table_has_the_paper_beside_ours() -> None:
    run = SavedRun({"top1": 50.0, "top5": 90.0}, None, 123)
    text = table(Config(data=Path("cifar")), {"softmax": [run, run], "primalformer": [run]})
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert "| softmax | 50.0 ± 0.0 | 90.0 ± 0.0 | 123 | 74.2 | 92.4 |" in rows
    assert "| primalformer | 50.0 | 90.0 | 123 | | |" in rows


def test_picture_folders_are_a_task_of_the_arena(tmp_path: Path) -> None:
    """Ten classes of 32 x 32 pixels become 1,024 gray values; a tenth of the training split is held out."""
    random, pixels = np.random.default_rng(0), {}
    for split, count in (("train", 3), ("test", 1)):
        for name in "abcdefghij":
            (tmp_path / split / name).mkdir(parents=True)
            for number in range(count):
                pixels[split, name, number] = random.integers(0, 256, (32, 32, 3)).astype(np.uint8)
                Image.fromarray(pixels[split, name, number]).save(tmp_path / split / name / f"{number}.png")
    splits = load_image(tmp_path)
    assert [len(splits[name].labels) for name in ("train", "validation", "test")] == [27, 3, 10]
    gray = np.rint(pixels["test", "c", 0] @ [0.299, 0.587, 0.114]).flatten()
    assert splits["test"].tokens[2].tolist() == gray.tolist()
    every = torch.cat([splits["train"].labels, splits["validation"].labels])
    assert every.bincount().tolist() == [3] * 10


def test_no_image_is_read_twice_from_disk(tmp_path: Path) -> None:
    training, _ = load_splits(write_images(tmp_path))
    first = np.asarray(training.image(0))
    training.paths[0].unlink()
    np.testing.assert_array_equal(training.image(0), first)
    assert isinstance(training, ImageFolder)
