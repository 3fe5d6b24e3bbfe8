"""Specifications: they are restored exactly, and nothing that only the data names is imported without trust."""

import json
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from envs.errors import DataError
from envs.specifications import make_specified, parse_specification, plain_where_equal
from primal_dt.task import Specification, Wrapper


def spec_of(env: gymnasium.Env[Any, Any]) -> str:
    assert env.spec is not None
    return env.spec.to_json()


def plain(text: str) -> Specification:
    return plain_where_equal(parse_specification(text, "here"))


def test_a_plain_environment_has_a_plain_specification() -> None:
    assert plain(spec_of(gymnasium.make("Hopper-v5"))) == Specification("Hopper-v5")
    assert str(Specification("Hopper-v5")) == "Hopper-v5"


def test_arguments_limit_and_wrappers_are_restored() -> None:
    env = gymnasium.make("Hopper-v5", terminate_when_unhealthy=False, max_episode_steps=15)
    bounds: Any = (-0.5, 0.5)
    with pytest.warns(UserWarning, match="precision"):
        env = gymnasium.wrappers.RescaleAction(env, *bounds)
    specification = plain(spec_of(env))
    assert str(specification) == (
        "Hopper-v5 (terminate_when_unhealthy = False, at most 15 steps, "
        "RescaleAction(max_action = 0.5, min_action = -0.5))"
    )
    made = make_specified(specification)
    assert made.action_space == env.action_space
    for each in (env, made):
        each.reset(seed=0)
    actions = np.random.default_rng(0).uniform(-0.5, 0.5, (15, 3)).astype(np.float32)
    for action in actions:
        one, two = env.step(action), made.step(action)
        np.testing.assert_array_equal(one[0], two[0])
        assert one[1:4] == two[1:4]
    assert two[3]  # truncated at step 15
    assert plain(spec_of(made)) == specification


def test_only_modules_of_others_are_named() -> None:
    wrapper = Wrapper("RescaleAction", "gymnasium.wrappers.transform_action:RescaleAction")
    assert Specification("Hopper-v5", wrappers=(wrapper,)).imported == []
    assert Specification("my_env:Reach-v0", wrappers=(Wrapper("A", "other:A"), wrapper)).imported == ["my_env", "other"]


def test_reading_imports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Creating imports a module that only the data names if the user trusts it, and not otherwise."""
    (tmp_path / "named_by_data.py").write_text(
        "from gymnasium.envs.classic_control import CartPoleEnv as Own\nfrom gymnasium import Wrapper as Around\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    content: dict[str, Any] = {"id": "Own-v0", "entry_point": "named_by_data:Own", "max_episode_steps": 7}
    own = parse_specification(json.dumps(content), "here")
    wrapped = {"name": "Around", "entry_point": "named_by_data:Around", "kwargs": {}}
    around = parse_specification(json.dumps({"id": "CartPole-v1", "additional_wrappers": [wrapped]}), "here")
    for specification in (own, around):
        assert specification.imported == ["named_by_data"]
        with pytest.raises(DataError, match=r"would import named_by_data:.* if you trust the data, add --trust-env"):
            make_specified(specification)
    assert "named_by_data" not in sys.modules
    env = make_specified(own, trust=True)
    env.reset(seed=0)
    assert sum(not env.step(0)[3] for _ in range(7)) == 6  # the limit of 7 steps
    assert str(make_specified(around, trust=True)).startswith("<Wrapper<TimeLimit")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not json", "cannot be read"),
        ("[]", "cannot be read"),
        ('{"id": 3}', "3 must be a text"),
        ('{"id": "Hopper-v5", "kwargs": [1]}', "arguments must be a mapping"),
        ('{"id": "Hopper-v5", "max_episode_steps": 0}', "limit must be at least 1, not 0"),
        ('{"id": "Hopper-v5", "additional_wrappers": [{"name": "x"}]}', "cannot be read"),
    ],
)
def test_another_form_is_refused(text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        parse_specification(text, "here")


def test_a_wrapper_that_cannot_be_restored_is_an_error() -> None:
    class Silent(gymnasium.RewardWrapper[Any, Any]):
        """It does not record its arguments."""

        def __init__(self, env: gymnasium.Env[Any, Any], scale: float) -> None:
            super().__init__(env)
            self.scale = scale

        def reward(self, reward: Any) -> Any:
            return self.scale * reward

    specification = plain(spec_of(Silent(gymnasium.make("CartPole-v1"), 2.0)))
    assert str(specification) == "CartPole-v1 (Silent(unknown arguments))"
    with pytest.raises(DataError, match="the wrapper Silent of CartPole-v1 cannot be restored"):
        make_specified(specification, trust=True)


def test_what_cannot_be_created_is_explained() -> None:
    with pytest.raises(DataError, match=r"Hopper-v5 \(wings = 2\) cannot be created: TypeError"):
        make_specified(Specification("Hopper-v5", '{"wings": 2}'))
    with pytest.raises(DataError, match="Nothing-v0 is not registered"):
        make_specified(Specification("Nothing-v0"))
