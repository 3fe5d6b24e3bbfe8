"""The Decision Transformer: what each prediction may see, and that nothing else reaches it."""

from dataclasses import replace

import pytest
import torch

from primal_dt.attention import model_spectra
from primal_dt.data.sampler import Batch
from primal_dt.model.transformer import ATTENTION_STACKS, STATE_POSITIONS, DecisionTransformer, ModelShape

STATE, ACTION, STEPS, BATCH = 5, 2, 6, 3
SHAPE = ModelShape(
    state_width=STATE,
    action_low=(-1.0, -2.0),
    action_high=(1.0, 4.0),
    width=16,
    num_heads=2,
    num_layers=3,
    context=STEPS,
    rank=4,
    dropout=0.0,
    max_timesteps=50,
)
CAUSAL_STACKS = [stack for stack in ATTENTION_STACKS if stack != "reformer"]  # its sorting sees the whole sequence


def make(attention: str = "primal-plus", **options: object) -> DecisionTransformer:
    torch.manual_seed(0)
    model = DecisionTransformer(replace(SHAPE, attention=attention, **options)).double()  # type: ignore[arg-type]
    with torch.no_grad():  # large weights, so that everything matters
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def batch(lengths: tuple[int, ...] = (STEPS,) * BATCH, seed: int = 0) -> Batch:
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    count = len(lengths)
    valid = torch.arange(STEPS) < torch.tensor(lengths)[:, None]
    return Batch(
        states=normal(count, STEPS, STATE),
        actions=normal(count, STEPS, ACTION),
        returns_to_go=normal(count, STEPS, 1),
        timesteps=torch.randint(0, 40, (count, 1), generator=random) + torch.arange(STEPS),
        valid=valid,
    )


@pytest.mark.parametrize("attention", CAUSAL_STACKS)
@pytest.mark.parametrize("changed", range(STEPS))
def test_a_prediction_sees_the_past_its_return_and_its_state(attention: str, changed: int) -> None:
    """Tokens are (R, s, a): step t sees R and s up to t, and actions before t."""
    model, before = make(attention), batch()
    original = model(before).actions
    for name, first_moved in (("returns_to_go", changed), ("states", changed), ("actions", changed + 1)):
        tensor = getattr(before, name).clone()
        tensor[:, changed] += 1.0
        moved = (model(replace(before, **{name: tensor})).actions != original).any(-1).any(0)  # (K,)
        expected = torch.arange(STEPS) >= first_moved
        assert torch.equal(moved, expected), name


@pytest.mark.parametrize("attention", ATTENTION_STACKS)
def test_the_pruned_top_layer_equals_the_full_one(attention: str) -> None:
    """Values, J and all gradients, with padding."""
    model, source = make(attention), batch((6, 2, 4))
    output = model(source, with_objective=True)
    x, valid = model.tokens(source), source.valid.repeat_interleave(3, dim=1)
    objectives = {}
    for number, block in enumerate(model.blocks):
        x, objective = block(x, valid, with_objective=True)
        if objective is not None:
            objectives[number] = objective
    full = model.actions_at(x[:, STATE_POSITIONS])
    torch.testing.assert_close(output.actions[source.valid], full[source.valid])
    assert output.objectives.keys() == objectives.keys()
    weight = torch.randn_like(full[source.valid])

    def gradients(actions: torch.Tensor, terms: dict[int, torch.Tensor]) -> list[torch.Tensor | None]:
        loss = (actions[source.valid] * weight).sum() + sum(term.square().sum() for term in terms.values())
        return list(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))

    pruned, complete = gradients(output.actions, output.objectives), gradients(full, objectives)
    for one, two in zip(pruned, complete, strict=True):
        assert (one is None) == (two is None)
        if one is not None and two is not None:
            torch.testing.assert_close(one, two)


