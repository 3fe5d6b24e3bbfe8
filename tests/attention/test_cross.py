"""Cross-attention of Primal-Attention: equal to a slow reference, masked, and with the KSVD of a rectangular kernel."""

from typing import Any

import pytest
import torch
from torch import Tensor

from primal_dt import PrimalAttention

from .kinds import make_layer, make_sequences, pad
from .slow import _parts, slow_primal_rows

QUERIES, KEYS = (5, 2, 7), (3, 9, 4)


def make(**options: Any) -> Any:
    return make_layer("primal, e", False, **options)


def slow_cross(layer: PrimalAttention, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """The output (L, D) and J of queries x (L, D) and keys z (M, D), one head and one token at a time."""
    rows = slow_primal_rows(layer, z)
    assert rows is not None
    heads, terms = [], []
    for h, part in enumerate(_parts(layer, x)):
        n = len(rows[h])
        w_e, w_r = layer.e_weight[h][:n], layer.r_weight[h][:n]
        q, k = layer.query_key(x).chunk(2, -1)[0][:, part], layer.query_key(z).chunk(2, -1)[1][:, part]
        e = [w_e.T @ rows[h] @ (one / one.norm()) for one in q]
        r = [w_r.T @ rows[h] @ (one / one.norm()) for one in k]
        lam = layer.lam[h].abs()
        left, right = (sum((lam * one * one).sum() for one in side) / len(side) / 2 for side in (e, r))
        terms.append(left + right - torch.trace(w_e.T @ w_r))
        heads.append(torch.stack([layer.merge(one) for one in e]))
    return layer.output(torch.cat(heads, 1)), torch.stack(terms).mean()


@pytest.mark.parametrize("side", ["right", "left", "scattered"])
def test_cross_attention_equals_its_reference(side: str) -> None:
    """In outputs, J and gradients, with padding among the queries and among the keys."""
    layer = make()
    x, valid = pad(make_sequences(*QUERIES), 8, side, fill=float("nan"))
    z, keys_valid = pad(make_sequences(*KEYS, seed=1), 10, side, fill=float("nan"))
    hidden, objective = layer(x, valid, with_objective=True, keys=z, keys_valid=keys_valid)
    slow = [slow_cross(layer, x[row][valid[row]], z[row][keys_valid[row]]) for row in range(3)]
    for row, (expected, _) in enumerate(slow):
        torch.testing.assert_close(hidden[row][valid[row]], expected)
    assert bool((hidden[~valid] == 0).all())
    torch.testing.assert_close(objective, torch.stack([term for _, term in slow]))
    weights = list(layer.parameters())
    loss = hidden.sin().sum() + objective.square().sum()
    expected_loss = torch.stack([out.sin().sum() + term.square() for out, term in slow]).sum()
    torch.testing.assert_close(
        torch.autograd.grad(loss, weights), torch.autograd.grad(expected_loss, weights), rtol=1e-6, atol=1e-9
    )


def test_a_sequence_as_its_own_keys_is_self_attention() -> None:
    layer, (x, valid) = make(), pad(make_sequences(*QUERIES), 8, "right")
    own = layer(x, valid, with_objective=True)
    torch.testing.assert_close(layer(x, valid, with_objective=True, keys=x, keys_valid=valid), own)


def test_positions_select_queries() -> None:
    layer, (x,), (z,) = make(), make_sequences(6), make_sequences(4, seed=1)
    full = layer(x[None], keys=z[None]).hidden
    chosen = torch.tensor([4, 0])
    torch.testing.assert_close(layer(x[None], keys=z[None], positions=chosen).hidden, full[:, chosen])


def test_a_query_sees_every_sampled_key_but_no_other_query() -> None:
    layer, x, z = make(), torch.randn(1, 4, 12).double(), torch.randn(1, 6, 12).double()
    moved_query, moved_key = x.clone(), z.clone()
    moved_query[0, 2] += 1.0
    moved_key[0, 3] += 1.0
    original = layer(x, keys=z).hidden
    changed = (layer(moved_query, keys=z).hidden != original).any(-1)[0]
    assert changed.tolist() == [False, False, True, False]
    assert bool((layer(x, keys=moved_key).hidden != original).any(-1).all())


@pytest.mark.parametrize(("num_queries", "num_keys"), [(9, 5), (5, 9), (7, 7)])
def test_the_svd_of_the_kernel_is_a_stationary_point(num_queries: int, num_keys: int) -> None:
    """J and its gradients at W_e and W_r vanish there, and J does not vanish for another Lambda."""
    layer, rank = make(rank=2, rank_multi=4), 2
    (x,), (z,) = make_sequences(num_queries), make_sequences(num_keys, seed=1)
    rows = slow_primal_rows(layer, z)
    assert rows is not None
    with torch.no_grad():
        for h, part in enumerate(_parts(layer, x)):
            q, k = layer.query_key(x).chunk(2, -1)[0][:, part], layer.query_key(z).chunk(2, -1)[1][:, part]
            left_map, right_map = (one / one.norm(dim=1, keepdim=True) @ rows[h].T for one in (q, k))  # f phi
            u, s, v = torch.linalg.svd(left_map @ right_map.T)
            n = len(rows[h])
            layer.e_weight[h].zero_()[:n] = right_map.T @ v.T[:, :rank]
            layer.r_weight[h].zero_()[:n] = (num_keys / num_queries) ** 0.5 * left_map.T @ u[:, :rank]
            layer.lam[h] = (num_queries * num_keys) ** 0.5 / s[:rank]
        scale = float(layer._trace(None).abs().max())
    objective = layer(x[None], with_objective=True, keys=z[None]).objective
    assert abs(float(objective.detach())) < 1e-12 * scale
    for gradient in torch.autograd.grad(objective.sum(), [layer.e_weight, layer.r_weight]):
        assert float(gradient.abs().max()) < 1e-10 * scale
    with torch.no_grad():
        layer.lam *= 1.1
        assert abs(float(layer(x[None], with_objective=True, keys=z[None]).objective)) > 1e-3 * scale


def test_sequences_without_queries_or_keys_have_no_objective() -> None:
    layer, x, z = make(), torch.randn(2, 3, 12).double(), torch.randn(2, 4, 12).double()
    seen = torch.tensor([[True] * 4, [False] * 4])
    for masks in ({"keys_valid": seen}, {"valid": seen[:, :3]}):
        hidden, objective = layer(x, keys=z, with_objective=True, **masks)
        assert objective[1] == 0
        assert bool(hidden.isfinite().all())


@pytest.mark.parametrize(
    ("name", "causal", "options", "message"),
    [
        ("primal", True, {"scores": "e"}, "keys are for bidirectional layers"),
        ("primal", False, {}, "needs scores='e', not 'both': a query has no right score"),
        ("primal", False, {"scores": "e", "data_dependent": False}, "otherwise the queries do not see the keys"),
        (
            "primal",
            False,
            {"scores": "e", "feature_map": "exponential"},
            "needs data_dependent=True and the cosine map",
        ),
    ],
)
def test_unsupported_layers_say_why(name: str, causal: bool, options: dict[str, Any], message: str) -> None:
    x = torch.randn(1, 4, 12).double()
    with pytest.raises(ValueError, match=message):
        make_layer(name, causal, **options)(x, keys=x)


def test_wrong_arguments_are_rejected() -> None:
    layer, x = make(), torch.randn(2, 4, 12).double()
    with pytest.raises(ValueError, match="keys_valid is given without keys"):
        layer(x, keys_valid=torch.ones(2, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"keys \(batch size 1\) must have the batch size of x \(2\)"):
        layer(x, keys=x[:1])
    with pytest.raises(ValueError, match="width 12"):
        layer(x, keys=x[..., :5])
