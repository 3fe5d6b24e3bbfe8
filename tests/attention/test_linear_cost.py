"""Linear kinds build no square matrix: the elements they compute grow linearly with the length."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .kinds import VARIANTS, WIDTH, both_directions, make_layer

SQUARE = ("softmax", "attention_bn", "attention_sh")


class Elements(TorchDispatchMode):
    """Counts the operators of a forward and backward pass, and the elements of the tensors that they return."""

    total = largest = operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.operators += 1
        self.total += sum(sizes)
        self.largest = max(self.largest, *sizes, 0)
        return result


def count(layer: torch.nn.Module, length: int) -> Elements:
    x = torch.randn(1, length, WIDTH, requires_grad=True)
    with Elements() as elements:  # type: ignore[no-untyped-call]
        hidden, objective = layer(x, torch.ones(1, length, dtype=torch.bool), with_objective=True)
        (hidden.sum() if objective is None else hidden.sum() + objective.sum()).backward()
    return elements


def growth(name: str, causal: bool) -> tuple[float, float, float]:
    """Growth of the total, of the largest tensor and of the number of operators when the length doubles."""
    options: dict[str, Any] = {"cosformer": {"horizon": 4096}, "linformer": {"max_length": 4096}}.get(name, {})
    layer = make_layer(name, causal, dtype=torch.float32, **options)
    short, long = count(layer, 1024), count(layer, 2048)
    return long.total / short.total, long.largest / short.largest, long.operators / short.operators


@pytest.mark.slow
@pytest.mark.parametrize(("name", "causal"), [v for v in VARIANTS if not v[0].startswith(SQUARE)])
def test_linear_kinds_grow_linearly(name: str, causal: bool) -> None:
    total, largest, operators = growth(name, causal)
    assert total < 2.05
    assert largest < 2.05
    assert operators == 1  # no loop over tokens


@pytest.mark.slow
@both_directions
def test_the_count_detects_a_square_matrix(causal: bool) -> None:
    assert growth("softmax, explicit", causal)[1] > 3.9
