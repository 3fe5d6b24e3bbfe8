"""The task of a data set: the exact environment, spaces, bounds, references and targets, from its metadata."""

import json
import sys
from collections import OrderedDict
from dataclasses import astuple
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings

from envs.behavior.policies import load_policy
from envs.behavior.record import run_episode
from envs.datasets.load import Dataset, load_dataset
from envs.datasets.minari import open_minari, write_minari
from envs.datasets.part_tasks import DataOptions
from envs.errors import DataError
from envs.make import make_environment, make_raw
from envs.spaces import flat_width, to_action
from envs.tasks import Task, task_of
from primal_dt.config import ModelConfig
from primal_dt.task import Reference, Specification, Wrapper
from tests.envs import odd
from tests.envs.files import d4rl_arrays, write_d4rl
from tests.envs.odd import KITCHEN
from tests.envs.test_spaces import ACTIONS, NESTED

NAME = "test/odd-v0"
REFERENCE = Reference(-20.272305, 3234.3)
RESCALED = Wrapper(
    "RescaleAction", "gymnasium.wrappers.transform_action:RescaleAction", '{"max_action": 0.5, "min_action": -0.5}'
)


def recorded(task: Task, name: str = NAME, *, episodes: int = 2, replace: bool = False, **metadata: Any) -> str:
    """A data set of random actions, written by Minari. Entries of the metadata are replaced; None removes one."""
    env, policy = make_raw(task), load_policy("random", task)
    runs = [run_episode(env, policy, seed=seed) for seed in range(episodes)]
    folder = write_minari(name, runs, task=task, algorithm="none", description="", metadata={}, replace=replace)
    path = folder / "data" / "metadata.json"
    changed = json.loads(path.read_text()) | metadata
    path.write_text(json.dumps({key: value for key, value in changed.items() if value is not None}))
    return name


def odd_task(env_id: str = "tests.envs.odd:Odd-v0") -> Task:
    return task_of(env_id, trusted=True)


def forget(patch: pytest.MonkeyPatch) -> None:
    """As if the module of the tests' environments had not been imported."""
    patch.delitem(sys.modules, "tests.envs.odd")
    for name in ("Odd-v0", "Shifting-v0", "Endless-v0", "Growing-v0"):
        patch.delitem(gymnasium.registry, name)


def load(name: str = NAME, **options: Any) -> Dataset:
    return load_dataset(name, DataOptions(**options))


def assert_refused(message: str, name: str = NAME, **options: Any) -> None:
    with pytest.raises(DataError, match=message):
        load(name, **options)


@pytest.mark.parametrize(
    "variant",
    [
        Specification("Hopper-v5", '{"terminate_when_unhealthy": false}', 15),
        Specification("Hopper-v5", max_episode_steps=15, wrappers=(RESCALED,)),
        Specification("Pendulum-v1", '{"g": 5.0}'),
    ],
    ids=str,
)
def test_a_variant_is_evaluated_as_it_was_recorded(variant: Specification) -> None:
    dataset = load(recorded(task_of(variant)))
    assert dataset.task.specification == variant
    assert dataset.parts[0].env_id == str(variant)
    task = dataset.run_task()
    assert task.environment_text == str(variant)
    assert task.reference is None  # the table's are for the plain Hopper
    best = float(dataset.trajectories.returns.max())
    assert task.targets == pytest.approx((best, best / 2 if best > 0 else 2 * best), rel=1e-3)
    assert "the data" in task.target_source
    # The environment gives the very rewards of the recording.
    env = make_environment(dataset.task)
    env.reset(seed=0)
    data = dataset.trajectories
    rewards = [float(env.step(action)[1]) for action in data.actions[: data.offsets[1]]]
    np.testing.assert_allclose(np.array(rewards), data.rewards[: data.offsets[1]].astype(float), rtol=1e-6)


def test_the_plain_environment_in_place_of_a_variant_is_not_silent() -> None:
    """It is an error, or with --mix-versions a note for every table."""
    name = recorded(task_of(Specification("Hopper-v5", max_episode_steps=15)))
    assert_refused(
        r"these are mixed: test/odd-v0 Hopper-v5 \(at most 15 steps\), --env-id Hopper-v5", env_id="Hopper-v5"
    )
    mixed = load(name, env_id="Hopper-v5", mix_versions=True)
    assert str(mixed.task.specification) == "Hopper-v5"
    assert mixed.run_task().data_env_ids == ("Hopper-v5 (at most 15 steps)",)
    assert "was recorded in Hopper-v5 (at most 15 steps) but is used for Hopper-v5" in mixed.run_task().notes[0]


