"""A Hugging Face Hub as small as reading a repository's files needs: a folder over HTTP on a free port."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from urllib.parse import unquote, urlsplit

COMMIT = "b" * 40


@contextmanager
def hub_of(folder: Path, repository: str = "org/name", second_half: Event | None = None) -> Iterator[str]:
    """The endpoint of a hub whose only repository has the files of the folder. The second halves of files come
    once `second_half` is set; None: at once."""
    facts = {"folder": folder, "repository": repository, "second_half": second_half}
    handler = type("Handler", (_Handler,), facts)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    folder: Path
    repository: str
    second_half: Event | None
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if path.startswith(f"/api/models/{self.repository}/tree/"):
            files = [
                {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": "a" * 40}
                for file in self.folder.iterdir()
            ]
            self._answer(json.dumps(files).encode())
        elif path.startswith(f"/api/models/{self.repository}"):
            self._answer(json.dumps({"id": self.repository, "sha": COMMIT, "siblings": []}).encode())
        elif path.startswith(f"/{self.repository}/resolve/") and (file := self.folder / Path(path).name).is_file():
            self._send_file(file)
        else:
            known = path.startswith(f"/{self.repository}/")
            code = "EntryNotFound" if known else "RepoNotFound"
            self._answer(b"{}", 404, {"X-Error-Code": code})

    def _send_file(self, file: Path) -> None:
        data = file.read_bytes()
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{file.name}"'}
        wanted = self.headers.get("Range")
        if not wanted or self.command == "HEAD":
            self._answer(data, 200, headers)
            return
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        part = data[int(first) : int(last) + 1 if last else None]
        headers["Content-Range"] = f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}"
        self._answer(part, 206, headers)

    def _answer(self, body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {"Content-Type": "application/json"}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            half = len(body) // 2
            self.wfile.write(body[:half])
            if self.second_half is not None and headers is not None:  # a file's
                self.second_half.wait(60)
            self.wfile.write(body[half:])
