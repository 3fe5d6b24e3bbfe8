"""The Long-Range Arena's tasks, and the readers of their files on small files in the standard formats."""

import pickle
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.batches import Sequences
from benchmarks.lra.data import LOADERS, TASKS, Task, load_task
from benchmarks.lra.files import MAX_BYTES, TRAINING_FILES, load_image, load_pathfinder, load_retrieval, load_text

CPU = torch.device("cpu")
PAIR_FILES = ("new_aan_pairs.train.tsv", "new_aan_pairs.eval.tsv", "new_aan_pairs.test.tsv")


def write_cifar(folder: Path, pixels: np.ndarray, labels: np.ndarray) -> None:
    """Write pictures (number, 3072) and their classes, divided evenly among CIFAR-10's six files."""
    parts = np.split(np.column_stack([labels, pixels]).astype(np.uint8), 6)
    for name, part in zip((*TRAINING_FILES, "test_batch.bin"), parts, strict=True):
        (folder / name).write_bytes(part.tobytes())


def test_pictures_become_gray_pixels_in_reading_order(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    pixels, labels = random.integers(0, 256, (24, 3072)), random.integers(0, 10, 24)
    write_cifar(tmp_path, pixels, labels)
    splits = load_image(tmp_path)
    red, green, blue = pixels.reshape(24, 3, 1024).swapaxes(0, 1)
    gray = 0.299 * red + 0.587 * green + 0.114 * blue
    for name, rows in (("train", slice(18)), ("validation", slice(18, 20)), ("test", slice(20, 24))):
        assert splits[name].labels.tolist() == labels[rows].tolist()
        np.testing.assert_allclose(torch.stack(list(splits[name].tokens)), gray[rows], atol=0.5 + 1e-6, rtol=0)
    batch = splits["train"].batch([0, 5], CPU)
    assert batch.valid is None
    assert batch.x.shape == (2, 1024)
    assert batch.labels.tolist() == labels[[0, 5]].tolist()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"must contain the \.bin files of CIFAR-10's binary version"),
        (b"x" * 100, "it has 100 bytes, not a multiple of 3,073"),
        (bytes([77] * 3073), "it has a class 77, not 0 to 9"),
    ],
)
def test_other_files_than_cifar_are_rejected(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / TRAINING_FILES[0]).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_image(tmp_path)


def test_reviews_become_bytes(tmp_path: Path) -> None:
    for split, name, number in product(("train", "test"), ("neg", "pos"), range(10)):
        path = tmp_path / split / name / f"{number}_1.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{split} {name} {number} \u00e9" + "x" * (5000 if number == 0 else 0))
    splits = load_text(tmp_path)
    assert {name: len(split.labels) for name, split in splits.items()} == {"train": 18, "validation": 2, "test": 20}
    test = splits["test"]
    assert len(test.tokens[0]) == MAX_BYTES
    assert bytes(test.tokens[11].tolist()).decode() == "test pos 1 \u00e9"
    assert test.labels.tolist() == [0] * 10 + [1] * 10
    for name in ("train", "validation"):
        for tokens, label in zip(splits[name].tokens, splits[name].labels, strict=True):
            assert bytes(tokens[6:9].tolist()).decode() == ("neg", "pos")[label]
    batch = test.batch([1, 0], CPU)
    assert batch.valid is not None
    assert batch.valid.sum(1).tolist() == [len(test.tokens[1]), MAX_BYTES]


def test_folder_without_reviews_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no reviews"):
        load_text(tmp_path / "missing")


Pair = tuple[bytes, bytes, bytes]
"""Label, first document, second document."""


def write_pairs(folder: Path, train: list[Pair], validation: list[Pair], test: list[Pair]) -> None:
    for name, pairs in zip(PAIR_FILES, (train, validation, test), strict=True):
        lines = [b"\t".join([label, b"P04-1", b"P05-2", *texts]) + b"\n" for label, *texts in pairs]
        (folder / name).write_bytes(b"".join(lines))


def load_pairs(folder: Path, *train: Pair) -> Sequences:
    """Write pairs as the training split, and load it."""
    write_pairs(folder, list(train), [(b"0.0", b"a", b"b")], [(b"0.0", b"a", b"b")])
    return load_retrieval(folder)["train"]


