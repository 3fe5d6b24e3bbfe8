"""The published networks equal a slow description of them, written from the published code's formulas."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.encoder import EncoderShape, Network
from benchmarks.published_encoder import LraEncoder, UeaEncoder, build_encoder
from primal_dt.attention import SoftmaxAttention

Weights = dict[str, Tensor]
CHANNELS, WIDTH, HEADS, LENGTH, CLASSES, RANK, MULTI = 3, 8, 2, 9, 4, 2, 3


def make(network: Network, attention: str, *, is_pair: bool = False) -> UeaEncoder | LraEncoder:
    torch.manual_seed(0)
    options = {"primal": {"rank": RANK, "rank_multi": MULTI}, "softmax": {"attention_dropout": 0.1}}
    sizes = {"width": WIDTH, "num_heads": HEADS, "mlp_width": 12, "options": options}
    shape = EncoderShape(CLASSES, LENGTH, attention, **sizes, network=network, is_pair=is_pair)  # type: ignore[arg-type]
    embed = nn.Linear(CHANNELS, WIDTH) if network == "uea" else nn.Embedding(7, WIDTH)
    encoder = build_encoder(embed, shape).double().eval()
    assert isinstance(encoder, UeaEncoder | LraEncoder)
    return encoder


def linear(w: Weights, name: str, x: Tensor) -> Tensor:
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def norm(w: Weights, name: str, x: Tensor) -> Tensor:
    return F.layer_norm(x, (WIDTH,), w[f"{name}.weight"], w[f"{name}.bias"])


def heads(x: Tensor) -> list[Tensor]:
    return list(x.split(WIDTH // HEADS, -1))


def softmax_attention(w: Weights, name: str, x: Tensor, keys: Tensor | None) -> Tensor:
    """Canonical attention of one sequence (L, D); ``keys`` marks the real ones, and None means that all count."""
    q, k, v = (heads(linear(w, f"{name}.{part}", x)) for part in ("query", "key", "value"))
    out = []
    for head in range(HEADS):
        scores = q[head] @ k[head].T / math.sqrt(WIDTH // HEADS)
        if keys is not None:
            scores = scores - 1e6 * (1 - keys.double())
        out.append(scores.softmax(-1) @ v[head])
    return linear(w, f"{name}.output", torch.cat(out, -1))


def primal_attention(w: Weights, name: str, x: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
    """Primal-Attention of one sequence (L, D), padding included, and its J. ``real``: heads are zero elsewhere."""
    queries, keys = linear(w, f"{name}.query_key", x).chunk(2, -1)
    rows = torch.linspace(0, len(x) - 1, min(len(x), RANK * MULTI)).long()
    out, objective = [], torch.zeros(())
    parts = zip(heads(queries), heads(keys), heads(x[rows]), strict=True)
    for head, (q, k, sampled) in enumerate(parts):
        e_weight, r_weight = w[f"{name}.e_weight"][head], w[f"{name}.r_weight"][head]
        e = q / q.norm(dim=-1, keepdim=True) @ (sampled.T @ e_weight)
        r = k / k.norm(dim=-1, keepdim=True) @ (sampled.T @ r_weight)
        lam = w[f"{name}.lam"][head].abs().sqrt()
        energy = ((e * lam).square().sum(-1).mean() + (r * lam).square().sum(-1).mean()) / 2
        objective = objective + (energy - (e_weight.T @ r_weight).trace()) / HEADS
        merged = linear(w, f"{name}.merge", torch.cat((e, r), -1))
        out.append(merged if real is None else merged * real[:, None])
    return linear(w, f"{name}.output", torch.cat(out, -1)), objective


def attend(w: Weights, name: str, kind: str, x: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor | None]:
    if kind == "softmax":
        return softmax_attention(w, name, x, real), None
    return primal_attention(w, name, x, real)


def mlp(w: Weights, name: str, x: Tensor) -> Tensor:
    return linear(w, f"{name}.3", F.gelu(linear(w, f"{name}.0", x)))


def slow_uea(encoder: UeaEncoder, series: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Class scores and J of each layer for one series (steps, channels) without padding."""
    w, objectives = encoder.state_dict(), []
    padded = torch.zeros(LENGTH, CHANNELS, dtype=series.dtype)
    padded[: len(series)] = series
    x = linear(w, "embed", padded) * math.sqrt(WIDTH) + w["positions"]
    for number, kind in enumerate(encoder.shape.layer_kinds):
        block = f"blocks.{number}"
        hidden, objective = attend(w, f"{block}.attention", kind, x, None)
        objectives += [] if objective is None else [objective]
        x = norm(w, f"{block}.attention_norm", x + hidden)
        x = norm(w, f"{block}.mlp_norm", x + mlp(w, f"{block}.mlp", x))
    x = F.gelu(norm(w, "final_norm", x))
    x[len(series) :] = 0
    return linear(w, "head", x.flatten()), objectives


