"""A Hugging Face Hub as small as pushing a folder needs: repositories in memory, over HTTP on a free port.

Large files go by git-lfs' batch API, small ones in the commit, as the Hub has it for a client without xet.
"""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_writer"
LARGE = ".safetensors"


@dataclass
class Repository:
    """A repository's files at its head, and the titles of its commits."""

    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)


@dataclass
class Hub:
    """What the server has, and what it was asked for."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)  # large files by sha256, committed or not
    uploads: list[str] = field(default_factory=list)  # sha256 of each that was sent
    fail: list[int] = field(default_factory=list)  # status codes to answer uploads of large files with, in turn
    url: str = ""


@contextmanager
def serving() -> Iterator[Hub]:
    """A Hub while the context lasts."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._model("GET")

    def do_POST(self) -> None:
        path = urlsplit(self.path).path
        if path == "/api/repos/create":
            self._create()
        elif path == "/api/validate-yaml":
            self._body()
            self._answer(200, {"errors": [], "warnings": []})
        elif path.endswith(".git/info/lfs/objects/batch"):
            self._batch()
        else:
            self._model("POST")

    def do_PUT(self) -> None:
        data, name = self._body(), self.path.rsplit("/", 1)[1]
        if self.hub.fail:
            self._answer(self.hub.fail.pop(0), {"error": "not now"})
            return
        assert hashlib.sha256(data).hexdigest() == name
        self.hub.blobs[name] = data
        self.hub.uploads.append(name)
        self._answer(200, {})

    def _create(self) -> None:
        asked = json.loads(self._body())
        if self.headers.get("authorization") != f"Bearer {TOKEN}":
            self._answer(403, {"error": "this token may not write"})
            return
        name = f"{asked['organization']}/{asked['name']}"
        there = name in self.hub.repositories
        if not there:
            self.hub.repositories[name] = Repository(
                asked.get("visibility") == "private" or bool(asked.get("private"))
            )
        said = {"url": f"{self.hub.url}/{name}", "name": name, "id": name}
        self._answer(409 if there else 200, said | ({"error": "you have it already"} if there else {}))

    def _batch(self) -> None:
        wanted = json.loads(self._body())
        objects = [self._lfs(found["oid"], found["size"]) for found in wanted["objects"]]
        self._answer(200, {"transfer": "basic", "objects": objects})

    def _lfs(self, oid: str, size: int) -> dict[str, Any]:
        known: dict[str, Any] = {"oid": oid, "size": size}
        there = oid in self.hub.blobs
        return known if there else known | {"actions": {"upload": {"href": f"{self.hub.url}/blobs/{oid}"}}}

    def _model(self, method: str) -> None:
        parts = [unquote(part) for part in urlsplit(self.path).path.removeprefix("/api/models/").split("/")]
        body, repository = self._body(), self.hub.repositories.get("/".join(parts[:2]))
        if repository is None:
            self._answer(404, {"error": "there is no such repository"})
            return
        match method, parts[2:]:
            case "GET", [] | ["revision", _]:
                siblings = [{"rfilename": name} for name in repository.files]
                known = {"id": "/".join(parts[:2]), "private": repository.private, "sha": "0" * 40}
                tags = ["atoll"] if b"\n- atoll\n" in repository.files.get("README.md", b"") else []
                self._answer(200, known | {"siblings": siblings, "tags": tags})
            case "GET", ["tree", *_]:
                self._answer(200, [_entry(name, data) for name, data in repository.files.items()])
            case "POST", ["preupload", _]:
                files = [
                    {
                        "path": file["path"],
                        "uploadMode": "lfs" if file["path"].endswith(LARGE) else "regular",
                        "shouldIgnore": False,
                        "oid": _oid(file["path"], repository.files.get(file["path"])),
                    }
                    for file in json.loads(body)["files"]
                ]
                self._answer(200, {"files": files})
            case "POST", ["commit", _]:
                self._commit(repository, [json.loads(line) for line in body.splitlines()])
                said = {"commitUrl": f"{self.hub.url}/{parts[0]}/{parts[1]}/commit/{'1' * 40}", "success": True}
                self._answer(200, said | {"commitOid": "1" * 40})
            case _:
                self._answer(404, {"error": f"nothing answers {method} {self.path}"})

    def _commit(self, repository: Repository, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            value = line["value"]
            match line["key"]:
                case "header":
                    repository.commits.append(value["summary"])
                case "file":
                    repository.files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    repository.files[value["path"]] = self.hub.blobs[value["oid"]]
                case "deletedFile":
                    del repository.files[value["path"]]

    def _body(self) -> bytes:
        if self.headers.get("transfer-encoding") == "chunked":
            found = b""
            while size := int(self.rfile.readline(), 16):
                found += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return found
        return self.rfile.read(int(self.headers.get("content-length", 0)))

    def _answer(self, status: int, said: object) -> None:
        data = json.dumps(said).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


def _oid(name: str, data: bytes | None) -> str | None:
    """What the Hub knows a file at its head by: a large one by its sha256, a small one as git does."""
    if data is None:
        return None
    if name.endswith(LARGE):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _entry(name: str, data: bytes) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "file", "path": name, "size": len(data), "oid": _oid("", data)}
    if name.endswith(LARGE):
        found["lfs"] = {"oid": _oid(name, data), "size": len(data), "pointerSize": 100}
    return found
