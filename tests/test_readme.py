"""The README and ``docs/``: code blocks and commands run, links and names of extras exist."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import conftest
from tests.envs.files import d4rl_arrays, write_d4rl

pytestmark = pytest.mark.xdist_group("readme")  # one process records the data sets for all tests
ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ALL_PAGES = [*PAGES, ROOT / "CONTRIBUTING.md"]

# Flags that are added to a command to make it short.
TRAINING = shlex.join(conftest.SMALL)
SWEEP = f"--attention softmax --seeds 0 --episodes 1 --memory-per-job 0.2 {TRAINING} --eval-every-steps 0"
SMALL = {
    "python sweep.py demo": SWEEP,
    "python sweep.py demo --dry-run": SWEEP,
    "python -m benchmarks.attention": "--lengths 32 --seconds 0.01",
    "python train.py": TRAINING,
    "python train.py paper --dataset hopper-medium-v2 --attention primal-plus --seed 0": TRAINING,
    "python -m benchmarks.train": "--peers --widths 16 --contexts 4 --steps 2 --no-growth",
    "python -m benchmarks.ablation": "--widths 16 --context 4 --steps 2 --without shards",
    "python -m benchmarks.startup": "--steps 1000 --runs 1",
    "python -m benchmarks.roofline": "--widths 16 --contexts 4",
    "python -m benchmarks.rollout": "--envs 1 2 --seconds 0.01 --width 16 --context 4 --contexts 4",
    "python -m benchmarks.uea --dataset JapaneseVowels --attention primal-plus --seeds 0 1 2": "--epochs 1 --seeds 0",
    "python -m benchmarks.scale": "--sweep table7 --seconds 0.01",
    "python -m benchmarks.spectrum runs/*": "--sequences 4",
    "python -m benchmarks.torture --minutes 10": "--attacks 6",
    "python evaluate.py runs/*": "--episodes 1",
    "python evaluate.py --pretrained hopper --episodes 10": "--episodes 1",
    "python evaluate.py --policy random --task hopper": "--episodes 2",
    "python evaluate.py --policy hopper/expert": "--episodes 2",
    "python -m benchmarks.data": "--steps 3000 --rounds 1 --record-seconds 0.01 --sampler-seconds 0.01",
}


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def commands() -> list[str]:
    """Every command, except the installation and the tests: .ci/run and .ci/wheel run these."""
    lines = [line for page in PAGES for block in blocks(page, "sh") for line in block.splitlines()]
    every = {part for line in lines for part in line.split(" && ")}
    return sorted(part for part in every if not part.startswith("pip install") and part != "pytest")


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A cache and a Minari folder with the data sets of the examples, at a twentieth of their steps.

    The cache also has the file that would be downloaded from D4RL; its content is noise.
    """
    root = tmp_path_factory.mktemp("data")
    variables = conftest.data_variables(root) | {"PYTHONPATH": str(ROOT)}
    for tier in ("medium", "medium-expert"):
        run(f"python -m envs record primal/hopper/{tier}-v0 --steps 5000", root, variables)
    downloads = root / "cache" / "primal-dt" / "downloads"
    downloads.mkdir(parents=True)
    write_d4rl(downloads / "hopper_medium-v2.hdf5", d4rl_arrays((30,) * 20))
    return variables


@pytest.fixture(scope="session")
def runs(folders: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run of the README's command, for the commands that need a run."""
    root = tmp_path_factory.mktemp("trained")
    run(f"python train.py {SMALL['python train.py']}", root, folders)
    return root / "runs"


def run(command: str, folder: Path, variables: dict[str, str]) -> None:
    """Run a command in a folder, and expand patterns as a shell does."""
    words: list[str] = []
    for word in shlex.split(command):
        words += sorted(map(str, folder.glob(word))) if "*" in word else [word]
    assert words[0] == "python"
    if words[1].endswith(".py"):
        words[1] = str(ROOT / words[1])
    result = subprocess.run(
        [sys.executable, *words[1:]], cwd=folder, env=os.environ | variables, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_examples_run(
    page: Path, folders: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All blocks of a page run in one session, from top to bottom."""
    monkeypatch.chdir(tmp_path)  # examples may write files
    for name, value in folders.items():
        monkeypatch.setenv(name, value)
    torch.manual_seed(0)
    session: dict[str, Any] = {}
    for block in blocks(page, "python"):
        exec(compile(block, page.name, "exec"), session)
    if page == PAGES[0]:
        for name, parameter in session["block"].attention.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.abs().max() > 0, name
        assert session["batch"].states.shape == (64, 20, 11)


@pytest.mark.slow
@pytest.mark.parametrize("command", commands())
def test_commands_run(command: str, folders: dict[str, str], runs: Path, tmp_path: Path) -> None:
    """Commands run in a folder outside the repository that has a run."""
    shutil.copytree(runs, tmp_path / "runs")
    run(f"{command} {SMALL.get(command, '')}", tmp_path, folders)


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: page.name)
def test_installed_extras_exist(page: Path) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for install in re.findall(r"pip install [^\n`&|]*", page.read_text()):
        words = shlex.split(install)
        assert words[2:5] == ["-c", "constraints.txt", "-e"], install
        named = re.fullmatch(r"\.(?:\[(.*)\])?", words[5])
        assert named is not None, install
        assert set((named[1] or "dev").split(",")) <= extras.keys(), install


def test_the_test_command_is_what_ci_runs() -> None:
    (command,) = re.findall(r"<!-- test command -->\n```sh\n(.*?)```", PAGES[0].read_text(), re.DOTALL)
    script = (ROOT / ".ci" / "run").read_text().split("# The block")[1].split("\n\n")[0]
    extract = script[script.index("tests=") :].splitlines()[0]
    result = subprocess.run(
        ["bash", "-c", f'{extract}; printf "%s\\n" "$tests"'], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout == command
    assert "pytest" in result.stdout


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub names them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: page.name)
def test_links_of_a_page_exist(page: Path) -> None:
    for link in re.findall(r"\]\(([^)]+?)\)", page.read_text()):
        if link.startswith("http"):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link
