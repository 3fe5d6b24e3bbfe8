"""The table of tasks: its numbers, names and units."""

import json
from dataclasses import astuple

import gymnasium
import numpy as np
import pytest

from envs.datasets.names import KNOWN_NAMES, parse_name
from envs.errors import DataError
from envs.make import make_environment
from envs.spaces import unit_box
from envs.tasks import ENVIRONMENTS, Spaces, Task, environment_of, task_of
from primal_dt.evaluation.score import normalized
from primal_dt.task import Reference, RunTask, Specification, Wrapper


def test_scores_match_d4rl() -> None:
    """The ends of the scale, and the mean returns of D4RL's medium v2 data, calculated by hand."""
    for environment in ENVIRONMENTS.values():
        reference = environment.reference
        assert reference is not None
        ends = [reference.random_return, reference.expert_return]
        np.testing.assert_allclose(normalized(ends, reference), [0, 100])
    for name, mean, score in (("hopper", 1422, 44.3), ("halfcheetah", 4770, 40.7), ("walker2d", 2852, 62.1)):
        assert normalized(mean, ENVIRONMENTS[name].reference).item() == pytest.approx(score, abs=0.05)


def test_targets_and_references_are_the_published_ones() -> None:
    table = {
        name: (*environment.targets, *astuple(environment.reference))
        for name, environment in ENVIRONMENTS.items()
        if environment.reference is not None
    }
    assert table == {
        "hopper": (3600, 1800, -20.272305, 3234.3),
        "halfcheetah": (12000, 6000, -280.178953, 12135.0),
        "walker2d": (5000, 2500, 1.629008, 4592.3),
    }


def test_environments_of_the_table_are_plain() -> None:
    """A policy acts in what ``gymnasium.make`` gives, without a conversion: model cards show it so."""
    for environment in ENVIRONMENTS.values():
        task = task_of(f"{environment.gymnasium_name}-v5")
        assert task.run_task().is_in_table
        assert type(make_environment(task)) is type(gymnasium.make(task.env_id))
    for other in ("Pendulum-v1", Specification("Hopper-v5", max_episode_steps=9)):
        assert not task_of(other).run_task().is_in_table


def test_a_score_is_linear_in_the_return() -> None:
    scores = normalized([[-50, 50], [150, 250]], Reference(-50.0, 150.0))
    np.testing.assert_allclose(scores, [[0, 50], [100, 150]])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("hopper-medium-v2", ("d4rl", "hopper", "medium", "Hopper-v4")),
        ("halfcheetah-medium-replay-v2", ("d4rl", "halfcheetah", "medium-replay", "HalfCheetah-v4")),
        ("pen-human-v1", ("d4rl", "pen", "human", "AdroitHandPen-v1 (at most 100 steps)")),
        ("mujoco/walker2d/expert-v0", ("minari", "walker2d", "expert", "Walker2d-v5")),
        ("primal/hopper/medium-expert-v0", ("primal", "hopper", "medium-expert", "Hopper-v5")),
    ],
)
def test_a_name_gives_source_environment_tier_version(name: str, expected: tuple[str, ...]) -> None:
    parsed = parse_name(name)
    assert parsed is not None
    assert (parsed.source, parsed.environment, parsed.tier, str(parsed.specification)) == expected
    assert str(parsed) == name


@pytest.mark.parametrize("name", ["hopper-medium-v3", "primal/hopper/simple-v0", "mujoco/hopper/medium-replay-v0", ""])
def test_other_names_are_unknown(name: str) -> None:
    assert parse_name(name) is None


def test_known_names_survive_a_round_trip() -> None:
    assert {name.source for name in KNOWN_NAMES.values()} == {"primal", "d4rl", "minari"}
    assert all(parse_name(str(name)) == name for name in KNOWN_NAMES.values())


def test_the_papers_nine_tasks_have_a_rank() -> None:
    names = [f"{env}-{tier}-v2" for env in ENVIRONMENTS for tier in ("medium-expert", "medium", "medium-replay")]
    ranks = [task.paper_rank for name in (*names, "hopper-expert-v2") if (task := KNOWN_NAMES[name].task)]
    assert ranks == [64, 96, 64, 96, 64, 32, 96, 96, 96, None]
    assert task_of("Hopper-v5").paper_rank is None


def test_an_environment_id_gives_its_task() -> None:
    task = task_of("Walker2d-v4", "medium")
    assert (task.environment.name, task.env_id, task.environment.targets[0]) == ("walker2d", "Walker2d-v4", 5000)


@pytest.mark.parametrize(
    ("env_id", "hint"),
    [("hopper-v5", "there are Hopper-v2, Hopper-v3, Hopper-v4, Hopper-v5"), ("Own-v0", "--env-id my_module:MyEnv-v0")],
)
def test_an_unknown_environment_gives_a_hint(env_id: str, hint: str) -> None:
    with pytest.raises(DataError, match=f"the environment {env_id} is not registered: .*{hint}"):
        task_of(env_id)


WRAPPED = Specification("Own-v0", '{"a": 1}', 7, (Wrapper("Around", "module:Around", '{"b": 2}'),))


@pytest.mark.parametrize(
    "task",
    [
        task_of("Walker2d-v4", "medium").run_task(),
        Task(environment_of(WRAPPED, Spaces(2, unit_box(1))), WRAPPED).run_task(),
        Task(environment_of(None, Spaces(2, unit_box(1))), None).run_task(),
    ],
    ids=lambda task: task.environment,
)
def test_a_run_task_survives_a_round_trip(task: RunTask) -> None:
    assert RunTask.from_dict(json.loads(json.dumps(task.to_dict()))) == task


def test_the_table_is_for_the_plain_environment_only() -> None:
    """Its targets and references would be wrong for other arguments, another limit or a wrapper."""
    spaces = Spaces(11, unit_box(3))
    assert environment_of(Specification("Hopper-v5"), spaces) is ENVIRONMENTS["hopper"]
    for variant in (
        Specification("Hopper-v5", '{"terminate_when_unhealthy": false}'),
        Specification("Hopper-v5", max_episode_steps=15),
        Specification("Hopper-v5", wrappers=(Wrapper("RescaleAction", "gymnasium.wrappers:RescaleAction"),)),
    ):
        environment = environment_of(variant, spaces)
        assert (environment.name, environment.reference, environment.targets) == ("hopper", None, ())


def test_a_unit_names_version_and_references() -> None:
    assert task_of("Hopper-v4").run_task().unit == "Hopper-v4, 0 at a return of -20.2723, 100 at 3234.3"
