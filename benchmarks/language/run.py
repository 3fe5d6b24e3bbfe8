"""Word-level language models on WikiText, with any causal attention stack.

The data are WikiText's standard files: wiki.train.tokens, wiki.valid.tokens and wiki.test.tokens in the folder --data.

The defaults are the published settings for WikiText-103 (fairseq's transformer_lm): 6 layers, width 512, 8 heads, MLP
2048, tied embeddings, dropout 0.1, blocks of 512 tokens, 64 blocks per update in 16 parts, 150,000 updates of Adam at
1e-3 with an inverse square root schedule. Gradients are not clipped. The last block of the training split is left out
if it is shorter than the others.

The result is the perplexity after the last update, on the validation and the test split. With --cost, nothing is
trained: the time of a training step is measured for all stacks alternately, and the memory in a fresh process for each.
With --generate, trained models continue a text.
"""

import json
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.batches import EpochOrder
from benchmarks.language.cost import Cell, Job, cost_table, measure
from benchmarks.language.data import EOS, SPLITS, UNK, Blocks, Corpus, load_corpus
from benchmarks.language.flags import PUBLISHED_STEPS, SIZES, Config
from benchmarks.language.generate import generate
from benchmarks.language.model import LanguageModel
from benchmarks.language.optimizer import make_optimizer, make_schedule
from benchmarks.language.perplexity import perplexity
from benchmarks.language.report import results_table
from benchmarks.program import save_report
from benchmarks.runs import SavedRun, load_weights, num_parameters, run_stacks, save_run
from benchmarks.trainer import Curves, Trainer
from primal_dt.system.files import check_writable
from primal_dt.system.process import keep_freed_memory
from primal_dt.system.provenance import commit
from primal_dt.training.distributed import Processes, choose_device, join_processes

__all__ = ["COST", "Config", "main", "train"]

COST = "cost.json"


def train(config: Config, attention: str, seed: int, corpus: Corpus, processes: Processes) -> SavedRun:
    """Train one language model, and compute its perplexity on the validation and the test split."""
    device, settings, folder = processes.device, config.settings(attention, seed), config.run_folder(attention, seed)
    training = Blocks(corpus.streams["train"], config.tokens)
    if len(training) == 0:
        number = len(corpus.streams["train"])
        raise ValueError(f"the training split has {number} tokens, fewer than a block: tokens is {config.tokens}")
    torch.manual_seed(seed)
    model = LanguageModel(config.shape(attention, len(corpus.vocabulary))).to(device)
    optimizer = make_optimizer(model, config.lr)
    order = EpochOrder(len(training), config.batch_size, seed)
    seen: dict[int, Curves] = {}  # the last step's evaluation serves as the final one

    def evaluate(split: str) -> Curves:
        stream, window = corpus.streams[split], config.context_window
        value = perplexity(model, stream, length=config.tokens, window=window, processes=processes)
        return {f"{split}/perplexity": value}

    def validate() -> Curves:
        if trainer.step not in seen:
            seen[trainer.step] = evaluate("valid")
        return seen[trainer.step]

    version = commit()  # of the code that trains, even if it changes meanwhile
    trainer = Trainer(
        model,
        optimizer,
        lambda step: (training.batch(rows, device) for rows in order.shares(step, processes.rank, processes.count)),
        config.plan(attention, seed),
        folder,
        settings=settings,
        processes=processes,
        schedule=make_schedule(optimizer, config.lr, config.warmup_steps),
        evaluate=validate,
    )
    found = trainer.run(
        name=f"{attention}, seed {seed}", final=lambda: {**validate(), **evaluate("test")}, again=config.again
    )
    scores = {split: found[f"{split}/perplexity"] for split in SPLITS[1:]}
    run = SavedRun(scores, version, num_parameters(model))
    if processes.is_main:
        save_run(folder, model, settings, run, shape=asdict(model.shape), source=config.data)
    trainer.finish()
    return run


def load_together(config: Config, processes: Processes) -> Corpus:
    """Load the corpus. Rank 0 goes first and writes the cache, from which the others read."""
    if not processes.is_main:
        processes.agree(True)
    corpus = load_corpus(config.data)
    if processes.is_main:
        processes.agree(True)
    return corpus


