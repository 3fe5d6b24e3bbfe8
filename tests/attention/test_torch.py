"""Layers work with torch's features: compile, export, autocast, state_dict, dropout and empty batches."""

import copy
import shutil
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from primal_dt import CausalPrimalAttention

from .kinds import PRIMAL_VARIANTS, VARIANTS, all_variants, make_batch, make_layer, make_sequences, pad, with_gradients

masked_or_not = pytest.mark.parametrize("masked", [False, True])


@pytest.mark.slow
@masked_or_not
@pytest.mark.parametrize(("name", "causal"), [*PRIMAL_VARIANTS, ("softmax", False), ("softmax", True)])
def test_compiled_layers_equal_eager_ones(name: str, causal: bool, masked: bool) -> None:
    torch.compiler.reset()
    layer = make_layer(name, causal)
    x, valid = pad(make_sequences(10, 6), 12, "both")
    # "aot_eager" traces one graph each for forward and backward, but does not spend minutes generating code.
    calls = (layer, torch.compile(layer, fullgraph=True, backend="aot_eager"))
    options = {"positions": slice(1, None, 3), "with_objective": True}
    outputs = [call(x.requires_grad_(), valid if masked else None, **options) for call in calls]
    torch.testing.assert_close(*[with_gradients(output, layer, x) for output in outputs])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.* is deprecated:DeprecationWarning")  # in torch itself
@pytest.mark.parametrize(("name", "causal"), [("primal", True), ("primal", False), ("softmax", True)])
def test_generated_code_has_the_same_values(name: str, causal: bool) -> None:
    torch.compiler.reset()
    layer = make_layer(name, causal, dtype=torch.float32)
    x, valid = pad(make_sequences(10, 6, dtype=torch.float32), 12, "right")
    compiled: Any = torch.compile(layer, fullgraph=True)
    torch.testing.assert_close(compiled(x, valid).hidden, layer(x, valid).hidden)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["primal", "primal, exponential"])
def test_export_supports_any_batch_and_length(name: str) -> None:
    layer = make_layer(name, True).eval()
    sizes = {0: torch.export.Dim("batch", min=1, max=64), 1: torch.export.Dim("length", min=2, max=256)}
    example = pad(make_sequences(10, 6), 12, "right")
    exported = torch.export.export(layer, example, dynamic_shapes=(sizes, sizes)).module()
    for lengths, padded in [((10, 6), 12), ((7, 3, 2), 33)]:
        x, valid = pad(make_sequences(*lengths), padded, "left")
        torch.testing.assert_close(exported(x, valid).hidden, layer(x, valid).hidden)


# Rounding moves Reformer's tokens between buckets, and Attention-BN divides it by a small variance.
INACCURATE = ("reformer", "attention_bn")


@all_variants
def test_autocast_stays_close_to_single_precision(name: str, causal: bool) -> None:
    layer = make_layer(name, causal, dtype=torch.float32)
    x, valid = pad(make_sequences(10, 6, dtype=torch.float32), 12, "both")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden, objective = layer(x, valid, with_objective=True)
    assert hidden.dtype == torch.bfloat16
    assert objective is None or objective.dtype == torch.float32  # J is a difference of large sums
    (hidden.float().square().sum() + (0 if objective is None else objective.square().sum())).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
    if name not in INACCURATE:
        exact = layer(x, valid, with_objective=True)
        assert (hidden.float() - exact.hidden).norm() < 0.05 * exact.hidden.norm()
        torch.testing.assert_close(objective, exact.objective, atol=0.05, rtol=0.05)