def test_the_evaluation_environment_of_the_metadata_comes_first() -> None:
    spec = make_raw(task_of(Specification("Pendulum-v1", '{"g": 3.0}'))).spec
    assert spec is not None
    dataset = load(recorded(task_of("Pendulum-v1"), eval_env_spec=spec.to_json()))
    assert str(dataset.task.specification) == "Pendulum-v1 (g = 3.0)"
    assert (
        dataset.parts[0]
        .notes[0]
        .endswith("was recorded in Pendulum-v1; its metadata names Pendulum-v1 (g = 3.0) to evaluate in")
    )


@pytest.mark.parametrize(
    ("metadata", "options", "expected", "source"),
    [
        ({}, {}, None, ""),
        ({"ref_min_score": -5, "ref_max_score": 5.5}, {}, Reference(-5, 5.5), "the data's metadata"),
        ({"ref_min_score": -5, "ref_max_score": 5}, {"reference": (1.0, 2.0)}, Reference(1, 2), "--reference"),
    ],
)
def test_references_come_from_the_user_or_the_metadata(
    metadata: dict[str, Any], options: dict[str, Any], expected: Reference | None, source: str
) -> None:
    task = load(recorded(task_of("Pendulum-v1"), **metadata), **options).run_task()
    assert task.reference == expected
    assert expected is None or task.reference_source == source


def test_the_table_overrides_the_metadata_and_says_so() -> None:
    dataset = load(recorded(task_of("Hopper-v5"), ref_min_score=0, ref_max_score=1))
    assert dataset.run_task().reference == Reference(-20.272305, 3234.3)
    assert (
        "the reference returns of its metadata (0 at a return of 0, 100 at 1) are not used" in dataset.parts[0].notes[0]
    )


def test_references_that_cannot_be_used_are_refused() -> None:
    name = recorded(task_of("Pendulum-v1"), ref_min_score=3, ref_max_score=3)
    assert_refused(r"ref_min_score \(3\) must be below ref_max_score \(3\)", name)
    for part, high in (("one", 5), ("two", 6)):
        recorded(task_of("Pendulum-v1"), f"test/{part}-v0", ref_min_score=0, ref_max_score=high)
    both = "test/one-v0+test/two-v0"
    assert_refused(r"different reference returns: test/one-v0 .* 100 at 5\), .* Pass --reference LOW HIGH", both)
    assert load(both, reference=(0.0, 9.0)).run_task().reference == Reference(0, 9)


def test_a_module_that_only_the_data_names_needs_trust(monkeypatch: pytest.MonkeyPatch) -> None:
    """The data set can be read and trained on, but its environment is not created."""
    name = recorded(odd_task())
    forget(monkeypatch)
    dataset = load(name, needs_environment=False)
    assert "tests.envs.odd" not in sys.modules
    assert dataset.task.environment.actions.categories == (3,)
    with pytest.raises(DataError, match=r"Odd-v0 .*would import tests\.envs\.odd:Odd, .* --trust-env"):
        make_environment(load(name).task)
    assert "tests.envs.odd" not in sys.modules
    assert make_environment(load(name, trust_env=True).task).spec is not None


def test_the_users_own_word_is_trusted() -> None:
    dataset = load(recorded(odd_task()), env_id="tests.envs.odd:Odd-v0")
    assert (dataset.task.env_id, dataset.task.trusted) == ("tests.envs.odd:Odd-v0", True)
    task = dataset.run_task()
    assert task.data_env_ids == (task.environment_text,) == ("Odd-v0",)  # not marked as another environment
    trusted = load(trust_env=True).run_task()
    assert (trusted.environment_text, str(trusted.specification)) == ("Odd-v0", "Odd-v0")  # the same environment
    assert dataset.episode_limit == 10


def test_a_nested_dictionary_is_flattened_in_its_order() -> None:
    dataset = load(recorded(odd_task()))
    assert dataset.task.environment.state_width == 7 + 1 + 7 + 1 + 59 == dataset.trajectories.observations.shape[1]
    space = open_minari(Path("minari") / NAME).observation_space
    assert isinstance(space, spaces.Dict)
    assert list(space) == list(KITCHEN)
    shape = dataset.model_shape(ModelConfig())
    assert (shape.state_width, shape.categories) == (75, (3,))
    assert set(np.unique(dataset.trajectories.actions)) == {0, 1, 2}  # stored from 0 on, recorded from 5 on


