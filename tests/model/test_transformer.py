"""The Decision Transformer: each prediction depends on exactly the tokens that it may see."""

from dataclasses import replace

import pytest
import torch

from primal_dt.attention import model_spectra
from primal_dt.model.transformer import ATTENTION_STACKS

from .small import BATCH, HIGH, LOW, SHAPE, STEPS, make_batch, make_model, part_of, random_model

all_stacks = pytest.mark.parametrize("attention", ATTENTION_STACKS)


@pytest.mark.parametrize(
    "attention", [stack for stack in ATTENTION_STACKS if stack != "reformer"]
)  # it sorts all tokens
@pytest.mark.parametrize("changed", range(STEPS))
def test_predictions_are_causal(attention: str, changed: int) -> None:
    """Tokens are (R, s, a): step t sees R and s up to t, and actions before t. Reformer sorts all tokens."""
    model, batch = make_model(attention), make_batch()
    original = model(batch).actions
    for name, first_moved in (("returns_to_go", changed), ("states", changed), ("actions", changed + 1)):
        tensor = getattr(batch, name).clone()
        tensor[:, changed] += 1.0
        moved = (model(replace(batch, **{name: tensor})).actions != original).any(-1).any(0)  # (K,)
        assert torch.equal(moved, torch.arange(STEPS) >= first_moved), name


@pytest.mark.parametrize("changed", range(STEPS))
def test_cloning_sees_states_and_past_actions(changed: int) -> None:
    """Tokens are (s, a): step t sees s up to t and actions before t, and no return."""
    model, batch = random_model(replace(SHAPE, conditioning="none"), 0.3, torch.float64), make_batch()
    assert model.tokens(batch).shape[1] == 2 * STEPS
    steps = torch.arange(STEPS)
    expected = {"returns_to_go": steps > STEPS, "states": steps >= changed, "actions": steps > changed}
    original = model(batch).actions
    for name, moved in expected.items():
        other = model(replace(batch, **{name: moved_at(getattr(batch, name), changed)})).actions
        assert torch.equal((other != original).any(-1).any(0), moved), name


@pytest.mark.parametrize("changed", range(STEPS))
def test_predicted_returns_do_not_see_themselves(changed: int) -> None:
    """Tokens are (s, R, a): the action at step t sees s and R up to t, the prediction of R only R before t."""
    model, batch = random_model(replace(SHAPE, conditioning="max-return"), 0.3, torch.float64), make_batch()
    steps, original = torch.arange(STEPS), model(batch)
    before, after = steps > changed, steps >= changed
    expected = {"returns_to_go": (after, before), "states": (after, after), "actions": (before, before)}
    for name, moved in expected.items():
        other = model(replace(batch, **{name: moved_at(getattr(batch, name), changed)}))
        assert other.best_returns is not None
        assert original.best_returns is not None
        assert torch.equal((other.actions != original.actions).any(-1).any(0), moved[0]), name
        assert torch.equal((other.best_returns != original.best_returns).any(-1).any(0), moved[1]), name


def moved_at(tensor: torch.Tensor, step: int) -> torch.Tensor:
    """The tensor (B, K, ...) with other values at one step."""
    other = tensor.clone()
    other[:, step] += 1.0
    return other


def test_hidden_actions_are_hidden_in_training_only() -> None:
    """In a training window that hides them, no prediction depends on past actions."""
    model, batch = random_model(replace(SHAPE, action_dropout=0.999), 0.3, torch.float64), make_batch()
    other = replace(batch, actions=batch.actions + 1)
    assert not torch.equal(model(batch).actions, model(other).actions)
    model.train()
    assert torch.equal(model(batch).actions, model(other).actions)


def test_spreads_depend_on_state_and_return_within_bounds() -> None:
    model, batch = random_model(replace(SHAPE, action_loss="gaussian"), 0.3, torch.float64), make_batch()
    log_std = model(batch).log_std
    assert log_std is not None
    radius = torch.tensor(HIGH).sub(torch.tensor(LOW)).div(2).log()
    assert (log_std > -4 + radius).all()
    assert (log_std < 1 + radius).all()
    for name in ("states", "returns_to_go"):
        other = model(replace(batch, **{name: getattr(batch, name) + 1})).log_std
        assert other is not None
        assert (other != log_std).all()


