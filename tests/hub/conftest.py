"""The stand-in for the hub, and a trained run to share."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import close_session, constants

import train
from primal_dt.hub import __main__ as program
from tests.conftest import ON_ONE_CORE, SMALL, run_program, small_data
from tests.hub.server import Hub, serving

Call = Callable[..., tuple[str, str]]


def use_address(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send the client's requests to an address, as HF_ENDPOINT does in a new process."""
    monkeypatch.setattr(constants, "ENDPOINT", address)
    path = "{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{address}/{path}")


@pytest.fixture
def hub(own_folders: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The stand-in, an empty cache, and a token that may write to the repositories of ``owner``.

    Xet is switched off: its client speaks a protocol of its own to a storage service, which the stand-in is not.
    """
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)  # between attempts
    with serving() as hub:
        use_address(hub.address, monkeypatch)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(own_folders / "hub-cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(own_folders / "no-token"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", "writer")
        yield hub
        close_session()


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose training ended with an evaluation and a report."""
    root = tmp_path_factory.mktemp("shared")
    flags = ["--dataset", small_data(root / "hopper.hdf5"), "--out", root / "runs", "--name", "run"]
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert run_program(train, monkeypatch, *flags, *SMALL, *ON_ONE_CORE) == 0
    return root / "runs" / "run"


@pytest.fixture
def run(trained: Path, own_folders: Path) -> Path:
    """A copy of the trained run."""
    return Path(shutil.copytree(trained, own_folders / "runs" / "run"))


def fine_tuned(run: Path, init_from: object, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run on the same data that starts with the weights of a policy. Its command has absolute paths."""
    data = small_data(run.parent / "more.hdf5")
    flags = [f"--dataset={data}", f"--out={run.parent}", f"--init-from={init_from}", "--name=tuned"]
    assert run_program(train, monkeypatch, *SMALL, *ON_ONE_CORE, *flags, "--eval-every-steps", 0) == 0
    return run.parent / "tuned"


@pytest.fixture
def call(own_folders: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs ``python -m primal_dt.hub``, checks its exit code, and returns what it writes to stdout and stderr."""

    def run(*arguments: Any, code: int = 0) -> tuple[str, str]:
        capsys.readouterr()
        result = run_program(program, monkeypatch, *arguments)
        out, err = capsys.readouterr()
        assert result == code, err
        return out, err

    return run
