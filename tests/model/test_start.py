"""The start of the Decision Transformer: as published with ``init="published"``, small with ``init="small"``."""

import math
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from primal_dt.attention import SoftmaxAttention
from primal_dt.attention.dropout import masks_from
from primal_dt.config import PRESETS
from primal_dt.model.transformer import DecisionTransformer, ModelShape

S, A = 17, 60
"""Many actions, so that the deviation of the head's biases is known well."""
stacks = pytest.mark.parametrize("attention", ["primal-plus", "softmax", "primalformer", "flowformer"])


def make(attention: str = "primal-plus", **options: Any) -> DecisionTransformer:
    """A model of the paper's size, with the seed fixed."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"width": 256, "num_heads": 4, "rank": 96, "attention": attention}
    return DecisionTransformer(ModelShape(S, (-1.0,) * A, (1.0,) * A, **(sizes | options)))


def expected_std(model: DecisionTransformer, name: str, init: str) -> float:
    """The standard deviation of a parameter at the start, by its group."""
    part, _, kind = name.rpartition(".")
    if "norm" in part:
        return 0.0
    module = model.get_submodule(part)
    in_blocks, in_attention = part.startswith("blocks."), ".attention" in part
    small = in_blocks if init == "published" else not in_attention
    if isinstance(module, nn.Linear):
        uniform = 1 / math.sqrt(3 * module.in_features)  # torch's default, weight and bias alike
        return (0.0 if kind == "bias" else 0.02) if small else uniform
    if isinstance(module, nn.Embedding):
        return 0.02 if small else 1.0
    if kind in ("e_weight", "r_weight"):  # Frobenius norm 1 in each head
        return 1 / math.sqrt(64 * 96)
    assert kind == "lam"
    return math.sqrt(1 / 5 - 1 / 9)  # the square of a uniform number


@stacks
@pytest.mark.parametrize("init", ["published", "small"])
def test_every_parameter_starts_with_its_deviation(attention: str, init: Literal["published", "small"]) -> None:
    model = make(attention, init=init)
    for name, value in model.named_parameters():
        expected = expected_std(model, name, init)
        # a sample of n numbers has a relative error of about 1 / sqrt(2 n); small biases have few numbers
        tolerance = 5 / math.sqrt(2 * value.numel())
        assert float(value.detach().std()) == pytest.approx(expected, rel=tolerance, abs=1e-12), name
        if name.endswith("norm.weight"):
            assert bool((value == 1).all())


def variance(x: Tensor) -> float:
    return float(x.var(dim=0).mean())


def time_share(model: DecisionTransformer) -> float:
    """The share of the timestep in the variance of a state token, over standardized states and timesteps."""
    with torch.no_grad():
        state = model.embed_state(torch.randn(4000, S))
        time = model.embed_timestep(torch.randint(1000, (4000,)))
        bias = float(model.embed_state.bias.var())
        return variance(time) / (variance(time) + variance(state) + bias)


def test_time_is_three_quarters_of_a_state_token() -> None:
    assert time_share(make()) == pytest.approx(0.74, abs=0.02)
    assert time_share(make(init="small")) < 0.1


def test_presets_drop_as_published_or_not_at_all() -> None:
    quick, paper = PRESETS["quick"][1].model, PRESETS["paper"][1].model
    assert (paper.init, paper.dropout, paper.attention_dropout, paper.penalty) == ("published", 0.1, 0.1, "mean")
    assert (paper.primal_init, paper.scores, paper.feature_map, paper.eta) == ("unit", "both", "cosine", 0.05)
    assert (quick.init, quick.dropout, quick.attention_dropout) == ("small", 0.0, 0.0)


@pytest.mark.parametrize("attention", ["primal-plus", "softmax"])
def test_attention_weights_are_dropped_in_softmax_layers(attention: str) -> None:
    layers = [m for m in make(attention, attention_dropout=0.1).modules() if isinstance(m, SoftmaxAttention)]
    assert [layer.attention_dropout for layer in layers] == [0.1] * (2 if attention == "primal-plus" else 3)


def test_dropped_weights_come_from_the_given_generator() -> None:
    """Not from torch's, which threads share. A tenth of the weights is zero, the others are scaled up."""
    torch.manual_seed(0)
    layer = SoftmaxAttention(width=8, num_heads=2, causal=True, attention_dropout=0.1, right_padded=True).train()
    x = torch.randn(4, 30, 8)
    outputs: list[Tensor] = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed + len(outputs))  # must not matter
        with masks_from(torch.Generator().manual_seed(seed)):
            outputs.append(layer(x).hidden)
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.allclose(outputs[0], outputs[2])
    torch.manual_seed(0)
    mean = torch.stack([layer(x).hidden for _ in range(400)]).mean(0)
    torch.testing.assert_close(mean, layer.eval()(x).hidden, atol=0.06, rtol=0.05)


def test_rank_32_has_the_parameters_of_softmax() -> None:
    """In a model of the width and heads of ``quick``, so that the stacks can be compared at equal size."""
    sizes: dict[str, Any] = {"width": 128, "num_heads": 1, "rank": 32}
    primal, softmax = (make(attention, **sizes).num_parameters() for attention in ("primal-plus", "softmax"))
    assert abs(primal - softmax) < 1e-3 * softmax