def texts(sequences: Sequences) -> list[tuple[bytes, bytes]]:
    assert sequences.others is not None
    every = zip(sequences.tokens, sequences.others, strict=True)
    return [(bytes(first.tolist()), bytes(second.tolist())) for first, second in every]


def test_each_split_of_retrieval_has_its_own_file(tmp_path: Path) -> None:
    pairs = [(b"0.0", b"a", b"b"), (b"1.0", b"c", b"d"), (b"1.0", b"e", b"f"), (b"0.0", b"g", b"h")]
    write_pairs(tmp_path, pairs[:2], pairs[2:3], pairs[3:])
    splits = load_retrieval(tmp_path)
    assert list(splits) == ["train", "validation", "test"]
    assert [texts(split) for split in splits.values()] == [[(b"a", b"b"), (b"c", b"d")], [(b"e", b"f")], [(b"g", b"h")]]
    assert [split.labels.tolist() for split in splits.values()] == [[0, 1], [1], [0]]


def test_documents_are_raw_bytes(tmp_path: Path) -> None:
    first, second = b"b'a \"quote\", \\n and \xff'", b'"b'
    found = load_pairs(tmp_path, (b"1.0", first, second), (b"0.0", b"'", b"c"))
    assert texts(found) == [(first, second), (b"'", b"c")]
    assert found.tokens[0].dtype == torch.uint8


def test_documents_are_cut(tmp_path: Path) -> None:
    found = load_pairs(tmp_path, (b"1.0", b"a" * 3_999 + b"bcd", b"e" * 4_000))
    assert texts(found) == [(b"a" * 3_999 + b"b", b"e" * 4_000)]


def test_an_empty_document_is_a_space(tmp_path: Path) -> None:
    assert texts(load_pairs(tmp_path, (b"1.0", b"", b""))) == [(b" ", b" ")]


def test_the_last_line_needs_no_newline(tmp_path: Path) -> None:
    load_pairs(tmp_path, (b"1.0", b"a", b"b"))
    path = tmp_path / PAIR_FILES[0]
    path.write_bytes(path.read_bytes().removesuffix(b"\n"))
    assert texts(load_retrieval(tmp_path)["train"]) == [(b"a", b"b")]


def test_repeated_documents_share_memory(tmp_path: Path) -> None:
    found = load_pairs(tmp_path, (b"1.0", b"a", b"b"), (b"0.0", b"b", b"a"))
    assert found.others is not None
    assert found.tokens[0] is found.others[1]


def test_first_documents_come_first_in_a_batch(tmp_path: Path) -> None:
    found = load_pairs(tmp_path, (b"0.0", b"a", b"bb"), (b"1.0", b"ccc", b"d"), (b"1.0", b"e", b"f"))
    batch = found.batch([1, 0], CPU)
    assert batch.valid is not None
    rows = [bytes(row[valid].tolist()) for row, valid in zip(batch.x, batch.valid, strict=True)]
    assert rows == [b"ccc", b"a", b"d", b"bb"]
    assert batch.labels.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"1.0\tid1\tid2\ttext", r"train\.tsv, line 2: the number of tab-separated fields \(4\) must be 5: label, id1"),
        (b"1.0\tid1\tid2\ta\tb\tc", r"train\.tsv, line 2: the number of tab-separated fields \(6\) must be 5"),
        (b"", r"train\.tsv, line 2: the number of tab-separated fields \(1\) must be 5"),
        (b"2.0\tid1\tid2\ta\tb", r"train\.tsv, line 2: the label \('2\.0'\) must be 0 or 1"),
        (b"\xff\tid1\tid2\ta\tb", r"train\.tsv, line 2: the label .* must be 0 or 1"),
    ],
)
def test_invalid_pairs_are_rejected(tmp_path: Path, line: bytes, message: str) -> None:
    load_pairs(tmp_path, (b"1.0", b"a", b"b"))
    with (tmp_path / PAIR_FILES[0]).open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(ValueError, match=message):
        load_retrieval(tmp_path)


