"""The estimates for GPUs: what they count, and how jobs share a GPU."""

import pytest
import torch

from benchmarks import scale
from benchmarks.roofline import Gpu, Step, Watch, Work, step_of
from primal_dt.config import PRESETS
from primal_dt.model.transformer import ModelShape
from primal_dt.sweep.estimate import makespan
from primal_dt.sweep.grid import SWEEPS


def test_views_are_not_counted_as_work() -> None:
    a, b = torch.empty(3, 5, device="meta"), torch.empty(7, 5, device="meta")
    with Watch() as watch:
        product = a @ b.t()
        product.view(-1).add_(1.0)
    assert watch.work == [Work(2 * 3 * 5 * 7, 4 * (15 + 35 + 21)), Work(0, 4 * 2 * 21)]


def test_operations_are_bound_by_compute_or_bandwidth() -> None:
    step = Step([Work(100, 10), Work(0, 50)], num_parameters=0, kept_bytes=2**20)
    assert step.device_seconds(Gpu("", flops=10.0, bytes=5.0)) == pytest.approx(100 / 10 + 50 / 5)
    assert step.memory_mib == 1.0


@pytest.mark.parametrize("batch_size", [2, 8])
def test_flops_match_a_count_by_hand(batch_size: int) -> None:
    """A weight matrix costs 6 operations per entry and token: 2 forward, 4 backward."""
    shape = ModelShape(3, (-1.0,), (1.0,), attention="softmax", width=16, context=4, num_layers=1)
    tokens, states, width = 12 * batch_size, 4 * batch_size, 16
    blocks = 6 * width**2 * (2 * tokens + 10 * states)  # keys and values everywhere; queries, output, MLP at the states
    attention = 6 * 2 * states * 12 * width
    embeddings = 4 * states * width * (1 + 3 + 1)  # the inputs need no gradient
    head = 6 * states * width
    assert sum(work.flops for work in step_of(shape, batch_size).work) == blocks + attention + embeddings + head


def test_jobs_on_one_gpu_share_its_arithmetic() -> None:
    step = Step([Work(1000, 0)] * 100, num_parameters=0, kept_bytes=0)
    slow, fast = (Gpu("", flops=flops, bytes=1.0) for flops in (1e6, 1e12))

    def seconds(gpu: Gpu, jobs_per_gpu: int) -> tuple[float, ...]:
        config = scale.Config(jobs_per_gpu=jobs_per_gpu, share_of_peak=0.5, launch_microseconds=6.0)
        time = scale.job_time(step, PRESETS["paper"][1], SWEEPS["table4"], gpu, config, rate=200.0)
        return time.training, time.watching, time.evaluation

    launching = 100 * 6e-6
    assert seconds(fast, 1) == seconds(fast, 4) == pytest.approx((1e5 * launching, 10_000 * launching, 1000))
    assert seconds(slow, 1)[0] == pytest.approx(1e5 * (100 * 1e-3 / 0.5))
    assert seconds(slow, 4)[0] == pytest.approx(4 * seconds(slow, 1)[0])


def test_makespan_gives_each_job_the_first_free_place() -> None:
    assert makespan([3.0, 1.0, 1.0, 1.0, 2.0], 2) == 5.0
    assert makespan([1.0] * 450, 256) == 2.0
    assert makespan([1.0, 2.0], 64) == 2.0
