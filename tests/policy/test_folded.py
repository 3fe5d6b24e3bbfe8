"""Folded blocks are the same function as the model's own."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from primal_dt.model.transformer import Block, ModelShape
from primal_dt.policy.folded import FoldedBlock, fold_blocks
from tests.model.small import SHAPE, random_model

LAST = slice(-1, None)
SHAPES = pytest.mark.parametrize(
    "shape",
    [
        replace(SHAPE, attention="softmax"),
        *(replace(SHAPE, attention="primalformer", scores=scores) for scores in ("both", "e", "r")),
    ],
    ids=lambda shape: f"{shape.attention}-{shape.scores}",
)


def both(shape: ModelShape) -> list[tuple[Block, FoldedBlock]]:
    blocks = [block for block in random_model(shape, 0.3, torch.float64).blocks if isinstance(block, Block)]
    folded = [block for block in fold_blocks(blocks) if isinstance(block, FoldedBlock)]
    return list(zip(blocks, folded, strict=True))


@SHAPES
@pytest.mark.parametrize("positions", [None, LAST], ids=["all", "last"])
@torch.no_grad()
def test_folded_blocks_compute_the_same(shape: ModelShape, positions: slice | None) -> None:
    x = torch.randn(3, 7, shape.width, dtype=torch.float64)
    for block, folded in both(shape):
        expected, _ = block(x, None, positions=positions)
        torch.testing.assert_close(folded(x, None, positions=positions)[0], expected)


def test_other_layers_are_not_folded() -> None:
    blocks = [random_model(replace(SHAPE, **changes), 0.1).blocks[-1] for changes in OTHERS]
    assert fold_blocks(blocks) == blocks


OTHERS: list[dict[str, Any]] = [{"attention": "linear"}, {"feature_map": "exponential"}]
