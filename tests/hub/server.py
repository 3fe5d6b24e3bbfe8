"""A stand-in for the Hugging Face hub, on loopback: the parts of its interface that pushing and loading use.

Repositories are in memory. Weights, plots and videos go through LFS, other files in the commit, as on the hub. A
repository that does not exist, or may not be read, answers 401 without a token and 404 with one.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from huggingface_hub import ModelCard

LFS = (".safetensors", ".png", ".mp4")
LICENSES = ("apache-2.0", "mit", "bsd-3-clause", "cc-by-4.0", "cc0-1.0", "gpl-3.0", "openrail", "unknown", "other")
"""Some of the licenses that the hub knows."""
TOKENS = {"writer": "owner", "reader": "nobody"}
"""Token -> the account whose repositories it may write."""


@dataclass
class Repository:
    """A repository: its branches, and the files of each commit."""

    private: bool = False
    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)

    def commit(self, branch: str, files: dict[str, bytes]) -> str:
        sha = hashlib.sha1(repr((len(self.commits), branch)).encode()).hexdigest()
        self.commits[sha] = files
        self.branches[branch] = sha
        return sha

    def files(self, revision: str = "main") -> dict[str, bytes]:
        return self.commits[self.branches.get(revision, revision)]


@dataclass
class Hub:
    """The server's state."""

    address: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    """Method and path of each request."""
    failing: int | None = None
    """The status with which requests are answered."""
    failing_paths: str = ".*"
    """The paths, as a regular expression, whose requests fail if ``failing`` is set."""

    def add(self, name: str, files: dict[str, bytes], *, private: bool = False) -> Repository:
        """Add a repository with one commit."""
        repository = self.repositories[name] = Repository(private=private)
        repository.commit("main", files)
        return repository


class Answer(Exception):  # noqa: N818 - the end of a request, not always an error
    """An answer to a request."""

    def __init__(self, status: int, content: object = None, **headers: str) -> None:
        super().__init__(status)
        self.status = status
        self.body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.headers = headers