@pytest.mark.parametrize("name", PAIR_FILES)
def test_every_file_of_pairs_is_needed(tmp_path: Path, name: str) -> None:
    load_pairs(tmp_path, (b"1.0", b"a", b"b"))
    (tmp_path / name).unlink()
    with pytest.raises(ValueError, match=f"{name} is missing: the folder must contain new_aan_pairs.train.tsv"):
        load_retrieval(tmp_path)


def test_an_empty_file_of_pairs_is_rejected(tmp_path: Path) -> None:
    write_pairs(tmp_path, [], [], [])
    with pytest.raises(ValueError, match=r"new_aan_pairs\.train\.tsv has no pairs"):
        load_retrieval(tmp_path)


def write_images(folder: Path, pixels: np.ndarray, labels: np.ndarray) -> None:
    """Write images (number, 32, 32) and their labels in the layout of Pathfinder, 4 images per list."""
    (folder / "metadata").mkdir(parents=True)
    for first in range(0, len(labels), 4):
        part = first // 4 + 8  # 8, 9, 10, ...: their order as numbers is not their order as names
        (folder / "imgs" / str(part)).mkdir(parents=True)
        lines = []
        for number, (image, label) in enumerate(zip(pixels[first : first + 4], labels[first : first + 4], strict=True)):
            Image.fromarray(image).save(folder / "imgs" / str(part) / f"sample_{number}.png")
            lines.append(f"imgs/{part} sample_{number}.png {number} {label} 1.8 6 2.0 5 1.5 2 22\n")
        (folder / "metadata" / f"{part}.npy").write_text("".join(lines))


Images = tuple[Path, np.ndarray, np.ndarray]
"""A folder with 20 images of Pathfinder, their pixels and their labels."""


@pytest.fixture
def images(tmp_path: Path) -> Images:
    random = np.random.default_rng(0)
    pixels, labels = random.integers(0, 256, (20, 32, 32), np.uint8), random.integers(0, 2, 20)
    folder = tmp_path / "pathfinder32" / "curv_contour_length_14"
    write_images(folder, pixels, labels)
    return folder, pixels, labels


def rows_of(splits: dict[str, Sequences]) -> np.ndarray:
    """All images of all splits in their order, (number, 1024)."""
    return np.stack([tokens.numpy() for split in splits.values() for tokens in split.tokens])


def test_images_become_pixels_in_reading_order(images: Images) -> None:
    folder, pixels, labels = images
    splits = load_pathfinder(folder)
    found = rows_of(splits)
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found, pixels.reshape(20, 1024))
    assert torch.cat([split.labels for split in splits.values()]).tolist() == labels.tolist()


def test_images_are_split_in_order(images: Images) -> None:
    splits = load_pathfinder(images[0])
    assert {name: len(split.tokens) for name, split in splits.items()} == {"train": 16, "validation": 2, "test": 2}
    assert all(len(split.tokens) == len(split.labels) for split in splits.values())


def test_either_folder_of_pathfinder_is_accepted(images: Images) -> None:
    inner, outer = load_pathfinder(images[0]), load_pathfinder(images[0].parent)
    np.testing.assert_array_equal(rows_of(inner), rows_of(outer))


def test_color_images_become_gray(images: Images) -> None:
    folder, pixels, _ = images
    Image.fromarray(pixels[0]).convert("RGB").save(folder / "imgs/8/sample_0.png")
    np.testing.assert_array_equal(rows_of(load_pathfinder(folder))[0], pixels[0].ravel())


