"""No square matrix where none is promised: the numbers a step makes grow with the length, not with its square."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from primal_dt.attention import AttentionLayer

from .kinds import VARIANTS, WIDTH, make_layer

SQUARE = ("softmax", "attention_bn", "attention_sh")


class Elements(TorchDispatchMode):
    """Counts the elements of every tensor that an operator gives, in the forward and backward pass."""

    total = 0
    largest = 0
    operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.operators += 1
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.total += leaf.numel()
                self.largest = max(self.largest, leaf.numel())
        return result


def count(layer: AttentionLayer, length: int) -> Elements:
    x = torch.randn(1, length, WIDTH, requires_grad=True)
    valid = torch.ones(1, length, dtype=torch.bool)
    with Elements() as elements:  # type: ignore[no-untyped-call]
        hidden, objective = layer(x, valid, with_objective=True)
        loss = hidden.sum() if objective is None else hidden.sum() + objective.sum()
        loss.backward()
    return elements


def growth(name: str, causal: bool) -> tuple[float, float, float]:
    """How the total, the largest and the number of operators grow when the length is doubled."""
    options: dict[str, Any] = {"cosformer": {"horizon": 4096}, "linformer": {"max_length": 4096}}.get(name, {})
    layer = make_layer(name, causal, dtype=torch.float32, **options)
    short, long = count(layer, 1024), count(layer, 2048)
    return long.total / short.total, long.largest / short.largest, long.operators / short.operators


@pytest.mark.parametrize(("name", "causal"), [v for v in VARIANTS if not v[0].startswith(SQUARE)])
def test_linear_kinds_grow_linearly(name: str, causal: bool) -> None:
    total, largest, operators = growth(name, causal)
    assert total < 2.05
    assert largest < 2.05
    assert operators == 1  # no loop over tokens


@pytest.mark.parametrize("causal", [False, True])
def test_the_count_would_see_a_square_matrix(causal: bool) -> None:
    assert growth("softmax, explicit", causal)[1] > 3.9
