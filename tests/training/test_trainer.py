"""Training learns, is reproducible, resumes bit for bit, and stops at values that are not finite."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal, get_args

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from primal_dt.attention import PenaltyReduction
from primal_dt.config import OptimizerConfig
from primal_dt.data.normalizer import Normalizer
from primal_dt.data.sampler import Batch, WindowSampler
from primal_dt.data.trajectories import Trajectories, Trajectory
from primal_dt.model.loss import LossTerms, Objective, loss_terms
from primal_dt.model.transformer import ATTENTION_STACKS, DecisionTransformer, ModelOutput, ModelShape
from primal_dt.training import trainer as trainer_module
from primal_dt.training.guidance import Guidance, value_range
from primal_dt.training.trainer import GRADIENT_NORM, BadLossError, Trainer, TrainMetrics, learning_rate
from tests.conftest import SHAPE

CONFIG = OptimizerConfig(steps=12, batch_size=8, lr=3e-3, warmup_steps=4, schedule="cosine", clip=1.0)
WITHOUT_DROPOUT = replace(SHAPE, dropout=0.0)
both_optimizers = pytest.mark.parametrize("optimizer", ["adamw", "muon"])


def trajectories(count: int = 12, length: int = 15) -> Trajectories:
    """Episodes whose action is a function of the state: its first two entries, bounded."""
    random = np.random.default_rng(0)
    states = random.normal(size=(count, length, 3)).astype(np.float32)
    rewards = random.normal(size=(count, length)).astype(np.float32)
    return Trajectories.of([Trajectory(s, np.tanh(s[:, :2]), r) for s, r in zip(states, rewards, strict=True)])


DATA = trajectories()
UNITS = Normalizer.of(DATA.observations, return_scale=10.0)


def make(
    shape: ModelShape = SHAPE,
    *,
    eta: float = 0.05,
    penalty: PenaltyReduction = "mean",
    seed: int = 0,
    log: int = 3,
    data: Trajectories = DATA,
    device: str = "cpu",
    weights_seed: int | None = None,
    process: int = 0,
    num_processes: int = 1,
    critic_context: int | None = None,
    **changes: Any,
) -> Trainer:
    """A trainer with changes to the optimizer's configuration. The environment ended every other episode."""
    config = replace(CONFIG, **changes)
    torch.manual_seed(seed if weights_seed is None else weights_seed)
    model = DecisionTransformer(shape).to(device)
    guidance = None
    if config.critic_weight:
        guidance = Guidance(model, weight=config.critic_weight, values=value_range(data), reward_scale=10.0)
    sampler = WindowSampler(
        data,
        UNITS,
        context=critic_context or shape.context,
        batch_size=config.batch_size,
        seed=seed,
        is_terminated=None if guidance is None else np.arange(len(data.lengths)) % 2 == 0,
        process=process,
        num_processes=num_processes,
    )
    objective = Objective(eta=eta, penalty=penalty)
    return Trainer(model, sampler, config, objective=objective, seed=seed, log_every_steps=log, guidance=guidance)


def metrics_of(trainer: Trainer) -> list[TrainMetrics]:
    """Train, and return all metrics but the speed."""
    return [replace(point, scalars={**point.scalars, "train/steps_per_second": 0.0}) for point in trainer]


def layers_with_objective(point: TrainMetrics) -> list[int]:
    return [int(name[-1]) for name in point.scalars if name.startswith("train/J/layer_")]


def weights(trainer: Trainer) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


def after_update(trainer: Trainer, step: int, action: Callable[[], object]) -> None:
    """Call ``action`` after the update that reaches ``step``."""
    update = trainer.update

    def patched(batch: Batch) -> None:
        update(batch)
        if trainer.step == step:
            action()

    trainer.update = patched  # type: ignore[method-assign]


def small_task(attention: str = "primal-plus", optimizer: str = "adamw") -> float:
    """The final action MSE on more data than can be memorized. The variance of the actions is 0.4."""
    shape = replace(WITHOUT_DROPOUT, attention=attention, width=32)
    *_, last = make(
        shape, data=trajectories(400), log=25, steps=100, batch_size=32, lr=1e-2, warmup_steps=10, optimizer=optimizer
    )
    return last.action_mse


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "optimizer"),
    [("primal-plus", "adamw"), ("softmax", "adamw"), ("primalformer", "adamw"), ("primal-plus", "muon")],
)
def test_small_task_is_learned(attention: str, optimizer: str) -> None:
    assert small_task(attention, optimizer) < 2e-3


