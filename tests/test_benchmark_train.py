"""The benchmark of training steps: what it computes from what it measures."""

import sys
from pathlib import Path

import pytest

from benchmarks.train import Result, Shape, Worker, findings


def result(name: str, seconds: float, *, flops: int | None = None) -> Result:
    parts = {"data": 0.01, "forward": 0.5, "logging": 0.02} if flops else {}
    return Result(name, (seconds, 2 * seconds, 3 * seconds), 1.0, flops, parts)


def test_ours_is_held_against_the_fastest_peer_and_the_machine() -> None:
    results = (result("primal-plus", 0.1, flops=200), result("d3rlpy", 0.5), result("transformers", 0.25))
    shape = Shape(128, 1, 20, 1e-3 / 2, results)
    fastest = shape.fastest_peer()
    assert fastest is not None
    assert fastest.name == "transformers"
    assert shape.share_of_bound(results[0]) == pytest.approx(200 * 5e-4 / 0.2)
    lines = list(findings([shape]))
    assert "[met] width 128, 1 head, K 20: times the fastest peer (transformers): 2.50 (bar: at least 1.5)" in lines[0]
    assert "[MISSED] width 128, 1 head, K 20: share of the bound: 0.50" in lines[1]
    assert "[met] width 128, 1 head, K 20: data: 1.89 %" in lines[2]
    assert "[MISSED] width 128, 1 head, K 20: logging: 3.77 %" in lines[3]


def test_a_worker_that_dies_is_told_of_in_its_own_words(tmp_path: Path) -> None:
    program = tmp_path / "broken.py"
    program.write_text("raise SystemExit('no such library')")
    worker = Worker("a peer", Path(sys.executable), str(program), threads=1)
    with pytest.raises(ChildProcessError, match="a peer has ended: no such library"):
        worker.ask("step")
    worker.close()