class Handler(BaseHTTPRequestHandler):
    """Answers requests by the first route that matches."""

    protocol_version = "HTTP/1.1"
    hub: Hub

    def handle_request(self) -> None:
        self.body = self.read_body()
        path = urlsplit(self.path).path
        self.hub.requests.append(f"{self.command} {unquote(path)}")
        try:
            if self.hub.failing is not None and re.fullmatch(self.hub.failing_paths, path):
                raise Answer(self.hub.failing, {"error": "this server always fails"})
            for methods, pattern, route in ROUTES:
                if self.command in methods.split() and (found := re.fullmatch(pattern, path)):
                    route(self, *map(unquote, found.groups()))
            raise Answer(500, {"error": f"the stand-in has no route for {self.command} {path}"})
        except Answer as answer:
            self.send_response(answer.status)
            for name, value in {"Content-Length": str(len(answer.body)), **answer.headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer.body)

    def read_body(self) -> bytes:
        """Read the body, which has a length or comes in chunks."""
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    do_GET = do_HEAD = do_POST = do_PUT = handle_request  # noqa: N815 - names of the base class

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
        """Show nothing."""

    @property
    def account(self) -> str | None:
        return TOKENS.get((self.headers.get("Authorization") or "").removeprefix("Bearer "))

    def repository(self, name: str, *, writing: bool = False) -> Repository:
        found = self.hub.repositories.get(name)
        owner = name.partition("/")[0]
        if found is None or (found.private and self.account != owner):
            status = 401 if self.account is None else 404
            raise Answer(status, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
        if writing and self.account != owner:
            raise Answer(403 if self.account else 401, {"error": "no permission"}, X_Error_Message="no permission")
        return found

    def commit_of(self, repository: Repository, revision: str) -> str:
        sha = repository.branches.get(revision, revision)
        if sha not in repository.commits:
            raise Answer(404, {"error": "Invalid rev id"}, X_Error_Code="RevisionNotFound")
        return sha

    def create(self) -> None:
        wanted = json.loads(self.body)
        name = f"{wanted['organization']}/{wanted['name']}"
        if self.account is None:
            raise Answer(401, {"error": "Invalid credentials"})
        if self.account != wanted["organization"]:
            raise Answer(403, {"error": "no rights to create"}, X_Error_Message="no rights to create")
        content = {"url": f"{self.hub.address}/{name}", "name": name}
        if name in self.hub.repositories:
            raise Answer(409, {"error": "You already created this model repo", **content})
        self.hub.add(name, {".gitattributes": b""}, private=wanted.get("visibility") == "private")
        raise Answer(200, content)

    def info(self, name: str) -> None:
        repository = self.repository(name)
        raise Answer(
            200, {"id": name, "sha": repository.branches["main"], "private": repository.private, "siblings": []}
        )

    def branch(self, name: str, branch: str) -> None:
        repository = self.repository(name, writing=True)
        if branch in repository.branches:
            raise Answer(409, {"error": "Reference already exists"})
        repository.branches[branch] = repository.branches["main"]
        raise Answer(200, {})

    def tree(self, name: str, revision: str) -> None:
        repository = self.repository(name)
        files = repository.files(self.commit_of(repository, revision))
        entries = [{"type": "file", "path": p, "size": len(c), "oid": git_oid(c)} for p, c in files.items()]
        raise Answer(200, entries)

    def validate(self) -> None:
        errors = metadata_errors(json.loads(self.body)["content"])
        raise Answer(400 if errors else 200, {"errors": [{"message": text} for text in errors], "warnings": []})

    def preupload(self, name: str, revision: str) -> None:
        self.commit_of(self.repository(name, writing=True), revision)
        files = [
            {"path": f["path"], "uploadMode": "lfs" if f["path"].endswith(LFS) else "regular", "shouldIgnore": False}
            for f in json.loads(self.body)["files"]
        ]
        raise Answer(200, {"files": files})

    def batch(self, name: str) -> None:
        self.repository(name, writing=True)
        objects = json.loads(self.body)["objects"]
        for each in objects:
            each["actions"] = {"upload": {"href": f"{self.hub.address}/lfs/{each['oid']}", "header": {}}}
        raise Answer(200, {"transfer": "basic", "objects": objects})

    def store(self, oid: str) -> None:
        assert hashlib.sha256(self.body).hexdigest() == oid
        self.hub.blobs[oid] = self.body
        raise Answer(200, {})

    def blob(self, oid: str) -> None:
        raise Answer(200, self.hub.blobs[oid], ETag=f'"{oid}"')

    def commit(self, name: str, revision: str) -> None:
        repository = self.repository(name, writing=True)
        files = dict(repository.files(self.commit_of(repository, revision)))
        for line in self.body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                files[value["path"]] = self.hub.blobs[value["oid"]]
            elif item["key"] == "deletedFile":
                del files[value["path"]]
        sha = repository.commit(revision, files)
        raise Answer(200, {"commitUrl": f"{self.hub.address}/{name}/commit/{sha}", "commitOid": sha})

    def resolve(self, name: str, revision: str, path: str) -> None:
        repository = self.repository(name)
        sha = self.commit_of(repository, revision)
        if path not in repository.commits[sha]:
            raise Answer(404, {"error": "Entry not found"}, X_Error_Code="EntryNotFound", X_Repo_Commit=sha)
        content = repository.commits[sha][path]
        if not path.endswith(LFS):
            raise Answer(200, content, X_Repo_Commit=sha, ETag=f'"{git_oid(content)}"')
        oid = hashlib.sha256(content).hexdigest()
        self.hub.blobs[oid] = content
        raise Answer(
            302,
            b"",
            X_Repo_Commit=sha,
            X_Linked_Etag=f'"{oid}"',
            X_Linked_Size=str(len(content)),
            Location=f"{self.hub.address.replace('127.0.0.1', 'localhost')}/lfs/{oid}",  # another host, as on the hub
        )


def metadata_errors(card: str) -> list[str]:
    """What the hub refuses in the metadata of a card: the parts of its check that concern cards of policies."""
    parsed: Any = ModelCard(card, ignore_metadata_errors=True).data
    data = parsed.to_dict()
    found = [] if data["license"] in LICENSES else [f'"license" must be one of [{", ".join(LICENSES)}]']
    ids = {f"datasets[{i}]": ("dataset", name) for i, name in enumerate(data.get("datasets", ()))}
    ids |= {"base_model": ("model", data["base_model"])} if "base_model" in data else {}
    for field_name, (kind, value) in ids.items():
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", value, re.ASCII):
            advice = f"If possible, use a {kind} id from https://hf.co/{kind}s."
            found.append(f'"{field_name}" with value "{value}" is not valid. {advice}')
    for i, model in enumerate(data.get("model-index", ())):
        for j, result in enumerate(model["results"]):
            needed = [("task", "type"), ("dataset", "type"), ("dataset", "name")]
            values = {f"{part}.{name}": result.get(part, {}).get(name) for part, name in needed}
            for k, metric in enumerate(result.get("metrics", ())):
                values |= {f"metrics[{k}].{name}": metric.get(name) for name in ("type", "value")}
            at = f"model-index[{i}].results[{j}]"
            found += [f'"{at}.{name}" is required' for name, value in values.items() if value in (None, "")]
    return found


def git_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


NAME = "([^/]+/[^/]+)"
ROUTES: list[tuple[str, str, Callable[..., Any]]] = [
    ("POST", "/api/repos/create", Handler.create),
    ("POST", "/api/validate-yaml", Handler.validate),
    ("GET", f"/api/models/{NAME}", Handler.info),
    ("POST", f"/api/models/{NAME}/branch/([^/]+)", Handler.branch),
    ("GET", f"/api/models/{NAME}/tree/([^/]+)", Handler.tree),
    ("POST", f"/api/models/{NAME}/preupload/([^/]+)", Handler.preupload),
    ("POST", f"/api/models/{NAME}/commit/([^/]+)", Handler.commit),
    ("POST", f"/{NAME}\\.git/info/lfs/objects/batch", Handler.batch),
    ("PUT", "/lfs/([0-9a-f]+)", Handler.store),
    ("GET HEAD", "/lfs/([0-9a-f]+)", Handler.blob),
    ("GET HEAD", f"/{NAME}/resolve/([^/]+)/(.+)", Handler.resolve),
]


@contextmanager
def serving() -> Iterator[Hub]:
    """Run the server while the block runs."""
    hub = Hub()
    handler = type("HubHandler", (Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        hub.address = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
