"""The table of tasks: its numbers, and that units are not mixed."""

import numpy as np
import pytest

from envs.tasks import ENVIRONMENTS, KNOWN_NAMES, DatasetName, Reference, Unit, parse_name, require_one_unit, task_of


def test_scores_are_those_of_d4rl() -> None:
    """The ends of the scale, and the mean returns of D4RL's medium v2 data, worked out by hand."""
    for environment in ENVIRONMENTS.values():
        reference = environment.reference
        np.testing.assert_allclose(reference.score([reference.random_return, reference.expert_return]), [0, 100])
    assert ENVIRONMENTS["hopper"].reference.score(1422).item() == pytest.approx(44.3, abs=0.05)
    assert ENVIRONMENTS["halfcheetah"].reference.score(4770).item() == pytest.approx(40.7, abs=0.05)
    assert ENVIRONMENTS["walker2d"].reference.score(2852).item() == pytest.approx(62.1, abs=0.05)


def test_targets_and_references_are_the_published_ones() -> None:
    table = {
        name: (*environment.targets, environment.reference.random_return, environment.reference.expert_return)
        for name, environment in ENVIRONMENTS.items()
    }
    assert table == {
        "hopper": (3600, 1800, -20.272305, 3234.3),
        "halfcheetah": (12000, 6000, -280.178953, 12135.0),
        "walker2d": (5000, 2500, 1.629008, 4592.3),
    }


def test_a_score_is_linear_in_the_return() -> None:
    reference = Reference(-50.0, 150.0, "made up")
    np.testing.assert_allclose(reference.score([[-50, 50], [150, 250]]), [[0, 50], [100, 150]])


@pytest.mark.parametrize(
    ("name", "source", "environment", "tier", "env_id"),
    [
        ("hopper-medium-v2", "d4rl", "hopper", "medium", "Hopper-v4"),
        ("halfcheetah-medium-replay-v2", "d4rl", "halfcheetah", "medium-replay", "HalfCheetah-v4"),
        ("mujoco/walker2d/expert-v0", "minari", "walker2d", "expert", "Walker2d-v5"),
        ("primal/hopper/medium-expert-v0", "primal", "hopper", "medium-expert", "Hopper-v5"),
    ],
)
def test_a_name_tells_source_environment_tier_and_version(
    name: str, source: str, environment: str, tier: str, env_id: str
) -> None:
    parsed = parse_name(name)
    assert parsed is not None
    assert (parsed.source, parsed.environment, parsed.tier, parsed.task.env_id) == (source, environment, tier, env_id)
    assert str(parsed) == name


@pytest.mark.parametrize("name", ["hopper-medium-v1", "primal/hopper/simple-v0", "mujoco/hopper/medium-replay-v0", ""])
def test_other_names_are_unknown(name: str) -> None:
    assert parse_name(name) is None


def test_every_name_comes_back() -> None:
    assert len(KNOWN_NAMES) == 3 * (5 + 3 + 5)
    assert all(parse_name(str(name)) == name for name in KNOWN_NAMES.values())


def test_the_nine_tasks_of_the_paper_have_a_rank_and_others_none() -> None:
    ranks = {
        (environment, tier): DatasetName("d4rl", environment, tier).task.paper_rank
        for environment in ENVIRONMENTS
        for tier in ("medium-expert", "medium", "medium-replay")
    }
    assert list(ranks.values()) == [64, 96, 64, 96, 64, 32, 96, 96, 96]
    assert DatasetName("d4rl", "hopper", "expert").task.paper_rank is None
    assert task_of("Hopper-v5").paper_rank is None


def test_an_environment_id_has_a_task_in_its_own_version() -> None:
    task = task_of("Walker2d-v4", "medium")
    assert task.environment.name == "walker2d"
    assert task.env_id == "Walker2d-v4"
    assert task.environment.targets[0] == 5000


@pytest.mark.parametrize("env_id", ["Ant-v5", "Hopper", "hopper-v5", "Hopper-v5 "])
def test_an_unknown_environment_is_told_what_there_is(env_id: str) -> None:
    with pytest.raises(
        ValueError, match=f"no task for the environment {env_id!r}.*Hopper-v5, HalfCheetah-v5, Walker2d-v5"
    ):
        task_of(env_id)


def test_units_are_not_mixed() -> None:
    old, new = DatasetName("d4rl", "hopper", "medium").task, DatasetName("primal", "hopper", "medium").task
    assert require_one_unit([old.unit, DatasetName("d4rl", "hopper", "expert").task.unit]) == old.unit
    with pytest.raises(ValueError, match=r"different units .*Hopper-v4, 0 at a return of -20\.2723.*; Hopper-v5"):
        require_one_unit([old.unit, new.unit])
    other = Unit(new.env_id, Reference(0.0, 3000.0, "another table"))
    with pytest.raises(ValueError, match="different units"):
        require_one_unit([new.unit, other])
    with pytest.raises(ValueError, match="no score"):
        require_one_unit([])
