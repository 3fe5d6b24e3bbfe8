"""The benchmark of training steps: what it computes from its measurements, and its worker processes."""

import sys
from pathlib import Path

import pytest

from benchmarks.train import Result, Shape, findings, growth_finding
from benchmarks.workers import Job, Worker, ours, take_turns, working, write_episodes


def result(name: str, seconds: float, *, flops: int | None = None) -> Result:
    parts = {"data": 0.01, "forward": 0.5, "logging": 0.02} if flops else {}
    return Result(name, (seconds, 2 * seconds, 3 * seconds), 1.0, flops, parts)


def test_our_model_is_compared_with_the_fastest_peer() -> None:
    results = (result("primal-plus", 0.1, flops=200), result("d3rlpy", 0.5), result("transformers", 0.25))
    shape = Shape(128, 1, 20, 2000.0, 4000.0, results)
    assert shape.fastest_peer() == results[2]
    assert shape.share(results[0], shape.plain_rate) == pytest.approx(200 / 2000 / 0.2)
    peer, share, data, logging = findings([shape])
    assert "[met] width 128, 1 head, K 20: times the fastest peer (transformers): 2.50 (bar: at least 1.5)" in peer
    assert "[MISSED] width 128, 1 head, K 20: matrix-product share: 0.50" in share
    assert "[met] width 128, 1 head, K 20: data: 1.89 %" in data
    assert "[MISSED] width 128, 1 head, K 20: logging: 3.77 %" in logging


def test_dead_worker_is_reported_with_its_last_words(tmp_path: Path) -> None:
    program = tmp_path / "broken.py"
    program.write_text("raise SystemExit('no such library')")
    worker = Worker(Job("a peer", Path(sys.executable), str(program), {}), threads=1)
    with pytest.raises(ChildProcessError, match="a peer has ended: no such library"):
        worker.ask("step")
    worker.close()


@pytest.mark.parametrize(
    ("resident", "finding"),
    [
        ([90, 95, *[101] * 8], "[met] memory: 101 MiB after a fifth of 2,000 steps, 101 MiB at the end: +0.0 %"),
        (list(range(90, 100)), "[MISSED] memory: 92 MiB after a fifth of 2,000 steps, 99 MiB at the end: +7.6 %"),
    ],
)
def test_memory_growth_is_reported(resident: list[float], finding: str) -> None:
    assert finding in growth_finding(resident)


@pytest.mark.slow
def test_workers_alternate_and_count_their_flops(tmp_path: Path) -> None:
    """Without state positions, the top block computes all tokens instead of one in three."""
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
    tokens = 64 * 2 * context  # the tokens that state positions save
    projections = 6 * tokens * 10 * width**2  # queries, outputs, MLP: 2 operations an entry, in 3 products
    attention = 2 * tokens * (3 * context) * width * 6  # 2 products forward, 4 backward
    assert flops[1] - flops[0] == projections + attention
