"""A stand-in for the Hugging Face Hub on this machine: the documented HTTP API that huggingface_hub's client uses.

It has repositories with commits in memory: create, preupload, LFS batch and upload, commit, info, tree, files. A client
without the token sees public repositories only.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_standin"
LFS_ENDINGS = (".safetensors", "tokenizer.json")


@dataclass
class Repository:
    """Files of the newest commit by path, and the summaries of all commits by id."""

    private: bool = False
    files: dict[str, bytes] = field(default_factory=dict)
    commits: dict[str, str] = field(default_factory=dict)

    @property
    def head(self) -> str:
        return list(self.commits)[-1]

    def commit(self, summary: str, files: Mapping[str, bytes]) -> str:
        self.files = dict(files)
        content = "".join(f"{path} {hashlib.sha256(data).hexdigest()}\n" for path, data in sorted(files.items()))
        identity = hashlib.sha1(f"{len(self.commits)} {summary}\n{content}".encode()).hexdigest()
        self.commits[identity] = summary
        return identity


@dataclass
class Hub:
    """The stand-in: its address, its repositories by kind and name, and the requests that it got."""

    address: str = ""
    repositories: dict[tuple[str, str], Repository] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)

    def add(self, kind: str, name: str, files: Mapping[str, bytes]) -> Repository:
        repository = self.repositories[kind, name] = Repository()
        repository.commit("first", files)
        return repository

    def environment(self, home: Path, *, token: str | None = TOKEN) -> dict[str, str | None]:
        """Variables of a client with an empty cache. None: the variable is taken away."""
        return {
            "HF_ENDPOINT": self.address,
            "HF_HOME": str(home),
            "HF_TOKEN": token,
            "HF_HUB_OFFLINE": None,
            # Large files go through Git LFS, whose protocol is documented.
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }


@contextmanager
def hub_server() -> Iterator[Hub]:
    """Serve a stand-in on a free port of this machine until the context ends."""
    hub = Hub()

    class Handler(_Handler):
        state = hub

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.address = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    state: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    do_GET = do_POST = do_PUT = do_HEAD  # noqa: N815

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        self.state.requests.append(f"{self.command} {path}")
        parts = path.strip("/").split("/")
        try:
            if self.command == "PUT" and parts[0] == "lfs":
                self.state.blobs[parts[1]] = body
                self._send(200)
            elif parts == ["api", "repos", "create"]:
                self._create(json.loads(body))
            elif parts == ["api", "validate-yaml"]:
                self._validate(json.loads(body)["content"])
            elif path.endswith(".git/info/lfs/objects/batch"):
                self._batch(json.loads(body))
            elif parts[0] == "api" and parts[1] in ("models", "datasets"):
                self._api(parts[1].removesuffix("s"), "/".join(parts[2:4]), parts[4:], body)
            else:
                kind = "dataset" if parts[0] == "datasets" else "model"
                self._file(kind, parts[1:] if kind == "dataset" else parts)
        except _RefusalError as refusal:
            self._send(refusal.status, {"error": refusal.code}, {"X-Error-Code": refusal.code})

    @property
    def _has_token(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _repository(self, kind: str, name: str) -> Repository:
        found = self.state.repositories.get((kind, name))
        if found is None or (found.private and not self._has_token):
            # Like the Hub, which hides the existence of private repositories.
            raise _RefusalError(404 if self._has_token else 401, "RepoNotFound")
        return found

    def _create(self, given: Mapping[str, Any]) -> None:
        if not self._has_token:
            raise _RefusalError(401, "Unauthorized")
        name = f"{given['organization']}/{given['name']}"
        key = (given.get("type") or "model", name)
        is_new = key not in self.state.repositories
        if is_new:
            is_private = given.get("visibility") == "private" or bool(given.get("private"))
            self.state.repositories[key] = Repository(is_private)
            self.state.repositories[key].commit("initial commit", {".gitattributes": b""})
        self._send(200 if is_new else 409, {"url": f"{self.state.address}/{name}"})

    def _validate(self, content: str) -> None:
        from huggingface_hub import ModelCard

        try:
            ModelCard(content)
        except ValueError as error:
            self._send(400, {"errors": [{"message": str(error)}], "warnings": []}, {"X-Error-Code": "BadRequest"})
        else:
            self._send(200, {"errors": [], "warnings": []})

    def _batch(self, given: Mapping[str, Any]) -> None:
        if not self._has_token:
            raise _RefusalError(401, "Unauthorized")
        address = self.state.address
        objects: list[dict[str, Any]] = []
        for one in given["objects"]:
            upload = {"upload": {"href": f"{address}/lfs/{one['oid']}"}}
            objects.append({**one, **({} if one["oid"] in self.state.blobs else {"actions": upload})})
        self._send(200, {"transfer": "basic", "objects": objects})

    def _api(self, kind: str, name: str, rest: list[str], body: bytes) -> None:
        repository = self._repository(kind, name)
        match rest:
            case [] | ["revision", _]:
                siblings = [{"rfilename": path} for path in repository.files]
                facts = {"id": name, "sha": repository.head, "private": repository.private, "siblings": siblings}
                self._send(200, {**facts, "tags": [], "downloads": 0, "likes": 0})
            case ["tree", _, *_]:
                self._send(200, [_entry(path, data) for path, data in repository.files.items()])
            case ["preupload", _]:
                files = [
                    {
                        "path": one["path"],
                        "uploadMode": "lfs" if one["path"].endswith(LFS_ENDINGS) else "regular",
                        "shouldIgnore": False,
                    }
                    for one in json.loads(body)["files"]
                ]
                self._send(200, {"files": files})
            case ["commit", _] if self._has_token:
                self._commit(name, repository, [json.loads(line) for line in body.splitlines()])
            case _:
                raise _RefusalError(401 if rest[:1] == ["commit"] else 404, "EntryNotFound")

    def _commit(self, name: str, repository: Repository, lines: list[dict[str, Any]]) -> None:
        files, summary = dict(repository.files), ""
        for line in lines:
            value = line["value"]
            match line["key"]:
                case "header":
                    summary = value["summary"]
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    data = self.state.blobs[value["oid"]]
                    assert (hashlib.sha256(data).hexdigest(), len(data)) == (value["oid"], value["size"])
                    files[value["path"]] = data
                case "deletedFile":
                    del files[value["path"]]
        identity = repository.commit(summary, files)
        url = f"{self.state.address}/{name}/commit/{identity}"
        self._send(200, {"commitUrl": url, "commitOid": identity, "hookOutput": ""})

    def _file(self, kind: str, parts: list[str]) -> None:
        repository = self._repository(kind, "/".join(parts[:2]))
        path = "/".join(parts[4:])
        if parts[2:3] != ["resolve"] or path not in repository.files:
            raise _RefusalError(404, "EntryNotFound")
        data = repository.files[path]
        headers = {"X-Repo-Commit": repository.head, "ETag": f'"{_entry(path, data)["oid"]}"'}
        self._send(200, data, headers)

    def _send(self, status: int, content: Any = None, headers: Mapping[str, str] | None = None) -> None:
        data = content if isinstance(content, bytes) else json.dumps({} if content is None else content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Type", "application/octet-stream" if data is content else "application/json")
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


class _RefusalError(Exception):
    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status, self.code = status, code


def _entry(path: str, data: bytes) -> dict[str, Any]:
    """A file in the listing of a repository, with the id that git or Git LFS gives to its content."""
    if not path.endswith(LFS_ENDINGS):
        oid = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        return {"type": "file", "path": path, "size": len(data), "oid": oid}
    oid = hashlib.sha256(data).hexdigest()
    lfs = {"oid": oid, "size": len(data), "pointerSize": 130}
    return {"type": "file", "path": path, "size": len(data), "oid": oid, "lfs": lfs}