def test_shifted_actions_are_not_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: predictions are compared with the next step's actions, which no input reveals."""

    def shifted(output: Any, batch: Any, _: Objective, **options: Any) -> LossTerms:
        return loss_terms(output, replace(batch, actions=batch.actions.roll(-1, dims=1)), Objective(), **options)

    monkeypatch.setattr(trainer_module, "loss_terms", shifted)
    assert small_task() > 0.1


def test_same_seed_is_bit_identical() -> None:
    one, two, other = make(), make(), make(seed=1)
    assert metrics_of(one) == metrics_of(two)
    assert torch.equal(weights(one), weights(two))
    list(other)
    assert not torch.equal(weights(one), weights(other))


@both_optimizers
@pytest.mark.parametrize("stop_at", [1, 4, 6, 11])
def test_resume_is_bit_identical(stop_at: int, optimizer: str) -> None:
    """In a new trainer, with dropout, at a logging point (6) and between two."""
    whole, first, second = (make(optimizer=optimizer) for _ in range(3))
    after_update(first, stop_at, first.stop)
    seen = metrics_of(first)
    assert first.step == stop_at
    torch.rand(7)  # draws of other code in between have no effect
    second.model.load_state_dict(first.model.state_dict())
    second.load_state_dict(first.state_dict())
    assert seen + metrics_of(second) == metrics_of(whole)
    assert torch.equal(weights(second), weights(whole))


@pytest.mark.parametrize(
    ("change", "critic_weight"),
    [
        ({"action_loss": "gaussian", "action_dropout": 0.5}, 0.0),
        ({"conditioning": "max-return"}, 0.7),
        ({"action_loss": "gaussian"}, 0.7),
        ({"conditioning": "none"}, 0.0),
    ],
)
@pytest.mark.parametrize("shards", [1, 2])
def test_resume_is_bit_identical_with_other_losses(change: dict[str, Any], critic_weight: float, shards: int) -> None:
    """Critics, averages and their optimizer are part of the state."""
    options: dict[str, Any] = {"critic_weight": critic_weight, "shards": shards}
    whole, first, second = (make(replace(SHAPE, **change), **options) for _ in range(3))
    after_update(first, 5, first.stop)
    seen = metrics_of(first)
    second.model.load_state_dict(first.model.state_dict())
    second.load_state_dict(first.state_dict())
    assert seen + metrics_of(second) == metrics_of(whole)
    assert torch.equal(weights(second), weights(whole))
    if critic_weight:
        assert second.critic is not None
        assert whole.critic is not None
        torch.testing.assert_close(second.critic.state_dict(), whole.critic.state_dict(), atol=0, rtol=0)


@pytest.mark.parametrize("shards", [1, 2])
def test_guidance_of_weight_zero_is_bit_equal_to_none(shards: int) -> None:
    without, zero, strong = (make(critic_weight=weight, shards=shards) for weight in (0.0, 1.0, 1.0))
    assert zero.guidance is not None
    zero.guidance.weight = 0.0
    for trainer in (without, zero, strong):
        list(trainer)
    assert torch.equal(weights(without), weights(zero))
    assert (weights(without) - weights(strong)).abs().max() > 1e-3


def test_critics_have_longer_windows_than_the_model() -> None:
    """The model is trained on the first steps of the windows, as it would be without critics."""
    short, long = make(steps=3, log=1), make(steps=3, log=1, critic_weight=1.0, critic_context=9)
    assert long.guidance is not None
    long.guidance.weight = 0.0
    seen: list[int] = []
    forward = long.model.forward

    def watched(batch: Batch, **options: Any) -> ModelOutput:
        seen.append(batch.valid.shape[1])
        return forward(batch, **options)

    long.model.forward = watched  # type: ignore[method-assign]
    assert [point.loss for point in long] == [point.loss for point in short]
    assert set(seen) == {SHAPE.context}
    assert torch.equal(weights(short), weights(long))


def test_metrics_are_means_since_the_last_point() -> None:
    fine, coarse = metrics_of(make(log=1)), metrics_of(make(log=5))
    assert [point.step for point in coarse] == [5, 10, 12]
    for point, steps in zip(coarse, (fine[:5], fine[5:10], fine[10:]), strict=True):
        for name in ("loss", "action_mse", "penalty", "gradient_norm", "J/layer_2"):
            mean = np.mean([step.scalars[f"train/{name}"] for step in steps])
            assert point.scalars[f"train/{name}"] == pytest.approx(mean, rel=1e-4, abs=1e-6)
        assert point.loss == pytest.approx(point.action_mse + 0.05 * point.scalars["train/penalty"], rel=1e-5)
        assert point.scalars["train/learning_rate"] == steps[-1].scalars["train/learning_rate"]


