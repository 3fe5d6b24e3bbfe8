"""``python -m envs list | info | record | cache``: lists, inspects and records data sets."""

if __name__ == "__main__":  # imports take seconds; until then, Ctrl-C ends the program without a traceback
    import signal

    signal.signal(signal.SIGINT, signal.SIG_DFL)

import json
import os
import sys
import textwrap
from pathlib import Path
from typing import Annotated, Any

import tyro

from envs.datasets import cache
from envs.datasets.describe import QUANTILES, describe, plot_returns
from envs.datasets.load import load_dataset
from envs.datasets.minari import open_minari
from envs.datasets.minari_folder import check_name, minari_folder, restore_all
from envs.datasets.names import BUILTIN_TIERS, KNOWN_NAMES, parse_name
from envs.datasets.part_tasks import DataOptions
from envs.datasets.sources import d4rl_path
from envs.datasets.suites import listing, name_of_file
from envs.errors import DataError
from envs.tasks import ENVIRONMENTS, task_of
from primal_dt.data.store import StoreError
from primal_dt.system.process import memory_errors
from primal_dt.system.table import format_table
from primal_dt.system.terminal import begin_program, explain
from primal_dt.task import Specification

RESERVED = ("primal/", "mujoco/", "d4rl/", "D4RL/")
Name = Annotated[str, tyro.conf.Positional]


def list_datasets() -> None:
    """List local data sets and all known names."""
    rows, problems = [], []
    restore_all()
    folders = sorted(path.parent.parent for path in minari_folder().glob("**/data/metadata.json"))
    for folder in folders:
        name = folder.relative_to(minari_folder()).as_posix()
        if name.startswith("."):
            continue
        try:
            data = open_minari(folder)
        except DataError as error:
            problems.append(f"{name} cannot be read: {error}")
            continue
        env_id = "?" if data.specification is None else data.specification.env_id
        rows.append([name, env_id, f"{data.num_episodes:,}", str(data.metadata.get("total_steps", "?"))])
    print(f"Local data sets in {minari_folder()}:\n")
    print(format_table(["name", "environment", "episodes", "steps"], rows) if rows else "  none yet")
    for problem in problems:
        print(textwrap.fill(problem, 80, subsequent_indent="  "))
    local = {row[0] for row in rows}
    local |= {name for name, known in KNOWN_NAMES.items() if known.source == "d4rl" and d4rl_path(known).exists()}
    print("\nBuilt in, recorded when first used, without a network:\n")
    for environment in ENVIRONMENTS:
        print(f"  primal/{environment}/{{{','.join(BUILTIN_TIERS)}}}-v0")
    print(f"\nDownloaded when first used:\n\n{listing(local)}")
    print(
        "\nA path to a file in D4RL's layout or to a Minari data set is also a name.\nA+B combines several data sets."
    )


