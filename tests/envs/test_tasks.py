"""The table of tasks: its numbers, names and units."""

import numpy as np
import pytest

from envs.datasets.names import KNOWN_NAMES, DatasetName, parse_name
from envs.tasks import ENVIRONMENTS, task_of
from primal_dt.evaluation.score import normalized
from primal_dt.task import Reference, RunTask


def test_scores_match_d4rl() -> None:
    """The ends of the scale, and the mean returns of D4RL's medium v2 data, calculated by hand."""
    for environment in ENVIRONMENTS.values():
        reference = environment.reference
        ends = [reference.random_return, reference.expert_return]
        np.testing.assert_allclose(normalized(ends, reference), [0, 100])
    for name, mean, score in (("hopper", 1422, 44.3), ("halfcheetah", 4770, 40.7), ("walker2d", 2852, 62.1)):
        assert normalized(mean, ENVIRONMENTS[name].reference).item() == pytest.approx(score, abs=0.05)


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
    scores = normalized([[-50, 50], [150, 250]], Reference(-50.0, 150.0))
    np.testing.assert_allclose(scores, [[0, 50], [100, 150]])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("hopper-medium-v2", ("d4rl", "hopper", "medium", "Hopper-v4")),
        ("halfcheetah-medium-replay-v2", ("d4rl", "halfcheetah", "medium-replay", "HalfCheetah-v4")),
        ("mujoco/walker2d/expert-v0", ("minari", "walker2d", "expert", "Walker2d-v5")),
        ("primal/hopper/medium-expert-v0", ("primal", "hopper", "medium-expert", "Hopper-v5")),
    ],
)
def test_a_name_gives_source_environment_tier_version(name: str, expected: tuple[str, ...]) -> None:
    parsed = parse_name(name)
    assert parsed is not None
    assert (parsed.source, parsed.environment, parsed.tier, parsed.task.env_id) == expected
    assert str(parsed) == name


@pytest.mark.parametrize("name", ["hopper-medium-v1", "primal/hopper/simple-v0", "mujoco/hopper/medium-replay-v0", ""])
def test_other_names_are_unknown(name: str) -> None:
    assert parse_name(name) is None


def test_known_names_survive_a_round_trip() -> None:
    assert len(KNOWN_NAMES) == 3 * (5 + 3 + 5)
    assert all(parse_name(str(name)) == name for name in KNOWN_NAMES.values())


def test_the_papers_nine_tasks_have_a_rank() -> None:
    ranks = [
        DatasetName("d4rl", environment, tier).task.paper_rank
        for environment in ENVIRONMENTS
        for tier in ("medium-expert", "medium", "medium-replay")
    ]
    assert ranks == [64, 96, 64, 96, 64, 32, 96, 96, 96]
    assert DatasetName("d4rl", "hopper", "expert").task.paper_rank is None
    assert task_of("Hopper-v5").paper_rank is None


def test_an_environment_id_gives_its_task() -> None:
    task = task_of("Walker2d-v4", "medium")
    assert (task.environment.name, task.env_id, task.environment.targets[0]) == ("walker2d", "Walker2d-v4", 5000)


@pytest.mark.parametrize("env_id", ["Ant-v5", "Hopper", "hopper-v5", "Hopper-v5 "])
def test_an_unknown_environment_lists_the_known_ones(env_id: str) -> None:
    message = f"no task for the environment {env_id!r}.*Hopper-v5, HalfCheetah-v5, Walker2d-v5"
    with pytest.raises(ValueError, match=message):
        task_of(env_id)


def test_the_headline_target_always_comes_first() -> None:
    task = task_of("Hopper-v5")
    assert task.run_task().targets == (3600, 1800)
    assert task.run_task([100.0, 3600.0]).targets == (3600, 100)
    assert task.run_task([100.0]).headline == 3600


def test_a_run_task_survives_a_round_trip() -> None:
    task = task_of("Walker2d-v4", "medium").run_task([7.0], dataset="a", data_env_ids=["b", "a", "b"], fingerprint="f")
    assert task.data_env_ids == ("a", "b")
    assert task.environment == "walker2d"
    assert RunTask.from_dict(task.to_dict()) == task


def test_a_unit_names_version_and_references() -> None:
    assert task_of("Hopper-v4").run_task().unit == "Hopper-v4, 0 at a return of -20.2723, 100 at 3234.3"
