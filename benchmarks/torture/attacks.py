"""The attacks. Each restores the world, disturbs a program, and checks what must hold; it returns what was seen."""

import errno
import os
import random
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.torture.flags import random_command
from benchmarks.torture.invariants import check_files, check_leftovers, state_of
from benchmarks.torture.process import Outcome, Process, limit_file_size, limit_memory, on_calls
from benchmarks.torture.world import HALF, OWN, PROGRAMS, InvariantError, World

__all__ = ["ATTACKS"]

ERRORS = (errno.ENOSPC, errno.EIO, errno.EACCES, errno.EROFS, errno.EDQUOT)
GIBIBYTE = 2**30
TOLD = ("is damaged", "damaged lines", "points missing", "training is unfinished")
"""What programs say if they succeed without something that was damaged or deleted."""
FLAG_SECONDS = 10.0
"""Seconds after which a program with random flags, which may be a valid long run, is asked to stop."""
Random = random.Random
Attack = Callable[[World, Random], str]


def _disturb(world: World, chance: Random, disturb: Callable[[str], Outcome]) -> tuple[str, Outcome]:
    """Choose a program, restore the world for it and disturb it; check that it loses nothing. Returns its name too."""
    name = chance.choice(list(PROGRAMS))
    world.reset(PROGRAMS[name])
    before = state_of(world.root)
    outcome = disturb(name)
    check_files(before, state_of(world.root), program=name)
    return name, outcome


def _recover(world: World, name: str) -> None:
    """Resume or repeat a program, which must then give the result that it has undisturbed."""
    before = state_of(world.root)
    outcome = world.run(world.again(PROGRAMS[name]))
    check_files(before, state_of(world.root), program=name)
    world.check_result(name, outcome)
    check_leftovers(world.root)


def _signalled(world: World, chance: Random, name: str, number: int) -> Outcome:
    """Send a signal to a program at a random moment."""
    process = world.start(PROGRAMS[name].command)
    process.has_ended(chance.uniform(0, world.seconds[name]))
    process.send(number)
    return process.outcome()


def kill(world: World, chance: Random) -> str:
    """Kill a program at a random moment, or at a random call that writes."""

    def killed(name: str) -> Outcome:
        if chance.random() < 0.5:
            return _signalled(world, chance, name, signal.SIGKILL)
        last = chance.randint(1, world.calls[name])
        return world.run(
            PROGRAMS[name].command,
            on_calls(world.root, lambda number, _: os.kill(os.getpid(), signal.SIGKILL) if number == last else None),
        )

    name, _ = _disturb(world, chance, killed)
    _recover(world, name)
    return "same result"


def stop(world: World, chance: Random) -> str:
    """Ask a program to stop at a random moment, as Ctrl-C or a scheduler does."""
    number = chance.choice((signal.SIGINT, signal.SIGTERM))
    name, outcome = _disturb(world, chance, lambda name: _signalled(world, chance, name, number))
    if outcome.has_traceback or outcome.code not in (0, 128 + number, -number):
        raise InvariantError(f"a request to stop did not end it well:\n{outcome}")
    _recover(world, name)
    return "same result"


def fail(world: World, chance: Random) -> str:
    """Fail one call of the file system, or all from one on; or limit the size of files."""

    def failing(name: str) -> Outcome:
        if chance.random() < 0.3:
            return world.run(PROGRAMS[name].command, limit_file_size(int(10 ** chance.uniform(1, 5.5))))
        code, first, is_lasting = chance.choice(ERRORS), chance.randint(1, world.calls[name]), chance.random() < 0.5

        def raise_error(number: int, path: object) -> None:
            if number == first or (is_lasting and number > first):
                named = [os.fsdecode(path)] if isinstance(path, str | bytes | os.PathLike) else []
                raise OSError(code, os.strerror(code), *named)

        return world.run(PROGRAMS[name].command, on_calls(world.root, raise_error))

    name, outcome = _disturb(world, chance, failing)
    seen = _check_clear(world, name, outcome)
    _recover(world, name)
    return seen


def damage(world: World, chance: Random) -> str:
    """Damage, delete or replace one or two of the files and folders that the programs wrote."""
    name = chance.choice(list(PROGRAMS))
    world.reset(PROGRAMS[name])
    if name == "resume" and chance.random() < 0.2:
        shutil.rmtree(world.root / HALF / "checkpoints")
    paths = [path for path in sorted(world.root.rglob("*")) if _may_matter(name, path)]
    damaged = chance.sample(paths, 2 if chance.random() < 0.2 else 1)
    for path in damaged:
        if path.exists():  # its folder may be gone
            damages = FILE_DAMAGES if path.is_file() else FOLDER_DAMAGES
            damages[chance.choice(list(damages))](path, chance)
    before = state_of(world.root)
    outcome = world.run(PROGRAMS[name].command)
    check_files(before, state_of(world.root), program=name)
    return _check_clear(world, name, outcome, damaged=damaged)