@settings(deadline=None, max_examples=10)
@given(NESTED, ACTIONS)
def test_training_and_acting_see_the_same_numbers(observations: spaces.Space[Any], actions: spaces.Space[Any]) -> None:
    """In random nested spaces: a policy's inputs are the rows of the data, and it acts as recorded."""
    odd.current[:] = [observations, actions]
    dataset = load(recorded(task_of("Shifting-v0"), replace=True))
    data, env = dataset.trajectories, make_environment(dataset.task)
    seen = [env.reset(seed=1)[0]]
    seen += [env.step(action)[0] for action in data.actions[data.offsets[1] :]]  # it refuses actions out of its space
    np.testing.assert_allclose(np.stack(seen[:-1]), data.observations[data.offsets[1] :], rtol=1e-6)


def outside(arrays: dict[str, np.ndarray]) -> str:
    arrays["actions"][2, 1], arrays["actions"][5, 0] = 1.25, -3.0
    return str(write_d4rl(Path("outside.hdf5"), arrays, env_id="Hopper-v5"))


def test_actions_out_of_bounds_are_counted_and_clipped() -> None:
    arrays = d4rl_arrays()
    path = outside(arrays)
    assert_refused(
        r"2 of 8 actions are out of bounds by up to 2, the first at .*episode 0, step 2, which has 1\.25: "
        r"the environment takes 3 numbers in \[-1, 1\]\. To clip them, pass --clip-actions",
        path,
    )
    for _ in range(2):  # also from the cache
        dataset = load(path, clip_actions=True)
        np.testing.assert_array_equal(dataset.trajectories.actions, np.clip(arrays["actions"], -1, 1))
        assert "actions out of bounds are clipped: 2 of 8 actions, by up to 2" in dataset.run_task().notes[0]
    assert_refused("2 of 8 actions", path)


@pytest.mark.parametrize(
    ("actions", "categories", "is_unbounded"),
    [
        (np.array([0, 2, 1, 1, 0, 2, 0, 1]), (3,), False),
        (np.array([[0, 2], [4, 1]] * 4, np.int64), (5, 3), False),
        (np.linspace(-1, 1, 16).reshape(8, 2), (), False),
        (np.linspace(-9, 30, 16).reshape(8, 2), (), True),
    ],
)
def test_a_log_without_an_environment_can_be_trained_on(
    actions: np.ndarray, categories: tuple[int, ...], is_unbounded: bool
) -> None:
    path = str(write_d4rl(Path("robot.hdf5"), d4rl_arrays() | {"actions": actions}))
    assert_refused(r"does not name its environment: pass --env-id.* or train without evaluations", path)
    dataset = load(path, needs_environment=False)
    shape = dataset.model_shape(ModelConfig())
    assert (shape.categories, any(shape.unbounded)) == (categories, is_unbounded)
    if is_unbounded:
        assert shape.action_low == pytest.approx(actions.mean(0) - actions.std(0), rel=1e-5)
    assert (dataset.run_task().environment_text, dataset.run_task().reference) == ("", None)


@pytest.mark.parametrize("edge", [1.0, -1.0])
def test_actions_are_exact_at_their_bounds(edge: float) -> None:
    """The bound itself is fine, also if single precision rounds to it. The next number is not."""
    arrays = d4rl_arrays()
    for number, action in enumerate([edge, np.float32(edge), edge * (1 + 1e-9), np.nextafter(np.float32(edge), 0)]):
        arrays["actions"][2, 1] = action
        path = str(write_d4rl(Path(f"within-{number}.hdf5"), arrays, env_id="Hopper-v5"))
        assert load(path).trajectories.actions[2, 1] == np.float32(action)
    arrays["actions"] = arrays["actions"].astype(np.float32)
    arrays["actions"][2, 1] = np.nextafter(np.float32(edge), np.float32(2 * edge))
    path = str(write_d4rl(Path("beyond.hdf5"), arrays, env_id="Hopper-v5"))
    assert_refused("1 of 8 actions are out of bounds by up to 1.19209e-07", path)
    actions = load(path, clip_actions=True).trajectories.actions
    assert actions[2, 1] == edge


