"""Two processes train as one does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from primal_dt.training.distributed import choose_device

SCRIPT = """
import json, sys, torch
from dataclasses import asdict
from primal_dt.training.distributed import join_processes
from primal_dt.data.sampler import WindowSampler
from primal_dt.model.transformer import DecisionTransformer
from primal_dt.training.trainer import Trainer
from tests.training.test_trainer import CONFIG, DATA, SHAPE, UNITS
from dataclasses import replace

torch.set_num_threads(1)
accumulate = int(sys.argv[2])
with join_processes("cpu") as processes:
    torch.manual_seed(processes.rank)  # the first process's weights count
    model = DecisionTransformer(replace(SHAPE, dropout=0.0))
    config = replace(CONFIG, batch_size=7, accumulate=accumulate)
    sampler = WindowSampler(
        DATA, UNITS, context=4, batch_size=7, seed=0, process=processes.rank, num_processes=processes.count
    )
    trainer = Trainer(model, sampler, config, eta=0.05, seed=0, log_every_steps=1)
    points = [asdict(point) for point in trainer]
    if processes.is_first:
        weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        json.dump({"points": points, "weights": weights.tolist()}, open(sys.argv[1], "w"))
"""


def run(folder: Path, processes: int, accumulate: int = 1) -> dict[str, list[dict[str, float]]]:
    script, out = folder / "script.py", folder / f"{processes}.json"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    subprocess.run(
        [*command, str(script), str(out), str(accumulate)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
    )
    return json.loads(out.read_text())


@pytest.mark.parametrize("accumulate", [1, 2])
def test_two_processes_give_the_losses_of_one(tmp_path: Path, accumulate: int) -> None:
    """The batch of 7 is shared out as 3 and 4 rows with different numbers of valid steps."""
    one, two = run(tmp_path, 1), run(tmp_path, 2, accumulate)
    assert len(one["points"]) == len(two["points"]) == 12
    for alone, shared in zip(one["points"], two["points"], strict=True):
        for name in ("loss", "action_mse", "penalty", "gradient_norm"):
            assert shared[name] == pytest.approx(alone[name], abs=1e-5, rel=0), name
    torch.testing.assert_close(torch.tensor(one["weights"]), torch.tensor(two["weights"]), atol=1e-4, rtol=0)


def test_a_device_that_is_not_here_is_told() -> None:
    assert choose_device("cpu").type == "cpu"
    assert choose_device("auto").type in ("cpu", "cuda", "mps")
    with pytest.raises(ValueError, match="the device 'nonsense' cannot be used"):
        choose_device("nonsense")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"the device 'cuda' cannot be used: .*auto takes the best"):
            choose_device("cuda")
