"""ListOps, generated as in the Long-Range Arena: nested MIN, MAX, MED and SM of digits, to be evaluated.

``[MAX 4 [SM 7 8 ] 0 ]`` is 5: SM is the sum modulo 10, MED the integer part of the median. Trees have the distribution
of the published generator. A node is an operator with probability 0.25; otherwise, and at the maximum depth, it is a
digit. An operator has 2 to 10 arguments. Trees with more than 500 and fewer than 2,000 tokens are accepted (operators,
closing brackets and digits count), and duplicates are discarded. The seeds are our own.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from primal_dt.system.files import atomic_write

__all__ = ["NUM_CLASSES", "TOKENS", "ListOps", "evaluate", "generate", "load_listops"]

DIGITS = tuple("0123456789")
OPERATORS: dict[str, Callable[[list[int]], int]] = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: int(np.median(values)),
    "[SM": lambda values: sum(values) % 10,
}
END = "]"
TOKENS = (*DIGITS, *OPERATORS, END)
"""All tokens. A token is encoded as its index in this tuple."""
END_TOKEN, FIRST_OPERATOR = TOKENS.index(END), len(DIGITS)
NUM_CLASSES = len(DIGITS)
OPERATOR_SHARE, MAX_DEPTH, MAX_ARGUMENTS = 0.25, 10, 10
MIN_LENGTH, MAX_LENGTH = 500, 2_000
SPLITS = {"train": 96_000, "validation": 2_000, "test": 2_000}


def generate(draw: Callable[[], float], *, longest: int = MAX_LENGTH) -> bytes | None:
    """Draw one tree and return its tokens in order, or None if it has ``longest`` tokens or more.

    Args:
        draw: returns a uniform random number in [0, 1).
        longest: the limit on the number of tokens. Drawing stops as soon as it is reached.
    """
    tokens = bytearray()
    waiting: list[int] = []  # missing arguments of each open operator
    while True:
        if len(waiting) + 1 < MAX_DEPTH and draw() <= OPERATOR_SHARE:
            tokens.append(FIRST_OPERATOR + int(draw() * len(OPERATORS)))
            waiting.append(2 + int(draw() * (MAX_ARGUMENTS - 1)))
        else:
            tokens.append(int(draw() * len(DIGITS)))
            if waiting:
                waiting[-1] -= 1
        while waiting and waiting[-1] == 0:
            waiting.pop()
            tokens.append(END_TOKEN)
            if waiting:
                waiting[-1] -= 1
        if len(tokens) + len(waiting) >= longest:  # each open operator still needs its bracket
            return None
        if not waiting:
            return bytes(tokens)


def evaluate(tokens: bytes) -> int:
    """Evaluate an expression to a digit."""
    operators = list(OPERATORS.values())
    open_lists: list[tuple[int, list[int]]] = []
    for token in tokens:
        if token == END_TOKEN:
            operator, values = open_lists.pop()
            value = operators[operator](values)
        elif token >= FIRST_OPERATOR:
            open_lists.append((token - FIRST_OPERATOR, []))
            continue
        else:
            value = token
        if not open_lists:
            return value
        open_lists[-1][1].append(value)
    raise ValueError("the expression has no end")


def distinct_trees(number: int, seed: int) -> Iterator[bytes]:
    """Generate ``number`` distinct trees of an accepted length."""
    draw = random.Random(seed).random
    seen: set[bytes] = set()
    while len(seen) < number:
        tokens = generate(draw)
        if tokens is not None and len(tokens) > MIN_LENGTH and tokens not in seen:
            seen.add(tokens)
            yield tokens


@dataclass(frozen=True)
class ListOps:
    """Expressions of one split, concatenated."""

    tokens: np.ndarray
    """(number of all tokens,) uint8."""
    ends: np.ndarray
    """(number of expressions,) int64, where each expression ends."""
    values: np.ndarray
    """(number of expressions,) int64, the value of each."""

    def __len__(self) -> int:
        return len(self.values)

    def expression(self, number: int) -> np.ndarray:
        """Tokens of one expression, (length,) uint8."""
        return self.tokens[0 if number == 0 else self.ends[number - 1] : self.ends[number]]


def load_listops(folder: Path, *, seed: int = 0, splits: dict[str, int] = SPLITS) -> dict[str, ListOps]:
    """Load the splits from a file in the folder. If it is missing, generate it first, which takes a minute or two."""
    sizes = "-".join(map(str, splits.values()))
    path = folder / f"listops-{sizes}-seed-{seed}.npz"
    if not path.exists():
        number = sum(splits.values())
        trees = list(tqdm(distinct_trees(number, seed), "generating ListOps", number, unit=" trees", disable=None))
        with atomic_write(path) as file:
            np.savez_compressed(
                file,
                tokens=np.frombuffer(b"".join(trees), np.uint8),
                ends=np.cumsum([len(tree) for tree in trees]),
                values=np.array([evaluate(tree) for tree in trees]),
            )
    with np.load(path, allow_pickle=False) as file:
        tokens, ends, values = file["tokens"], file["ends"], file["values"]
    found, first = {}, 0
    for name, number in splits.items():
        begin = 0 if first == 0 else int(ends[first - 1])
        rows = slice(first, first + number)
        found[name] = ListOps(tokens[begin : ends[rows.stop - 1]], ends[rows] - begin, values[rows])
        first += number
    return found