def test_a_choice_that_does_not_exist_is_refused() -> None:
    arrays = d4rl_arrays() | {"observations": np.zeros((8, 4)), "actions": np.array([0, 1, 2, 0, 0, 0, 0, 0])}
    path = str(write_d4rl(Path("cartpole.hdf5"), arrays, env_id="CartPole-v1"))
    assert_refused("episode 0, step 2: actions must be choices among 2, not 2", path)


def test_actions_are_shown_with_all_digits() -> None:
    arrays = d4rl_arrays()
    arrays["actions"][2, 1] = 1.0000001
    path = str(write_d4rl(Path("outside.hdf5"), arrays, env_id="Hopper-v5"))
    assert_refused(r"1 of 8 actions .* step 2, which has 1\.0000001: the environment takes", path)
    arrays |= {"observations": np.zeros((8, 4)), "actions": np.array([[0, 1, 1.0000001, 0, 0, 0, 0, 0]]).T}
    path = str(write_d4rl(Path("cartpole.hdf5"), arrays, env_id="CartPole-v1"))
    assert_refused(r"step 2: actions must be choices among 2, not 1\.0000001 ", path)


def test_an_environment_without_a_limit_gets_one() -> None:
    env = make_environment(odd_task("tests.envs.odd:Endless-v0"))
    env.reset(seed=0)
    lengths = 1
    while not env.step(np.zeros(1))[3]:
        lengths += 1
    assert lengths == 1000


def test_a_missing_robotics_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name in [name for name in gymnasium.registry if name.startswith("PointMaze_")]:
        monkeypatch.delitem(gymnasium.registry, name)
    with pytest.raises(DataError, match=r"PointMaze_UMaze-v3 is in gymnasium-robotics, which is not installed: pip"):
        task_of("PointMaze_UMaze-v3")


def test_an_environment_whose_spaces_are_not_the_datas_is_refused() -> None:
    wider = {"type": "Box", "dtype": "float32", "shape": [1], "low": [-3.0], "high": [3.0]}
    dataset = load(recorded(task_of("Pendulum-v1"), action_space=json.dumps(wider)))
    message = r"Pendulum-v1 has 3 .* 1 numbers in \[-2, 2\]; but 3 and 1 numbers in \[-3, 3\] are expected"
    with pytest.raises(DataError, match=message):
        make_environment(dataset.task)


def test_a_dictionary_keeps_its_own_order() -> None:
    """An OrderedDict is not sorted by gymnasium, and its metadata has its order."""
    parts: OrderedDict[str, spaces.Space[Any]] = OrderedDict(zeta=spaces.Box(-1, 0, (1,)), alpha=spaces.Box(1, 2, (2,)))
    odd.current[:] = [spaces.Dict(parts), spaces.Discrete(2)]
    dataset = load(recorded(task_of("Shifting-v0")))
    seen = make_environment(dataset.task).reset(seed=0)[0]
    np.testing.assert_allclose(seen, dataset.trajectories.observations[0], rtol=1e-6)
    assert seen[0] <= 0 < seen[1]


def edited_spec(env_id: str, **changes: Any) -> str:
    """The specification of an environment in gymnasium's JSON form, with other entries."""
    spec = gymnasium.make(env_id).spec
    assert spec is not None
    return json.dumps(json.loads(spec.to_json()) | changes)


def test_another_class_for_a_known_id_is_not_the_known_environment() -> None:
    changed = edited_spec("Hopper-v5", entry_point="heavy:Hopper")
    name = recorded(task_of("Hopper-v5"), env_spec=changed, eval_env_spec=None)
    dataset = load(name)
    assert (str(dataset.task.specification), dataset.run_task().reference) == ("Hopper-v5 (by heavy:Hopper)", REFERENCE)
    with pytest.raises(DataError, match=r"Hopper-v5 \(by heavy:Hopper\) would import heavy:Hopper"):
        make_environment(dataset.task)


def test_no_episode_limit_is_not_the_registrys() -> None:
    unlimited = edited_spec("CartPole-v1", max_episode_steps=None)
    dataset = load(recorded(task_of("CartPole-v1"), env_spec=unlimited, eval_env_spec=None))
    assert (str(dataset.task.specification), dataset.episode_limit) == ("CartPole-v1 (no episode limit)", 1000)
    env = make_environment(dataset.task)
    assert env.spec is not None
    assert env.spec.max_episode_steps == 1000


