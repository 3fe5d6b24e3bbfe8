"""The data sets of D4RL's suites and of Minari: names, files, environments and reference returns.

Sources:
    [infos]    D4RL, ``d4rl/infos.py``: names, files and reference returns.
    [register] D4RL, the ``__init__.py`` of each suite: names that [infos] omits (antmaze v1, the ``eval`` mazes and
               maze2d v0), their files and reference returns, and the episode limits.
    [minari]   Minari's namespaces ``mujoco`` and ``D4RL`` on Hugging Face (``farama-minari``).

Nothing here imports an environment. Which environment fits was determined with gymnasium 1.4.0 and gymnasium-robotics
1.4.2.
"""

import textwrap
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby, product
from pathlib import PurePath
from typing import Any, Literal

from envs.references import REFERENCES
from primal_dt.task import Reference

__all__ = ["NAMES", "Fit", "KnownName", "known_name", "listing", "name_of_file"]

D4RL_URL = "http://rail.eecs.berkeley.edu/datasets/offline_rl"
"""The public location of D4RL's files [infos]."""


@dataclass(frozen=True)
class Fit:
    """Today's environment for a data set, and the widths of the data."""

    env_id: str | None = None
    """The environment in which a policy that is trained on the data can act; None if there is none."""
    arguments: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """The arguments that the environment needs to have the data's observations. They can be written as JSON."""
    max_episode_steps: int | None = None
    """The data set's episode limit, if the registry has another one for the environment."""
    state_width: int | None = None
    """The width of the observations. None for Minari, whose data describes its spaces."""
    action_width: int | None = None
    why_not: str = ""
    """Why there is no environment."""


@dataclass(frozen=True)
class KnownName:
    """A data set that can be downloaded by its name."""

    name: str
    source: Literal["d4rl", "minari"]
    suite: str
    """``gym``, ``adroit``, ``kitchen``, ``antmaze`` or ``maze2d`` (D4RL); ``mujoco``, ``adroit``, ``kitchen``,
    ``antmaze`` or ``pointmaze`` (Minari)."""
    environment: str
    """The name of the environment, such as ``hopper`` or ``antmaze-umaze``."""
    tier: str | None
    """The tier, such as ``medium-replay``; None if the name has none."""
    version: int
    fit: Fit
    """Today's environment. The specification in a Minari data set comes before it."""
    reference: Reference | None
    """D4RL's reference returns; None if D4RL does not have the environment."""
    url: str | None = None
    """The file's address (D4RL)."""

    @property
    def file_name(self) -> str | None:
        """D4RL's name of the file, which is also its name in the cache; None for Minari."""
        return None if self.url is None else self.url.rpartition("/")[2]


# D4RL's ant has 111 observations, of which the 84 contact forces are always 0 (seen in ant-medium-v2). A range of 0 for
# the forces gives such observations, and no contact cost; without it they would be far outside of the data.
ANT = {"use_contact_forces": True, "contact_force_range": [0.0, 0.0]}

D4RL_FITS: Mapping[str, Fit] = {
    "halfcheetah": Fit("HalfCheetah-v4", state_width=17, action_width=6),
    "hopper": Fit("Hopper-v4", state_width=11, action_width=3),
    "walker2d": Fit("Walker2d-v4", state_width=17, action_width=6),
    "ant": Fit("Ant-v4", ANT, state_width=111, action_width=8),
    "pen": Fit("AdroitHandPen-v1", max_episode_steps=100, state_width=45, action_width=24),
    "hammer": Fit("AdroitHandHammer-v1", state_width=46, action_width=26),
    "door": Fit("AdroitHandDoor-v1", state_width=39, action_width=28),
    "relocate": Fit("AdroitHandRelocate-v1", state_width=39, action_width=30),
    "kitchen": Fit(
        state_width=60,
        action_width=9,
        why_not="D4RL's 60 observations are positions and goals; FrankaKitchen-v1 has 59, positions and velocities, "
        "and the goals apart",
    ),
    "antmaze": Fit(
        state_width=29,
        action_width=8,
        why_not="D4RL's 29 observations include the position, and the goal is only in infos/goal; AntMaze has 27 (v4) "
        "or 105 (v5), and the position and the goal apart",
    ),
    "maze2d": Fit(
        state_width=4,
        action_width=2,
        why_not="D4RL's 4 observations do not include the goal; PointMaze has a dictionary with the goal",
    ),
}
"""By environment, or by suite if all of its environments are alike."""

ANTMAZE_IDS = {
    "umaze": "UMaze",
    "umaze-diverse": "UMaze",
    "medium-play": "Medium",
    "medium-diverse": "Medium_Diverse_GR",
    "large-play": "Large",
    "large-diverse": "Large_Diverse_GR",
}
POINTMAZE_IDS = {"open": "Open", "umaze": "UMaze", "medium": "Medium", "large": "Large"}
MAZES = ("umaze", "medium", "large")
File = tuple[str, str | None, int, str]
"""Environment, tier, version, and the file's path on the server."""


