"""MuJoCo's graphics library, which only pictures need: that of ``MUJOCO_GL``, or one that needs no screen."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes.util import find_library

__all__ = ["VARIABLE", "choose_graphics", "graphics_problem", "import_without_graphics"]

VARIABLE = "MUJOCO_GL"
OFF_SCREEN = {"egl": ("EGL", "libegl1"), "osmesa": ("OSMesa", "libosmesa6")}
"""Value of the variable -> its library, and Debian's package of it."""
KNOWN = (*OFF_SCREEN, "glfw")
SCREENS = ("DISPLAY", "WAYLAND_DISPLAY")


def choose_graphics() -> None:
    """Without a screen and without a choice of the user, choose a library that renders into memory."""
    if os.environ.get(VARIABLE) or _has_screen():
        return
    for name, (library, _) in OFF_SCREEN.items():
        if find_library(library):
            os.environ[VARIABLE] = name
            return


def graphics_problem() -> str | None:
    """Why MuJoCo cannot render with the chosen library, and what to do; None if no reason is known."""
    name = os.environ.get(VARIABLE)
    packages = " or ".join(package for _, package in OFF_SCREEN.values())
    if not name:
        return (
            None if _has_screen() else f"there is neither a screen nor a software renderer: install {packages} (Debian)"
        )
    if name not in KNOWN:
        return f"{VARIABLE} must be one of {', '.join(KNOWN)}, not {name!r}"
    if name in OFF_SCREEN and not find_library(OFF_SCREEN[name][0]):
        library, package = OFF_SCREEN[name]
        return f"{VARIABLE} is {name}, but its library {library} is not installed: install {package} (Debian)"
    if name == "glfw" and not _has_screen():
        return f"{VARIABLE} is glfw, which needs a screen, and there is none: unset it, or set it to egl or osmesa"
    return None


@contextmanager
def import_without_graphics() -> Iterator[None]:
    """Let mujoco be imported although its graphics library cannot be: training and evaluation need none.

    MuJoCo loads the library when it is imported, and cannot be imported if that fails.
    """
    name = os.environ.get(VARIABLE)
    if not name or graphics_problem() is None:
        yield
        return
    os.environ[VARIABLE] = "disable"
    try:
        yield
    finally:
        os.environ[VARIABLE] = name


def _has_screen() -> bool:
    """Whether there may be a screen: elsewhere than on Linux, MuJoCo's own choice is right."""
    return sys.platform != "linux" or any(os.environ.get(name) for name in SCREENS)
