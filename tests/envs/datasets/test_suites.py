"""The table of D4RL's and Minari's data sets."""

import json
import re
import urllib.parse
from collections import Counter
from itertools import product

import gymnasium
import pytest

from envs.datasets.suites import NAMES, Fit, known_name, listing, name_of_file
from envs.references import REFERENCES
from envs.specifications import make_specified
from envs.tasks import ENVIRONMENTS
from primal_dt.task import Specification

D4RL = [known for known in NAMES.values() if known.source == "d4rl"]
FITS = {known.environment: known.fit for known in D4RL if known.fit.env_id is not None}


def register_robotics() -> None:
    gymnasium.register_envs(pytest.importorskip("gymnasium_robotics"))


def expanded(pattern: str) -> list[str]:
    """The words that a shell makes of a pattern with braces."""
    parts = [part.split(",") for part in re.split(r"[{}]", pattern)]
    return ["".join(words) for words in product(*parts)]


def test_every_suite_has_all_of_its_names() -> None:
    assert Counter((known.source, known.suite) for known in NAMES.values()) == {
        ("d4rl", "gym"): 4 * (5 * 3 + 2) + 1,  # full-replay has no v0; ant has random-expert-v0
        ("d4rl", "adroit"): 4 * 3 * 2,
        ("d4rl", "kitchen"): 3,
        ("d4rl", "antmaze"): 6 * 3 + 6,
        ("d4rl", "maze2d"): 2 * (4 + 6),
        ("minari", "mujoco"): 6 * 3 + 5 * 2,
        ("minari", "adroit"): 4 * 3,
        ("minari", "kitchen"): 3,
        ("minari", "antmaze"): 6,
        ("minari", "pointmaze"): 8,
    }


def test_every_name_is_found_by_name_and_file() -> None:
    for known in NAMES.values():
        assert known_name(known.name) is known
        assert known.name.endswith(f"-v{known.version}")
    for known in D4RL:
        assert known.file_name is not None
        assert name_of_file(known.file_name) is known
        assert name_of_file(f"/data/{known.name}.hdf5") is known


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("hopper_medium-v2.hdf5", "hopper-medium-v2"),
        ("hopper_medium.hdf5", "hopper-medium-v0"),
        ("halfcheetah_mixed.hdf5", "halfcheetah-medium-replay-v0"),
        ("walker_mixed.hdf5", "walker2d-medium-replay-v0"),
        ("pen-human-v1.hdf5", "pen-human-v1"),
        ("pen-v0_demos_clipped.hdf5", "pen-human-v0"),
        ("door-demos-v0-bc-combined.hdf5", "door-cloned-v0"),
        ("kitchen_microwave_kettle_bottomburner_light-v0.hdf5", "kitchen-mixed-v0"),
        ("antmaze-umaze-v0.hdf5", "antmaze-umaze-v0"),
        ("Ant_maze_u-maze_noisy_multistart_False_multigoal_False_sparse.hdf5", "antmaze-umaze-v0"),
        ("Ant_maze_umaze_noisy_multistart_True_multigoal_True_sparse.hdf5", "antmaze-umaze-diverse-v1"),
        ("Ant_maze_hardest-maze_noisy_multistart_True_multigoal_False_sparse_fixed.hdf5", "antmaze-large-play-v2"),
        ("Ant_maze_umaze_eval_noisy_multistart_True_multigoal_False_sparse.hdf5", "antmaze-eval-umaze-v0"),
        ("Ant_maze_medium_eval_noisy_multistart_True_multigoal_True_sparse.hdf5", "antmaze-eval-medium-play-v0"),
        ("maze2d-open-sparse.hdf5", "maze2d-open-v0"),
        ("maze2d-eval-large-dense-v1.hdf5", "maze2d-eval-large-dense-v1"),
    ],
)
def test_d4rl_file_names_are_recognized(file: str, name: str) -> None:
    known = name_of_file(file)
    assert known is not None
    assert known.name == name


@pytest.mark.parametrize("name", ["", "hopper", "hopper-full-replay-v0", "mujoco/hopper/medium-v1", "hopper_medium-v2"])
def test_other_names_are_unknown(name: str) -> None:
    assert known_name(name) is None
    assert name_of_file(name) is None
    assert name_of_file("mine.hdf5") is None


