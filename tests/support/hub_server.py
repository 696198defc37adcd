"""A stand-in for the Hugging Face hub: the part of its HTTP API that huggingface_hub's client uses
to publish a model (small files in the commit, large ones by LFS) and to download it.

Repositories are kept in memory; revisions are branches and commits.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

TOKEN = "hf_standin"
# Above it a file goes by LFS; the hub decides by name and content.
MAX_REGULAR = 10_000


@dataclass
class Repository:
    private: bool
    commits: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"0" * 40: {}})
    branches: dict[str, str] = field(default_factory=lambda: {"main": "0" * 40})

    def commit_of(self, revision: str) -> str | None:
        commit = self.branches.get(revision, revision)
        return commit if commit in self.commits else None


@dataclass
class Hub:
    """What the server has; `requests` are its methods and paths in order."""

    endpoint: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    large_files: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)

    def files(self, name: str, revision: str = "main") -> dict[str, bytes]:
        repository = self.repositories[name]
        return repository.commits[repository.branches[revision]]


@contextmanager
def running_hub():
    """Start the server on a free port; yield its Hub."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *args):
        pass

    # -- answers

    def answer(self, value, status: int = 200, **headers: str) -> None:
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for key, text in headers.items():
            self.send_header(key.replace("_", "-"), text)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, status: int, code: str) -> None:
        self.answer({"error": code}, status, X_Error_Code=code, X_Error_Message=code)

    def dispatch(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        length = int(self.headers.get("Content-Length") or 0)
        self.body = self.rfile.read(length)
        parts = path.strip("/").split("/")
        if self.command in ("POST", "PUT") and parts[0] != "lfs":
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                return self.refuse(401, "Unauthorized")
        if parts[0] == "lfs":
            self.hub.large_files[parts[1]] = self.body
            return self.answer({})
        if parts[0] == "api":
            return self.answer_api(parts[1:])
        name = "/".join(parts[:2]).removesuffix(".git")
        if parts[1].endswith(".git"):
            return self.answer_lfs_batch()
        return self.answer_file(name, parts[3], "/".join(parts[4:]))

    do_GET = do_HEAD = do_POST = do_PUT = dispatch

    # -- the API

    def answer_api(self, parts: list[str]) -> None:
        if parts == ["repos", "create"]:
            return self.create_repository()
        if parts[0] != "models":
            # The metadata of the card.
            return self.answer({"errors": [], "warnings": []})
        name = "/".join(parts[1:3])
        repository = self.hub.repositories.get(name)
        if repository is None:
            return self.refuse(404, "RepoNotFound")
        action, arguments = (parts[3] if parts[3:] else "revision"), parts[4:] or ["main"]
        if action == "branch":
            repository.branches[arguments[0]] = repository.branches["main"]
            return self.answer({})
        commit = repository.commit_of(arguments[0])
        if commit is None:
            return self.refuse(404, "RevisionNotFound")
        if action == "revision":
            return self.answer({"id": name, "sha": commit, "private": repository.private})
        if action == "tree":
            return self.answer([_entry(*item) for item in repository.commits[commit].items()])
        if action == "preupload":
            return self.answer({"files": [_mode(file) for file in json.loads(self.body)["files"]]})
        assert action == "commit", action
        return self.commit(name, repository, arguments[0], commit)

    def create_repository(self) -> None:
        values = json.loads(self.body)
        name = f"{values['organization']}/{values['name']}"
        url = {"url": f"{self.hub.endpoint}/{name}"}
        if name in self.hub.repositories:
            return self.answer({**url, "error": "exists"}, 409)
        is_private = values.get("visibility") == "private" or values.get("private", False)
        self.hub.repositories[name] = Repository(is_private)
        return self.answer(url)

    def answer_lfs_batch(self) -> None:
        def action(entry: dict) -> dict:
            if entry["oid"] in self.hub.large_files:
                return entry
            upload = {"href": f"{self.hub.endpoint}/lfs/{entry['oid']}"}
            return {**entry, "actions": {"upload": upload}}

        self.answer({"objects": [action(entry) for entry in json.loads(self.body)["objects"]]})

    def commit(self, name: str, repository: Repository, branch: str, parent: str) -> None:
        files = dict(repository.commits[parent])
        for line in self.body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.hub.large_files[value["oid"]]
            elif entry["key"] == "deletedFile":
                del files[value["path"]]
        new = hashlib.sha1(f"{parent} {sorted(files)}".encode() + self.body).hexdigest()
        repository.commits[new], repository.branches[branch] = files, new
        url = f"{self.hub.endpoint}/{name}/commit/{new}"
        self.answer({"commitUrl": url, "commitOid": new})

    def answer_file(self, name: str, revision: str, path: str) -> None:
        repository = self.hub.repositories.get(name)
        commit = repository and repository.commit_of(revision)
        if repository is None or commit is None:
            return self.refuse(404, "RepoNotFound")
        content = repository.commits[commit].get(path)
        if content is None:
            return self.refuse(404, "EntryNotFound")
        tag = hashlib.sha256(content).hexdigest()
        return self.answer(content, X_Repo_Commit=commit, ETag=f'"{tag}"')


def _mode(file: dict) -> dict:
    mode = "lfs" if file["size"] > MAX_REGULAR else "regular"
    return {"path": file["path"], "uploadMode": mode, "shouldIgnore": False}


def _entry(path: str, content: bytes) -> dict:
    entry = {"type": "file", "path": path, "size": len(content)}
    entry["oid"] = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    if len(content) > MAX_REGULAR:
        digest = hashlib.sha256(content).hexdigest()
        entry["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 130}
    return entry
