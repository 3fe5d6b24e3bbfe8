"""``python -m envs list | info | record | cache``: see data sets, and make them."""

if __name__ == "__main__":  # importing takes seconds, in which Ctrl-C shall end the program without a traceback
    import signal

    signal.signal(signal.SIGINT, signal.SIG_DFL)

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import tyro

from envs.datasets import cache
from envs.datasets.describe import QUANTILES, describe, plot_returns
from envs.datasets.load import load_dataset
from envs.datasets.minari import check_name, minari_folder, open_minari
from envs.datasets.names import KNOWN_NAMES, parse_name
from envs.datasets.sources import d4rl_path
from envs.errors import DataError
from envs.tasks import task_of
from primal_dt.system.table import format_table
from primal_dt.system.terminal import begin_program, explain

RESERVED = ("primal/", "mujoco/", "d4rl/", "D4RL/")
Name = Annotated[str, tyro.conf.Positional]


def list_datasets() -> None:
    """List the data sets that are here, and the names that are known."""
    rows = []
    folders = sorted(path.parent.parent for path in minari_folder().glob("**/data/metadata.json"))
    for folder in folders:
        name = folder.relative_to(minari_folder()).as_posix()
        if name.startswith("."):
            continue
        try:
            data = open_minari(folder)
        except DataError as error:
            rows.append([name, "", "", str(error)])
            continue
        rows.append([name, data.env_id or "?", f"{data.num_episodes:,}", str(data.metadata.get("total_steps", "?"))])
    print(f"Here, in {minari_folder()}:\n")
    print(format_table(["name", "environment", "episodes", "steps"], rows) if rows else "  nothing yet")
    here = {row[0] for row in rows}
    print("\nKnown:\n")
    for source, how in (
        ("primal", "built in: recorded when first used, needs no network"),
        ("minari", "downloaded by Minari"),
        ("d4rl", "downloaded from D4RL's server"),
    ):
        names = [name for name, known in KNOWN_NAMES.items() if known.source == source]
        print(f"  {how}")
        for name in names:
            known = KNOWN_NAMES[name]
            is_local = d4rl_path(known).exists() if source == "d4rl" else name in here
            print(f"    {name:36} {known.task.env_id:15}{'  here' if is_local else ''}")
    print("\nA path to a file in D4RL's layout or to a Minari folder is a name too, and A+B is both together.")


def info(
    name: Name,
    env_id: str | None = None,
    mix_versions: bool = False,
    plot: Path | None = None,
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Show what is in a data set: episodes, returns, scores, lengths, where it comes from.

    Args:
        name: a name, a path, or several with + between them.
        env_id: the environment, if the data does not say, such as Hopper-v5.
        mix_versions: allow data from several versions of the environment.
        plot: save a histogram of the returns there (needs the extra plots).
        as_json: print JSON.
    """
    dataset = load_dataset(name, env_id=env_id, mix_versions=mix_versions)
    facts = describe(dataset)
    print(json.dumps(facts, indent=2) if as_json else _shown(facts))
    if plot is not None:
        plot = plot.expanduser()
        plot_returns(dataset, plot)
        if not as_json:
            print(f"\nplot         {plot}")


def _shown(facts: dict[str, Any]) -> str:
    lines = [
        ("data set", facts["name"]),
        ("environment", facts["environment"]),
        ("score", f"in the unit of {facts['unit']} ({facts['reference']['source']})"),
        ("episodes", f"{facts['episodes']:,}, of which {facts['cut_off_episodes']} cut off"),
        ("steps", f"{facts['steps']:,}"),
        ("widths", f"states {facts['state_width']}, actions {facts['action_width']}"),
        ("fingerprint", facts["fingerprint"]),
    ]
    lines += [("note", note) for note in facts["notes"]]
    for part in facts["parts"]:
        lines.append(("source", f"{part['path']} ({part['environment']})"))
        lines.extend(("", f"{key}: {part[key]}") for key in ("description", "seed", "converted_from") if key in part)
    text = "\n".join(f"{label:13}{value}" for label, value in lines)
    header = ["", "mean", "std", *QUANTILES]
    digits = {"returns": 1, "scores": 1, "lengths": 0}
    rows = [[kind, *(f"{facts[kind][key]:.{d}f}" for key in header[1:])] for kind, d in digits.items()]
    return f"{text}\n\n{format_table(header, rows)}"


def record(
    name: Name,
    policy: str | None = None,
    env_id: str | None = None,
    steps: int = 100_000,
    seed: int = 0,
    overwrite: bool = False,
) -> None:
    """Record a Minari data set from a policy.

    A built-in name (primal/hopper/medium-v0) has its own policies. Any other name takes --policy and --env-id.

    Args:
        name: of the data set, NAMESPACE/.../NAME-vN.
        policy: hopper/medium, hopper/expert, ..., random, or a function (observation, random) -> action of your own as
            module:name.
        env_id: where it acts, such as Hopper-v5.
        steps: how many to record, of each tier; episodes are not cut off.
        seed: of the first episode; the next has seed + 1, and so on.
        overwrite: replace a data set of that name.
    """
    from envs.behavior.recipes import Ingredient, builtin_recipe
    from envs.behavior.record import record as record_dataset

    if steps < 1 or not 0 <= seed < 2**31:
        raise DataError(f"--steps ({steps}) must be at least 1, and --seed ({seed}) from 0 to 2^31 - 1")
    check_name(name)
    known = parse_name(name)
    if name.startswith(RESERVED) and (known is None or known.source != "primal"):
        raise DataError(
            f"{name} would pass for somebody else's: give it a name of your own, such as mine/hopper/walk-v0"
        )
    if known is not None and known.source == "primal":
        if policy is not None or env_id is not None:
            raise DataError(f"{name} is built in and has its own policy and environment; give another name")
        task, recipe = known.task, builtin_recipe(known, steps)
    elif policy is None or env_id is None:
        raise DataError(f"{name} is not built in: give --policy and --env-id")
    else:
        task, recipe = task_of(env_id), [Ingredient(policy, steps)]
    folder = record_dataset(name, recipe, task=task, seed=seed, replace=overwrite)
    print(f"{name} is in {folder}")


def show_cache(clear: bool = False, clear_downloads: bool = False) -> None:
    """Show what the cache holds, or clear it.

    It lies in the user's cache folder, or where PRIMAL_DT_CACHE says. Minari's data sets are not in it.

    Args:
        clear: delete all but downloads; what is needed again is made again.
        clear_downloads: delete downloads too, those put there by hand among them.
    """
    rows = [[kind, f"{files:,}", f"{size / 2**20:.1f}"] for kind, (files, size) in cache.usage().items()]
    print(f"{cache.cache_folder()}\n")
    print(format_table(["", "files", "MiB"], rows))
    if clear or clear_downloads:
        cache.clear_cache(downloads=clear_downloads)
        print("\ncleared")


def main() -> None:
    """Run a command; a user's mistake ends in a message."""
    begin_program()
    try:
        tyro.extras.subcommand_cli_from_dict(
            {"list": list_datasets, "info": info, "record": record, "cache": show_cache},
            prog="python -m envs",
            description="Data sets: what is here, what is in them, and how to record one.",
        )
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (DataError, OSError) as error:
        sys.exit(f"error: {explain(error)}")
    except KeyboardInterrupt:
        print("interrupted; nothing is left half done", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
