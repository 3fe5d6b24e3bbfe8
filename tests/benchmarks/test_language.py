"""Language models: what they read, train, score, generate and cost."""

import json
import math
import os
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.batches import EpochOrder
from benchmarks.blocks import CAUSAL_STACKS, PENALIZED, Block
from benchmarks.language import data, run
from benchmarks.language.cost import Cell, cost_table
from benchmarks.language.data import EOS, FILES, UNK, Blocks, Corpus, load_corpus
from benchmarks.language.flags import PUBLISHED, SIZES, Config
from benchmarks.language.generate import STREAMING_STACKS, KeyValues, LanguageStream, generate
from benchmarks.language.model import LanguageModel, LanguageShape, sinusoids
from benchmarks.language.optimizer import make_optimizer, make_schedule
from benchmarks.language.perplexity import perplexity, spans
from benchmarks.language.report import results_table
from benchmarks.language.run import main
from benchmarks.published import WIKITEXT_103
from benchmarks.runs import RESULT, SavedRun
from benchmarks.step import ONE_PROCESS
from primal_dt.attention import CausalPrimalAttention, PrimalState, SoftmaxAttention
from primal_dt.training.metrics_log import read_metrics

CPU = torch.device("cpu")
NUM_WORDS, LENGTH = 23, 12
TEXT = {
    "train": " the cat sat \n\n on the mat , the cat \n the dog",
    "valid": "the bird sat \n",
    "test": "a dog \n the \u00e9t\u00e9 \n",
}
every_stack = pytest.mark.parametrize("attention", CAUSAL_STACKS)


def write(folder: Path, texts: dict[str, str] = TEXT) -> Path:
    folder.mkdir(exist_ok=True)
    for split, text in texts.items():
        (folder / FILES[split]).write_bytes(text.encode())
    return folder


def make_model(attention: str, dtype: torch.dtype = torch.float64, **changes: Any) -> LanguageModel:
    torch.manual_seed(0)
    options = {"primal": {"rank": 3, **changes.pop("primal", {})}}
    sizes: dict[str, Any] = {
        "num_layers": 2,
        "width": 16,
        "num_heads": 2,
        "mlp_width": 24,
        "dropout": 0.0,
        "options": options,
    }
    return LanguageModel(LanguageShape(NUM_WORDS, LENGTH, attention, **(sizes | changes))).to(dtype).eval()


def make_stream(number: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(NUM_WORDS, (number,), generator=generator, dtype=torch.int32)


# The data


def test_words_are_numbered_by_frequency(own_folders: Path) -> None:
    """The text ends without a line break, and has an empty line. Equally frequent words keep their order."""
    corpus = load_corpus(write(own_folders / "text"))
    assert corpus.vocabulary == [EOS, UNK, "the", "cat", "sat", "on", "mat", ",", "dog"]
    the, cat, sat, on, mat, comma, dog = range(2, 9)
    assert corpus.streams["train"].tolist() == [the, cat, sat, 0, 0, on, the, mat, comma, the, cat, 0, the, dog, 0]
    assert corpus.streams["valid"].tolist() == [the, 1, sat, 0]
    assert corpus.streams["test"].tolist() == [1, dog, 0, the, 1, 0]
    assert {stream.dtype for stream in corpus.streams.values()} == {torch.int32}


def test_unk_in_the_text_is_the_unknown_word(own_folders: Path) -> None:
    corpus = load_corpus(write(own_folders / "text", TEXT | {"train": "the <unk> <unk> cat \n"}))
    assert corpus.streams["train"].tolist() == [2, 1, 1, 3, 0]
    assert corpus.vocabulary == [EOS, UNK, "the", "cat"]


def test_decoding_gives_the_text_back(own_folders: Path) -> None:
    random = np.random.default_rng(0)
    words = [f"w{number}" for number in random.zipf(1.3, 4000) % 300]
    lines = [" ".join(part) for part in np.split(words, np.sort(random.integers(0, 4000, 200)))]
    corpus = load_corpus(write(own_folders / "text", TEXT | {"train": "\n".join(lines) + "\n"}))
    assert corpus.decode(corpus.streams["train"].tolist()) == "\n".join(lines) + "\n"
    assert corpus.encode("w1 never w2") == [corpus.vocabulary.index("w1"), 1, corpus.vocabulary.index("w2")]
    counts = Counter(words)
    assert [counts[word] for word in corpus.vocabulary[2:]] == sorted(counts.values(), reverse=True)


def test_the_cache_gives_the_same_corpus(own_folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(own_folders / "text")
    first = load_corpus(folder)
    read = data._read
    monkeypatch.setattr(data, "_read", lambda *_: pytest.fail("the files were read again"))
    second = load_corpus(folder)
    assert second.vocabulary == first.vocabulary
    assert all(torch.equal(second.streams[split], stream) for split, stream in first.streams.items())
    monkeypatch.setattr(data, "_read", read)
    write(folder, TEXT | {"valid": "the cat \n"})  # other files have another cache
    assert load_corpus(folder).streams["valid"].tolist() == [2, 3, 0]


@pytest.mark.parametrize("name", [data.TOKENS, data.INDEX])
def test_a_damaged_cache_is_written_again(own_folders: Path, name: str) -> None:
    folder = write(own_folders / "text")
    first = load_corpus(folder)
    (path,) = own_folders.rglob(name)
    content = path.read_bytes()
    path.write_bytes(content[:-4] + b"\x07" + content[-3:])
    assert load_corpus(folder).streams["train"].tolist() == first.streams["train"].tolist()
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ({"valid": None}, r"wiki\.valid\.tokens is missing: .* wiki\.train\.tokens, wiki\.valid\.tokens, wiki\.test"),
        ({"train": b""}, r"wiki\.train\.tokens is empty: it must contain text"),
        ({"test": b" \n \n"}, r"wiki\.test\.tokens is empty"),
        ({"valid": b"the cat \n a \xff b \n"}, r"wiki\.valid\.tokens, line 2: it is not UTF-8 text"),
    ],
)
def test_unusable_files_are_rejected(own_folders: Path, texts: dict[str, bytes | None], message: str) -> None:
    folder = write(own_folders / "text")
    for split, content in texts.items():
        path = folder / FILES[split]
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_corpus(folder)


