"""Pushing to the hub and loading from it, against a stand-in on loopback: round trips, revisions and clear failures."""

import io
import json
import logging
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import ModelCard, constants

import primal_dt
from primal_dt.hub import remote
from primal_dt.hub.remote import HubError
from primal_dt.hub.sources import find_policy, load_policy
from primal_dt.policy.policy import DecisionTransformerPolicy
from primal_dt.training import policy_folder
from primal_dt.training.checkpoint import load_checkpoint, save_checkpoint
from tests.hub.conftest import Call, fine_tuned, use_address
from tests.hub.server import Hub

pytestmark = [
    pytest.mark.xdist_group("hub"),  # one process trains the run for all tests
    pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning"),  # the client's own upload
]
REPOSITORY = "owner/policy"
SOURCE = f"hub:{REPOSITORY}"


@pytest.fixture
def client_lines() -> Iterator[io.StringIO]:
    """What the client's logger writes."""
    lines = io.StringIO()
    handler = logging.StreamHandler(lines)
    logging.getLogger("huggingface_hub").addHandler(handler)
    yield lines
    logging.getLogger("huggingface_hub").removeHandler(handler)


def actions(policy: DecisionTransformerPolicy) -> bytes:
    """The actions of a short episode, until the window has slid."""
    random = np.random.default_rng(0)
    policy.reset(3600.0)
    found = []
    for _ in range(8):
        found.append(policy.act(random.normal(size=11)))
        policy.observe(1.0)
    return np.stack(found).tobytes()


def change_weights(run: Path) -> None:
    """Make the run's last checkpoint another policy."""
    (path,) = (run / "checkpoints").glob("*.pt")
    checkpoint = load_checkpoint(path)
    checkpoint.weights["head.weight"].mul_(0.5)
    save_checkpoint(path, checkpoint)


def test_a_pushed_policy_acts_bit_for_bit_the_same(hub: Hub, run: Path, call: Call) -> None:
    out, _ = call("push", run, REPOSITORY)
    assert f'load_policy("{SOURCE}")' in out
    assert f"pushed: {hub.address}/{REPOSITORY}/commit/" in out
    assert actions(primal_dt.load_policy(SOURCE)) == actions(load_policy(run))
    assert actions(load_policy(SOURCE, mode="streaming", reproducible=True)) == actions(
        load_policy(run, mode="streaming", reproducible=True)
    )
    files = hub.repositories[REPOSITORY].files()
    assert files.keys() >= {"README.md", "config.json", "model.safetensors", "plots/scores.png"}
    assert f'load_policy("{SOURCE}")' in files["README.md"].decode()
    assert not hub.repositories[REPOSITORY].private


def test_a_pinned_revision_stays_what_it_was(hub: Hub, run: Path, call: Call) -> None:
    call("push", run, REPOSITORY, "--revision", "v1")
    first, sha = actions(load_policy(run)), hub.repositories[REPOSITORY].branches["v1"]
    change_weights(run)
    call("push", run, REPOSITORY)
    second = actions(load_policy(run))
    assert first != second
    assert actions(load_policy(f"{SOURCE}@v1")) == actions(load_policy(f"{SOURCE}@{sha}")) == first
    assert actions(load_policy(SOURCE)) == second


def test_the_card_of_a_branch_names_the_branch(hub: Hub, run: Path, call: Call) -> None:
    call("save", run, "--out", "policy")
    for source, branch in ((run, "v1"), ("policy", "v2")):
        out, _ = call("push", source, REPOSITORY, "--revision", branch)
        assert f'load_policy("{SOURCE}@{branch}")' in out
        card = hub.repositories[REPOSITORY].files(branch)["README.md"].decode()
        assert card.count(SOURCE) == card.count(f"{SOURCE}@{branch}") == 2