@pytest.mark.parametrize("attention", ATTENTION_STACKS)
def test_the_stack_is_what_its_name_says(attention: str) -> None:
    kinds = replace(SHAPE, attention=attention).layer_kinds
    if attention == "primal-plus":
        assert kinds == ("softmax", "softmax", "primal")
    elif attention == "primalformer":
        assert kinds == ("primal",) * 3
    else:
        assert kinds == (attention,) * 3
    layers = [type(block.attention).__name__.lower() for block in make(attention).blocks]
    assert [("primal" in layer) for layer in layers] == [kind == "primal" for kind in kinds]


def test_actions_stay_in_the_box_and_reach_its_middle_and_sides() -> None:
    model = make()
    with torch.no_grad():
        model.head.weight.mul_(1000)
    actions = model(batch()).actions
    low, high = torch.tensor([-1.0, -2.0]).double(), torch.tensor([1.0, 4.0]).double()
    assert (actions >= low).all()
    assert (actions <= high).all()
    assert ((actions - low).abs() < 1e-6).any()
    assert ((actions - high).abs() < 1e-6).any()
    torch.nn.init.zeros_(model.head.weight)
    torch.nn.init.zeros_(model.head.bias)
    torch.testing.assert_close(model(batch()).actions, ((low + high) / 2).expand(BATCH, STEPS, 2))


def test_the_timestep_embedding_is_shared_by_the_three_tokens_of_a_step() -> None:
    model, source = make(), batch()
    model.embed_norm = torch.nn.Identity()  # type: ignore[assignment]
    later = replace(source, timesteps=source.timesteps + 1)
    shift = model.tokens(later) - model.tokens(source)  # (B, L, D)
    expected = model.embed_timestep(later.timesteps) - model.embed_timestep(source.timesteps)
    torch.testing.assert_close(shift, expected.repeat_interleave(3, dim=1))


def test_the_same_tokens_elsewhere_in_the_window_differ_by_what_precedes_them_only() -> None:
    """There is no embedding of the position: the first step alone gives what it gives in a longer window."""
    model, source = make(), batch()
    short = Batch(*(getattr(source, name)[:, :1] for name in vars(source)))
    torch.testing.assert_close(model(short).actions, model(source).actions[:, :1])


@pytest.mark.parametrize("attention", ["primal-plus", "primalformer", "softmax"])
def test_padding_does_not_count_in_the_spectra_of_layers(attention: str) -> None:
    model, source = make(attention).eval(), batch((6, 2, 4))
    whole = model_spectra(model, source)
    alone = model_spectra(model, Batch(*(getattr(source, name)[1:2, :2] for name in vars(source))))
    for name, spectrum in whole.items():
        torch.testing.assert_close(spectrum.effective_rank[1:2], alone[name].effective_rank)


def test_padding_before_a_real_step_is_told() -> None:
    source = batch()
    with pytest.raises(ValueError, match="it must be on the right, after all real steps"):
        make()(replace(source, valid=source.valid.roll(1, 1).logical_and(torch.arange(STEPS) > 0)))


def test_a_timestep_past_the_table_is_told() -> None:
    source = batch()
    with pytest.raises(ValueError, match="timestep 50 is not one of the model's, 0 to 49"):
        make()(replace(source, timesteps=source.timesteps.clamp(min=50, max=50)))
    with pytest.raises(ValueError, match="timestep -1 is not one of the model's"):
        make()(replace(source, timesteps=source.timesteps.clamp(max=-1)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention": "best"}, "attention must be one of primal-plus, primalformer, softmax, .* not 'best'"),
        ({"attention": "linformer"}, "attention must be one of"),
        ({"width": 15}, r"width \(15\) must be divisible by num_heads \(2\)"),
        ({"num_layers": 0}, r"num_layers \(0\) must be at least 1"),
        ({"dropout": 1.0}, r"dropout \(1.0\) must be at least 0 and below 1"),
        ({"action_low": (1.0, -2.0)}, "must be below its action_high"),
        ({"action_low": (0.0,)}, r"action_low \(1 entries\) and action_high \(2\) must agree"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SHAPE, **change)  # type: ignore[arg-type]
