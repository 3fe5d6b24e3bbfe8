"""Two processes train like one, and devices are chosen by name."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from primal_dt.model.transformer import ModelShape
from primal_dt.training.distributed import choose_device
from tests.training.test_trainer import WITHOUT_DROPOUT, make, weights

ROOT = Path(__file__).parents[2]
RUNS: list[tuple[ModelShape, dict[str, Any]]] = [
    (WITHOUT_DROPOUT, {"batch_size": 7}),
    (WITHOUT_DROPOUT, {"batch_size": 7, "accumulate": 2}),
    (WITHOUT_DROPOUT, {"batch_size": 7, "critic_weight": 0.5, "critic_context": 6}),
    (replace(WITHOUT_DROPOUT, conditioning="max-return", action_loss="gaussian"), {"batch_size": 7}),
]
SCRIPT = """
import json, sys
from primal_dt.model.transformer import ModelShape
from primal_dt.training.distributed import join_processes
from tests.training.test_distributed import RUNS
from tests.training.test_trainer import after_update, make, weights

with join_processes("cpu") as processes:
    own = {"log": 1, "weights_seed": processes.rank, "process": processes.rank, "num_processes": processes.count}
    trainers = [make(shape, **own, **options) for shape, options in RUNS]  # all ranks start from the weights of rank 0
    runs = [([point.scalars for point in trainer], weights(trainer).tolist()) for trainer in trainers]
    stopped = make(**own)
    if not processes.is_main:
        after_update(stopped, 5, stopped.stop)
    list(stopped)
    if processes.is_main:
        json.dump({"runs": runs, "stopped_at": stopped.step}, open(sys.argv[1], "w"))
"""


@pytest.mark.slow
def test_two_processes_train_and_stop_like_one(tmp_path: Path) -> None:
    """With and without accumulation, and with critics. The batch of 7 is divided into 3 and 4 rows."""
    script, out = tmp_path / "script.py", tmp_path / "results.json"
    script.write_text(SCRIPT)
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script), str(out)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
    )
    results = json.loads(out.read_text())
    for (points, final), (shape, options) in zip(results["runs"], RUNS, strict=True):
        one = make(shape, log=1, **options | {"accumulate": 1})
        expected = list(one)
        assert len(points) == len(expected) == 12
        for alone, shared in zip(expected, points, strict=True):
            for name in alone.scalars.keys() - {"train/steps_per_second"}:
                assert shared[name] == pytest.approx(alone.scalars[name], abs=2e-5, rel=1e-3), name
        torch.testing.assert_close(torch.tensor(final), weights(one), atol=1e-4, rtol=0)
    assert results["stopped_at"] == 5  # rank 1 requested the stop


def test_unavailable_devices_are_refused() -> None:
    assert choose_device("cpu").type == "cpu"
    assert choose_device("auto").type in ("cpu", "cuda", "mps")
    for name in ("nonsense", "meta", "hpu", "privateuseone", "", "cpu:-1"):
        with pytest.raises(ValueError, match=rf"the device '{name}' cannot be used: .*it must be cpu, cuda, mps"):
            choose_device(name)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"the device 'cuda' cannot be used: .*auto, which selects the best"):
            choose_device("cuda")