def run_all(config: Config, corpus: Corpus, processes: Processes) -> dict[str, list[SavedRun]]:
    """Train every stack with every seed, unless a finished run has the result: stack -> results."""
    return run_stacks(
        config,
        lambda attention, seed: train(config, attention, seed, corpus, processes),
        lambda run: ", ".join(f"{split} perplexity {run.scores[split]:.2f}" for split in SPLITS[1:]),
        processes,
    )


def report(config: Config, corpus: Corpus, runs: dict[str, list[SavedRun]]) -> str:
    """Our results beside the published ones, and what they mean."""
    embedding = config.width * len(corpus.vocabulary)
    path = config.out / COST
    cost = json.loads(path.read_text()) if path.is_file() else {}
    cells = {}
    if cost.get("sizes") == cost_sizes(config, corpus):
        cells = {cell["attention"]: Cell(**cell) for cell in cost["cells"]}
    return "\n".join(
        [
            results_table(config.corpus_name, runs, cells),
            "",
            f"Context: each word is predicted from the {config.context_window + 1} to {config.tokens} words before it.",
            f"The embedding of {len(corpus.vocabulary):,} words has {embedding:,} of the parameters.",
            f"Steps: {config.steps:,} (published for WikiText-103: {PUBLISHED_STEPS:,}).",
        ]
    )


def cost_sizes(config: Config, corpus: Corpus) -> dict[str, Any]:
    """What the cost of a step depends on, except the attention stack."""
    primal = config.primal("primal-plus")
    return {
        "corpus": config.corpus_name,
        "num_words": len(corpus.vocabulary),
        **{name: getattr(config, name) for name in SIZES},
        **{name: primal[name] for name in ("rank", "feature_map", "scores")},
    }


def measure_cost(config: Config, corpus: Corpus) -> None:
    """Measure, print, save."""
    device = str(choose_device(config.device))
    jobs = {
        attention: Job(
            config.shape(attention, len(corpus.vocabulary)),
            config.plan(attention, 0),
            config.batch_size,
            config.lr,
            device,
            torch.get_num_threads(),
        )
        for attention in config.attention
    }
    cells = measure(jobs, seconds=config.cost_seconds, device=device)
    shown = cost_table(cells)
    print(f"{shown}\n\nIn parentheses: the published ratios for WikiText-103, on a GPU.")
    raw = {"sizes": cost_sizes(config, corpus), "cells": [asdict(cell) for cell in cells.values()]}
    save_report(config.out / COST, shown, raw)
    print(f"Saved {config.out / COST}")


def write_texts(config: Config, corpus: Corpus, device: torch.device) -> None:
    """Print how each trained model continues the text, word by word."""
    assert config.generate is not None
    prompt = [*corpus.encode(EOS), *corpus.encode(config.generate)]
    if unknown := sorted(set(config.generate.split()) - set(corpus.vocabulary)):
        print(f"Words that are not in the vocabulary are read as {UNK}: {', '.join(unknown)}")
    for attention in config.attention:
        for seed in config.seeds:
            model = LanguageModel(config.shape(attention, len(corpus.vocabulary)))
            load_weights(config.run_folder(attention, seed), model)
            generator = torch.Generator().manual_seed(config.generate_seed)
            print(f"\n{attention}, seed {seed}: {config.generate}", end="", flush=True)
            for token in generate(
                model.eval().to(device),
                prompt,
                config.generate_tokens,
                temperature=config.temperature,
                generator=generator,
            ):
                print("", corpus.decode([token]), end="", flush=True)
            print()


def main(config: Config) -> None:
    """Train, measure or generate; print, save."""
    check_writable(config.out)
    config.use_threads()
    keep_freed_memory()
    if config.cost:
        measure_cost(config, load_corpus(config.data))
        return
    with join_processes(config.device) as processes:
        corpus = load_together(config, processes)
        runs = run_all(config, corpus, processes)
    if not processes.is_main:
        return
    print(f"\n{report(config, corpus, runs)}\nCurves: tensorboard --logdir {config.out}")
    if config.generate is not None:
        write_texts(config, corpus, processes.device)
