"""Training: it learns, it repeats itself bit for bit, it goes on where it was, and it notices when all is lost."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from primal_dt.config import OptimizerConfig
from primal_dt.data.normalizer import Normalizer
from primal_dt.data.sampler import Batch, WindowSampler
from primal_dt.data.trajectories import Trajectories, Trajectory
from primal_dt.model.objective import LossTerms, loss_terms
from primal_dt.model.transformer import ATTENTION_STACKS, DecisionTransformer, ModelOutput, ModelShape
from primal_dt.training import trainer as trainer_module
from primal_dt.training.trainer import BadLossError, Trainer, TrainMetrics, learning_rate

CONFIG = OptimizerConfig(steps=12, batch_size=8, lr=3e-3, warmup_steps=4, schedule="cosine", clip=1.0)
SHAPE = ModelShape(3, (-1.0, -1.0), (1.0, 1.0), width=16, context=4, rank=4, dropout=0.1, max_timesteps=20)


def trajectories(count: int = 12, length: int = 15) -> Trajectories:
    """The action is a function of the state: its first two entries, bounded."""
    random = np.random.default_rng(0)
    episodes = []
    for _ in range(count):
        states = random.normal(size=(length, 3)).astype(np.float32)
        rewards = random.normal(size=length).astype(np.float32)
        episodes.append(Trajectory(states, np.tanh(states[:, :2]), rewards))
    return Trajectories.of(episodes)


DATA = trajectories()
MORE_DATA = trajectories(400)  # too much to be learned by heart
UNITS = Normalizer.of(DATA.observations, return_scale=10.0)


def make(
    config: OptimizerConfig = CONFIG,
    *,
    shape: ModelShape = SHAPE,
    eta: float = 0.05,
    seed: int = 0,
    log: int = 3,
    data: Trajectories = DATA,
) -> Trainer:
    torch.manual_seed(seed)
    model = DecisionTransformer(shape)
    sampler = WindowSampler(data, UNITS, context=shape.context, batch_size=config.batch_size, seed=seed)
    return Trainer(model, sampler, config, eta=eta, seed=seed, log_every_steps=log)


def values(metrics: list[TrainMetrics]) -> list[TrainMetrics]:
    """All but the timing."""
    return [replace(point, steps_per_second=0.0) for point in metrics]


def weights(trainer: Trainer) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


TINY = OptimizerConfig(steps=400, batch_size=32, lr=3e-3, warmup_steps=20, schedule="cosine", clip=1.0)


@pytest.mark.parametrize(
    ("attention", "optimizer"),
    [("primal-plus", "adamw"), ("softmax", "adamw"), ("primalformer", "adamw"), ("primal-plus", "muon")],
)
def test_a_tiny_task_is_learned(attention: str, optimizer: Literal["adamw", "muon"]) -> None:
    *_, last = make(
        replace(TINY, optimizer=optimizer),
        shape=replace(SHAPE, attention=attention, dropout=0.0, width=32),
        log=50,
        data=MORE_DATA,
    )
    assert last.action_mse < 2e-3  # the actions' variance is 0.4


def test_the_same_task_is_not_learned_when_the_loss_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: predictions compared with the next step's actions, which nothing tells."""
    right = loss_terms

    def shifted(output: Any, batch: Any, **options: Any) -> LossTerms:
        return right(output, replace(batch, actions=batch.actions.roll(-1, dims=1)), **options)

    monkeypatch.setattr(trainer_module, "loss_terms", shifted)
    *_, last = make(TINY, shape=replace(SHAPE, dropout=0.0, width=32), log=50, data=MORE_DATA)
    assert last.action_mse > 0.1


def test_two_runs_of_one_seed_are_equal_bit_for_bit_and_others_differ() -> None:
    one, two, other = make(), make(), make(seed=1)
    assert values(list(one)) == values(list(two))
    assert torch.equal(weights(one), weights(two))
    list(other)
    assert not torch.equal(weights(one), weights(other))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("stop_at", [1, 4, 6, 11])
def test_going_on_is_as_if_never_stopped(stop_at: int, optimizer: Literal["adamw", "muon"]) -> None:
    """At a logging point and between two of them, with dropout, into a fresh trainer."""
    config = replace(CONFIG, optimizer=optimizer)
    whole = make(config)
    expected = values(list(whole))
    first = make(config)
    seen = []
    update = first.update

    def stop_after(batch: Any) -> None:
        update(batch)
        if first.step == stop_at:
            first.stop()

    first.update = stop_after  # type: ignore[method-assign]
    seen += values(list(first))
    assert first.step == stop_at
    torch.rand(7)  # what others draw in between does not matter
    second = make(config)
    second.model.load_state_dict(first.model.state_dict())
    second.load_state_dict(first.state_dict())
    seen += values(list(second))
    assert seen == expected
    assert torch.equal(weights(second), weights(whole))


