"""Provenance of a result: the command, the commit and the versions."""

import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

__all__ = ["commit", "provenance", "versions"]

PACKAGES = ("torch", "numpy", "gymnasium", "mujoco", "minari")


def provenance() -> dict[str, Any]:
    """Return the command, the commit and the versions, as plain values for JSON."""
    return {"command": sys.argv, "commit": commit(), "versions": versions()}


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that affect results."""
    found = {"python": platform.python_version()}
    for package in ("primal-dt", *PACKAGES):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def commit() -> str | None:
    """Return the git commit of this code, with a plus sign if files were modified. None outside a repository."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