def _gym_files() -> Iterator[File]:
    tiers = ("random", "medium", "expert", "medium-replay", "medium-expert", "full-replay")
    for environment in ("halfcheetah", "hopper", "walker2d", "ant"):
        for tier in tiers:
            stem = f"{environment}_{tier.replace('-', '_')}"
            if tier == "medium-replay":
                yield environment, tier, 0, f"gym_mujoco/{environment.replace('walker2d', 'walker')}_mixed"
            elif tier != "full-replay":
                yield environment, tier, 0, f"gym_mujoco/{stem}"
            yield from ((environment, tier, version, f"gym_mujoco_v{version}/{stem}-v{version}") for version in (1, 2))
    yield "ant", "random-expert", 0, "gym_mujoco/ant_random_expert"


def _adroit_files() -> Iterator[File]:
    first = {"human": "{}-v0_demos_clipped", "cloned": "{}-demos-v0-bc-combined", "expert": "{}-v0_expert_clipped"}
    for environment, tier in product(("pen", "hammer", "door", "relocate"), first):
        yield environment, tier, 0, f"hand_dapg/{first[tier].format(environment)}"
        yield environment, tier, 1, f"hand_dapg_v1/{environment}-{tier}-v1"


def _kitchen_files() -> Iterator[File]:
    yield "kitchen", "complete", 0, "kitchen/mini_kitchen_microwave_kettle_light_slider-v0"
    yield "kitchen", "partial", 0, "kitchen/kitchen_microwave_kettle_light_slider-v0"
    yield "kitchen", "mixed", 0, "kitchen/kitchen_microwave_kettle_bottomburner_light-v0"


def _antmaze_files() -> Iterator[File]:
    longer = {"umaze": "u-maze", "medium": "big-maze", "large": "hardest-maze"}
    for maze, diverse in product(MAZES, (False, True)):
        tier = "diverse" if diverse else None if maze == "umaze" else "play"
        starts = f"noisy_multistart_{diverse or maze != 'umaze'}_multigoal_{diverse}_sparse"
        yield f"antmaze-{maze}", tier, 0, f"ant_maze_new/Ant_maze_{longer[maze]}_{starts}"
        yield f"antmaze-{maze}", tier, 1, f"ant_maze_v1/Ant_maze_{maze}_{starts}"
        yield f"antmaze-{maze}", tier, 2, f"ant_maze_v2/Ant_maze_{longer[maze]}_{starts}_fixed"
        # [register] exchanges the goals of play and diverse in the medium and large mazes for evaluation.
        starts = f"noisy_multistart_True_multigoal_{diverse == (maze == 'umaze')}_sparse"
        yield f"antmaze-eval-{maze}", tier, 0, f"ant_maze_new/Ant_maze_{maze}_eval_{starts}"


def _maze2d_files() -> Iterator[File]:
    for reward in ("sparse", "dense"):
        suffix = "-dense" if reward == "dense" else ""
        for maze in ("open", *MAZES):
            yield f"maze2d-{maze}{suffix}", None, 0, f"maze2d/maze2d-{maze}-{reward}"
        for maze in (*MAZES, *(f"eval-{maze}" for maze in MAZES)):
            yield f"maze2d-{maze}{suffix}", None, 1, f"maze2d/maze2d-{maze}-{reward}-v1"


def _d4rl_names() -> Iterator[KnownName]:
    files = {
        "gym": _gym_files(),
        "adroit": _adroit_files(),
        "kitchen": _kitchen_files(),
        "antmaze": _antmaze_files(),
        "maze2d": _maze2d_files(),
    }
    for suite, rows in files.items():
        for environment, tier, version, path in rows:
            name = "-".join(filter(None, (environment, tier, f"v{version}")))
            reference = REFERENCES.get(name, REFERENCES[environment])
            fit = D4RL_FITS[environment if environment in D4RL_FITS else suite]
            url = f"{D4RL_URL}/{path}.hdf5"
            yield KnownName(name, "d4rl", suite, environment, tier, version, fit, reference, url)


