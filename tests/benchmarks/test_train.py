"""The benchmark of training steps: what it computes from what it measures."""

import sys
from pathlib import Path

import pytest

from benchmarks.train import Result, Shape, findings, growth_finding
from benchmarks.workers import Worker, ours, take_turns, working, write_episodes


def result(name: str, seconds: float, *, flops: int | None = None) -> Result:
    parts = {"data": 0.01, "forward": 0.5, "logging": 0.02} if flops else {}
    return Result(name, (seconds, 2 * seconds, 3 * seconds), 1.0, flops, parts)


def test_ours_is_held_against_the_fastest_peer_and_the_machine() -> None:
    results = (result("primal-plus", 0.1, flops=200), result("d3rlpy", 0.5), result("transformers", 0.25))
    shape = Shape(128, 1, 20, 2000.0, 4000.0, results)
    fastest = shape.fastest_peer()
    assert fastest is not None
    assert fastest.name == "transformers"
    assert shape.share(results[0], shape.plain_rate) == pytest.approx(200 / 2000 / 0.2)
    lines = list(findings([shape]))
    assert "[met] width 128, 1 head, K 20: times the fastest peer (transformers): 2.50 (bar: at least 1.5)" in lines[0]
    assert "[MISSED] width 128, 1 head, K 20: share of the products: 0.50" in lines[1]
    assert "[met] width 128, 1 head, K 20: data: 1.89 %" in lines[2]
    assert "[MISSED] width 128, 1 head, K 20: logging: 3.77 %" in lines[3]


def test_a_worker_that_dies_is_told_of_in_its_own_words(tmp_path: Path) -> None:
    program = tmp_path / "broken.py"
    program.write_text("raise SystemExit('no such library')")
    worker = Worker("a peer", Path(sys.executable), str(program), threads=1)
    with pytest.raises(ChildProcessError, match="a peer has ended: no such library"):
        worker.ask("step")
    worker.close()


def test_memory_that_grows_is_told() -> None:
    assert "[met] memory: 101 MiB after a fifth of 2,000 steps, 101 after all: +0.0 %" in growth_finding(
        [90.0, 95.0, *[101.0] * 8]
    )
    assert "[MISSED] memory: 92 MiB after a fifth of 2,000 steps, 99 after all: +7.6 %" in growth_finding(
        [float(90 + step) for step in range(10)]
    )


def test_workers_step_by_turns_and_count_their_products(tmp_path: Path) -> None:
    """Without state positions a step has the products of the top block at all tokens, 3 times as many."""
    data, width, context = tmp_path / "episodes.npz", 8, 2
    write_episodes(data)
    jobs = [ours("softmax"), ours("softmax", name="everywhere", without="state positions")]
    with working(jobs, data, threads=1, width=width, num_heads=1, context=context) as workers:
        seconds = take_turns(workers, 2, "")
        assert {name: len(seen) for name, seen in seconds.items()} == {"softmax": 2, "everywhere": 2}
        flops = [worker.ask("flops") for worker in workers]
        parts = workers[0].ask("parts")
    assert set(parts) == {"data", "forward", "backward", "optimizer", "logging"}
    assert min(parts.values()) > 0
    tokens = 64 * 2 * context  # that are saved
    projections = 6 * tokens * 10 * width**2  # queries, outputs, MLP: 2 operations an entry, in 3 products
    attention = 2 * tokens * (3 * context) * width * 7  # 2 products forward, 5 backward
    assert flops[1] - flops[0] == projections + attention