@pytest.mark.parametrize(("accumulate", "shards"), [(2, 1), (3, 1), (8, 1), (1, 2), (1, 3), (2, 2), (1, 16)])
@pytest.mark.parametrize("attention", ["primal-plus", "softmax"])
def test_split_batches_train_like_whole_ones(accumulate: int, shards: int, attention: str) -> None:
    shape = replace(WITHOUT_DROPOUT, attention=attention)
    whole, split = make(shape, shards=1), make(shape, accumulate=accumulate, shards=shards)
    for one, two in zip(whole, split, strict=True):
        assert one.loss == pytest.approx(two.loss, rel=1e-5)
        assert one.scalars[GRADIENT_NORM] == pytest.approx(two.scalars[GRADIENT_NORM], rel=1e-4)
    torch.testing.assert_close(weights(whole), weights(split), atol=2e-4, rtol=0)


@both_optimizers
def test_shards_are_bit_identical_in_any_order(optimizer: str) -> None:
    shape = replace(SHAPE, attention_dropout=0.1)
    one, two = (make(shape, shards=3, optimizer=optimizer) for _ in range(2))
    forward = two.model.forward

    def late(batch: Batch, **options: Any) -> ModelOutput:
        time.sleep(0.02 * (batch.states[0, 0, 0].item() > 0))  # delays a different shard in each step
        return forward(batch, **options)

    two.model.forward = late  # type: ignore[method-assign]
    assert metrics_of(one) == metrics_of(two)
    assert torch.equal(weights(one), weights(two))


@pytest.mark.parametrize("scores", ["e", "r"])
@pytest.mark.parametrize("eta", [0.0, 0.05])
def test_one_sided_layers_train_with_and_without_penalty(scores: Literal["e", "r"], eta: float) -> None:
    shape = replace(SHAPE, scores=scores, attention="primalformer")
    first, *_, last = metrics_of(make(shape, eta=eta, steps=60, log=10))
    assert last.action_mse < first.action_mse
    assert layers_with_objective(last) == ([] if eta == 0 else [0, 1, 2])


def test_the_penalty_of_layers_is_their_mean_or_sum() -> None:
    shape = replace(WITHOUT_DROPOUT, attention="primalformer")
    mean, total = (make(shape, penalty=reduction, steps=1, log=1) for reduction in get_args(PenaltyReduction))
    (one,), (other,) = metrics_of(mean), metrics_of(total)
    penalty = other.scalars["train/penalty"]
    assert penalty == pytest.approx(3 * one.scalars["train/penalty"], rel=1e-5)
    assert other.loss == pytest.approx(other.action_mse + 0.05 * penalty, rel=1e-5)


def test_shards_have_different_dropout_masks() -> None:
    trainer = make(replace(SHAPE, dropout=0.5), shards=2, steps=1)
    masks: list[torch.Tensor] = []
    trainer.model.embed_dropout.register_forward_hook(lambda module, args, out: masks.append((out != 0).detach()))
    list(trainer)
    first, second = masks
    assert first.shape == second.shape
    assert not torch.equal(first, second)


@pytest.mark.parametrize(("threads", "shards"), [(1, 1), (2, 2), (16, 4)])
def test_default_shards_follow_the_threads(threads: int, shards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(torch, "compile", lambda model: model)
    assert make().num_shards == shards
    assert make(compile=True).num_shards == 1


def test_shards_are_refused_with_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda model: model)
    with pytest.raises(ValueError, match=r"shards \(2\) must be 1 or omitted on a GPU"):
        make(shards=2, compile=True)


def test_error_in_a_shard_reaches_the_caller() -> None:
    trainer = make(replace(SHAPE, max_timesteps=15), shards=2)
    trainer.model.shape = replace(SHAPE, max_timesteps=3)
    with pytest.raises(ValueError, match="must be from 0 to 2"):
        list(trainer)


def test_learning_rate_warms_up_then_stays_or_decays() -> None:
    config = OptimizerConfig(steps=100, lr=2.0, warmup_steps=10)
    assert [learning_rate(step, config) for step in (0, 4, 9, 10, 99)] == [0.2, 1.0, 2.0, 2.0, 2.0]
    cosine = replace(config, schedule="cosine")
    assert [learning_rate(step, cosine) for step in (0, 9, 10, 55)] == pytest.approx([0.2, 2.0, 2.0, 1.0])
    assert 0 < learning_rate(99, cosine) < 0.001
    assert learning_rate(0, replace(config, warmup_steps=0)) == 2.0


