"""ListOps: what is generated is what the published generator would draw, and its values are right."""

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from benchmarks.lra.listops import (
    END_TOKEN,
    FIRST_OPERATOR,
    SPLITS,
    TOKENS,
    distinct_trees,
    evaluate,
    generate,
    load_listops,
)


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
        ("[MED 2 3 ]", 2),  # 2.5, its integer part
        ("[SM 9 9 9 ]", 7),
        ("[MAX [MIN 8 5 ] [MED [SM 1 1 ] 9 0 ] ]", 5),
    ],
)
def test_expressions_have_their_values(text: str, value: int) -> None:
    assert evaluate(tokens_of(text)) == value


def test_an_expression_without_an_end_is_told() -> None:
    with pytest.raises(ValueError, match="has no end"):
        evaluate(tokens_of("[MAX 1 2"))


def arguments_and_depth(tokens: bytes) -> tuple[list[int], int]:
    """How many arguments each operator has, and how deep the tree is (a digit alone: 1)."""
    counts: list[int] = []
    open_lists: list[int] = []
    depth = 1
    for token in tokens:
        if token == END_TOKEN:
            counts.append(open_lists.pop())
            continue
        if open_lists:
            open_lists[-1] += 1
        depth = max(depth, len(open_lists) + 1)
        if token >= FIRST_OPERATOR:
            open_lists.append(0)
    assert not open_lists
    return counts, depth


def test_trees_are_drawn_as_published() -> None:
    draw = random.Random(0).random
    trees = [tree for _ in range(20_000) if (tree := generate(draw, longest=10**6)) is not None]
    assert len(trees) == 20_000
    roots = sum(tree[0] >= FIRST_OPERATOR for tree in trees) / len(trees)
    assert roots == pytest.approx(0.25, abs=0.01)
    counts: Counter[int] = Counter()
    deepest, digits, operators = 0, Counter[int](), Counter[int]()
    for tree in trees[:4000]:
        own, depth = arguments_and_depth(tree)
        counts.update(own)
        deepest = max(deepest, depth)
        for token in tree:
            (digits if token < FIRST_OPERATOR else operators)[token] += 1
    assert set(counts) == set(range(2, 11))
    assert deepest == 10
    for number in counts.values():
        assert number / counts.total() == pytest.approx(1 / 9, abs=0.02)
    for number in digits.values():
        assert number / digits.total() == pytest.approx(1 / 10, abs=0.01)
    del operators[END_TOKEN]
    for number in operators.values():
        assert number / operators.total() == pytest.approx(1 / 4, abs=0.02)


def drawn_recursively(random_: random.Random, depth: int = 1) -> list[str]:
    """The same distribution, written from its description: the words of a tree."""
    if depth == 10 or random_.random() > 0.25:
        return [str(random_.randrange(10))]
    words = [random_.choice(["[MIN", "[MAX", "[MED", "[SM"])]
    for _ in range(random_.randint(2, 10)):
        words += drawn_recursively(random_, depth + 1)
    return [*words, "]"]


def test_lengths_are_distributed_as_those_of_a_recursion() -> None:
    draw, random_ = random.Random(1).random, random.Random(2)
    ours = [len(tree) for _ in range(20_000) if (tree := generate(draw, longest=10**6)) is not None]
    theirs = [len(drawn_recursively(random_)) for _ in range(20_000)]
    for bound in (1, 10, 50, 200, 500, 1000, 2000):
        share, expected = (sum(length > bound for length in lengths) / 20_000 for lengths in (ours, theirs))
        assert share == pytest.approx(expected, abs=4 * (expected * (1 - expected) * 2 / 20_000) ** 0.5 + 1e-4)


def test_the_splits_are_the_published_ones() -> None:
    assert SPLITS == {"train": 96_000, "validation": 2_000, "test": 2_000}


def test_long_trees_are_given_up_early_and_no_others() -> None:
    for seed in range(3000):
        whole = generate(random.Random(seed).random, longest=10**6)
        short = generate(random.Random(seed).random, longest=300)
        assert whole is not None
        assert short == (whole if len(whole) < 300 else None)


def test_accepted_trees_are_distinct_and_of_the_lengths() -> None:
    trees = list(distinct_trees(60, seed=0))
    assert len(set(trees)) == 60
    assert all(500 < len(tree) < 2000 for tree in trees)
    assert list(distinct_trees(60, seed=0)) == trees
    assert list(distinct_trees(5, seed=1)) != trees[:5]


def test_splits_come_back_from_the_file(tmp_path: Path) -> None:
    sizes = {"train": 12, "validation": 3, "test": 4}
    made = load_listops(tmp_path, splits=sizes)
    (path,) = tmp_path.iterdir()
    stamp = path.stat().st_mtime_ns
    again = load_listops(tmp_path, splits=sizes)
    assert path.stat().st_mtime_ns == stamp  # not made anew
    expected = list(distinct_trees(19, seed=0))
    number = 0
    for name, size in sizes.items():
        assert len(made[name]) == size
        for row in range(size):
            assert made[name].expression(row).tobytes() == again[name].expression(row).tobytes() == expected[number]
            assert made[name].values[row] == evaluate(expected[number])
            number += 1
    assert np.concatenate([own.values for own in made.values()]).max() < 10