def test_urls_are_well_formed_and_unique() -> None:
    urls = [known.url for known in D4RL]
    for url in urls:
        assert url is not None
        parts = urllib.parse.urlsplit(url)
        assert (parts.scheme, parts.netloc) == ("http", "rail.eecs.berkeley.edu")
        assert re.fullmatch(r"/datasets/offline_rl/\w+/[\w-]+\.hdf5", parts.path)
    assert len(set(urls)) == len(urls)
    assert len({known.file_name for known in D4RL}) == len(D4RL)
    assert all(known.url is None and known.file_name is None for known in NAMES.values() if known.source == "minari")


def test_references_are_those_of_the_tasks() -> None:
    assert all(REFERENCES[name] == environment.reference for name, environment in ENVIRONMENTS.items())
    assert all(reference.random_return < reference.expert_return for reference in REFERENCES.values())
    assert all(known.reference is not None for known in D4RL)
    assert {known.environment for known in D4RL} | {known.name for known in D4RL} >= set(REFERENCES)


def test_maze2d_versions_have_their_own_references() -> None:
    assert NAMES["maze2d-umaze-v0"].reference != NAMES["maze2d-umaze-v1"].reference
    assert NAMES["maze2d-open-v0"].reference == REFERENCES["maze2d-open"]


def test_minari_mazes_have_no_references() -> None:
    mazes = [known for known in NAMES.values() if known.source == "minari" and "maze" in known.suite]
    assert mazes
    assert all(known.reference is None for known in mazes)


def test_names_have_an_environment_or_a_reason() -> None:
    for known in NAMES.values():
        assert (known.fit.env_id is None) == bool(known.fit.why_not)
        assert json.loads(json.dumps(known.fit.arguments)) == known.fit.arguments
        assert hash(known) == hash(NAMES[known.name])


def test_mujoco_environments_are_registered() -> None:
    ids = {known.fit.env_id for known in NAMES.values() if known.suite in ("gym", "mujoco")}
    assert len(ids) == 4 + 11
    assert ids <= set(gymnasium.registry)


def test_robotics_environments_are_registered() -> None:
    register_robotics()
    assert {known.fit.env_id for known in NAMES.values()} - {None} <= set(gymnasium.registry)


def check_widths(fit: Fit) -> None:
    assert fit.env_id is not None
    specification = Specification(fit.env_id, json.dumps(fit.arguments), fit.max_episode_steps)
    env = make_specified(specification)
    assert env.observation_space.shape == (fit.state_width,)
    assert env.action_space.shape == (fit.action_width,)
    env.close()


@pytest.mark.parametrize("environment", ["halfcheetah", "hopper", "walker2d", "ant"])
def test_mujoco_widths_match(environment: str) -> None:
    check_widths(FITS[environment])


@pytest.mark.parametrize("environment", ["pen", "hammer", "door", "relocate"])
def test_adroit_widths_match(environment: str) -> None:
    register_robotics()
    check_widths(FITS[environment])


def test_ant_has_no_contact_forces_as_in_d4rl() -> None:
    fit = FITS["ant"]
    assert fit.env_id is not None
    env = make_specified(Specification(fit.env_id, json.dumps(fit.arguments)))
    observation, _ = env.reset(seed=0)
    for _ in range(10):  # the ant falls to the ground
        observation, *_ = env.step(env.action_space.sample() * 0)
    assert observation[:27].any()
    assert not observation[27:].any()
    env.close()


def test_the_listing_contains_every_name_once() -> None:
    patterns = [word for line in listing(()).splitlines() if line.startswith("  ") for word in line.split()]
    assert Counter(name for pattern in patterns for name in expanded(pattern)) == Counter(list(NAMES))


@pytest.mark.parametrize("local", [(), tuple(NAMES)])
def test_the_listing_fits_80_columns(local: tuple[str, ...]) -> None:
    assert max(map(len, listing(local).splitlines())) <= 80


def test_the_listing_marks_local_data_sets() -> None:
    text = listing({"hopper-medium-v2", "hopper-expert-v2", "mine/other-v0"})
    assert text.count("local:") == 1
    assert "  local: hopper-medium-v2, hopper-expert-v2\n" in text
