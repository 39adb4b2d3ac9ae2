"""Small data sets in a folder, and a web server that has one: with ranges, faults, and a count of what it gave."""

import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from atoll.comm.digest import digest
from atoll.node.data.manifest import MANIFEST, BlockFormat, Manifest, Shard

END = 0  # of text


def document_tokens(count: int, vocabulary: int, seed: int, length: int = 50) -> NDArray[np.int64]:
    """`count` tokens of documents of `length` tokens each, the last of which is `END`."""
    tokens = np.random.default_rng(seed).integers(1, vocabulary, count)
    tokens[length - 1 :: length] = END
    return tokens


def write_data_set(
    folder: Path,
    train: int = 4000,
    validation: int = 500,
    block_tokens: int = 64,
    shard_blocks: int = 8,
    vocabulary: int = 256,
    seed: int = 0,
    masked: bool = False,
) -> str:
    """Write a data set with so many tokens in its slices; returns the manifest's digest, hexadecimal. Where it is
    masked, every third token is not learned."""
    folder.mkdir(parents=True, exist_ok=True)
    layout, shards = BlockFormat(np.dtype("<u2"), block_tokens, masked), list[Shard]()
    for number, (name, count) in enumerate((("train", train), ("validation", validation))):
        tokens = document_tokens(count, vocabulary, 2 * seed + number)
        begins = np.concatenate([[True], tokens[:-1] == END])
        size = block_tokens * shard_blocks
        for first in range(0, count, size):
            part = slice(first, min(first + size, count))
            blocks = -(-(part.stop - first) // block_tokens)
            padding = blocks * block_tokens - (part.stop - first)
            words = np.concatenate([tokens[part], np.full(padding, END)]).reshape(blocks, -1)
            starts = np.concatenate([begins[part], np.zeros(padding, bool)]).reshape(blocks, -1)
            learned = (np.arange(blocks * block_tokens) % 3 != 0).reshape(blocks, -1)
            bodies = [layout.encode(*block) for block in zip(words, starts, learned, strict=True)]
            digests = b"".join(map(digest, bodies))
            file = f"{name}-{first // size:05d}"
            (folder / f"{file}.tokens").write_bytes(b"".join(bodies))
            (folder / f"{file}.digests").write_bytes(digests)
            shards.append(Shard(file, name, blocks, part.stop - first, digest(digests).hex()))
    manifest = Manifest(
        *(1, "made", "uint16", block_tokens, vocabulary, END, "ab" * 16, masked),
        documents=(train + validation) // 50,
        shards=tuple(shards),
    )
    data = manifest.encode()
    (folder / MANIFEST).write_bytes(data)
    return digest(data).hex()


@dataclass
class WebServer:
    """Files of a folder, over HTTP."""

    folder: Path
    url: str = ""
    given: Counter[str] = field(default_factory=Counter)  # bytes of bodies, by file
    requests: list[tuple[str, str]] = field(default_factory=list)  # file and range of each, in order
    status: int = 0  # answered to everything; 0: as it should be
    serves_ranges: bool = True
    cut_answers: int = 0  # so many answers end half-way
    redirect: str = ""  # URL that everything is answered with; empty: none
    hold: threading.Event | None = None  # waited for before each answer
    delays: dict[str, float] = field(default_factory=dict)  # seconds before each answer, by the client's address
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def total(self) -> int:
        """Bytes given of all files."""
        return sum(self.given.values())


@contextmanager
def web_server(folder: Path, host: str = "127.0.0.1") -> Iterator[WebServer]:
    """Serve the folder on a free port of this machine's address."""
    served = WebServer(folder)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.partition("?")[0].lstrip("/")
            span = self.headers.get("Range", "")
            with served.lock:
                served.requests.append((name, span))
            if served.hold is not None:
                served.hold.wait(30)
            time.sleep(served.delays.get(self.client_address[0], 0.0))
            path = served.folder / name
            if served.redirect:
                self.send_response(302)
                self.send_header("Location", f"{served.redirect}/{name}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            if served.status or not path.is_file():
                self.send_error(served.status or 404)
                return
            size, found = path.stat().st_size, re.fullmatch(r"bytes=(\d+)-(\d+)", span)
            first, last, ranged = 0, size - 1, bool(found and served.serves_ranges)
            if found and ranged:
                first, last = int(found[1]), min(int(found[2]), size - 1)
            if first >= size:
                self.send_error(416)
                return
            with path.open("rb") as file:
                file.seek(first)
                body = file.read(last + 1 - first)
            self.send_response(206 if ranged else 200)
            if ranged:
                self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with served.lock:
                cut, served.cut_answers = served.cut_answers > 0, max(0, served.cut_answers - 1)
                body = body[: len(body) // 2] if cut else body
                served.given[name] += len(body)
            self.wfile.write(body)

        def log_message(self, *words: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, *request: object) -> None:
            pass  # a client that went away

    server = Server((host, 0), Handler)
    served.url = f"http://{host}:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