def test_a_missing_folder_is_rejected(own_folders: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere is not a folder: --data must be a folder with wiki\.train\.tokens"):
        load_corpus(own_folders / "nowhere")


@pytest.mark.parametrize("number", [48, 50])
def test_an_epoch_predicts_each_token_once(number: int) -> None:
    """Except those of a shorter block at the end. Each input is the token before its label."""
    stream = torch.arange(5, 5 + number, dtype=torch.int32)
    blocks = Blocks(stream, 8)
    order = EpochOrder(len(blocks), 3, seed=0)
    batches = [blocks.batch(order.rows(step), CPU) for step in range(order.steps_per_epoch)]
    labels = torch.cat([batch.labels for batch in batches])
    assert sorted(labels.flatten().tolist()) == list(range(5, 53))
    assert labels[:, 0].tolist() != sorted(labels[:, 0].tolist())  # the blocks are shuffled
    inputs = torch.cat([batch.x for batch in batches])
    torch.testing.assert_close(inputs, torch.where(labels == 5, 0, labels - 1))  # <eos> before the first token


# The model


@every_stack
def test_a_word_does_not_change_the_scores_before_it(attention: str) -> None:
    model, x = make_model(attention), make_stream(2 * LENGTH).reshape(2, LENGTH).long()
    before = model(x).logits
    for place in (4, LENGTH - 1):
        changed = x.clone()
        changed[:, place] = (x[:, place] + 7) % NUM_WORDS
        after = model(changed).logits
        torch.testing.assert_close(after[:, :place], before[:, :place], atol=1e-12, rtol=0)
        assert not torch.allclose(after[:, place:], before[:, place:], atol=1e-6)


@every_stack
def test_a_word_changes_the_scores_after_it(attention: str) -> None:
    """Reformer's hashes and windows choose what a token sees, so one word need not reach the end."""
    model, x = make_model(attention), make_stream(LENGTH)[None].long()
    changed = x.clone()
    changed[0, 3] = (x[0, 3] + 7) % NUM_WORDS
    later = slice(4, None) if attention == "reformer" else slice(-1, None)
    assert not torch.allclose(model(changed).logits[:, later], model(x).logits[:, later], atol=1e-6)


@pytest.mark.parametrize("attention", ["softmax", "primal-plus", "primalformer"])
def test_the_model_equals_its_description(attention: str) -> None:
    model, x = make_model(attention), make_stream(LENGTH)[None].long()
    w = model.state_dict()
    embedding, D = w["embed.weight"], 16
    places = torch.arange(LENGTH)[:, None] / 10_000 ** (torch.arange(D // 2) / (D // 2 - 1))
    hidden = embedding[x[0]] * math.sqrt(D) + torch.cat((places.sin(), places.cos()), -1).float()

    def norm(name: str, z: Tensor) -> Tensor:
        return F.layer_norm(z, (D,), w[f"{name}.weight"], w[f"{name}.bias"])

    def linear(name: str, z: Tensor) -> Tensor:
        return z @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    objectives = []
    for number, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        name = f"blocks.{number}"
        mixed, objective = block.attention(norm(f"{name}.attention_norm", hidden)[None], with_objective=True)
        objectives += [] if objective is None else [objective]
        hidden = hidden + mixed[0]
        middle = linear(f"{name}.mlp.0", norm(f"{name}.mlp_norm", hidden)).relu()
        hidden = hidden + linear(f"{name}.mlp.3", middle)
    output = model(x, with_objective=True)
    torch.testing.assert_close(output.logits[0], norm("final_norm", hidden) @ embedding.T, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(output.objectives, objectives)
    assert len(output.objectives) == {"softmax": 0, "primal-plus": 1, "primalformer": 2}[attention]
    assert model(x).objectives == []


@pytest.mark.parametrize(
    ("attention", "layers"), [("softmax", []), ("primal-plus", [3]), ("primalformer", [0, 1, 2, 3])]
)
def test_stacks_have_causal_primal_layers(attention: str, layers: list[int]) -> None:
    blocks = make_model(attention, num_layers=4).blocks
    kinds = [type(block.attention) for block in blocks]
    assert [number for number, kind in enumerate(kinds) if kind is CausalPrimalAttention] == layers
    assert set(kinds) <= {CausalPrimalAttention, SoftmaxAttention}
    assert all(block.attention.causal for block in blocks)  # type: ignore[union-attr]


def test_embedding_and_output_are_one_matrix() -> None:
    model = make_model("primal-plus", torch.float32)
    assert sum(parameter.shape == (NUM_WORDS, 16) for parameter in model.parameters()) == 1
    x = make_stream(LENGTH)[None].long()
    F.cross_entropy(model(x).logits[0], x[0]).backward()
    gradient = model.get_parameter("embed.weight").grad
    assert gradient is not None
    assert bool(gradient.any(1).all())  # words that x lacks have one too


def test_the_embedding_starts_as_published() -> None:
    torch.manual_seed(0)
    weight = LanguageModel(LanguageShape(2_000, attention="softmax", num_layers=1, width=64)).embed.weight.detach()
    assert float(weight.std()) == pytest.approx(64**-0.5, rel=0.02)
    assert abs(float(weight.mean())) < 1e-3


def test_positions_of_a_later_part_are_those_of_the_whole() -> None:
    whole = sinusoids(torch.arange(1_000), 16)
    assert torch.equal(sinusoids(torch.arange(900, 1_000), 16), whole[900:])
    torch.testing.assert_close(whole.square().sum(1), torch.full((1_000,), 8.0))


def test_dropout_is_where_it_is_published() -> None:
    """After the embedding, and at the outputs of attention and MLP; not inside the MLP or on attention weights."""
    torch.manual_seed(0)
    model = LanguageModel(LanguageShape(NUM_WORDS, LENGTH, "primal-plus", width=16, num_heads=2, mlp_width=24))
    dropped = {name for name, module in model.named_modules() if isinstance(module, nn.Dropout) and module.p == 0.1}
    blocks = [f"blocks.{number}.{part}" for number in range(6) for part in ("attention.dropout", "mlp.4")]
    assert dropped == {"dropout", *blocks}


def of_linear(inputs: int, outputs: int) -> int:
    return (inputs + 1) * outputs


def test_published_parameter_counts() -> None:
    """With the sizes of WikiText-103's model, but a small vocabulary."""
    D, H, R = 512, 8, 30
    P = D // H
    softmax = 4 * of_linear(D, D)
    primal = 3 * of_linear(D, D) + 2 * H * P * R + H * R + of_linear(2 * R, P)
    rest = 1_000 * D + 6 * (of_linear(D, 2048) + of_linear(2048, D) + 4 * D) + 2 * D
    expected = {
        "softmax": rest + 6 * softmax,
        "flowformer": rest + 6 * softmax,
        "primal-plus": rest + 5 * softmax + primal,
        "primalformer": rest + 6 * primal,
    }
    for attention, number in expected.items():
        with torch.device("meta"):
            model = LanguageModel(LanguageShape(1_000, attention=attention, options={"primal": {"rank": R}}))
        assert sum(parameter.numel() for parameter in model.parameters()) == number, attention


@every_stack
def test_equal_parameters_are_equal(attention: str) -> None:
    """Without the embedding, to within half a hidden unit in each layer."""
    sizes: dict[str, Any] = {"width": 64, "num_heads": 4, "mlp_width": 256, "num_layers": 3, "equal_parameters": True}
    numbers = [
        sum(parameter.numel() for parameter in make_model(stack, **sizes).blocks.parameters())
        for stack in ("softmax", attention)
    ]
    assert abs(numbers[1] - numbers[0]) <= 3 * (64 + 1)
    assert numbers[1] == pytest.approx(numbers[0], rel=0.01)
    plain = make_model("softmax", **sizes | {"equal_parameters": False})
    assert numbers[0] == sum(parameter.numel() for parameter in plain.blocks.parameters())


# Perplexity


@torch.no_grad()
def slow_perplexity(model: LanguageModel, stream: list[int], length: int, window: int) -> float:
    """Each token alone, from the tokens that its block sees before it."""
    total = 0.0
    for place, token in enumerate(stream):
        scored = length - window
        block = place // scored * scored  # the first scored token of its block
        past = [0, *stream][max(0, block - window) : place + 1]
        total -= float(model(torch.tensor([past])).logits[0, -1].log_softmax(-1)[token])
    return math.exp(total / len(stream))


@pytest.mark.parametrize("window", [0, 1, 5, LENGTH - 1])
@pytest.mark.parametrize("number", [3 * LENGTH, 3 * LENGTH + 5, 7])
def test_perplexity_equals_a_slow_reference(number: int, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.language.perplexity.BATCH_TOKENS", 2 * LENGTH)
    monkeypatch.setattr("benchmarks.language.perplexity.SLICE_SCORES", 5 * NUM_WORDS)
    model, stream = make_model("primal-plus").train(), make_stream(number)
    found = perplexity(model, stream, length=LENGTH, window=window)
    assert model.training  # its mode is restored
    assert found == pytest.approx(slow_perplexity(model.eval(), stream.tolist(), LENGTH, window), rel=1e-6)


@pytest.mark.parametrize(("number", "length", "window"), [(100, 10, 0), (101, 10, 3), (7, 10, 9), (1, 4, 2)])
def test_each_token_is_scored_once(number: int, length: int, window: int) -> None:
    every = list(spans(number, length, window))
    assert [place for span in every for place in range(span.scored, span.end)] == list(range(number))
    assert all(span.end - span.first <= length for span in every)
    assert all(span.scored - span.first == min(window, span.scored) for span in every)


def test_a_uniform_model_has_the_perplexity_of_its_vocabulary() -> None:
    model = make_model("softmax")
    nn.init.zeros_(model.embed.weight)
    assert perplexity(model, make_stream(101), length=LENGTH) == pytest.approx(NUM_WORDS, rel=1e-6)


# Generation


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("feature_map", ["cosine", "exponential"])
@pytest.mark.parametrize("attention", STREAMING_STACKS)
def test_streamed_scores_equal_the_parallel_ones(
    attention: str, feature_map: str, dtype: torch.dtype, tolerance: float
) -> None:
    """Over twice the length of a block, in parts of several lengths and one by one."""
    model = make_model(attention, dtype, primal={"feature_map": feature_map}, num_layers=3)
    x = make_stream(4 * LENGTH).reshape(2, 2 * LENGTH).long()
    parallel = model(x).logits
    for sizes in ([1] * (2 * LENGTH), [7, 1, 1, 9, 6]):
        stream = LanguageStream(model, batch_size=2)
        streamed = torch.cat([stream(part) for part in x.split(sizes, 1)], 1)
        torch.testing.assert_close(streamed, parallel, atol=tolerance, rtol=tolerance)


def test_the_state_of_a_primal_layer_does_not_grow() -> None:
    stream = LanguageStream(make_model("primal-plus"))
    sizes = []
    for token in make_stream(2 * LENGTH).long():
        stream(token[None, None])
        primal, softmax = stream.states[1], stream.states[0]
        assert isinstance(primal, PrimalState)
        assert isinstance(softmax, KeyValues)
        sizes.append((sum(part.numel() for part in primal if part is not None), softmax.keys.shape[2]))
    assert sizes == [(16 + 1, number) for number in range(1, 2 * LENGTH + 1)]


def slow_greedy(model: LanguageModel, prompt: list[int], number: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(number):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("attention", STREAMING_STACKS)
def test_generated_words_are_those_of_the_parallel_model(attention: str) -> None:
    model, prompt = make_model(attention), [0, 4, 11]
    generator = torch.Generator().manual_seed(0)
    greedy = list(generate(model, prompt, 15, temperature=0.0, generator=generator))
    assert greedy == slow_greedy(model, prompt, 15)
    cold = list(generate(model, prompt, 15, temperature=1e-6, generator=generator))
    assert cold == greedy


def test_words_are_drawn_with_their_probabilities() -> None:
    model, temperature = make_model("primal-plus"), 3.0
    generator = torch.Generator().manual_seed(0)
    words = [next(generate(model, [0, 4], 1, temperature=temperature, generator=generator)) for _ in range(1_000)]
    drawn = torch.tensor(words).bincount(minlength=NUM_WORDS) / 1_000
    expected = (model(torch.tensor([[0, 4]])).logits[0, -1] / temperature).softmax(-1)
    torch.testing.assert_close(drawn.double(), expected, atol=0.05, rtol=0)
    texts = [
        list(generate(model, [0], 9, temperature=9.0, generator=torch.Generator().manual_seed(seed)))
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_other_kinds_do_not_stream() -> None:
    with pytest.raises(ValueError, match=r"LinearAttention has no form for single tokens here: .* softmax, primal-p"):
        LanguageStream(make_model("linear"))


# Training


def test_the_schedule_is_the_inverse_square_root() -> None:
    optimizer = make_optimizer(nn.Linear(1, 1), 1e-3)
    schedule = make_schedule(optimizer, 1e-3, 6_000)
    group = optimizer.param_groups[0]
    assert (group["betas"], group["weight_decay"]) == ((0.9, 0.98), 0.01)
    rates = []
    optimizer.step()  # before the schedule's first one, as torch expects
    for _ in range(24_001):
        rates.append(group["lr"])
        schedule.step()
    assert rates[0] == pytest.approx(1e-7)
    assert rates[3_000] == pytest.approx((1e-3 + 1e-7) / 2)
    assert rates[6_000] == pytest.approx(1e-3)
    assert rates[24_000] == pytest.approx(5e-4)
    np.testing.assert_allclose(np.diff(rates[:6_000], n=2), 0, atol=1e-12)


def words(number: int, seed: int) -> str:
    """Lines that repeat a cycle of ten words, from random places of it."""
    random = np.random.default_rng(seed)
    starts = random.integers(10, size=number)
    return "\n".join(" ".join(f"w{(start + step) % 10}" for step in range(15)) for start in starts) + "\n"


@pytest.fixture
def folder(own_folders: Path) -> Path:
    """A small corpus, in a folder with a cache of its own."""
    return write(own_folders / "toy", {"train": words(60, 0), "valid": words(5, 1), "test": words(6, 2)})


def config_of(folder: Path, attention: str = "primal-plus", **changes: Any) -> Config:
    settings: dict[str, Any] = {
        "width": 16,
        "num_layers": 2,
        "num_heads": 2,
        "mlp_width": 32,
        "dropout": 0.1,
        "tokens": 12,
        "batch_size": 4,
        "accumulate": 2,
        "rank": 4,
        "steps": 6,
        "warmup_steps": 3,
        "eval_every_steps": 3,
        "save_every_steps": 2,
        "threads": 1,
        "out": folder.parent / "out",
    }
    return Config(attention=(attention,), seeds=(0,), data=folder, **(settings | changes))


def weights_of(config: Config) -> dict[str, Tensor]:
    return dict(torch.load(config.run_folder(config.attention[0], 0) / "weights.pt"))


def curves(config: Config) -> list[dict[str, float]]:
    lines = read_metrics(config.run_folder(config.attention[0], 0))
    return [{name: line[name] for name in line if name != "time" and "second" not in name} for line in lines]


@pytest.mark.parametrize("attention", ["softmax", "primal-plus"])
def test_a_resumed_training_is_bit_identical(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], attention: str
) -> None:
    """The program is stopped by SIGTERM in its fourth step, and started again."""
    whole, parts = (config_of(folder, attention, out=folder.parent / name) for name in ("whole", "parts"))
    main(whole)
    batch, seen = Blocks.batch, []

    def stop(self: Blocks, rows: list[int], device: torch.device) -> Any:
        seen.append(rows)
        if len(seen) == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return batch(self, rows, device)

    monkeypatch.setattr(Blocks, "batch", stop)
    with pytest.raises(SystemExit):
        main(parts)
    assert "of 6: the same command continues" in capsys.readouterr().out
    assert (parts.run_folder(attention, 0) / "checkpoint.pt").is_file()
    assert not (parts.run_folder(attention, 0) / RESULT).exists()
    main(parts)
    expected = weights_of(whole)
    assert all(torch.equal(weight, expected[name]) for name, weight in weights_of(parts).items())
    assert curves(parts) == curves(whole)


def test_a_finished_training_is_not_repeated(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(folder)
    main(config)
    first = curves(config)
    assert [line["step"] for line in first] == [3, 6, 6]  # the third has the final perplexities
    assert {"valid/perplexity", "test/perplexity"} <= first[2].keys()
    assert first[1]["valid/perplexity"] == first[2]["valid/perplexity"]
    assert "train/penalty" in first[1]
    assert len(list(config.run_folder("primal-plus", 0).glob("events.out.tfevents.*"))) == 1  # for TensorBoard
    capsys.readouterr()
    main(config)
    printed = capsys.readouterr().out
    assert f"(from {config.run_folder('primal-plus', 0)}; --again to retrain)" in printed
    assert f"test perplexity {first[2]['test/perplexity']:.2f}" in printed
    assert "Context: each word is predicted from the 1 to 12 words before it." in printed


def test_saved_models_have_the_reported_perplexity(folder: Path) -> None:
    config = config_of(folder, context_window=3)
    main(config)
    corpus, content = load_corpus(folder), json.loads((config.run_folder("primal-plus", 0) / RESULT).read_text())
    model = LanguageModel(LanguageShape(**content["shape"]))
    model.load_state_dict(weights_of(config))
    for split in ("valid", "test"):
        found = perplexity(model, corpus.streams[split], length=12, window=3)
        assert found == pytest.approx(content["scores"][split], rel=1e-6)
    assert content["num_parameters"] == sum(parameter.numel() for parameter in model.parameters())


def test_settings_of_other_results_differ(folder: Path) -> None:
    """In what is compared and in the folder; what a result does not depend on changes neither."""
    config = config_of(folder)
    own, place = config.settings("primal-plus", 0), config.run_folder("primal-plus", 0)
    others: list[dict[str, Any]] = [
        *({name: value} for name, value in (("lr", 0.5), ("rank", 3), ("eta", 0.7), ("steps", 7), ("tokens", 13))),
        *({name: True} for name in ("bf16", "compile", "equal_parameters")),
        *({"penalty": "sum"}, {"context_window": 2}, {"accumulate": 1}, {"primal_init": "orthonormal"}),
    ]
    for other in others:
        changed = replace(config, **other)
        assert changed.settings("primal-plus", 0) != own, other
        assert changed.run_folder("primal-plus", 0) != place, other
    same = replace(config, eval_every_steps=0, save_every_steps=1, generate="w1", cost=True, threads=2, again=True)
    assert (same.settings("primal-plus", 0), same.run_folder("primal-plus", 0)) == (own, place)
    write(folder, {"valid": words(7, 3)})
    assert config.settings("primal-plus", 0) != own  # the text is another


def test_the_defaults_are_the_published_settings() -> None:
    config = Config(data=Path("text"))
    sizes = ("width", "num_layers", "num_heads", "mlp_width", "tokens", "dropout", "steps", "lr", "warmup_steps")
    assert [getattr(config, name) for name in sizes] == [512, 6, 8, 2048, 512, 0.1, 150_000, 1e-3, 6_000]
    assert config.tokens * config.batch_size == 2_048 * 16
    assert config.batch_size // config.accumulate * config.tokens == 2_048
    assert config.primal("primal-plus") == {
        "rank": 30,
        "eta": 0.1,
        "feature_map": "cosine",
        "scores": "both",
        "init": "unit",
        "penalty": "mean",
    }
    assert config.primal("softmax") == {}
    assert (config.plan("primal-plus", 0).eta, config.plan("softmax", 0).eta) == (PUBLISHED.eta, 0.0)
    assert config.plan("softmax", 0).clip is None
    shape = config.shape("primal-plus", 9)
    assert replace(shape, options={}) == LanguageShape(9)
    assert set(SIZES) <= vars(config).keys()


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["softmax", "flowformer", "primal-plus", "primalformer"])
def test_training_learns_a_cycle_of_words(folder: Path, attention: str) -> None:
    """Inside a line, the next word is certain. A line has 15 words and begins with one of ten."""
    config = config_of(
        folder, attention, dropout=0.0, steps=400, warmup_steps=50, lr=1e-2, width=32, eval_every_steps=0
    )
    main(config)
    scores = json.loads((config.run_folder(attention, 0) / RESULT).read_text())["scores"]
    assert scores["test"] < 2.2
    entropy = math.log(10) / 16  # of a line's first word, for each of its 16 tokens
    assert scores["test"] > math.exp(entropy) * 0.9


@pytest.mark.slow
def test_a_cycle_is_generated(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes: dict[str, Any] = {"dropout": 0.0, "steps": 400, "warmup_steps": 50, "lr": 1e-2, "width": 32}
    config = config_of(folder, "primal-plus", **sizes, generate="w3 w4 what w6 w7", generate_tokens=4)
    main(config)
    printed = capsys.readouterr().out
    assert "Words that are not in the vocabulary are read as <unk>: what" in printed
    assert "primal-plus, seed 0: w3 w4 what w6 w7 w8 w9 w0 w1\n" in printed


@pytest.mark.slow
def test_two_processes_train_as_one(folder: Path) -> None:
    flags = {"--width": 16, "--num-layers": 2, "--num-heads": 2, "--mlp-width": 32, "--dropout": 0, "--tokens": 12}
    flags |= {"--batch-size": 4, "--accumulate": 2, "--rank": 4, "--steps": 6, "--warmup-steps": 3, "--threads": 1}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = [str(word) for flag in flags.items() for word in flag]
    command = [*torchrun, "-m", "benchmarks.language", "--data", str(folder), "--out", str(folder.parent / "two")]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    stacks = ["--attention", "primal-plus", "--seeds", "0", "--eval-every-steps", "0"]
    subprocess.run([*command, *stacks, *arguments], check=True, env=environment, capture_output=True)
    sizes: dict[str, Any] = {"dropout": 0.0, "eval_every_steps": 0}
    one, two = (config_of(folder, **sizes, out=folder.parent / name) for name in ("one", "two"))
    main(replace(one, save_every_steps=500))
    for name, weight in weights_of(one).items():
        if not name.endswith("key.bias"):  # softmax does not depend on it: its gradient is rounding errors
            torch.testing.assert_close(weights_of(two)[name], weight, atol=1e-4, rtol=1e-3, msg=name)
    assert curves(two)[-1]["test/perplexity"] == pytest.approx(curves(one)[-1]["test/perplexity"], rel=1e-4)


def test_processes_share_an_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.language.perplexity.BATCH_TOKENS", LENGTH)
    model, stream, parts = make_model("softmax"), make_stream(5 * LENGTH + 2), []

    def collect(results: Any, processes: Any) -> Tensor:
        parts.append(torch.stack(list(results)).sum(0))
        return parts[-1]

    whole = math.log(perplexity(model, stream, length=LENGTH)) * len(stream)
    monkeypatch.setattr("benchmarks.language.perplexity.total_over", collect)
    for rank in range(4):
        perplexity(model, stream, length=LENGTH, processes=replace(ONE_PROCESS, rank=rank, count=4))
    assert float(torch.stack(parts).sum()) == pytest.approx(whole, rel=1e-6)
    assert all(part > 0 for part in parts)


# The command line and the tables


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attention": ("linformer",)}, r"attention must be among softmax, primal-plus, .*flowformer.*not linformer"),
        ({"attention": ("magic",)}, "attention must be among softmax, primal-plus, .*, not magic"),
        ({"attention": ("softmax", "softmax")}, "attention must have at least one entry and no duplicates"),
        ({"seeds": ()}, "seeds must have at least one entry"),
        ({"data_dependent": True}, "data_dependent must be off: .* would let a causal layer see the future"),
        ({"width": 18, "num_heads": 4}, r"width \(18\) must be even, and divisible by num_heads \(4\)"),
        ({"width": 15, "num_heads": 5}, r"width \(15\) must be even"),
        ({"num_layers": 0}, r"num_layers \(0\) must be at least 1"),
        ({"tokens": -1}, r"tokens \(-1\) must be at least 1"),
        ({"warmup_steps": 0}, r"warmup_steps \(0\) must be at least 1"),
        ({"rank": 0}, r"rank \(0\) must be at least 1"),
        ({"eta": -0.1}, r"eta \(-0\.1\) must be finite and at least 0"),
        ({"lr": math.nan}, r"lr \(nan\) must be finite and above 0"),
        ({"cost_seconds": 0.0}, r"cost_seconds \(0\.0\) must be finite and above 0"),
        ({"dropout": 1.0}, r"dropout \(1\.0\) must be at least 0 and below 1"),
        ({"temperature": -1.0}, r"temperature \(-1\.0\) must be finite and at least 0"),
        ({"context_window": 512}, r"context_window \(512\) must be at least 0 and below tokens \(512\)"),
        ({"eval_every_steps": -1}, r"eval_every_steps \(-1\) must be at least 0"),
        ({"attention": ("linear",), "generate": "a"}, "generate supports softmax, primal-plus, primalformer, not line"),
        ({"device": "nonsense"}, "the device 'nonsense' cannot be used"),
        ({}, "nowhere is not a folder: --data must be a folder with"),
    ],
)
def test_invalid_settings_are_rejected(own_folders: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        main(Config(**{"data": Path("nowhere"), **settings}))


def test_a_text_shorter_than_a_block_is_rejected(folder: Path) -> None:
    with pytest.raises(ValueError, match="the training split has 960 tokens, fewer than a block: tokens is 2000"):
        main(config_of(folder, tokens=2_000))


@pytest.mark.slow
def test_the_program_explains_what_is_wrong(own_folders: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", "benchmarks.language", "--data", "nowhere"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=own_folders)
    assert done.returncode == 1
    assert done.stderr.startswith("error: nowhere is not a folder: --data must be a folder with wiki.train.tokens")


@pytest.mark.slow
def test_costs_are_measured_and_join_the_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(folder, cost=True, cost_seconds=0.01)
    main(replace(config, attention=("softmax", "primal-plus")))
    content = json.loads((config.out / run.COST).read_text())
    cells = {cell["attention"]: Cell(**cell) for cell in content["cells"]}
    assert list(cells) == ["softmax", "primal-plus"]
    assert all(cell.seconds > 0 and cell.memory_mib > 0 for cell in cells.values())
    assert content["report"] == cost_table(cells).splitlines()
    assert content["threads"] == 1
    main(replace(config, cost=False))
    assert f" {cells['primal-plus'].memory_mib:,.0f} |" in capsys.readouterr().out.splitlines()[-6]
    main(replace(config, cost=False, tokens=10))  # another cost
    assert capsys.readouterr().out.splitlines()[-6].endswith("|          |")


def cells_of(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]


def test_costs_stand_beside_the_published_ratios() -> None:
    cells = {"softmax": Cell("softmax", 2.0, 100.0), "flowformer": Cell("flowformer", 3.0, 110.0)}
    found = cells_of(cost_table(cells | {"primalformer": Cell("primalformer", 1.0, 90.0)}))
    assert found[2] == ["softmax", "2,000", "1.00 (1.00)", "100", "1.00 (1.00)"]
    assert found[3] == ["flowformer", "3,000", "1.50 (1.29)", "110", "1.10 (1.17)"]
    assert found[4] == ["primalformer", "1,000", "0.50", "90", "0.90"]  # it is not published
    assert cells_of(cost_table({"flowformer": cells["flowformer"]}))[2] == ["flowformer", "3,000", "", "110", ""]


def test_table_has_the_published_results_beside_ours() -> None:
    runs = {
        attention: [SavedRun({"valid": 100.0 + seed, "test": 90.0 + 2 * seed}, None, 5_000) for seed in (0, 1)]
        for attention in ("softmax", "primalformer")
    }
    cells = cells_of(results_table("wikitext-2", runs, {"softmax": Cell("softmax", 0.25, 1234.0)}))
    assert cells[2] == ["softmax", "100.5 ± 0.7", "91.0 ± 1.4", "2", "33.0", "5,000", "250", "1,234"]
    assert cells[3] == ["primalformer", "100.5 ± 0.7", "91.0 ± 1.4", "2", "", "5,000", "", ""]
    assert set(WIKITEXT_103) <= set(CAUSAL_STACKS)
    assert set(PENALIZED) <= set(CAUSAL_STACKS)


def test_a_corpus_knows_its_words() -> None:
    corpus = Corpus([EOS, UNK, "a", "b"], {}, "")
    assert corpus.encode("b a <eos> c") == [3, 2, 0, 1]
    assert corpus.decode([0, 2, 3, 0, 0, 1]) == "\na b\n\n<unk>"