def together(world: World, chance: Random) -> str:
    """Start two programs at once."""
    names = [chance.choice(list(PROGRAMS)) for _ in range(2)]
    world.reset(*(PROGRAMS[name] for name in names))
    before = state_of(world.root)
    processes: list[Process] = []
    for name in names:
        processes.append(world.start(PROGRAMS[name].command))
        processes[-1].has_ended(chance.uniform(0, world.seconds[name]) * chance.random())
    outcomes = [process.outcome() for process in processes]
    is_replaced = "record" in names  # then the others may see other data
    check_files(before, state_of(world.root), program="record" if is_replaced else names[0])
    if wrong := [outcome for outcome in outcomes if not outcome.is_clear]:
        raise InvariantError(f"two at once, and one failed without a message:\n{wrong[0]}")
    for name in ["record"] if is_replaced else dict.fromkeys(names):
        _recover(world, name)
    return "message" if any(outcome.code for outcome in outcomes) else "same result"


def flags(world: World, chance: Random) -> str:
    """Give a program random flags."""
    world.reset()
    before = state_of(world.root)
    process = world.start(random_command(chance), limit_memory(4 * GIBIBYTE))
    is_stopped = not process.has_ended(FLAG_SECONDS)
    process.send(signal.SIGTERM)
    outcome = process.outcome()
    is_clear = outcome.code in (143, -signal.SIGTERM) and not outcome.has_traceback if is_stopped else False
    if not is_clear and not outcome.is_clear:
        raise InvariantError(f"random flags did not end in a message:\n{outcome}")
    check_files(before, state_of(world.root), program="record")
    return "message" if outcome.code > 0 and not is_stopped else "accepted"


def _check_clear(world: World, name: str, outcome: Outcome, damaged: Sequence[Path] = ()) -> str:
    """Check that a disturbed program gave its usual result or a message."""
    shown = ", ".join(str(path.relative_to(world.root)) for path in damaged)
    if not outcome.is_clear:
        raise InvariantError(f"{name} failed without a message; damaged: {shown}\n{outcome}")
    if outcome.code:
        return "message"
    is_source = any("minari" in path.parts for path in damaged) and name in ("start", "read data", "convert data")
    try:
        if not is_source and not (damaged and _is_told(outcome)):
            world.check_result(name, outcome)
            return "same result"
        if not is_source and name in ("start", "resume"):
            world.check_weights(name)
    except InvariantError as error:
        raise InvariantError(f"damaged: {shown}: {error}") from error
    return "message" if _is_told(outcome) else "accepted"  # other data has other results


def _is_told(outcome: Outcome) -> bool:
    """Whether a program that succeeded said that something was damaged or missing."""
    return any(word in outcome.err + outcome.out for word in TOLD)


def _may_matter(name: str, path: Path) -> bool:
    """Whether a program reads or writes a file or a folder of its own."""
    parts = set(path.parts)
    if "home" in parts or path.name in OWN:
        return False
    if name == "resume":
        return "whole" not in parts and "reports" not in parts
    if name.startswith("evaluate"):
        return "whole" in parts or "reports" in parts
    return "runs" not in parts and "reports" not in parts


def _overwrite(path: Path, chance: Random, content: Callable[[int], bytes]) -> None:
    """Overwrite a random range of a file."""
    size = path.stat().st_size
    begin = chance.randrange(size) if size else 0
    with path.open("r+b") as file:
        file.seek(begin)
        file.write(content(min(int(2 ** chance.uniform(0, 12)), max(size - begin, 1))))


def _replace(path: Path, make: Callable[[Path], object]) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    make(path)


def _outside(path: Path) -> Path:
    """The file outside of all that the programs may write to."""
    return next(parent for parent in path.parents if parent.name == "world") / "home" / "secret"


def _copy(path: Path, chance: Random) -> None:
    """Add a copy beside a file, as users do."""
    shutil.copy(path, path.with_name(chance.choice(("copy-", "step-000000009", "step-best")) + path.suffix))


FILE_DAMAGES: Mapping[str, Callable[[Path, Random], object]] = {
    "flipped bit": lambda path, chance: _flip(path, chance),
    "zeros": lambda path, chance: _overwrite(path, chance, bytes),
    "noise": lambda path, chance: _overwrite(path, chance, chance.randbytes),
    "cut off": lambda path, chance: os.truncate(path, chance.randint(0, path.stat().st_size)),
    "longer": lambda path, chance: path.write_bytes(path.read_bytes() + chance.randbytes(chance.randint(1, 500))),
    "deleted": lambda path, _: path.unlink(),
    "copied": _copy,
    "link": lambda path, _: _replace(path, lambda path: path.symlink_to(_outside(path))),
    "pipe": lambda path, _: _replace(path, os.mkfifo),
    "folder": lambda path, _: _replace(path, Path.mkdir),
}
FOLDER_DAMAGES: Mapping[str, Callable[[Path, Random], object]] = {
    "deleted": lambda path, _: shutil.rmtree(path),
    "empty": lambda path, _: _replace(path, Path.mkdir),
    "pipe": lambda path, _: _replace(path, os.mkfifo),
    "file": lambda path, _: _replace(path, Path.touch),
}


def _flip(path: Path, chance: Random) -> None:
    content = bytearray(path.read_bytes())
    if content:
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


ATTACKS: Mapping[str, Attack] = {
    "killed": kill,
    "stopped": stop,
    "full disk, failed call": fail,
    "damaged file": damage,
    "two at once": together,
    "random flags": flags,
}