@all_stacks
def test_the_pruned_top_layer_equals_the_full_one(attention: str) -> None:
    """In actions, J and all gradients, with padding."""
    model, batch = make_model(attention), make_batch(6, 2, 4)
    pruned = model(batch, with_objective=True)
    x, valid = model.tokens(batch), batch.valid.repeat_interleave(3, dim=1)
    objectives = {}
    for number, block in enumerate(model.blocks):
        x, objective = block(x, valid, with_objective=True)
        if objective is not None:
            objectives[number] = objective
    full = model.actions_at(x[:, 1::3])
    assert pruned.objectives.keys() == objectives.keys()
    weight = torch.randn_like(full[batch.valid])
    results = []
    for actions, terms in ((pruned.actions, pruned.objectives), (full, objectives)):
        loss = (actions[batch.valid] * weight).sum() + sum(term.square().sum() for term in terms.values())
        gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        results.append([actions[batch.valid], *terms.values(), *gradients])
    torch.testing.assert_close(*results)


@all_stacks
def test_the_stack_has_the_kinds_of_its_name(attention: str) -> None:
    kinds = replace(SHAPE, attention=attention).layer_kinds
    mixed = {"primal-plus": ("softmax", "softmax", "primal"), "primalformer": ("primal",) * 3}
    assert kinds == mixed.get(attention, (attention,) * 3)
    layers = [type(block.attention).__name__ for block in make_model(attention).blocks]
    assert ["Primal" in layer for layer in layers] == [kind == "primal" for kind in kinds]


def test_actions_reach_all_of_the_box() -> None:
    model, batch = make_model(), make_batch()
    low, high = torch.tensor(LOW).double(), torch.tensor(HIGH).double()
    with torch.no_grad():
        model.head.weight.mul_(1000)
    actions = model(batch).actions
    assert (actions >= low).all()
    assert (actions <= high).all()
    assert ((actions - low).abs() < 1e-6).any()
    assert ((actions - high).abs() < 1e-6).any()
    torch.nn.init.zeros_(model.head.weight)
    torch.nn.init.zeros_(model.head.bias)
    torch.testing.assert_close(model(batch).actions, ((low + high) / 2).expand(BATCH, STEPS, 2))


def test_tokens_of_a_step_share_the_timestep_embedding() -> None:
    model, batch = make_model(), make_batch()
    model.embed_norm = torch.nn.Identity()  # type: ignore[assignment]
    later = replace(batch, timesteps=batch.timesteps + 1)
    shift = model.tokens(later) - model.tokens(batch)  # (B, L, D)
    expected = model.embed_timestep(later.timesteps) - model.embed_timestep(batch.timesteps)
    torch.testing.assert_close(shift, expected.repeat_interleave(3, dim=1))


def test_predictions_do_not_depend_on_the_position() -> None:
    """The position has no embedding: the first step alone has the same action as in a longer window."""
    model, batch = make_model(), make_batch()
    first = part_of(batch, slice(None), slice(1))
    torch.testing.assert_close(model(first).actions, model(batch).actions[:, :1])


@pytest.mark.parametrize("attention", ["primal-plus", "primalformer", "softmax"])
def test_padding_does_not_change_the_spectra(attention: str) -> None:
    model, batch = make_model(attention), make_batch(6, 2, 4)
    alone = model_spectra(model, part_of(batch, slice(1, 2), slice(2)))
    for name, spectrum in model_spectra(model, batch).items():
        torch.testing.assert_close(spectrum.effective_rank[1:2], alone[name].effective_rank)


def test_padding_before_a_valid_step_raises() -> None:
    valid = (torch.arange(STEPS) > 0).expand(BATCH, STEPS)
    with pytest.raises(ValueError, match="padding must be on the right, after all valid steps"):
        make_model()(replace(make_batch(), valid=valid))


@pytest.mark.parametrize("timestep", [50, -1])
def test_a_timestep_outside_the_table_raises(timestep: int) -> None:
    with pytest.raises(ValueError, match=f"timestep {timestep} must be from 0 to 49"):
        make_model()(replace(make_batch(), timesteps=torch.full((BATCH, STEPS), timestep)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention": "best"}, "attention must be one of primal-plus, primalformer, softmax, .* not 'best'"),
        ({"attention": "linformer"}, "attention must be one of"),
        ({"width": 15}, r"width \(15\) must be divisible by num_heads \(2\)"),
        ({"num_layers": 0}, r"num_layers \(0\) must be at least 1"),
        ({"conditioning": "best"}, "conditioning must be one of return, none, max-return, not 'best'"),
        ({"dropout": 1.0}, r"dropout \(1.0\) must be at least 0 and below 1"),
        ({"action_low": (1.0, -2.0)}, "must be below its action_high"),
        ({"action_low": (0.0,)}, r"action_low \(length 1\) and action_high \(length 2\) must have the same length"),
    ],
)
def test_a_wrong_shape_raises(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SHAPE, **change)  # type: ignore[arg-type]