def info(
    name: Name,
    env_id: str | None = None,
    mix_versions: bool = False,
    clip_actions: bool = False,
    reference: tuple[float, float] | None = None,
    plot: Path | None = None,
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Summarize a data set: episodes, returns, scores, lengths and sources.

    A data set that is not available locally is downloaded or recorded first.

    Args:
        name: Name or path of the data set, or several joined by +.
        env_id: Environment id, such as Hopper-v5, or module:Id for your own.
        mix_versions: Allow data from several versions of the environment.
        clip_actions: Clip actions that are out of bounds. Otherwise they are an error.
        reference: Returns of scores 0 and 100.
        plot: Save a histogram of the episode returns to this file. Needs the extra "plots".
        as_json: Print the summary as JSON.
    """
    options = DataOptions(env_id, mix_versions, clip_actions=clip_actions, reference=reference, needs_environment=False)
    dataset = load_dataset(name, options)
    dataset.store.verify()
    summary = describe(dataset)
    print(json.dumps(summary, indent=2) if as_json else _formatted(summary))
    if plot is not None:
        plot = plot.expanduser()
        plot_returns(dataset, plot)
        if not as_json:
            print(f"\nplot         {plot}")


def _formatted(summary: dict[str, Any]) -> str:
    lines = [
        ("data set", summary["name"]),
        ("environment", summary["environment"]),
        ("score", _score_text(summary)),
        ("episodes", f"{summary['episodes']:,}, of which {summary['cut_off_episodes']} cut off"),
        ("steps", f"{summary['steps']:,}"),
        ("widths", f"states {summary['state_width']}, actions {summary['action_width']}: {summary['actions']}"),
        ("targets", f"{', '.join(f'{target:g}' for target in summary['targets'])} ({summary['target_source']})"),
        ("fingerprint", summary["fingerprint"]),
    ]
    lines += [("note", note) for note in summary["notes"]]
    for part in summary["parts"]:
        lines.append(("source", f"{part['path']} ({part['environment']})"))
        lines.extend(("", f"{key}: {part[key]}") for key in ("description", "seed") if key in part)
    text = "\n".join(f"{label:13}{value}" for label, value in lines)
    header = ["", "mean", "std", *QUANTILES]
    digits = {kind: d for kind, d in {"returns": 1, "scores": 1, "lengths": 0}.items() if summary[kind]}
    rows = [[kind, *(f"{summary[kind][key]:.{d}f}" for key in header[1:])] for kind, d in digits.items()]
    return f"{text}\n\n{format_table(header, rows)}"


def _score_text(summary: dict[str, Any]) -> str:
    if summary["reference"] is None:
        return "none: there are no reference returns (--reference LOW HIGH sets them)"
    return f"normalized return; unit: {summary['unit']} ({summary['reference']['source']})"


def record(
    name: Name,
    policy: str | None = None,
    env_id: str | None = None,
    steps: int = 100_000,
    seed: int = 0,
    overwrite: bool = False,
) -> None:
    """Record a Minari data set from a behavior policy.

    Built-in names, such as primal/hopper/medium-v0, have their own policies.

    All other names need --policy and --env-id.

    Your own policy is a function (observation, random) -> action.

    Args:
        name: Name of the data set to record, NAMESPACE/.../NAME-vN.
        policy: random, a built-in policy such as hopper/medium or hopper/expert, a D4RL file (its own policy), or
            your own as module:name.
        env_id: Environment to act in, such as Hopper-v5, or module:Id for your own. For the policy of a D4RL file, the
            environment of its data if not given.
        steps: Minimum number of steps (for medium-expert: from each of its two policies). No episode is cut off.
        seed: Seed of the first episode. Each later episode adds 1.
        overwrite: Replace an existing data set of this name.
    """
    from envs.behavior.recipes import Ingredient, builtin_recipe
    from envs.behavior.record import record as record_dataset

    if steps < 1 or not 0 <= seed < 2**31:
        raise DataError(f"--steps ({steps}) must be at least 1, and --seed ({seed}) must be from 0 to 2^31 - 1")
    check_name(name)
    known = parse_name(name)
    if name.startswith(RESERVED) and (known is None or known.source != "primal"):
        raise DataError(
            f"{name} is in a reserved namespace ({', '.join(RESERVED)}): choose another, such as mine/hopper/walk-v0"
        )
    if known is not None and known.source == "primal":
        if policy is not None or env_id is not None:
            raise DataError(
                f"{name} is built in and has its own policy and environment: omit --policy and --env-id, "
                "or choose another name"
            )
        task, recipe = task_of(str(known.specification)), builtin_recipe(known, steps)
    elif policy is None:
        raise DataError(f"{name} is not built in: pass --policy and --env-id")
    else:
        specification = env_id or _environment_of_file(policy)
        if specification is None:
            raise DataError(f"{name} is not built in: pass --env-id")
        task, recipe = task_of(specification, trusted=True), [Ingredient(policy, steps)]
    folder = record_dataset(name, recipe, task=task, seed=seed, replace=overwrite)
    print(f"{name} is in {folder}")


def _environment_of_file(policy: str) -> Specification | None:
    """The environment of a D4RL file with a policy, if its name says what it is."""
    known = name_of_file(Path(policy).name)
    return None if known is None else KNOWN_NAMES[known.name].specification


def show_cache(clear: bool = False, clear_downloads: bool = False) -> None:
    """Show the contents of the cache, or clear it.

    The cache is in the user's cache folder, or in PRIMAL_DT_CACHE if it is set.

    It does not contain Minari data sets.

    Args:
        clear: Delete everything except downloads. It is rebuilt when needed.
        clear_downloads: Delete everything, including downloads and files that were placed there by hand.
    """
    rows = [[kind, f"{files:,}", f"{size / 2**20:.1f}"] for kind, (files, size) in cache.usage().items()]
    print(f"{cache.cache_folder()}\n")
    print(format_table(["", "files", "MiB"], rows))
    if clear or clear_downloads:
        cache.clear_cache(downloads=clear_downloads)
        print("\ncleared")


def main() -> None:
    """Run a command. Errors that a user can fix are printed without a traceback."""
    begin_program()
    try:
        with memory_errors():
            tyro.extras.subcommand_cli_from_dict(
                {"list": list_datasets, "info": info, "record": record, "cache": show_cache},
                prog="python -m envs",
                description="List, inspect and record data sets, and manage the cache.",
            )
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of the pipe, such as head, has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (DataError, StoreError) as error:
        sys.exit(f"error: {error}")
    except (OSError, MemoryError) as error:
        sys.exit(f"error: {explain(error)}\nno incomplete data set was saved; give the same command to start again")
    except KeyboardInterrupt:
        print("interrupted; no incomplete data set was saved", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
