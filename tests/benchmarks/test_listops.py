"""ListOps: trees have the distribution of the published generator, and expressions evaluate correctly."""

import random
from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from benchmarks.lra import listops
from benchmarks.lra.listops import END_TOKEN, FIRST_OPERATOR, TOKENS, distinct_trees, evaluate, generate, load_listops

NUM_TREES = 20_000


def tokens_of(text: str) -> bytes:
    return bytes(TOKENS.index(word) for word in text.split())


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("[MAX 4 [SM 7 8 ] 0 ]", 5),
        ("[MIN 4 [MAX 2 9 ] 3 ]", 3),
        ("[MED 1 2 9 ]", 2),
        ("[MED 1 2 4 9 ]", 3),
        ("[MED 2 3 ]", 2),  # the integer part of 2.5
        ("[SM 9 9 9 ]", 7),
        ("[MAX [MIN 8 5 ] [MED [SM 1 1 ] 9 0 ] ]", 5),
    ],
)
def test_expressions_have_their_values(text: str, value: int) -> None:
    assert evaluate(tokens_of(text)) == value


def test_expression_without_end_is_rejected() -> None:
    with pytest.raises(ValueError, match="has no end"):
        evaluate(tokens_of("[MAX 1 2"))


@pytest.fixture(scope="module")
def trees() -> list[bytes]:
    draw = random.Random(0).random
    drawn = [tree for _ in range(NUM_TREES) if (tree := generate(draw, longest=10**6)) is not None]
    assert len(drawn) == NUM_TREES
    return drawn


def arguments_and_depth(tokens: bytes) -> tuple[list[int], int]:
    """Number of arguments of each operator, and the depth of the tree (1 for a single digit)."""
    counts, depth, arguments = [], 1, [0]  # arguments so far: of the root's parent and of each open operator
    for token in tokens:
        if token == END_TOKEN:
            counts.append(arguments.pop())
            continue
        arguments[-1] += 1
        depth = max(depth, len(arguments))
        if token >= FIRST_OPERATOR:
            arguments.append(0)
    assert arguments == [1]
    return counts, depth


def test_trees_are_drawn_as_published(trees: list[bytes]) -> None:
    assert sum(tree[0] >= FIRST_OPERATOR for tree in trees) / NUM_TREES == pytest.approx(0.25, abs=0.01)
    arguments, depths = zip(*map(arguments_and_depth, trees[:4000]), strict=True)
    counts = Counter(number for one in arguments for number in one)
    assert set(counts) == set(range(2, 11))
    assert max(depths) == 10
    tokens = Counter(b"".join(trees[:4000]))
    digits = Counter({token: tokens[token] for token in range(FIRST_OPERATOR)})
    operators = Counter({token: tokens[token] for token in range(FIRST_OPERATOR, END_TOKEN)})
    for seen, kinds, tolerance in ((counts, 9, 0.02), (digits, 10, 0.01), (operators, 4, 0.02)):
        assert [number / seen.total() for number in seen.values()] == pytest.approx([1 / kinds] * kinds, abs=tolerance)


def drawn_recursively(random_: random.Random, depth: int = 1) -> list[str]:
    """Reference: the words of a tree from the same distribution, written from its description."""
    if depth == 10 or random_.random() > 0.25:
        return [str(random_.randrange(10))]
    words = [random_.choice(["[MIN", "[MAX", "[MED", "[SM"])]
    for _ in range(random_.randint(2, 10)):
        words += drawn_recursively(random_, depth + 1)
    return [*words, "]"]


@pytest.mark.slow
def test_lengths_match_a_recursive_reference(trees: list[bytes]) -> None:
    random_ = random.Random(2)
    references = [drawn_recursively(random_) for _ in range(NUM_TREES)]
    for bound in (1, 10, 50, 200, 500, 1000, 2000):
        share, expected = (sum(len(tree) > bound for tree in drawn) / NUM_TREES for drawn in (trees, references))
        assert share == pytest.approx(expected, abs=4 * (expected * (1 - expected) * 2 / NUM_TREES) ** 0.5 + 1e-4)


def test_splits_have_the_published_sizes() -> None:
    assert listops.SPLITS == {"train": 96_000, "validation": 2_000, "test": 2_000}


def test_only_trees_over_the_limit_are_dropped() -> None:
    for seed in range(3000):
        whole = generate(random.Random(seed).random, longest=10**6)
        assert whole is not None
        assert generate(random.Random(seed).random, longest=300) == (whole if len(whole) < 300 else None)


def test_accepted_trees_are_distinct_and_seeded() -> None:
    trees = list(distinct_trees(60, seed=0))
    assert len(set(trees)) == 60
    assert all(500 < len(tree) < 2000 for tree in trees)
    assert list(distinct_trees(60, seed=0)) == trees
    assert list(distinct_trees(5, seed=1)) != trees[:5]


def test_splits_are_read_back_from_the_file(tmp_path: Path) -> None:
    sizes = {"train": 12, "validation": 3, "test": 4}
    made = load_listops(tmp_path, splits=sizes)
    (path,) = tmp_path.iterdir()
    stamp = path.stat().st_mtime_ns
    again = load_listops(tmp_path, splits=sizes)
    assert path.stat().st_mtime_ns == stamp  # not generated again
    trees = distinct_trees(19, seed=0)
    for name, size in sizes.items():
        assert len(made[name]) == size
        for row, tree in enumerate(islice(trees, size)):
            assert made[name].expression(row).tobytes() == again[name].expression(row).tobytes() == tree
            assert made[name].values[row] == evaluate(tree)
    assert np.concatenate([split.values for split in made.values()]).max() < 10
