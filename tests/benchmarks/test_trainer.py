"""The benchmarks' training loop: resuming, several processes, accumulation, and what it stores."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.batches import EpochOrder, LabeledBatch
from benchmarks.encoder import Encoder, EncoderShape
from benchmarks.step import ONE_PROCESS, task_loss, update
from benchmarks.trainer import Plan, Trainer
from primal_dt.system.files import lock_folder
from primal_dt.training.distributed import Processes
from primal_dt.training.metrics_log import read_metrics

PLAN = Plan(12, 0, eta=0.1, clip=1.0, log_every_steps=5, save_every_steps=4)
SETTINGS = {"lr": 0.01}
Prepare = Callable[[LabeledBatch], LabeledBatch]


def make_encoder(dropout: float = 0.1) -> Encoder:
    torch.manual_seed(0)
    options = {"primal": {"rank": 4, "rank_multi": 2}}
    shape = EncoderShape(3, 6, "primal-plus", width=8, num_heads=2, mlp_width=8, dropout=dropout, options=options)
    return Encoder(nn.Linear(2, 8), shape)


def make_trainer(
    folder: Path,
    plan: Plan = PLAN,
    *,
    model: Encoder | None = None,
    prepare: Prepare | None = None,
    settings: dict[str, Any] = SETTINGS,
    processes: Processes = ONE_PROCESS,
) -> Trainer:
    model = make_encoder() if model is None else model
    generator = torch.Generator().manual_seed(1)
    x, labels = torch.randn(20, 6, 2, generator=generator), torch.randint(3, (20,), generator=generator)
    order = EpochOrder(20, 6, 0)

    def batches(step: int) -> Iterator[LabeledBatch]:
        for rows in order.shares(step, processes.rank, processes.count):
            yield LabeledBatch(x[rows], None, labels[rows])

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=plan.steps)
    return Trainer(
        model,
        optimizer,
        batches,
        plan,
        folder,
        settings=settings,
        processes=processes,
        schedule=schedule,
        evaluate=lambda: {"valid/accuracy": 100.0 - abs(trainer_step(folder) - 6)},
        prepare=prepare,
    )


def trainer_step(folder: Path) -> int:
    """The step of the last logged point, at which a made-up accuracy depends."""
    lines = read_metrics(folder)
    return int(lines[-1]["step"]) if lines else 0


def run(trainer: Trainer, **options: Any) -> dict[str, float]:
    return trainer.run(name="test", final=lambda: {"test/accuracy": 50.0}, **options)


def stop_at(step: int) -> Prepare:
    """Send this process SIGTERM when it has computed so many batches."""
    seen = []

    def prepare(batch: LabeledBatch) -> LabeledBatch:
        seen.append(batch)
        if len(seen) == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return batch

    return prepare


def curves(folder: Path) -> list[dict[str, float]]:
    return [
        {name: line[name] for name in line if name != "time" and "second" not in name} for line in read_metrics(folder)
    ]


@pytest.mark.parametrize("step", [4, 7])
def test_resume_is_bit_identical(tmp_path: Path, step: int, capsys: pytest.CaptureFixture[str]) -> None:
    whole = make_trainer(tmp_path / "whole")
    run(whole)
    with pytest.raises(SystemExit) as stopped:
        run(make_trainer(tmp_path / "parts", prepare=stop_at(step)))
    assert stopped.value.code == 128 + signal.SIGTERM
    assert f"stopped at step {step} of 12: the same command continues" in capsys.readouterr().out
    resumed = make_trainer(tmp_path / "parts", model=make_encoder(dropout=0.1))
    assert run(resumed) == {"test/accuracy": 50.0}
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name
    assert curves(tmp_path / "parts") == curves(tmp_path / "whole")
    resumed.finish()
    assert not resumed.checkpoint.exists()


def test_a_kill_loses_only_the_steps_after_the_checkpoint(tmp_path: Path) -> None:
    def die(batch: LabeledBatch) -> LabeledBatch:
        seen.append(batch)
        if len(seen) == 7:
            raise RuntimeError
        return batch

    seen: list[LabeledBatch] = []
    whole = make_trainer(tmp_path / "whole")
    run(whole)
    with pytest.raises(RuntimeError):
        run(make_trainer(tmp_path / "parts", prepare=die))
    resumed = make_trainer(tmp_path / "parts")
    run(resumed)
    assert torch.equal(resumed.model.positions, whole.model.positions)  # type: ignore[arg-type]
    assert curves(tmp_path / "parts") == curves(tmp_path / "whole")


def test_again_starts_from_step_0(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        run(make_trainer(tmp_path, prepare=stop_at(3)))
    counted: list[LabeledBatch] = []
    run(make_trainer(tmp_path, prepare=lambda batch: counted.append(batch) or batch), again=True)  # type: ignore[func-returns-value]
    assert len(counted) == PLAN.steps


def test_unusable_checkpoints_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        run(make_trainer(tmp_path, prepare=stop_at(3)))
    with pytest.raises(ValueError, match=r"is of a training with other settings \(lr\): --again starts from step 0"):
        run(make_trainer(tmp_path, settings={"lr": 0.1}))
    (tmp_path / "checkpoint.pt").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match=r"checkpoint\.pt is damaged or not a checkpoint of this program: --again"):
        run(make_trainer(tmp_path))


def test_one_folder_has_one_training(tmp_path: Path) -> None:
    with lock_folder(tmp_path, ""), pytest.raises(ValueError, match="is in use by another process"):
        run(make_trainer(tmp_path))


def test_a_loss_that_is_not_finite_is_an_error(tmp_path: Path) -> None:
    model = make_encoder()
    nn.init.constant_(model.positions, torch.nan)
    with pytest.raises(ValueError, match="the loss is not finite by step 5: lower the learning rate"):
        run(make_trainer(tmp_path, model=model))


def test_the_weights_of_the_best_point_are_stored(tmp_path: Path) -> None:
    """The made-up accuracy is highest at step 7, where the last point was that of step 6."""
    trainer = make_trainer(tmp_path, replace(PLAN, log_every_steps=1, evaluate_every_steps=1, best="valid/accuracy"))
    run(trainer)
    assert (trainer.best.step, trainer.best.value) == (7, 100.0)
    shorter = make_trainer(tmp_path / "other", replace(PLAN, steps=12, log_every_steps=1), prepare=stop_at(7))
    with pytest.raises(SystemExit):
        run(shorter)
    assert torch.equal(trainer.best.weights["positions"], shorter.model.positions)  # type: ignore[arg-type]


@pytest.mark.parametrize("parts", [2, 4, 9])
def test_accumulation_gives_the_gradient_of_the_batch(parts: int) -> None:
    models = [make_encoder(dropout=0.0).double() for _ in range(2)]
    batch = LabeledBatch(torch.randn(6, 6, 2, dtype=torch.float64), None, torch.arange(6) % 3)
    whole, split = (
        update(model, torch.optim.SGD(model.parameters(), lr=0.0), batch, eta=0.1, accumulate=number)
        for model, number in zip(models, (1, parts), strict=True)
    )
    torch.testing.assert_close(tuple(split), tuple(whole))
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_labels_may_be_tokens_or_shares() -> None:
    logits = torch.randn(2, 4, 3)
    labels = torch.randint(3, (2, 4))
    expected = nn.functional.cross_entropy(logits.transpose(1, 2), labels)
    torch.testing.assert_close(task_loss(logits, labels), expected)
    shares = nn.functional.one_hot(labels[:, 0], 3).float()
    torch.testing.assert_close(task_loss(logits[:, 0], shares), task_loss(logits[:, 0], labels[:, 0]))


@pytest.mark.parametrize("keep_last", [True, False])
def test_an_epoch_has_each_row_once(keep_last: bool) -> None:
    order = EpochOrder(10, 3, 0, keep_last=keep_last)
    assert order.steps_per_epoch == (4 if keep_last else 3)
    epochs = [[order.rows(epoch * order.steps_per_epoch + i) for i in range(order.steps_per_epoch)] for epoch in (0, 1)]
    for epoch in epochs:
        rows = [row for batch in epoch for row in batch]
        assert len(set(rows)) == len(rows) == (10 if keep_last else 9)
    assert epochs[0] != epochs[1]
    assert EpochOrder(10, 3, 0, keep_last=keep_last).rows(5) == order.rows(5)
    assert EpochOrder(10, 3, 1, keep_last=keep_last).rows(5) != order.rows(5)
    shares = [next(order.shares(5, rank, 2)) for rank in (0, 1)]
    assert sorted(shares[0] + shares[1]) == sorted(order.rows(5))


def test_an_empty_split_is_refused() -> None:
    with pytest.raises(ValueError, match="the training split is empty"):
        EpochOrder(0, 3, 0)


SHARED = """
import sys
from dataclasses import replace
from pathlib import Path
import torch
from primal_dt.training.distributed import join_processes
from tests.benchmarks.test_trainer import PLAN, make_encoder, make_trainer, run
with join_processes("cpu") as processes:
    plan = replace(PLAN, eta=float(sys.argv[2]), accumulate=2)
    trainer = make_trainer(Path(sys.argv[1]), plan, model=make_encoder(dropout=0.0), processes=processes)
    run(trainer)
    if processes.is_main:
        torch.save(trainer.model.state_dict(), Path(sys.argv[1]) / "weights.pt")
"""


@pytest.mark.slow
@pytest.mark.parametrize("eta", [0.1, 0.0])
def test_two_processes_train_as_one(tmp_path: Path, eta: float) -> None:
    (tmp_path / "shared.py").write_text(SHARED)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, str(tmp_path / "shared.py"), str(tmp_path / "two"), str(eta)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run(command, check=True, env=environment)
    one = make_trainer(tmp_path / "one", replace(PLAN, eta=eta), model=make_encoder(dropout=0.0))
    run(one)
    weights = torch.load(tmp_path / "two" / "weights.pt")
    for name, value in one.model.state_dict().items():
        if name.endswith("key.bias"):  # softmax does not depend on it: its gradient is rounding errors
            continue
        torch.testing.assert_close(weights[name], value, atol=1e-4, rtol=1e-3, msg=name)
    losses = [[point.get("train/loss", 0.0) for point in curves(tmp_path / name)] for name in ("one", "two")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
