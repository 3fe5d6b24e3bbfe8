"""The layers inside torch: compile, export, autocast, state_dict, dropout, and the smallest batches."""

import copy
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from primal_dt import CausalPrimalAttention
from primal_dt.attention import AttentionOutput, DualAttention

from .kinds import PRIMAL_VARIANTS, VARIANTS, WIDTH, make_batch, make_layer, pad

COMPILED = [*PRIMAL_VARIANTS, ("softmax", False), ("softmax", True)]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("name", "causal"), COMPILED)
def test_a_full_graph_compiles_to_the_same_values_and_gradients(name: str, causal: bool, masked: bool) -> None:
    torch.compiler.reset()
    layer = make_layer(name, causal)
    x, valid = pad(make_batch((10, 6)), 12, "both")
    mask = valid if masked else None
    inputs = [x.requires_grad_(), *layer.parameters()]

    def run(call: Callable[..., AttentionOutput]) -> list[Tensor]:
        hidden, objective = call(x, mask, positions=slice(1, None, 3), with_objective=True)
        loss = hidden.sin().sum() + (0 if objective is None else objective.square().sum())
        return [hidden, *torch.autograd.grad(loss, inputs)]

    # "aot_eager" traces forward and backward as one graph each, without the minutes of code generation.
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for eager, traced in zip(run(layer), run(compiled), strict=True):
        torch.testing.assert_close(traced, eager)


@pytest.mark.skipif(shutil.which("c++") is None, reason="torch.compile generates C++ and there is no compiler")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.* is deprecated:DeprecationWarning")  # torch's own
@pytest.mark.parametrize(("name", "causal"), [("primal", True), ("primal", False), ("softmax", True)])
def test_generated_code_has_the_same_values(name: str, causal: bool) -> None:
    torch.compiler.reset()
    layer = make_layer(name, causal, dtype=torch.float32)
    x, valid = pad(make_batch((10, 6), dtype=torch.float32), 12, "right")
    compiled = torch.compile(layer, fullgraph=True)
    torch.testing.assert_close(compiled(x, valid).hidden, layer(x, valid).hidden)


@pytest.mark.parametrize("name", ["primal", "primal, exponential"])
def test_the_causal_layer_exports_with_any_batch_and_length(name: str) -> None:
    layer = make_layer(name, True).eval()
    x, valid = pad(make_batch((10, 6)), 12, "right")
    batch, length = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("length", min=2, max=256)
    exported = torch.export.export(
        layer, (x, valid), dynamic_shapes=({0: batch, 1: length}, {0: batch, 1: length})
    ).module()
    for lengths, padded in [((10, 6), 12), ((7, 3, 2), 33)]:
        x, valid = pad(make_batch(lengths), padded, "left")
        torch.testing.assert_close(exported(x, valid).hidden, layer(x, valid).hidden)


@pytest.mark.parametrize(("name", "causal"), VARIANTS)
def test_autocast_to_bfloat16_stays_close_to_single_precision(name: str, causal: bool) -> None:
    layer = make_layer(name, causal, dtype=torch.float32)
    x, valid = pad(make_batch((10, 6), dtype=torch.float32), 12, "both")
    hold = copy.deepcopy(layer)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden, objective = layer(x, valid, with_objective=True)
    assert hidden.dtype == torch.bfloat16
    loss = hidden.float().square().sum()
    if objective is not None:
        assert objective.dtype == torch.float32  # J is a difference of large sums
        loss = loss + objective.square().sum()
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
    if name in ("reformer", "attention_bn"):
        # Rounding moves tokens between buckets, or is divided by a small variance: finite is all there is to ask.
        return
    exact = hold(x, valid, with_objective=True)
    assert (hidden.float() - exact.hidden).norm() < 0.05 * exact.hidden.norm()
    if objective is not None:
        torch.testing.assert_close(objective, exact.objective, atol=0.05, rtol=0.05)


