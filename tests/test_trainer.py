"""Training: it learns, it repeats itself bit for bit, it goes on where it was, and it notices when all is lost."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from primal_dt import trainer as trainer_module
from primal_dt.config import OptimizerConfig
from primal_dt.data import Trajectories, Trajectory, WindowSampler
from primal_dt.model import DecisionTransformer, ModelShape
from primal_dt.normalizer import Normalizer
from primal_dt.objective import LossTerms, loss_terms
from primal_dt.trainer import BadLossError, Trainer, TrainMetrics, learning_rate

aten = torch.ops.aten
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
MORE_DATA = trajectories(400)  # too much to be learnt by heart
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
def test_a_tiny_task_is_learnt(attention: str, optimizer: Literal["adamw", "muon"]) -> None:
    *_, last = make(
        replace(TINY, optimizer=optimizer),
        shape=replace(SHAPE, attention=attention, dropout=0.0, width=32),
        log=50,
        data=MORE_DATA,
    )
    assert last.action_mse < 2e-3  # the actions' variance is 0.4


def test_the_same_task_is_not_learnt_when_the_loss_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("parts", [2, 3, 8])
def test_a_batch_in_parts_trains_as_in_one(parts: int) -> None:
    whole = make(shape=replace(SHAPE, dropout=0.0))
    divided = make(replace(CONFIG, accumulate=parts), shape=replace(SHAPE, dropout=0.0))
    for one, two in zip(whole, divided, strict=True):
        assert one.loss == pytest.approx(two.loss, rel=1e-5)
        assert one.gradient_norm == pytest.approx(two.gradient_norm, rel=1e-4)
    torch.testing.assert_close(weights(whole), weights(divided), atol=2e-4, rtol=0)


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


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_an_update_never_makes_the_host_wait(
    optimizer: Literal["adamw", "muon"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No tensor is read by Python: on a GPU each such look would wait for all that is queued."""
    # The check of timesteps is for the CPU alone, where looking costs nothing.
    monkeypatch.setattr(DecisionTransformer, "_check_timesteps", lambda self, timesteps: None)
    looks: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket in (aten._local_scalar_dense, aten.nonzero, aten.equal, aten.masked_select):
                looks.append(str(func))
            return func(*args, **kwargs or {})

    trainer = make(replace(CONFIG, optimizer=optimizer))
    batch = trainer.sampler.batch(0)
    with Watch():  # type: ignore[no-untyped-call]
        trainer.update(batch)
        assert looks == []
        trainer.check()  # this one does look
    assert looks


def test_a_stop_before_the_first_update_makes_none() -> None:
    trainer = make()
    trainer.stop()
    assert list(trainer) == []
    assert trainer.step == 0