def test_wrappers_that_only_watch_are_left_out_and_statistics_refused() -> None:
    watch = {"name": "RecordEpisodeStatistics", "entry_point": "gymnasium.wrappers.common:RecordEpisodeStatistics"}
    watched = edited_spec("CartPole-v1", additional_wrappers=[{**watch, "kwargs": {}}])
    assert str(load(recorded(task_of("CartPole-v1"), eval_env_spec=watched)).task.specification) == "CartPole-v1"
    running = {
        "name": "NormalizeObservation",
        "entry_point": "gymnasium.wrappers.stateful_observation:NormalizeObservation",
    }
    normalized = edited_spec("CartPole-v1", additional_wrappers=[{**running, "kwargs": {}}])
    dataset = load(recorded(task_of("CartPole-v1"), replace=True, eval_env_spec=normalized))
    with pytest.raises(DataError, match=r"NormalizeObservation .* cannot be restored, because its running statistics"):
        make_environment(dataset.task)


def test_observations_that_change_in_place_are_copied() -> None:
    """And integer actions reach their largest value, in recording and in acting."""
    dataset = load(recorded(odd_task("tests.envs.odd:Growing-v0"), episodes=20))
    data = dataset.trajectories
    assert data.observations[: data.offsets[1], 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert set(np.unique(data.actions)) == {0, 1, 2, 3}
    space = spaces.Box(0, 3, (1,), np.int64)
    assert to_action(space, np.array([2.99])).tolist() == [3]


def test_one_sided_bounds_are_respected() -> None:
    space = spaces.Box(np.array([0.0, -np.inf], np.float32), np.array([np.inf, 1.0], np.float32))
    assert to_action(space, np.array([-0.1, 7.0])).tolist() == [0, 1]
    odd.current[:] = [spaces.Box(-1, 1, (1,)), space]
    env = make_environment(task_of("Shifting-v0"))
    env.reset(seed=0)
    env.step(np.array([-5.0, 5.0]))  # it would refuse an action out of its space


def test_a_store_is_not_taken_for_that_of_other_actions() -> None:
    """Choices from 0 on and from 1 on are different entries of the same file."""
    arrays = d4rl_arrays() | {"observations": np.zeros((8, 4)), "actions": np.array([1, 2, 1, 2, 1, 2, 1, 2])}
    path = str(write_d4rl(Path("choices.hdf5"), arrays))
    found = []
    for start in (0, 1):
        odd.current[:] = [spaces.Box(-1, 1, (4,)), spaces.Discrete(3, start=start)]
        found.append(load(path, env_id="Shifting-v0").trajectories.actions[:2, 0].tolist())
    assert found == [[1, 2], [0, 1]]


def test_a_constant_column_without_bounds_can_be_trained_on() -> None:
    actions = np.stack([np.linspace(-9, 9, 8), np.full(8, 5.0)], axis=1)
    shape = load(str(write_d4rl(Path("log.hdf5"), d4rl_arrays() | {"actions": actions})), needs_environment=False)
    assert all(map(np.less, *astuple(shape.model_shape(ModelConfig()))[1:3]))


def test_references_of_a_name_are_for_the_plain_environment() -> None:
    variant = Specification("Hopper-v5", '{"terminate_when_unhealthy": false}', 15)
    for task, reference in ((task_of("Hopper-v5"), REFERENCE), (task_of(variant), None)):
        name = recorded(task, "mujoco/hopper/medium-v0", replace=True, ref_min_score=None, ref_max_score=None)
        assert load(name).run_task().reference == reference


def test_episodes_longer_than_the_limit_are_told() -> None:
    arrays = d4rl_arrays((12, 5)) | {"observations": np.zeros((17, 75)), "actions": np.zeros(17, np.int64) + 5}
    dataset = load(str(write_d4rl(Path("long.hdf5"), arrays)), env_id="tests.envs.odd:Odd-v0")
    assert "1 episodes of the data are longer than the environment's limit of 10 steps" in dataset.run_task().notes[0]


def test_huge_one_hot_observations_are_refused() -> None:
    with pytest.raises(DataError, match="observations have 200,000 entries; at most 20,000 are supported"):
        flat_width(spaces.Discrete(200_000), "here")