@all_variants
def test_bfloat16_stays_close_to_single_precision(name: str, causal: bool) -> None:
    """With all parameters in bfloat16."""
    layer, x = make_layer(name, causal, dtype=torch.bfloat16), make_batch(2, 9).to(torch.bfloat16)
    hidden = layer(x, with_objective=True).hidden
    assert hidden.dtype == torch.bfloat16
    assert hidden.isfinite().all()
    if name not in INACCURATE:
        exact = copy.deepcopy(layer).float()(x.float()).hidden
        assert (hidden.float() - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize("scale", [0.0, 1e-20, 30.0, 1e4])
@all_variants
def test_outputs_and_gradients_stay_finite(name: str, causal: bool, scale: float) -> None:
    layer = make_layer(name, causal, dtype=torch.float32)
    x = (scale * make_batch(2, 9, dtype=torch.float32)).requires_grad_()
    outputs = [t for t in layer(x, with_objective=True) if t is not None]
    gradients = torch.autograd.grad([t.sin().sum() for t in outputs], [x, *layer.parameters()])
    assert all(t.isfinite().all() for t in (*outputs, *gradients))


def test_softmax_runs_the_fused_kernel_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    fused, seen = F.scaled_dot_product_attention, []

    def watch(q: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append(q.dtype)
        return fused(q, *args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        make_layer("softmax", True, dtype=torch.float32)(make_batch(2, 9, dtype=torch.float32))
    assert seen == [torch.bfloat16]


@all_variants
def test_a_state_dict_holds_the_whole_layer(name: str, causal: bool) -> None:
    """Also random features and rotations: after loading, a layer of another seed has the same outputs."""
    layer, other, x = make_layer(name, causal), make_layer(name, causal, seed=1), make_batch(2, 9)
    assert not torch.equal(layer(x).hidden, other(x).hidden)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x).hidden, other(x).hidden)


@masked_or_not
@all_variants
def test_an_empty_batch_gives_an_empty_result(name: str, causal: bool, masked: bool) -> None:
    x = make_batch(1, 7)[:0]
    valid = torch.ones(0, 7, dtype=torch.bool) if masked else None
    hidden, objective = make_layer(name, causal)(x, valid, with_objective=True)
    assert hidden.shape == x.shape
    assert objective is None or objective.shape == (0,)


NO_OWN_VALUE = ("primal", "linformer", "cosformer")  # no values; projected values; relu features may all be zero


@pytest.mark.parametrize(("name", "causal"), [v for v in VARIANTS if not v[0].startswith(NO_OWN_VALUE)])
def test_a_single_token_attends_to_itself(name: str, causal: bool) -> None:
    """Its output is its own value, projected. Flowformer scales it by sigmoid(1)."""
    layer, x = make_layer(name, causal), make_batch(2, 1)
    value = layer.value(x)
    if name == "flowformer":
        value = value * torch.ones((), dtype=x.dtype).sigmoid()
    torch.testing.assert_close(layer(x).hidden, layer.output(value))


def test_dropout_acts_in_training_only() -> None:
    layer = CausalPrimalAttention(width=8, num_heads=2, dropout=0.5)
    x = torch.randn(4, 16, 8)
    torch.manual_seed(0)
    assert 0.4 < (layer(x).hidden == 0).double().mean() < 0.6
    layer.eval()
    assert torch.equal(layer(x).hidden, layer(x).hidden)
    assert (layer(x).hidden == 0).sum() == 0


@masked_or_not
@pytest.mark.parametrize("fused", [False, True])
def test_attention_dropout_drops_attention_weights(fused: bool, masked: bool) -> None:
    layer, x = make_layer("softmax", True, attention_dropout=0.5, fused=fused), make_batch(2, 9)
    valid = torch.ones(2, 9, dtype=torch.bool) if masked else None
    assert not torch.equal(layer(x, valid).hidden, layer(x, valid).hidden)
    layer.eval()
    torch.testing.assert_close(layer(x, valid).hidden, make_layer("softmax", True)(x).hidden)


@masked_or_not
@all_variants
def test_no_call_waits_for_the_device(name: str, causal: bool, masked: bool) -> None:
    """On the meta device, reading a value back or using a CPU tensor raises an error."""
    layer = make_layer(name, causal).to("meta")
    x = make_batch(2, 9).to("meta").requires_grad_()
    valid = torch.ones(2, 9, dtype=torch.bool, device="meta") if masked else None
    output = layer(x, valid, positions=slice(1, None, 3), with_objective=True)
    assert output.hidden.shape == x[:, 1::3].shape
    with_gradients(output, layer, x)
    assert layer.kernel_matrix(x, valid).shape == (2, layer.num_heads, 9, 9)
    if isinstance(layer, CausalPrimalAttention):
        token, real = x[:, 0], None if valid is None else valid[:, 0]
        assert layer.step(token, layer.initial_state(2), real)[0].shape == token.shape
        assert layer.step_window(token, layer.initial_window(2, 3), real)[0].shape == token.shape
