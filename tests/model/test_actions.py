"""Action spaces: choices, and entries with and without bounds, through model, loss, training and policy."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from primal_dt.config import OptimizerConfig
from primal_dt.data.normalizer import Normalizer
from primal_dt.data.sampler import Batch, WindowSampler
from primal_dt.data.trajectories import Trajectories, Trajectory
from primal_dt.model.actions import BoxActions, CategoricalActions
from primal_dt.model.critic import TwinCritic
from primal_dt.model.loss import Objective, loss_terms
from primal_dt.model.transformer import DecisionTransformer
from primal_dt.policy.inference import InferenceMode
from primal_dt.policy.policy import DecisionTransformerPolicy
from primal_dt.training.guidance import Guidance, value_range
from primal_dt.training.trainer import Trainer
from tests.model.small import SHAPE, make_batch, random_model

CHOICES = (3, 2)
CATEGORICAL = replace(SHAPE, action_low=(), action_high=(), categories=CHOICES)


def choices_batch(*lengths: int) -> Batch:
    batch = make_batch(*lengths)
    random = torch.Generator().manual_seed(1)
    shape = batch.actions.shape[:2]
    actions = [torch.randint(0, number, shape, generator=random) for number in CHOICES]
    return replace(batch, actions=torch.stack(actions, -1).double())


def test_choices_are_encoded_and_decoded() -> None:
    space, actions = CategoricalActions(CHOICES), torch.tensor([[2.0, 0.0], [0.0, 1.0]])
    encoded = space.encode(actions)
    assert encoded.tolist() == [[0, 0, 1, 1, 0], [1, 0, 0, 0, 1]]
    assert torch.equal(space.decode(5 * encoded), actions)
    predicted = space.predict(torch.randn(7, 5))
    torch.testing.assert_close(torch.stack([part.sum(-1) for part in space.split(predicted)]), torch.ones(2, 7))


def test_entries_without_bounds_are_scaled_by_the_data() -> None:
    space, outputs = BoxActions((-1.0, 4.0), (1.0, 6.0), (False, True)), torch.tensor([[100.0, 100.0]])
    torch.testing.assert_close(space.predict(outputs), torch.tensor([[1.0, 105.0]]))
    torch.testing.assert_close(space.decode(torch.zeros(1, 2)), torch.tensor([[0.0, 5.0]]))


def test_saturated_outputs_are_within_the_bounds() -> None:
    """Rounding would lead one action in twenty beyond uneven bounds."""
    random = torch.Generator().manual_seed(0)
    low = 4 * torch.rand(1000, generator=random) - 2
    high = low + 3 * torch.rand(1000, generator=random)
    space = BoxActions(low.tolist(), high.tolist())
    for outputs in (torch.full((1000,), 100.0), torch.full((1000,), -100.0)):
        actions = space.decode(outputs)
        assert ((low <= actions) & (actions <= high)).all()
        torch.testing.assert_close(actions, high if outputs[0] > 0 else low, rtol=1e-6, atol=1e-6)


def test_the_loss_of_choices_is_the_cross_entropy() -> None:
    model, batch = random_model(CATEGORICAL, 0.3, torch.float64), choices_batch(6, 2, 4)
    output = model(batch, with_objective=True)
    terms = loss_terms(output, batch, Objective(eta=0.0))
    slow = [
        float(F.cross_entropy(output.logits[a][b, t], batch.actions[b, t, a].long()).detach())
        for b, n in enumerate((6, 2, 4))
        for t in range(n)
        for a in range(2)
    ]
    assert float(terms.total.detach()) == pytest.approx(sum(slow) / len(slow))
    assert "train/action_nll" in terms.scalars()


@pytest.mark.parametrize("fill", [1e6, float("nan")])
def test_padding_changes_nothing(fill: float) -> None:
    model, clean = random_model(CATEGORICAL, 0.3, torch.float64), choices_batch(6, 2, 4)
    dirty = replace(clean, actions=clean.actions.masked_fill(~clean.valid[..., None], fill))
    results = []
    for batch in (clean, dirty):
        total = loss_terms(model(batch, with_objective=True), batch, Objective()).total
        results.append([total, *torch.autograd.grad(total, list(model.parameters()), allow_unused=True)])
    torch.testing.assert_close(*results, atol=0, rtol=0)


@pytest.mark.parametrize("mode", ["window", "streaming"])
def test_a_policy_takes_the_likeliest_choice(mode: InferenceMode) -> None:
    model = random_model(replace(CATEGORICAL, context=4), 0.5)
    units = Normalizer(np.zeros(3, np.float32), np.ones(3, np.float32), 1.0)
    critic = TwinCritic(model.shape)
    plain, guided = (DecisionTransformerPolicy(model, units, mode=mode, critic=own) for own in (None, critic))
    random, seen = np.random.default_rng(0), []
    for policy in (plain, guided):
        policy.reset([1.0, 2.0, 3.0])
    states = random.normal(size=(4, 3, 3))  # four steps: the whole window
    for state in states:
        seen.append(plain.act(state))
        assert set(np.unique(guided.act(state))) <= {0.0, 1.0, 2.0}
        plain.observe([0.0] * 3)
        guided.observe([0.0] * 3)
    actions = np.stack(seen, 1)  # (E, T, A)
    batch = Batch(
        torch.from_numpy(states.transpose(1, 0, 2).astype(np.float32)),
        torch.from_numpy(actions),
        torch.tensor([1.0, 2.0, 3.0])[:, None, None].expand(-1, 4, 1),
        torch.arange(4).expand(3, 4),
        torch.ones(3, 4, dtype=torch.bool),
    )
    with torch.inference_mode():
        likeliest = torch.stack([logits.argmax(-1) for logits in model(batch).logits], -1)
    np.testing.assert_array_equal(actions, likeliest.numpy())
    assert len(np.unique(actions)) > 1


@pytest.mark.parametrize("critic_weight", [0.0, 0.5])
def test_choices_are_learned(critic_weight: float) -> None:
    """The choice is the sign of a state entry."""
    random = np.random.default_rng(0)
    states = random.normal(size=(60, 12, 3)).astype(np.float32)
    actions = np.stack([np.digitize(states[..., 0], (-0.4, 0.4)), states[..., 1] > 0], -1).astype(np.float32)
    data = Trajectories.of([Trajectory(s, a, np.ones(12, np.float32)) for s, a in zip(states, actions, strict=True)])
    units = Normalizer.of(data.observations, return_scale=10.0)
    torch.manual_seed(0)
    model = DecisionTransformer(replace(CATEGORICAL, width=32, context=4, dropout=0.0))
    options: dict[str, Any] = {}
    guidance = None
    if critic_weight:
        guidance = Guidance(model, weight=critic_weight, values=value_range(data), reward_scale=10.0)
        options["is_terminated"] = np.ones(60, np.bool_)
    sampler = WindowSampler(data, units, context=4, batch_size=32, seed=0, **options)
    config = OptimizerConfig(steps=80, batch_size=32, lr=1e-2, warmup_steps=10, shards=1, clip=1.0)
    trainer = Trainer(model, sampler, config, objective=Objective(), seed=0, log_every_steps=20, guidance=guidance)
    *_, last = trainer
    batch = sampler.batch(999)
    model.eval()
    with torch.no_grad():
        predicted = torch.stack([logits.argmax(-1) for logits in model(batch).logits], -1)
    right = (predicted == batch.actions)[batch.valid].float().mean()
    assert right > 0.9
    assert last.scalars["train/action_nll"] < 0.4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"categories": (0, 2)}, "one choice each"),
        ({"action_low": (0.0,)}, "must have no bounds"),
        ({"action_loss": "gaussian"}, "is for continuous actions"),
    ],
)
def test_a_wrong_space_raises(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(CATEGORICAL, **change)
