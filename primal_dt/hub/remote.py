"""The Hugging Face hub: policies are downloaded into its cache, and uploaded in one commit.

The client library raises errors of many types. Here each becomes a :class:`HubError` with one readable line.
"""

import errno
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from primal_dt.training.policy_folder import (
    LIBRARY,
    POLICY_CONFIG,
    WEIGHTS,
    DamagedError,
    read_settings,
    read_weights,
)

__all__ = [
    "CARD",
    "HUB",
    "PLACEHOLDER",
    "PLOTS",
    "VIDEO",
    "HubError",
    "check_repository",
    "download_policy",
    "source_of",
    "upload_policy",
]

CARD, PLOTS, VIDEO = "README.md", "plots", "replay.mp4"
"""Files of a policy folder besides the policy. The hub shows ``replay.mp4`` beside a card about reinforcement learning.
"""
HUB = "hub:"
"""Start of the name of a policy on the hub: ``hub:OWNER/NAME``."""
PLACEHOLDER = f"{HUB}OWNER/NAME"
"""What a card names as the policy's source until it is pushed."""
LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"
NOT_CAUGHT = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOMEM)
"""The numbers of the system's errors that are not about the hub."""


class HubError(ValueError):
    """A policy could not be downloaded from the hub or uploaded to it."""


def source_of(repository: str, revision: str | None = None) -> str:
    """The name by which a policy of the hub is loaded."""
    return f"{HUB}{repository}{f'@{revision}' if revision else ''}"


def check_repository(name: str) -> None:
    """Raise HubError if a name has not the form ``OWNER/NAME``."""
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name, re.ASCII):
        raise HubError(f"{name!r} is not the name of a repository: it must be OWNER/NAME")


def download_policy(repository: str, revision: str | None = None) -> Path:
    """Download a policy into the hub's cache, unless it is cached.

    ``config.json`` comes first: if it is not a policy's, the weights are not downloaded. Both are of the same commit.

    Args:
        repository: ``OWNER/NAME``.
        revision: a branch, a tag or a commit. If None: the main branch.

    Returns:
        The policy's folder in the cache.

    Raises:
        HubError: if it is not there, not a policy, or the hub cannot be reached and it is not cached.
    """
    check_repository(repository)
    folder = _download(repository, POLICY_CONFIG, revision).parent
    source = source_of(repository, revision)
    try:
        settings = read_settings(folder)
        _download(repository, WEIGHTS, folder.name)  # the folder is named by the commit
        read_weights(folder, settings)
    except DamagedError as error:
        where = folder.parent.parent
        raise HubError(
            f"{source} is damaged: {error}. Remove {where} to download it again. If it is damaged then, it is so on "
            "the hub"
        ) from error
    except HubError:
        raise
    except ValueError as error:
        raise HubError(f"{source} is not a policy of this version: {error}") from error
    return folder


def _download(repository: str, name: str, revision: str | None) -> Path:
    """Return a file in the cache. It is downloaded if the hub has a newer one, or if it is not cached."""
    from huggingface_hub import HfApi, try_to_load_from_cache

    with _explained(repository, revision):
        if not isinstance(try_to_load_from_cache(repository, name, revision=revision), str):
            _require_answer(repository, name, revision)
        return Path(HfApi(library_name=LIBRARY).hf_hub_download(repository, name, revision=revision))


def _require_answer(repository: str, name: str, revision: str | None) -> None:
    """Ask for a file once, and raise an error unless it is there.

    The client's download would ask seven times, with pauses. Without a network, that takes half a minute; if nothing
    answers, minutes. Here each request has a limit of ten seconds, or of HF_HUB_ETAG_TIMEOUT.
    """
    from huggingface_hub import errors, get_hf_file_metadata, hf_hub_url

    not_there = (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.RemoteEntryNotFoundError)
    url = hf_hub_url(repository, name, revision=revision)
    try:
        get_hf_file_metadata(url)
    except (*not_there, MemoryError):
        raise
    except Exception as error:  # of the client and of its HTTP library
        raise errors.LocalEntryNotFoundError(f"{url} cannot be downloaded") from error


