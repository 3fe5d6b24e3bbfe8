"""MuJoCo renders into memory where there is no screen, and can be imported whatever MUJOCO_GL says."""

import os
import subprocess
import sys
from ctypes.util import find_library
from pathlib import Path

import pytest

from envs import graphics
from envs.graphics import SCREENS, VARIABLE, choose_graphics, graphics_problem

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def headless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux without a screen and without a choice of the user, with both libraries."""
    monkeypatch.setattr(sys, "platform", "linux")
    for name in (*SCREENS, VARIABLE):
        monkeypatch.setenv(name, "")  # so that it is undone, whatever the test sets
        monkeypatch.delenv(name)
    monkeypatch.setattr(graphics, "find_library", lambda name: f"lib{name}.so")


def test_without_a_screen_egl_is_chosen() -> None:
    choose_graphics()
    assert os.environ[VARIABLE] == "egl"


def test_without_egl_osmesa_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphics, "find_library", lambda name: name if name == "OSMesa" else None)
    choose_graphics()
    assert os.environ[VARIABLE] == "osmesa"


@pytest.mark.parametrize("value", ["osmesa", "glfw", "nonsense"])
def test_the_users_choice_is_kept(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, value)
    choose_graphics()
    assert os.environ[VARIABLE] == value


@pytest.mark.parametrize("name", SCREENS)
def test_a_screen_is_used(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, ":0")
    choose_graphics()
    assert VARIABLE not in os.environ
    assert graphics_problem() is None


def test_other_systems_choose_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    choose_graphics()
    assert VARIABLE not in os.environ


@pytest.mark.parametrize(
    ("value", "libraries", "problem"),
    [
        ("egl", ["EGL"], None),
        ("egl", [], "MUJOCO_GL is egl, but its library EGL is not installed: install libegl1"),
        ("osmesa", ["EGL"], "MUJOCO_GL is osmesa, but its library OSMesa is not installed: install libosmesa6"),
        ("glfw", ["EGL"], "MUJOCO_GL is glfw, which needs a screen, and there is none: unset it, or set it to egl"),
        ("EGL", ["EGL"], "MUJOCO_GL must be one of egl, osmesa, glfw, not 'EGL'"),
        ("", [], "there is neither a screen nor a software renderer: install libegl1 or libosmesa6"),
    ],
)
def test_each_cause_has_its_advice(
    value: str, libraries: list[str], problem: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, value)
    monkeypatch.setattr(graphics, "find_library", lambda name: name if name in libraries else None)
    found = graphics_problem()
    assert found == problem if problem is None else found is not None and found.startswith(problem)


@pytest.mark.slow
@pytest.mark.parametrize("value", ["osmesa", "nonsense"])
def test_environments_need_no_graphics(value: str) -> None:
    """Not even those that MUJOCO_GL names: MuJoCo alone cannot be imported without them."""
    code = "import os, envs.make; print(os.environ['MUJOCO_GL'])"
    variables = os.environ | {VARIABLE: value, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == value  # as the user set it


RENDER = """
import numpy as np
from envs.tasks import task_of
from envs.video import _make_filmed
environment = _make_filmed(task_of("Hopper-v5"))
environment.reset(seed=0)
print(np.std(environment.render()))
environment.close()
"""


@pytest.mark.slow
def test_pictures_without_a_screen_are_not_black() -> None:
    if not any(find_library(name) for name in ("EGL", "OSMesa")):
        pytest.skip("there is no software renderer")
    variables = {name: value for name, value in os.environ.items() if name not in (*SCREENS, VARIABLE)}
    code = [sys.executable, "-c", RENDER]
    done = subprocess.run(code, env=variables | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    assert float(done.stdout) > 10
