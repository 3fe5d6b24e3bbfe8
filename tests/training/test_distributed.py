"""Two processes train like one, and devices are chosen by name."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from primal_dt.training.distributed import choose_device
from tests.training.test_trainer import WITHOUT_DROPOUT, make, weights

ROOT = Path(__file__).parents[2]
SCRIPT = """
import json, sys, torch
from dataclasses import asdict, replace
from primal_dt.data.sampler import WindowSampler
from primal_dt.model.transformer import DecisionTransformer
from primal_dt.training.distributed import join_processes
from primal_dt.training.trainer import Trainer
from tests.training.test_trainer import CONFIG, DATA, UNITS, WITHOUT_DROPOUT, after_update, weights

def make(accumulate):
    torch.manual_seed(processes.rank)  # all ranks start from the weights of rank 0
    model, part = DecisionTransformer(WITHOUT_DROPOUT), {"process": processes.rank, "num_processes": processes.count}
    sampler = WindowSampler(DATA, UNITS, context=4, batch_size=7, seed=0, **part)
    config = replace(CONFIG, batch_size=7, accumulate=accumulate)
    return Trainer(model, sampler, config, eta=0.05, seed=0, log_every_steps=1)

with join_processes("cpu") as processes:
    runs = [([asdict(point) for point in trainer], weights(trainer).tolist()) for trainer in map(make, (1, 2))]
    stopped = make(1)
    if not processes.is_main:
        after_update(stopped, 5, stopped.stop)
    list(stopped)
    if processes.is_main:
        json.dump({"runs": runs, "stopped_at": stopped.step}, open(sys.argv[1], "w"))
"""


@pytest.mark.slow
def test_two_processes_train_and_stop_like_one(tmp_path: Path) -> None:
    """With and without accumulation. The batch of 7 is divided into 3 and 4 rows with different valid steps."""
    script, out = tmp_path / "script.py", tmp_path / "results.json"
    script.write_text(SCRIPT)
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script), str(out)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
    )
    results, one = json.loads(out.read_text()), make(WITHOUT_DROPOUT, batch_size=7, log=1)
    expected = list(one)
    for points, final in results["runs"]:
        assert len(points) == len(expected) == 12
        for alone, shared in zip(expected, points, strict=True):
            for name in ("loss", "action_mse", "penalty", "gradient_norm"):
                assert shared[name] == pytest.approx(getattr(alone, name), abs=1e-5, rel=0), name
        torch.testing.assert_close(torch.tensor(final), weights(one), atol=1e-4, rtol=0)
    assert results["stopped_at"] == 5  # rank 1 requested the stop


def test_unavailable_devices_are_refused() -> None:
    assert choose_device("cpu").type == "cpu"
    assert choose_device("auto").type in ("cpu", "cuda", "mps")
    with pytest.raises(ValueError, match="the device 'nonsense' cannot be used"):
        choose_device("nonsense")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"the device 'cuda' cannot be used: .*auto selects the best"):
            choose_device("cuda")