def test_points_are_means_over_the_steps_since_the_last() -> None:
    fine = values(list(make(log=1)))
    coarse = values(list(make(log=5)))
    assert [point.step for point in coarse] == [5, 10, 12]
    for point, own in zip(coarse, (fine[:5], fine[5:10], fine[10:]), strict=True):
        for name in ("loss", "action_mse", "penalty", "gradient_norm"):
            assert getattr(point, name) == pytest.approx(np.mean([getattr(p, name) for p in own]), rel=1e-5)
        assert point.objectives[2] == pytest.approx(np.mean([p.objectives[2] for p in own]), rel=1e-4, abs=1e-6)
        assert point.loss == pytest.approx(point.action_mse + 0.05 * point.penalty, rel=1e-5)
        assert point.learning_rate == own[-1].learning_rate


@pytest.mark.parametrize(("accumulate", "shards"), [(2, 1), (3, 1), (8, 1), (1, 2), (1, 3), (2, 2), (1, 16)])
@pytest.mark.parametrize("attention", ["primal-plus", "softmax"])
def test_a_batch_in_parts_trains_as_in_one(accumulate: int, shards: int, attention: str) -> None:
    shape = replace(SHAPE, dropout=0.0, attention=attention)
    whole = make(replace(CONFIG, shards=1), shape=shape)
    divided = make(replace(CONFIG, accumulate=accumulate, shards=shards), shape=shape)
    for one, two in zip(whole, divided, strict=True):
        assert one.loss == pytest.approx(two.loss, rel=1e-5)
        assert one.gradient_norm == pytest.approx(two.gradient_norm, rel=1e-4)
    torch.testing.assert_close(weights(whole), weights(divided), atol=2e-4, rtol=0)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_shards_repeat_themselves_bit_for_bit_whoever_is_first(optimizer: Literal["adamw", "muon"]) -> None:
    config = replace(CONFIG, shards=3, optimizer=optimizer)
    one, two = make(config), make(config)
    forward = two.model.forward

    def late(batch: Batch, **options: Any) -> ModelOutput:
        time.sleep(0.02 * (batch.states[0, 0, 0].item() > 0))  # now one part, now another
        return forward(batch, **options)

    two.model.forward = late  # type: ignore[method-assign]
    assert values(list(one)) == values(list(two))
    assert torch.equal(weights(one), weights(two))


def test_shards_drop_different_entries() -> None:
    """The same window in every row: if shards shared their masks, rows of two shards would go alike."""
    trainer = make(replace(CONFIG, shards=2, steps=1), shape=replace(SHAPE, dropout=0.5))
    seen: list[torch.Tensor] = []
    trainer.model.embed_dropout.register_forward_hook(lambda module, args, out: seen.append((out != 0).detach()))
    list(trainer)
    first, second = seen
    assert first.shape == second.shape
    assert not torch.equal(first, second)


def test_shards_are_threads_of_one_process_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda model: model)
    threads = torch.get_num_threads()
    try:
        for number, expected in ((1, 1), (2, 2), (16, 4)):
            torch.set_num_threads(number)
            assert make().num_shards == expected
            assert make(replace(CONFIG, compile=True)).num_shards == 1
    finally:
        torch.set_num_threads(threads)
    with pytest.raises(ValueError, match=r"shards \(2\) are for one process on a CPU"):
        make(replace(CONFIG, shards=2, compile=True))


def test_a_mistake_in_a_shard_reaches_the_caller() -> None:
    trainer = make(replace(CONFIG, shards=2), shape=replace(SHAPE, max_timesteps=15))
    trainer.model.shape = replace(SHAPE, max_timesteps=3)
    with pytest.raises(ValueError, match="is not one of the model's, 0 to 2"):
        list(trainer)


def test_the_learning_rate_warms_up_and_then_stays_or_falls() -> None:
    config = OptimizerConfig(steps=100, lr=2.0, warmup_steps=10)
    assert [learning_rate(step, config) for step in (0, 4, 9, 10, 99)] == [0.2, 1.0, 2.0, 2.0, 2.0]
    cosine = replace(config, schedule="cosine")
    assert [learning_rate(step, cosine) for step in (0, 9, 10, 55)] == pytest.approx([0.2, 2.0, 2.0, 1.0])
    assert 0 < learning_rate(99, cosine) < 0.001
    assert learning_rate(0, replace(config, warmup_steps=0)) == 2.0


def test_the_gradient_is_clipped() -> None:
    shape = replace(SHAPE, dropout=0.0)
    moved: dict[float, float] = {}
    for clip in (1e-9, 1.0):
        one_step = make(OptimizerConfig(steps=1, batch_size=8, warmup_steps=0, clip=clip), shape=shape)
        list(one_step)
        moved[clip] = max(float(p.grad.abs().max()) for p in one_step.model.parameters() if p.grad is not None)
    assert moved[1e-9] < 1e-8 < moved[1.0]