def test_weights_are_of_the_commit_of_their_settings(
    hub: Hub, run: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if a new version is pushed between the two downloads."""
    call("push", run, REPOSITORY)
    first, repository = actions(load_policy(run)), hub.repositories[REPOSITORY]
    old = repository.files()
    change_weights(run)
    call("push", run, REPOSITORY)
    new = repository.files()
    assert old["model.safetensors"] != new["model.safetensors"]
    repository.commit("main", old)
    read_settings = policy_folder.read_settings

    def read_and_push(folder: Path) -> dict[str, Any]:
        repository.commit("main", new)
        return read_settings(folder)

    monkeypatch.setattr(remote, "read_settings", read_and_push)
    assert actions(load_policy(SOURCE)) == first


def test_a_new_version_replaces_the_cached_one(hub: Hub, run: Path, call: Call) -> None:
    call("push", run, REPOSITORY)
    first = actions(load_policy(SOURCE))
    change_weights(run)
    (run / "report" / "scores.png").unlink()
    call("push", run, REPOSITORY)
    assert actions(load_policy(SOURCE)) == actions(load_policy(run)) != first
    assert "plots/scores.png" not in hub.repositories[REPOSITORY].files()


def test_a_saved_folder_can_be_edited_and_pushed(hub: Hub, run: Path, call: Call) -> None:
    call("save", run, "--out", "policy")
    card = Path("policy/README.md")
    card.write_text(card.read_text() + "My words.\n")
    Path("policy/notes.txt").write_text("private")
    call("push", "policy", REPOSITORY, "--private")
    files = hub.repositories[REPOSITORY].files()
    assert files["README.md"].decode() == card.read_text().replace("hub:OWNER/NAME", SOURCE)
    assert "notes.txt" not in files
    assert hub.repositories[REPOSITORY].private
    assert actions(load_policy(SOURCE)) == actions(load_policy("policy")) == actions(load_policy(run))


def test_a_cached_policy_loads_offline(hub: Hub, run: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    call("push", run, REPOSITORY)
    expected = actions(load_policy(SOURCE))
    count = len(hub.requests)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert actions(load_policy(SOURCE)) == expected
    assert len(hub.requests) == count
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    use_address(unused_address(), monkeypatch)
    assert actions(load_policy(SOURCE)) == expected


def test_a_damaged_copy_can_be_downloaded_again(hub: Hub, run: Path, call: Call) -> None:
    call("push", run, REPOSITORY)
    folder = find_policy(SOURCE)
    for name in ("config.json", "model.safetensors"):
        file = (folder / name).resolve()
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
        with pytest.raises(HubError, match=rf"{SOURCE} is damaged: {name} .* Remove .* to download it again") as caught:
            load_policy(SOURCE)
        named = re.findall(r"Remove (\S+) to", str(caught.value))[0]
        assert Path(named).name == "models--owner--policy"
        shutil.rmtree(named)
        assert actions(load_policy(SOURCE)) == actions(load_policy(run))


def test_an_empty_name_or_revision_is_refused() -> None:
    with pytest.raises(ValueError, match="the path of the policy is empty"):
        load_policy("")
    with pytest.raises(ValueError, match=f"{SOURCE}@ names no revision"):
        load_policy(f"{SOURCE}@")


def unused_address() -> str:
    """An address at which no server listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def test_loading_explains_what_is_wrong(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = json.dumps({"library": "primal-dt", "format": 99}).encode()
    hub.add("owner/text", {"README.md": b""})
    hub.add("owner/other", {"config.json": b'{"model_type": "bert"}', "model.safetensors": b""})
    hub.add("owner/later", {"config.json": policy})
    hub.add("owner/secret", {}, private=True)
    monkeypatch.setenv("HF_TOKEN", "reader")
    for source, message in [
        ("hub:owner/none", f"there is no repository owner/none on {hub.address}, or it is private"),
        ("hub:owner/secret", "or it is private and you may not read it: log in with `hf auth login`"),
        ("hub:owner/text@v7", "owner/text has no revision 'v7'"),
        ("hub:owner/text", "hub:owner/text is not a policy of this package: it has no config.json"),
        ("hub:owner/other", "config.json is not that of a primal-dt policy"),
        ("hub:owner/later", "config.json has format 99, but this code reads format 1"),
        ("hub:policy", "'policy' is not the name of a repository: it must be OWNER/NAME"),
        ("hub:../etc/x", "is not the name of a repository"),
    ]:
        with pytest.raises(HubError) as caught:
            load_policy(source)
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)
    assert not any(request.endswith("model.safetensors") for request in hub.requests)  # nothing large for nothing


def test_a_missing_network_is_explained(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    use_address(address := unused_address(), monkeypatch)
    with pytest.raises(HubError, match=f"{address} cannot be reached .*owner/policy is not in the hub's cache"):
        load_policy(SOURCE)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="HF_HUB_OFFLINE is set, and owner/policy at v1 is not in the hub's cache"):
        load_policy(f"{SOURCE}@v1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    use_address(hub.address, monkeypatch)
    hub.failing = 500
    with pytest.raises(HubError, match="answered 500, and owner/policy is not in the hub's cache"):
        load_policy(SOURCE)


def test_a_missing_hub_is_not_waited_for(
    hub: Hub, run: Path, call: Call, monkeypatch: pytest.MonkeyPatch, client_lines: io.StringIO
) -> None:
    """Nor do lines of the client tell of its attempts."""
    call("push", run, REPOSITORY)
    weights = (find_policy(SOURCE) / "model.safetensors").resolve()

    def wait(seconds: float) -> None:
        raise AssertionError(f"waits for {seconds} s")

    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", wait)
    hub.failing = 503
    for address in (hub.address, unused_address()):
        use_address(address, monkeypatch)
        with pytest.raises(HubError, match="owner/other is not in the hub's cache"):
            load_policy("hub:owner/other")
        assert actions(load_policy(SOURCE)) == actions(load_policy(run))
    weights.unlink()  # as if a download had been interrupted
    with pytest.raises(HubError, match=r"owner/policy at \w{40} is not in the hub's cache"):
        load_policy(SOURCE)
    assert client_lines.getvalue() == ""


def test_a_failed_upload_is_one_line(hub: Hub, run: Path, call: Call, client_lines: io.StringIO) -> None:
    """The client's warnings about its attempts are left out."""
    hub.failing, hub.failing_paths = 503, "/lfs/.*"
    _, err = call("push", run, REPOSITORY, code=1)
    assert "answered 503 for owner/policy" in err
    assert client_lines.getvalue() == ""


def test_a_card_that_the_hub_refuses_is_explained(hub: Hub, run: Path, call: Call) -> None:
    call("save", run, "--out", "policy")
    card = Path("policy/README.md")
    card.write_text(card.read_text().replace("license: mit", "license: mit\ndatasets:\n- primal/hopper/medium-v0"))
    err = call("push", "policy", REPOSITORY, code=1)[1]
    assert f"{hub.address} refuses the card of owner/policy: Invalid metadata in README.md." in err
    assert '"datasets[0]" with value "primal/hopper/medium-v0" is not valid.' in err
    assert (
        '"license" must be one of [apache-2.0, mit, ' in call("push", run, REPOSITORY, "--license", "mine", code=1)[1]
    )
    assert not hub.repositories[REPOSITORY].files().keys() - {".gitattributes"}


def test_the_base_model_of_a_fine_tuned_policy_is_on_the_hub(
    hub: Hub, run: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    call("push", run, REPOSITORY, "--revision", "v1")
    tuned = fine_tuned(run, f"{SOURCE}@v1", monkeypatch)
    call("push", tuned, "owner/tuned")
    card = hub.repositories["owner/tuned"].files()["README.md"].decode()
    data: Any = ModelCard(card).data
    assert data.base_model == REPOSITORY
    assert f"its training started with the weights of `{SOURCE}@v1`, step 20." in card


def test_a_push_that_is_not_allowed_is_explained(
    hub: Hub, run: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("owner/public", {})
    hub.add("owner/other", {"config.json": b"{}"})
    hub.add("owner/weights", {"model.safetensors": b"of another"})
    before = {name: dict(repository.commits) for name, repository in hub.repositories.items()}
    for arguments, message in [
        ((REPOSITORY.partition("/")[2],), "'policy' is not the name of a repository: it must be OWNER/NAME"),
        (("somebody/policy",), "the token may not do this to somebody/policy (403): log in"),
        (("owner/public", "--private"), "owner/public exists and is public"),
        (("owner/other",), "owner/other holds something else than a policy"),
        (("owner/weights",), "owner/weights holds something else than a policy"),
    ]:
        _, err = call("push", run, *arguments, code=1)
        assert err.startswith("error: ")
        assert message in err
        assert err.count("\n") == 1
    monkeypatch.delenv("HF_TOKEN")
    assert "there is no token to push to owner/policy with: log in" in call("push", run, REPOSITORY, code=1)[1]
    monkeypatch.setenv("HF_TOKEN", "expired")
    assert "(401)" in call("push", run, REPOSITORY, code=1)[1]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set: unset it to push" in call("push", run, REPOSITORY, code=1)[1]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    use_address(unused_address(), monkeypatch)
    assert "cannot be reached for owner/policy" in call("push", run, REPOSITORY, code=1)[1]
    assert {name: dict(repository.commits) for name, repository in hub.repositories.items()} == before


def test_damaged_files_from_the_hub_are_refused(hub: Hub, run: Path, call: Call) -> None:
    call("push", run, REPOSITORY)
    repository = hub.repositories[REPOSITORY]
    good = repository.files()
    weights, config = bytearray(good["model.safetensors"]), json.loads(good["config.json"])
    weights[-1] ^= 1
    config["step"] = 19
    changes: list[tuple[dict[str, Any], str]] = [
        ({"model.safetensors": bytes(weights)}, "model.safetensors is not the file that config.json belongs to"),
        ({"config.json": json.dumps(config).encode()}, "config.json has changed since it was written"),
        ({"config.json": good["config.json"][:100]}, "config.json is not JSON"),
    ]
    for change, message in changes:
        repository.commit("main", {**good, **change})
        with pytest.raises(ValueError, match=message):
            load_policy(SOURCE)
    repository.commit("main", {name: content for name, content in good.items() if name != "model.safetensors"})
    with pytest.raises(HubError, match=r"it has no model\.safetensors"):
        find_policy(SOURCE)


def test_nothing_damaged_is_pushed(hub: Hub, run: Path, call: Call) -> None:
    call("save", run, "--out", "policy")
    Path("policy/model.safetensors").write_bytes(b"")
    assert "is damaged or not a policy of this version" in call("push", "policy", REPOSITORY, code=1)[1]
    assert not hub.repositories
