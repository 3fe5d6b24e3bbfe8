"""The README is true: its code runs, its commands run."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
TEST_COMMAND = re.search(r"<!-- test command -->\n```sh\n(.*?)```", README, re.DOTALL)

# Flags that make a long command short. The command itself is run as the README has it.
SMALL = {"python -m benchmarks.attention": "--lengths 32 --seconds 0.01"}


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands() -> list[str]:
    """Every command, but for those that the test command makes: that runs these tests, and is run by .ci/run."""
    assert TEST_COMMAND is not None
    lines = [line for block in blocks("sh") if block != TEST_COMMAND[1] for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith(("#", "pip install"))]


def run_python_blocks() -> dict[str, Any]:
    """All Python of the README in one session, from top to bottom."""
    torch.manual_seed(0)
    session: dict[str, Any] = {}
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), session)
    return session


def test_the_python_examples_run_and_train_the_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # they may write files
    session = run_python_blocks()
    attention = session["block"].attention
    for name, parameter in attention.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("command", commands())
def test_a_command_runs(command: str, tmp_path: Path) -> None:
    words = shlex.split(f"{command} {SMALL.get(command, '')} --out {shlex.quote(str(tmp_path))}")
    assert words[0] == "python"
    result = subprocess.run([sys.executable, *words[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert list(tmp_path.iterdir())


def test_the_test_command_is_the_one_that_ci_runs() -> None:
    assert TEST_COMMAND is not None
    script = (ROOT / ".ci" / "run").read_text().split("# The block")[1].split("\n\n")[0]
    extract = script[script.index("tests=") :].splitlines()[0]
    result = subprocess.run(
        ["bash", "-c", f'{extract}; printf "%s\\n" "$tests"'], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout == TEST_COMMAND[1]
    assert "pytest" in result.stdout


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda p: p.name)
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+?)\)", page.read_text()):
        if not link.startswith("http"):
            assert (page.parent / link).exists(), link