def poison(trainer: Trainer, step: int) -> None:
    """Make a weight infinite before an update."""
    update = trainer.update

    def poisoned(batch: Any) -> None:
        if trainer.step == step:
            with torch.no_grad():
                trainer.model.head.weight[0, 0] = float("inf")
        update(batch)

    trainer.update = poisoned  # type: ignore[method-assign]


def test_a_loss_that_is_not_finite_is_noticed_at_the_next_point() -> None:
    trainer = make()
    poison(trainer, 4)
    seen: list[TrainMetrics] = []
    with pytest.raises(BadLossError, match="not finite at step 5") as caught:
        seen.extend(trainer)
    assert caught.value.step == 5
    assert [point.step for point in seen] in ([], [3])  # list.extend may keep what came before the error


def test_a_bad_state_is_noticed_before_it_can_be_saved() -> None:
    trainer = make(log=12)
    poison(trainer, 2)
    stopper: Callable[[Any], None] = trainer.update

    def stop_soon(batch: Any) -> None:
        stopper(batch)
        if trainer.step == 3:
            trainer.stop()

    trainer.update = stop_soon  # type: ignore[method-assign]
    assert list(trainer) == []
    with pytest.raises(BadLossError, match="step 3"):
        trainer.check()


def test_without_the_penalty_lambda_stays_and_no_objective_is_reported() -> None:
    trainer = make(eta=0.0)
    (lam,) = (p for name, p in trainer.model.named_parameters() if name.endswith(".lam"))
    before = lam.detach().clone()
    points = list(trainer)
    assert torch.equal(lam, before)
    assert all(point.objectives == {} and point.penalty == 0 for point in points)


def test_episodes_longer_than_the_table_are_refused() -> None:
    with pytest.raises(ValueError, match=r"the longest episode has 15 steps, more than max_timesteps \(14\)"):
        make(shape=replace(SHAPE, max_timesteps=14))


def test_bfloat16_trains_too() -> None:
    points = list(make(replace(CONFIG, bf16=True), log=1))
    exact = list(make(log=1))
    assert points[0].loss == pytest.approx(exact[0].loss, rel=0.05)
    assert points[0].loss != exact[0].loss


LOOKS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select", "aten::is_nonzero"}
"""What reads a tensor's values into Python, or needs them to know a size: on a GPU it waits for all that is queued."""


def callers(event: Any) -> Iterator[str]:
    while (event := event.cpu_parent) is not None:
        yield event.name


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_between_logging_points_the_host_never_waits(
    optimizer: Literal["adamw", "muon"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six steps look at tensors as often as the two logging points among them do, by torch's profiler."""
    # The check of batches is for the CPU alone, where looking costs nothing.
    monkeypatch.setattr(DecisionTransformer, "_check_batch", lambda self, batch: None)

    def looks(call: Callable[[], object]) -> int:
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            call()
        # torch's fused AdamW looks at its own count of steps; its kernel for GPUs does that over there.
        return sum(event.name in LOOKS and "aten::_fused_adamw_" not in callers(event) for event in profiler.events())

    def logging_point() -> None:
        trainer.check()
        trainer.metrics(1.0)

    trainer = make(replace(CONFIG, optimizer=optimizer, shards=1, steps=6), log=3)
    once = looks(lambda: list(trainer)) / 2
    assert once == looks(logging_point) > 0
    assert looks(lambda: trainer.update(trainer.sampler.batch(0))) == 0


@pytest.mark.parametrize("attention", [stack for stack in ATTENTION_STACKS if stack != "reformer"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_update_asks_nothing_of_its_tensors(attention: str, accumulate: int) -> None:
    """On the meta device there are shapes and no values: a look at one, or a copy to the CPU, is an error."""
    torch.manual_seed(0)
    model = DecisionTransformer(replace(SHAPE, attention=attention)).to("meta")
    sampler = WindowSampler(DATA, UNITS, context=SHAPE.context, batch_size=CONFIG.batch_size, seed=0)
    config = replace(CONFIG, accumulate=accumulate)
    trainer = Trainer(model, sampler, config, eta=0.05, seed=0, log_every_steps=3)
    for step in range(3):
        trainer.update(sampler.batch(step).to("meta"))
    assert all(parameter.grad is not None and parameter.grad.is_meta for parameter in model.parameters())
    with pytest.raises((RuntimeError, NotImplementedError)):
        trainer.check()  # this one does look


def test_a_stop_before_the_first_update_makes_none() -> None:
    trainer = make()
    trainer.stop()
    assert list(trainer) == []
    assert trainer.step == 0