def _minari_names() -> Iterator[KnownName]:
    """The newest versions, as Minari offers them. D4RL's gym data is not among them: ``mujoco`` is other data."""

    def known(suite: str, environment: str, prefix: str, tier_version: str, env_id: str) -> KnownName:
        tier, _, version = tier_version.rpartition("-v")
        name, reference = f"{prefix}/{tier_version}", REFERENCES.get(environment)
        return KnownName(name, "minari", suite, environment, tier, int(version), Fit(env_id), reference)

    for key in ("HalfCheetah", "Hopper", "Walker2d", "Ant", "Humanoid", "HumanoidStandup"):
        for tier in ("simple", "medium", "expert"):
            yield known("mujoco", key.lower(), f"mujoco/{key.lower()}", f"{tier}-v0", f"{key}-v5")
    for key in ("InvertedPendulum", "InvertedDoublePendulum", "Pusher", "Reacher", "Swimmer"):
        for tier in ("medium", "expert"):
            yield known("mujoco", key.lower(), f"mujoco/{key.lower()}", f"{tier}-v0", f"{key}-v5")
    for key, tier in product(("Pen", "Hammer", "Door", "Relocate"), ("human", "cloned", "expert")):
        yield known("adroit", key.lower(), f"D4RL/{key.lower()}", f"{tier}-v2", f"AdroitHand{key}-v1")
    for tier in ("complete", "partial", "mixed"):
        yield known("kitchen", "kitchen", "D4RL/kitchen", f"{tier}-v2", "FrankaKitchen-v1")
    for tier, key in ANTMAZE_IDS.items():
        yield known("antmaze", "antmaze", "D4RL/antmaze", f"{tier}-v1", f"AntMaze_{key}-v4")
    for (tier, key), dense in product(POINTMAZE_IDS.items(), ("", "-dense")):
        yield known(
            "pointmaze", "pointmaze", "D4RL/pointmaze", f"{tier}{dense}-v2", f"PointMaze_{key}{dense[1:].title()}-v3"
        )


NAMES: Mapping[str, KnownName] = {known.name: known for known in (*_d4rl_names(), *_minari_names())}
"""Every known data set by its name."""
FILES: Mapping[str, KnownName] = {
    file: known for known in NAMES.values() if known.file_name for file in (f"{known.name}.hdf5", known.file_name)
}


def known_name(name: str) -> KnownName | None:
    """Look up a data set by its name; None if it is not in the table."""
    return NAMES.get(name)


def name_of_file(path_name: str) -> KnownName | None:
    """Look up a D4RL file by its path: ``<name>.hdf5``, or the name that D4RL gave it; None if it is neither."""
    return FILES.get(PurePath(path_name).name)


COLUMNS = 80


def listing(local: Collection[str]) -> str:
    """Format all names by suite in at most 80 columns.

    Names that differ in tier and version only are written as one, in the braces of a shell, which expands them again.

    Args:
        local: the names of the data sets that are available locally.
    """
    sections = []
    for (source, suite), group in groupby(NAMES.values(), lambda known: (known.source, known.suite)):
        names = list(group)
        training_only = ", to train only: no environment fits" if names[0].fit.env_id is None else ""
        lines = [f"{suite} ({'D4RL' if source == 'd4rl' else 'Minari'}{training_only})"]
        for environment in dict.fromkeys(known.environment for known in names):
            patterns = _patterns([known for known in names if known.environment == environment])
            lines += _wrapped(patterns, "  ", "  ")
        here = [known.name for known in names if known.name in local]
        lines += _wrapped([f"{name}," for name in here[:-1]] + here[-1:], "  local: ", " " * 9) if here else []
        sections.append("\n".join(lines))
    return "\n\n".join(sections)


def _patterns(names: list[KnownName]) -> list[str]:
    """One pattern for all tiers that have the same versions; names without a tier have their own."""
    versions: dict[str | None, list[str]] = {}
    for known in names:
        versions.setdefault(known.tier, []).append(str(known.version))
    groups: dict[tuple[bool, tuple[str, ...]], list[str]] = {}
    for tier, numbers in versions.items():
        groups.setdefault((tier is None, tuple(sorted(numbers))), []).append(tier or "")
    stem = names[0].environment + "-" if names[0].source == "d4rl" else names[0].name.rpartition("/")[0] + "/"
    return [
        pattern
        for (plain, numbers), tiers in groups.items()
        for pattern in ([f"{stem}v{_braces(numbers)}"] if plain else _split(stem, tiers, f"-v{_braces(numbers)}"))
    ]


def _split(stem: str, tiers: list[str], end: str) -> list[str]:
    """A pattern for the tiers, or several if it would be too long for a line."""
    pattern = stem + _braces(tiers) + end
    if len(pattern) <= COLUMNS - 2 or len(tiers) == 1:
        return [pattern]
    half = (len(tiers) + 1) // 2
    return _split(stem, tiers[:half], end) + _split(stem, tiers[half:], end)


def _braces(words: Collection[str]) -> str:
    return next(iter(words)) if len(words) == 1 else f"{{{','.join(words)}}}"


def _wrapped(words: list[str], first: str, rest: str) -> list[str]:
    return textwrap.wrap(
        " ".join(words),
        COLUMNS,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
