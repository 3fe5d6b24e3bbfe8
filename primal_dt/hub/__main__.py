"""Share trained policies.

To publish a run on the Hugging Face hub, with a model card, and to load it anywhere:
  python -m primal_dt.hub push runs/RUN OWNER/NAME
  load_policy("hub:OWNER/NAME")

To write the same folder without a network, for example to read the card first:
  python -m primal_dt.hub save runs/RUN --out policy
  python -m primal_dt.hub push policy OWNER/NAME
"""

if __name__ == "__main__":  # imports take seconds, during which Ctrl-C should end the program without a traceback
    import signal

    signal.signal(signal.SIGINT, signal.SIG_DFL)

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from primal_dt.hub.remote import PLACEHOLDER, check_repository, source_of, upload_policy
from primal_dt.hub.share import LICENSE, save_shared
from primal_dt.system.files import check_writable
from primal_dt.system.process import memory_errors
from primal_dt.system.terminal import begin_program, explain
from primal_dt.training.checkpoint import load_checkpoint
from primal_dt.training.policy_folder import is_policy_folder

EXIT_MISTAKE, EXIT_INTERRUPTED = 1, 130


# tyro starts a new line in --help where a field's docstring does, so each line below holds whole sentences.
@dataclass(frozen=True)
class Push:
    """Publish a policy on the Hugging Face hub. Needs a token: `hf auth login`, or HF_TOKEN."""

    run: Annotated[Path, tyro.conf.Positional]
    """Run folder, whose last checkpoint is published, checkpoint file, or a folder that save has written."""
    repository: Annotated[str, tyro.conf.Positional]
    """Repository on the hub, as OWNER/NAME. It is created if it does not exist."""
    private: bool = False
    """Create a private repository."""
    revision: str | None = None
    """Branch to push to. It is created if it does not exist. If not given: the main branch."""
    report: tuple[Path, ...] = ()
    """Folders of reports that evaluate.py has written about this run.
    If not given: the report of the training's last evaluation."""
    license: str | None = None
    """License of the weights, as the hub names it. If not given: mit; for a folder that save has written, its own."""


@dataclass(frozen=True)
class Save:
    """Write the folder that push would publish. Needs no network."""

    run: Annotated[Path, tyro.conf.Positional]
    """Run folder, whose last checkpoint is saved, or checkpoint file."""
    out: Path
    """Folder to write. It must be empty or missing."""
    report: tuple[Path, ...] = ()
    """Folders of reports that evaluate.py has written about this run.
    If not given: the report of the training's last evaluation."""
    license: str = LICENSE
    """License of the weights, as the hub names it."""
    source: str = PLACEHOLDER
    """What the card tells readers to pass to load_policy. push replaces the default by the repository."""


def main() -> int:
    """Parse the command line, save or push. A user's mistake ends in a message, not in a traceback."""
    begin_program()
    try:
        command: Push | Save = tyro.extras.subcommand_cli_from_dict(
            {"push": Push, "save": Save}, prog="python -m primal_dt.hub", description=__doc__
        )
        with memory_errors():
            if isinstance(command, Push):
                push(command)
            else:
                save(command)
    except (ValueError, OSError, MemoryError) as error:
        print(f"error: {explain(error)}", file=sys.stderr)
        return EXIT_MISTAKE
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0


def save(command: Save) -> None:
    """Write the folder."""
    check_writable(command.out)
    save_shared(
        command.run, command.out, reports=command.report, source=command.source, weights_license=command.license
    )
    size = (command.out / "model.safetensors").stat().st_size
    print(f"{command.out}: model.safetensors, {size / 1e6:.1f} MB")
    print(f"card:    {command.out / 'README.md'}")
    print(f"publish: python -m primal_dt.hub push {command.out} OWNER/NAME")


def push(command: Push) -> None:
    """Write the folder to a temporary place, unless it is given, and upload it."""
    check_repository(command.repository)
    with tempfile.TemporaryDirectory(prefix="primal-dt-") as scratch:
        folder = command.run
        if is_policy_folder(folder):
            given = {"--report": command.report, "--license": command.license}
            if flags := [flag for flag, value in given.items() if value]:
                raise ValueError(f"{flags[0]} is for runs: {folder} has its card already")
            load_checkpoint(folder)  # so that nothing damaged is published
        else:
            folder = Path(scratch)
            save_shared(command.run, folder, reports=command.report, weights_license=command.license or LICENSE)
        address = upload_policy(folder, command.repository, private=command.private, revision=command.revision)
    print(f"pushed: {address}")
    print(f'use:    load_policy("{source_of(command.repository, command.revision)}")')


if __name__ == "__main__":
    sys.exit(main())