def upload_policy(folder: Path, repository: str, *, private: bool = False, revision: str | None = None) -> str:
    """Upload a policy folder in one commit. The repository and the branch are created if they do not exist.

    Files of an earlier version that the folder lacks, such as plots, are removed in the same commit. Other files in the
    repository stay.

    Args:
        folder: the policy's folder.
        repository: ``OWNER/NAME``.
        private: whether a new repository is private.
        revision: a branch. If None: the main branch.

    Returns:
        The address of the commit.

    Raises:
        HubError: if there is no token or no permission, the repository holds something else or is public although it
            should be private, or the hub cannot be reached.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token

    check_repository(repository)
    if get_token() is None:
        raise HubError(f"there is no token to push to {repository} with: {LOG_IN}")
    api = HfApi(library_name=LIBRARY)
    files = {path.relative_to(folder).as_posix(): path for path in _files(folder)}
    with _explained(repository, revision):
        api.create_repo(repository, private=private or None, exist_ok=True)
        if private and not api.repo_info(repository).private:
            raise HubError(f"{repository} exists and is public: make it private there, or push without --private")
        if revision is not None:
            api.create_branch(repository, branch=revision, exist_ok=True)
        present = api.list_repo_files(repository, revision=revision)
        if POLICY_CONFIG in present:
            _require_policy(Path(api.hf_hub_download(repository, POLICY_CONFIG, revision=revision)).parent, repository)
        elif WEIGHTS in present:
            raise HubError(f"{repository} holds something else than a policy of this package: choose another name")
        own = [name for name in present if name.startswith(f"{PLOTS}/") or name == VIDEO]
        operations: list[Any] = [
            *(CommitOperationAdd(name, _content(path, repository, revision)) for name, path in files.items()),
            *(CommitOperationDelete(name) for name in own if name not in files),
        ]
        commit = api.create_commit(repository, operations, commit_message="Upload a policy", revision=revision)
    return str(commit.commit_url)


def _files(folder: Path) -> list[Path]:
    """The files of a policy folder that are uploaded, and no others that somebody put there."""
    known = [folder / name for name in (POLICY_CONFIG, WEIGHTS, CARD, VIDEO)]
    return [path for path in (*known, *sorted((folder / PLOTS).glob("*.png"))) if path.is_file()]


def _content(path: Path, repository: str, revision: str | None) -> Path | bytes:
    """What is uploaded of a file. A card that was written before the policy had a repository gets its name."""
    if path.name != CARD:
        return path
    return path.read_bytes().replace(PLACEHOLDER.encode(), source_of(repository, revision).encode())


def _require_policy(folder: Path, repository: str) -> None:
    try:
        read_settings(folder)
    except ValueError as error:
        raise HubError(f"{repository} holds something else than a policy: {error}. Choose another name") from error


@contextmanager
def _explained(repository: str, revision: str | None) -> Iterator[None]:
    """Replace the errors of the client library by a HubError that says what is wrong in one line.

    The client's own warnings about such errors are not shown, unless HF_HUB_VERBOSITY asks for more than warnings.
    """
    client = logging.getLogger("huggingface_hub")
    before = client.level
    if before == logging.WARNING:
        client.setLevel(logging.ERROR)
    try:
        yield
    except HubError:
        raise
    except Exception as error:  # of the client, of its HTTP library and of the system
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in NOT_CAUGHT):
            raise
        raise HubError(_reason(error, repository, revision)) from error
    finally:
        client.setLevel(before)


def _reason(error: Exception, repository: str, revision: str | None) -> str:
    from huggingface_hub import constants, errors

    while type(error) is RuntimeError and isinstance(error.__cause__, Exception):  # of an upload in a thread
        error = error.__cause__
    hub = constants.ENDPOINT
    if isinstance(error, errors.HFValidationError):
        return f"{repository!r} is not the name of a repository: {_first_line(error)}"
    if type(error) is ValueError:  # of the check of the card, with one line for each mistake
        return f"{hub} refuses the card of {repository}: {' '.join(str(error).split())}"
    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
    if isinstance(error, errors.GatedRepoError):
        return f"access to {repository} must be requested at {hub}/{repository}; then {LOG_IN}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"there is no repository {repository} on {hub}, or it is private and you may not read it: {LOG_IN}"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repository} has no revision {revision or 'main'!r}"
    if isinstance(error, errors.RemoteEntryNotFoundError):
        return f"hub:{repository} is not a policy of this package: it has no {_file_of(error)}"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return f"HF_HUB_OFFLINE is set: unset it to push to {repository}"
    not_cached = f"{repository}{f' at {revision}' if revision else ''} is not in the hub's cache"
    if isinstance(error.__cause__, errors.OfflineModeIsEnabled):
        return f"HF_HUB_OFFLINE is set, and {not_cached}: unset it, or download the policy where there is a network"
    if status in (401, 403):
        return f"the token may not do this to {repository} ({status}): {LOG_IN} with permission to write"
    if status is not None:
        return f"{hub} answered {status} for {repository}: {_first_line(error)}"
    if not isinstance(error, errors.LocalEntryNotFoundError):
        return f"{hub} cannot be reached for {repository}: {_first_line(error)}"
    cause = error.__cause__ or error
    if isinstance(cause, errors.HfHubHTTPError):
        return f"{hub} answered {cause.response.status_code}, and {not_cached}"
    if isinstance(cause, errors.FileMetadataError):
        return f"{hub} does not answer as a hub does, and {not_cached}: check HF_ENDPOINT, and proxies"
    return f"{hub} cannot be reached ({_first_line(cause)}), and {not_cached}"


def _file_of(error: Exception) -> str:
    return WEIGHTS if WEIGHTS in str(error) else POLICY_CONFIG


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
