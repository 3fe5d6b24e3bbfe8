"""What the estimate for GPUs counts."""

import pytest
import torch

from benchmarks import scale
from benchmarks.roofline import Gpu, Step, Watch, Work, step_of
from primal_dt.config import PRESETS
from primal_dt.model.transformer import ModelShape
from primal_dt.sweep.estimate import makespan
from primal_dt.sweep.grid import SWEEPS


def test_work_is_that_of_operations_and_not_of_views() -> None:
    a, b = torch.empty(3, 5, device="meta"), torch.empty(7, 5, device="meta")
    with Watch() as watch:
        product = a @ b.t()
        product.view(-1).add_(1.0)
    assert watch.work == [Work(2 * 3 * 5 * 7, 4 * (15 + 35 + 21)), Work(0, 4 * 2 * 21)]


def test_an_operation_takes_what_binds_it() -> None:
    step = Step([Work(100, 10), Work(0, 50)], num_parameters=0, kept_bytes=2**20)
    assert step.device_seconds(Gpu("", flops=10.0, bytes=5.0)) == pytest.approx(100 / 10 + 50 / 5)
    assert step.memory_mib == 1.0


@pytest.mark.parametrize("batch_size", [2, 8])
def test_products_grow_with_the_batch(batch_size: int) -> None:
    """Those of the blocks: 6 operations for each weight and token, and attention's."""
    shape = ModelShape(3, (-1.0,), (1.0,), attention="softmax", width=16, context=4, num_layers=1)
    flops = sum(work.flops for work in step_of(shape, batch_size).work)
    tokens, states, width = 12 * batch_size, 4 * batch_size, 16
    blocks = 6 * width**2 * (2 * tokens + 10 * states)  # keys and values everywhere; queries, output, MLP at the states
    attention = 6 * 2 * states * 12 * width
    embeddings = 4 * states * width * (1 + 3 + 1)  # of which no gradient is wanted at what comes in
    head = 6 * states * width
    assert flops == blocks + attention + embeddings + head


def test_jobs_that_share_a_gpu_share_its_arithmetic_but_not_the_launching() -> None:
    step = Step([Work(1000, 0)] * 100, num_parameters=0, kept_bytes=0)
    paper, table4 = PRESETS["paper"][1], SWEEPS["table4"]
    slow, fast = (Gpu("", flops=flops, bytes=1.0) for flops in (1e6, 1e12))

    def minutes(gpu: Gpu, jobs_per_gpu: int) -> tuple[float, ...]:
        config = scale.Config(jobs_per_gpu=jobs_per_gpu, share_of_peak=0.5, launch_microseconds=6.0)
        time = scale.job_time(step, paper, table4, gpu, config, rate=200.0)
        return time.training / 60, time.watching / 60, time.evaluation / 60

    launching = 100 * 6e-6
    assert (
        minutes(fast, 1)
        == minutes(fast, 4)
        == pytest.approx((1e5 * launching / 60, 10_000 * launching / 60, 1000 / 60))
    )
    assert minutes(slow, 1)[0] == pytest.approx(1e5 * (100 * 1e-3 / 0.5) / 60)
    assert minutes(slow, 4)[0] == pytest.approx(4 * minutes(slow, 1)[0])


def test_the_last_job_ends_when_places_are_taken_as_they_become_free() -> None:
    assert makespan([3.0, 1.0, 1.0, 1.0, 2.0], 2) == 5.0
    assert makespan([1.0] * 450, 256) == 2.0
    assert makespan([1.0, 2.0], 64) == 2.0