def test_gradient_is_clipped() -> None:
    def largest(clip: float) -> float:
        trainer = make(WITHOUT_DROPOUT, steps=1, clip=clip)
        list(trainer)
        return max(float(p.grad.abs().max()) for p in trainer.model.parameters() if p.grad is not None)

    assert largest(1e-9) < 1e-8 < largest(1.0)


def poison(trainer: Trainer, step: int) -> None:
    """Make a weight infinite after an update."""
    after_update(trainer, step, lambda: trainer.model.head.weight.data[0, 0].fill_(float("inf")))


def test_nonfinite_loss_is_detected() -> None:
    trainer = make()
    poison(trainer, 4)
    points = iter(trainer)
    assert next(points).step == 3
    with pytest.raises(BadLossError, match="not finite at step 5") as caught:
        next(points)
    assert caught.value.step == 5


def test_check_detects_nonfinite_state() -> None:
    """Training stops before the next logging point, so only this check keeps the state from being saved."""
    trainer = make(log=12)
    poison(trainer, 2)
    after_update(trainer, 3, trainer.stop)
    assert list(trainer) == []
    with pytest.raises(BadLossError, match="step 3"):
        trainer.check()


def test_without_penalty_lambda_stays_fixed() -> None:
    trainer = make(eta=0.0)
    (lam,) = (p for name, p in trainer.model.named_parameters() if name.endswith(".lam"))
    before = lam.detach().clone()
    points = list(trainer)
    assert torch.equal(lam, before)
    assert all(not layers_with_objective(point) and point.scalars["train/penalty"] == 0 for point in points)


def test_too_long_episodes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"the longest episode has 15 steps, more than max_timesteps \(14\)"):
        make(replace(SHAPE, max_timesteps=14))


def test_bfloat16_loss_is_close() -> None:
    rounded, exact = (metrics_of(make(bf16=bf16, log=1))[0].loss for bf16 in (True, False))
    assert rounded == pytest.approx(exact, rel=0.05)
    assert rounded != exact


READS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select", "aten::is_nonzero"}
"""Operations that read a tensor's values into Python, or need them for a size. On a GPU they wait for the device."""


def callers(event: Any) -> Iterator[str]:
    while (event := event.cpu_parent) is not None:
        yield event.name


@pytest.mark.slow
@both_optimizers
def test_host_waits_only_at_logging_points(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four steps read tensors as often as the two logging points among them do, by torch's profiler."""
    # Batches are checked only on the CPU, where reading costs nothing.
    monkeypatch.setattr(DecisionTransformer, "_check_batch", lambda self, batch: None)

    def num_reads(call: Callable[[], object]) -> int:
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            call()
        # torch's fused AdamW reads its step count. Its GPU kernel does that on the device.
        return sum(event.name in READS and "aten::_fused_adamw_" not in callers(event) for event in profiler.events())

    def logging_point() -> None:
        trainer.check()
        trainer.metrics(1.0)

    trainer = make(replace(SHAPE, num_layers=2), optimizer=optimizer, shards=1, steps=4, log=2)
    per_point = num_reads(lambda: list(trainer)) / 2
    assert per_point == num_reads(logging_point) > 0
    assert num_reads(lambda: trainer.update(trainer.sampler.batch(0))) == 0


@pytest.mark.slow
@pytest.mark.parametrize("attention", [stack for stack in ATTENTION_STACKS if stack != "reformer"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_update_reads_no_tensor_values(attention: str, accumulate: int) -> None:
    """Tensors on the meta device have no values: reading one, or copying it to the CPU, is an error."""
    trainer = make(replace(SHAPE, attention=attention), device="meta", accumulate=accumulate)
    for step in range(2):  # the second uses the optimizer's state
        trainer.update(trainer.sampler.batch(step).to("meta"))
    assert all(p.grad is not None and p.grad.is_meta for p in trainer.model.parameters())
    with pytest.raises((RuntimeError, NotImplementedError)):
        trainer.check()  # reads values


@pytest.mark.parametrize(
    "change", [{"conditioning": "max-return"}, {"conditioning": "none"}, {"action_loss": "gaussian"}]
)
def test_critics_and_other_losses_read_no_tensor_values(change: dict[str, Any]) -> None:
    trainer = make(replace(SHAPE, action_dropout=0.5, **change), device="meta", critic_weight=1.0)
    for step in range(2):
        trainer.update(trainer.sampler.batch(step).to("meta"))
    assert all(p.grad is not None and p.grad.is_meta for p in trainer.model.parameters())


def test_stop_before_the_first_update() -> None:
    trainer = make()
    trainer.stop()
    assert list(trainer) == []
    assert trainer.step == 0