def test_softmax_hands_half_precision_to_the_fused_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer("softmax", True, dtype=torch.float32)
    fused, seen = F.scaled_dot_product_attention, []

    def watch(q: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append(q.dtype)
        return fused(q, *args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer(torch.stack(make_batch((9, 9), dtype=torch.float32)))
    assert seen == [torch.bfloat16]


@pytest.mark.parametrize(("name", "causal"), VARIANTS)
def test_a_layer_in_bfloat16_runs(name: str, causal: bool) -> None:
    """All parameters in bfloat16, as a user's model may have them: close to the same layer in single precision."""
    layer = make_layer(name, causal, dtype=torch.bfloat16)
    x = torch.stack(make_batch((9, 9))).to(torch.bfloat16)
    hidden = layer(x, with_objective=True).hidden
    assert hidden.dtype == torch.bfloat16
    assert hidden.isfinite().all()
    if name not in ("reformer", "attention_bn"):
        exact = copy.deepcopy(layer).float()(x.float()).hidden
        assert (hidden.float() - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize(("name", "causal"), VARIANTS)
def test_a_state_dict_carries_the_whole_layer(name: str, causal: bool) -> None:
    """Random features and rotations too: a layer of another seed gives the same outputs after loading."""
    layer, other = make_layer(name, causal, seed=0), make_layer(name, causal, seed=1)
    x = torch.stack(make_batch((9, 9)))
    assert not torch.equal(layer(x).hidden, other(x).hidden)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x).hidden, other(x).hidden)


@pytest.mark.parametrize(("name", "causal"), VARIANTS)
def test_an_empty_batch_gives_an_empty_result(name: str, causal: bool) -> None:
    layer = make_layer(name, causal)
    x = torch.zeros(0, 7, WIDTH, dtype=torch.float64)
    for valid in (None, torch.ones(0, 7, dtype=torch.bool)):
        hidden, objective = layer(x, valid, with_objective=True)
        assert hidden.shape == (0, 7, WIDTH)
        assert objective is None or objective.shape == (0,)


OTHER_THAN_VALUE = ("primal", "linformer", "cosformer")  # no values; values projected; relu features may vanish


@pytest.mark.parametrize(("name", "causal"), [v for v in VARIANTS if not v[0].startswith(OTHER_THAN_VALUE)])
def test_a_single_token_attends_to_itself(name: str, causal: bool) -> None:
    """Alone, its output is its own value, projected (Flowformer scales it by a flow below one)."""
    layer = make_layer(name, causal)
    x = torch.stack(make_batch((1, 1)))
    assert isinstance(layer, DualAttention)
    value = layer.value(x)
    if name == "flowformer":
        value = value.unflatten(-1, (layer.num_heads, -1)) * torch.sigmoid(torch.ones((), dtype=x.dtype))
        value = value.flatten(-2)
    torch.testing.assert_close(layer(x).hidden, layer.output(value))


def test_dropout_acts_in_training_only() -> None:
    layer = CausalPrimalAttention(width=8, num_heads=2, dropout=0.5)
    x = torch.randn(4, 16, 8)
    torch.manual_seed(0)
    dropped = (layer(x).hidden == 0).double().mean()
    assert 0.4 < dropped < 0.6
    layer.eval()
    assert torch.equal(layer(x).hidden, layer(x).hidden)
    assert (layer(x).hidden == 0).sum() == 0


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_attention_dropout_drops_attention_weights(fused: bool, masked: bool) -> None:
    layer = make_layer("softmax", True, attention_dropout=0.5, fused=fused)
    x = torch.stack(make_batch((9, 9)))
    valid = torch.ones(2, 9, dtype=torch.bool) if masked else None
    assert not torch.equal(layer(x, valid).hidden, layer(x, valid).hidden)
    layer.eval()
    torch.testing.assert_close(layer(x, valid).hidden, make_layer("softmax", True)(x).hidden)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("name", "causal"), VARIANTS)
def test_nothing_waits_for_the_device(name: str, causal: bool, masked: bool) -> None:
    """On a device without data, forward and backward: a value that is read back, or a CPU tensor, would raise."""
    layer = make_layer(name, causal).to("meta")
    x = torch.zeros(2, 9, WIDTH, dtype=torch.float64, device="meta", requires_grad=True)
    valid = torch.ones(2, 9, dtype=torch.bool, device="meta") if masked else None
    hidden, objective = layer(x, valid, positions=slice(1, None, 3), with_objective=True)
    assert hidden.shape == (2, 3, WIDTH)
    (hidden.sum() if objective is None else hidden.sum() + objective.sum()).backward()
    assert layer.kernel_matrix(x, valid).shape == (2, layer.num_heads, 9, 9)
    if isinstance(layer, CausalPrimalAttention):
        token, real = x[:, 0], None if valid is None else valid[:, 0]
        assert layer.step(token, layer.initial_state(2), real)[0].shape == (2, WIDTH)
        assert layer.step_window(token, layer.initial_window(2, 3), real)[0].shape == (2, WIDTH)