def test_empty_images_are_skipped(images: Images) -> None:
    folder, pixels, labels = images
    (folder / "imgs/8/sample_1.png").write_bytes(b"")
    splits = load_pathfinder(folder)
    np.testing.assert_array_equal(rows_of(splits), np.delete(pixels, 1, 0).reshape(19, 1024))
    assert torch.cat([split.labels for split in splits.values()]).tolist() == np.delete(labels, 1).tolist()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"../../.. secret.png 0 1", r"path \('\.\./\.\./\.\./secret\.png'\) must be relative, without '\.\.'"),
        (b"imgs/8/../../.. secret.png 0 1", r"must be relative, without"),
        (b"imgs ../../../secret.png 0 1", r"must be relative, without"),
        (b"/ secret.png 0 1", r"path \('/secret\.png'\) must be relative"),
        (b"imgs/8 /secret.png 0 1", r"path \('/secret\.png'\) must be relative"),
        (b"imgs/8 sample_0.png 0", r"number of fields \(3\) must be at least 4"),
        (b"", r"number of fields \(0\) must be at least 4"),
        (b"imgs/8 sample_0.png 0 2", r"the label \('2'\) must be 0 or 1"),
        (b"imgs/8 sample_99.png 0 1", r"sample_99\.png cannot be read \(No such file or directory\)"),
        (b"imgs/8 \x00.png 0 1", "null byte"),
    ],
)
def test_invalid_lists_are_rejected(images: Images, line: bytes, message: str) -> None:
    folder, pixels, _ = images
    Image.fromarray(pixels[0]).save(folder.parent.parent / "secret.png")
    with (folder / "metadata" / "9.npy").open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(ValueError, match=r"9\.npy, line 5: .*" + message):
        load_pathfinder(folder)


class Touch:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("is_array", [False, True])
def test_pickles_are_not_executed(images: Images, is_array: bool) -> None:
    folder, mark = images[0], images[0] / "executed"
    path = folder / "metadata" / "9.npy"
    if is_array:
        np.save(path, np.array([Touch(mark)], object), allow_pickle=True)
    else:
        path.write_bytes(pickle.dumps(Touch(mark)))
    with pytest.raises(ValueError, match=r"9\.npy, line 1: the (label|number of fields)"):
        load_pathfinder(folder)
    assert not mark.exists()
    np.load(path, allow_pickle=True)  # the file does run code if it is unpickled
    assert mark.exists()


def test_damaged_images_are_rejected(images: Images) -> None:
    path = images[0] / "imgs/9/sample_2.png"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ValueError, match=r"9\.npy, line 3: .*sample_2\.png cannot be read as a PNG image"):
        load_pathfinder(images[0])


def test_images_of_another_format_are_rejected(images: Images) -> None:
    Image.new("L", (32, 32)).save(images[0] / "imgs/9/sample_2.png", "BMP")
    with pytest.raises(ValueError, match=r"sample_2\.png cannot be read as a PNG image"):
        load_pathfinder(images[0])


def test_images_of_another_size_are_rejected(images: Images) -> None:
    Image.new("L", (64, 32)).save(images[0] / "imgs/9/sample_2.png")
    with pytest.raises(ValueError, match=r"9\.npy, line 3: .*sample_2\.png has 64 x 32 pixels, not 32 x 32"):
        load_pathfinder(images[0])


def test_folder_without_lists_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"metadata has no \.npy files: the folder must be pathfinder32"):
        load_pathfinder(tmp_path)


def test_lists_must_have_numbers(images: Images) -> None:
    (images[0] / "metadata" / "all.npy").touch()
    with pytest.raises(ValueError, match=r"all\.npy must have a number as its name"):
        load_pathfinder(images[0])


def test_too_few_images_are_rejected(tmp_path: Path) -> None:
    write_images(tmp_path, np.zeros((9, 32, 32), np.uint8), np.zeros(9, int))
    with pytest.raises(ValueError, match=r"the number of images \(9\) must be at least 10"):
        load_pathfinder(tmp_path)


def test_pathfinder_says_what_to_install(images: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ValueError, match=r"needs pillow: pip install .*\[benchmarks\]"):
        load_pathfinder(images[0])


def test_every_task_can_be_loaded() -> None:
    assert set(LOADERS) == set(TASKS)


def test_tasks_are_loaded_by_name(images: Images) -> None:
    np.testing.assert_array_equal(rows_of(load_task("pathfinder", images[0])), rows_of(load_pathfinder(images[0])))


def test_only_retrieval_has_pairs() -> None:
    assert [name for name, task in TASKS.items() if task.is_pair] == ["retrieval"]


@pytest.mark.parametrize("name", ["retrieval", "text"])
def test_cut_documents_fit_the_positions(name: str) -> None:
    assert TASKS[name].max_length // 2 < MAX_BYTES <= TASKS[name].max_length


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_the_last_step_is_evaluated(task: Task) -> None:
    assert task.steps % task.eval_every_steps == 0