def slow_lra(encoder: LraEncoder, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The pooled features (D,) and J of each layer for one sequence (L,) without padding."""
    w, objectives = encoder.state_dict(), []
    padded = torch.full((LENGTH,), 6)
    padded[: len(tokens)] = tokens
    real = torch.arange(LENGTH) < len(tokens)
    x = w["embed.weight"][padded] + w["positions"]
    for number, kind in enumerate(encoder.shape.layer_kinds):
        block = f"blocks.{number}"
        hidden, objective = attend(w, f"{block}.attention", kind, norm(w, f"{block}.attention_norm", x), real)
        objectives += [] if objective is None else [objective]
        x = x + hidden
        x = x + mlp(w, f"{block}.mlp", norm(w, f"{block}.mlp_norm", x))
    return (norm(w, "final_norm", x) * real[:, None]).mean(0), objectives


def lra_scores(encoder: LraEncoder, features: Tensor) -> Tensor:
    w = encoder.state_dict()
    return linear(w, "head.2", linear(w, "head.0", features).relu())


STACKS = pytest.mark.parametrize("attention", ["softmax", "primal-plus", "primalformer"])


@STACKS
def test_uea_network_equals_its_description(attention: str) -> None:
    encoder = make("uea", attention)
    assert isinstance(encoder, UeaEncoder)
    series = [torch.randn(length, CHANNELS, dtype=torch.float64) for length in (5, 7)]
    x = nn.utils.rnn.pad_sequence(series, batch_first=True)
    output = encoder(x, torch.arange(7) < torch.tensor([[5], [7]]), with_objective=True)
    slow = [slow_uea(encoder, one) for one in series]
    torch.testing.assert_close(output.logits, torch.stack([scores for scores, _ in slow]))
    expected = [torch.stack(layer) for layer in zip(*(objectives for _, objectives in slow), strict=True)]
    torch.testing.assert_close(output.objectives, expected)


def test_uea_cuts_longer_series_and_ignores_padding() -> None:
    encoder = make("uea", "primal-plus")
    x = torch.randn(2, 12, CHANNELS, dtype=torch.float64)
    valid = torch.arange(12) < torch.tensor([[12], [4]])
    cut = encoder(x[:, :LENGTH], valid[:, :LENGTH]).logits
    x[1, 4:] = 7.0
    torch.testing.assert_close(encoder(x, valid).logits, cut)


@pytest.mark.parametrize("zero_is_padding", [False, True])
def test_lra_counts_black_pixels_as_padding(zero_is_padding: bool) -> None:
    """So what black looks like does not matter to softmax attention; an all-black picture has finite scores."""
    torch.manual_seed(0)
    sizes = {"width": WIDTH, "num_heads": HEADS, "mlp_width": 12, "zero_is_padding": zero_is_padding}
    shape = EncoderShape(CLASSES, LENGTH, "softmax", **sizes, network="lra")  # type: ignore[arg-type]
    encoder = build_encoder(nn.Embedding(7, WIDTH), shape)
    x = torch.tensor([[3, 0, 5, 0, 0, 1, 2, 2, 6], [0] * LENGTH])
    before = encoder.eval()(x).logits
    with torch.no_grad():
        encoder.get_parameter("embed.weight")[0] += torch.randn(WIDTH)
    assert bool(before.isfinite().all())
    assert torch.allclose(encoder(x).logits[0], before[0]) == zero_is_padding


@STACKS
def test_lra_network_equals_its_description(attention: str) -> None:
    encoder = make("lra", attention)
    assert isinstance(encoder, LraEncoder)
    sequences = [torch.randint(6, (length,)) for length in (4, 8)]
    x = nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    output = encoder(x, torch.arange(8) < torch.tensor([[4], [8]]), with_objective=True)
    slow = [slow_lra(encoder, one) for one in sequences]
    expected = torch.stack([lra_scores(encoder, features) for features, _ in slow])
    torch.testing.assert_close(output.logits, expected)
    if attention != "softmax":
        layers = zip(*(objectives for _, objectives in slow), strict=True)
        means = [torch.stack(layer).mean() for layer in layers]
        torch.testing.assert_close(encoder.penalty(output), torch.stack(means).square().mean())
        torch.testing.assert_close(encoder.penalty(output, "sum"), torch.stack(means).square().sum())


def test_lra_pairs_are_compared_as_published() -> None:
    encoder = make("lra", "primal-plus", is_pair=True)
    assert isinstance(encoder, LraEncoder)
    pairs = [(torch.randint(6, (3,)), torch.randint(6, (5,))), (torch.randint(6, (6,)), torch.randint(6, (2,)))]
    rows = [first for first, _ in pairs] + [second for _, second in pairs]
    x = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    valid = torch.arange(x.shape[1]) < torch.tensor([[len(row)] for row in rows])
    expected = []
    for first, second in pairs:
        (a, _), (b, _) = slow_lra(encoder, first), slow_lra(encoder, second)
        expected.append(lra_scores(encoder, torch.cat((a, b, a * b, a - b))))
    torch.testing.assert_close(encoder(x, valid).logits, torch.stack(expected))


def test_uea_network_starts_as_published() -> None:
    torch.manual_seed(0)
    shape = EncoderShape(
        9, 29, "primal-plus", mlp_width=2048, options={"primal": {"rank": 30, "rank_multi": 5}}, network="uea"
    )
    w = build_encoder(nn.Linear(12, 512), shape).state_dict()
    assert float(w["positions"].abs().max()) <= 0.02
    assert float(w["positions"].std()) == pytest.approx(0.02 / math.sqrt(3), rel=0.02)
    for name in ("e_weight", "r_weight"):  # Frobenius norm 1 in each head
        torch.testing.assert_close(w[f"blocks.1.attention.{name}"].flatten(1).norm(dim=1), torch.ones(8))
    assert w["head.weight"].shape == (9, 29 * 512)


def test_lra_network_starts_as_published() -> None:
    torch.manual_seed(0)
    shape = EncoderShape(10, 256, "softmax", width=64, num_heads=2, mlp_width=128, network="lra")
    w = build_encoder(nn.Embedding(257, 64), shape).state_dict()
    for name in ("embed.weight", "positions"):
        assert float(w[name].std()) == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize("network", ["uea", "lra"])
def test_attention_weights_are_dropped_in_training(network: Network) -> None:
    encoder = make(network, "softmax").train()
    for module in encoder.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    x = torch.randn(2, 5, CHANNELS, dtype=torch.float64) if network == "uea" else torch.randint(6, (2, 5))
    still = encoder(x).logits
    torch.testing.assert_close(encoder(x).logits, still)
    for layer in encoder.modules():
        if isinstance(layer, SoftmaxAttention):
            layer.weight_dropout.p = 0.5
    assert not torch.allclose(encoder(x).logits, still)
