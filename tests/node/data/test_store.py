"""The stores of data sets: exact ranges, no byte more, and a sentence for whatever goes wrong."""

import itertools
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pytest
from data_sets import WebServer, web_server
from hub_files import hub_of

from atoll.comm.errors import ConfigError, ResourceError
from atoll.node.data import network
from atoll.node.data import store as store_
from atoll.node.data.store import (
    CutShort,
    FsspecStore,
    Store,
    StoreError,
    StoreRefused,
    check_store,
    open_store,
)

CONTENT = bytes(range(256)) * 40


@pytest.fixture
def web(tmp_path: Path) -> Iterator[WebServer]:
    with web_server(tmp_path) as served:
        yield served


@pytest.fixture(params=["folder", "file", "http", "memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Each kind of store, with a file `a.tokens` of `CONTENT`."""
    (tmp_path / "a.tokens").write_bytes(CONTENT)
    match request.param:
        case "folder":
            return open_store(str(tmp_path), files=True)
        case "file":
            return open_store(f"file://{tmp_path}", files=True)
        case "http":
            web: WebServer = request.getfixturevalue("web")
            return open_store(f"{web.url}/", files=False)
        case "memory":
            with fsspec.open(f"memory://{tmp_path.name}/a.tokens", "wb") as file:
                file.write(CONTENT)
            return FsspecStore(f"memory://{tmp_path.name}")
        case _:
            environment = {"AWS_ENDPOINT_URL": request.getfixturevalue("s3"), "AWS_ACCESS_KEY_ID": "key"}
            environment |= {"AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
            for name, value in environment.items():
                monkeypatch.setenv(name, value)
            fsspec.filesystem("s3").mkdir(bucket := tmp_path.name.replace("_", "-")[:60].strip("-"))
            url = f"s3://{bucket}/corpus"
    with fsspec.open(f"{url}/a.tokens", "wb") as file:
        file.write(CONTENT)
    return open_store(url, files=False)


def test_a_range_is_read_and_nothing_else(store: Store) -> None:
    for start, size in ((0, 1), (0, len(CONTENT)), (1000, 77), (len(CONTENT) - 5, 5)):
        assert store.read("a.tokens", start, size) == CONTENT[start : start + size]
    assert store.read_whole("a.tokens", len(CONTENT)) == CONTENT


def test_a_file_that_is_too_short_missing_or_too_large_is_named(store: Store) -> None:
    for start in (len(CONTENT) - 3, len(CONTENT), len(CONTENT) + 100):
        with pytest.raises(CutShort, match="a.tokens ends"):
            store.read("a.tokens", start, 10)
    with pytest.raises(StoreRefused, match="b.tokens"):
        store.read("b.tokens", 0, 10)
    with pytest.raises(StoreRefused, match="has more than 100 bytes"):
        store.read_whole("a.tokens", 100)


def test_of_a_server_no_byte_more_is_asked_for(tmp_path: Path, web: WebServer) -> None:
    (tmp_path / "a.tokens").write_bytes(CONTENT)
    store = open_store(web.url, files=False)
    store.read("a.tokens", 500, 300)
    assert web.total == 300 and web.requests == [("a.tokens", "bytes=500-799")]


def broken(change: Callable[[WebServer], None], sentence: str, kind: type[StoreError] = StoreError) -> object:
    return pytest.param(change, kind, sentence, id=sentence)


@pytest.mark.parametrize(
    ("change", "kind", "sentence"),
    [
        broken(lambda web: setattr(web, "status", 403), "the server says 403 Forbidden", StoreRefused),
        broken(lambda web: setattr(web, "status", 401), "the server says 401", StoreRefused),
        broken(lambda web: setattr(web, "status", 503), "the server says 503 Service Unavailable"),
        broken(lambda web: setattr(web, "serves_ranges", False), "does not serve ranges of files", StoreRefused),
        broken(lambda web: setattr(web, "cut_answers", 1), "the connection"),
    ],
)
def test_what_a_server_does_wrong_is_said(
    change: Callable[[WebServer], None], kind: type[StoreError], sentence: str, tmp_path: Path, web: WebServer
) -> None:
    (tmp_path / "a.tokens").write_bytes(CONTENT)
    change(web)
    with pytest.raises(kind, match=sentence):
        open_store(web.url, files=False).read("a.tokens", 500, 300)


def test_a_server_that_is_silent_or_gone_is_said(
    tmp_path: Path, web: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.tokens").write_bytes(CONTENT)
    monkeypatch.setattr(store_, "SOCKET_SECONDS", 0.2)
    web.hold = threading.Event()
    with pytest.raises(StoreError, match="timed out"):
        open_store(web.url, files=False).read("a.tokens", 0, 10)
    web.hold.set()
    with pytest.raises(StoreError, match=r"127\.0\.0\.1:1: .*refused"):
        open_store("http://127.0.0.1:1/corpus", files=False).read("a.tokens", 0, 10)


@contextmanager
def answering(*parts: bytes, endless: bytes = b"", sent: list[int] | None = None) -> Iterator[str]:
    """The URL of a server that answers everything with these bytes, and then with `endless` again and again until
    the client goes; `sent` gets the number of those."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        stop = threading.Event()

        def answer(client: socket.socket) -> None:
            count = 0
            with client, suppress(OSError):
                client.recv(65536)
                client.sendall(b"".join(parts))
                while endless and not stop.is_set() and count < 1 << 14:
                    client.sendall(endless)
                    count += 1
            if sent is not None:
                sent.append(count * len(endless))

        def serve() -> None:
            with suppress(OSError):
                while True:
                    answer(listening.accept()[0])

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/corpus"
        stop.set()
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()


RANGE = b"HTTP/1.1 206 Partial\r\nContent-Range: bytes 0-99999/100000\r\n"


@pytest.mark.parametrize(
    ("begin", "endless", "sentence"),
    [
        (RANGE + b"Transfer-Encoding: chunked\r\n\r\n-5\r\n", b"x" * 65536, "bytes too late"),
        (b"HTTP/1.1 302 Found\r\nLocation: file:///etc/passwd\r\n\r\n", b"x" * 65536, "not allowed"),
        (b"HTTP/1.1 302 Found\r\nLocation: /other\r\n\r\n", b"x" * 65536, "infinite loop"),
    ],
    ids=["a chunk of less than nothing", "a redirect to a file", "a redirect"],
)
def test_of_an_answer_without_an_end_little_is_read(begin: bytes, endless: bytes, sentence: str) -> None:
    sent = list[int]()
    with answering(begin, endless=endless, sent=sent) as url:
        with pytest.raises(StoreError, match=sentence):
            open_store(url, files=False).read("a.tokens", 0, 100_000)
    assert max(sent) < 64 << 20


@pytest.mark.parametrize(
    ("begin", "endless"),
    [
        (b"HTTP/1.1 200 OK\r\nX: ", b"y"),
        (RANGE + b"Content-Length: 100000\r\n\r\n", b"z"),
        (RANGE + b"Transfer-Encoding: chunked\r\n\r\n", b"0"),
        (RANGE + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"x: y\r\n"),
    ],
    ids=["in the header", "in the body", "in a chunk's length", "behind the last chunk"],
)
@pytest.mark.parametrize("files", [False, True])
def test_a_server_that_drips_is_left_at_the_deadline(
    begin: bytes, endless: bytes, files: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = itertools.count(0.0, 50.0)  # each look at the clock is that much later
    monkeypatch.setattr(network, "time", SimpleNamespace(monotonic=lambda: next(now)))
    with answering(begin, endless=endless) as url:
        with pytest.raises(StoreError, match="took more than 120 s"):
            open_store(url, files).read("a.tokens", 0, 100_000)


@pytest.mark.parametrize("length", [b"\xb2", b"1" * 5000, b"-1", b"x"])
def test_a_length_that_is_none_is_not_believed(length: bytes) -> None:
    with answering(b"HTTP/1.1 200 OK\r\nContent-Length: " + length + b"\r\n\r\n" + CONTENT) as url:
        assert open_store(url, files=False).read_whole("a.tokens", len(CONTENT)) == CONTENT
    begin = b"HTTP/1.1 206 Partial\r\nContent-Range: bytes 0-" + length + b"/10\r\n\r\n"
    with answering(begin) as url, pytest.raises(StoreError, match="another range"):
        open_store(url, files=False).read("a.tokens", 0, 10)


def test_this_machines_files_are_its_owners_to_give(tmp_path: Path) -> None:
    for url in (str(tmp_path), f"file://{tmp_path}"):
        with pytest.raises(ResourceError, match="only where the node has files=true"):
            open_store(url, files=False)


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("ftp://host/corpus", "reads no data set at ftp://"),
        ("memory://corpus", "reads no data set at memory://"),
        ("sftp://host/corpus", "reads no data set at sftp://"),
        ("https://host/corpus#part", "has a '#' in it"),
        ("https://me@host/corpus", "has a '@' in it"),
        ("https://host\\@other/corpus", "in it, which may hide where it leads"),
        ("s3://me@bucket/corpus", "has a '@' in it"),
        ("http://[host/corpus", "is no URL"),
    ],
)
def test_what_may_lead_elsewhere_is_not_asked(url: str, sentence: str) -> None:
    with pytest.raises(ResourceError, match=sentence):
        check_store(url, files=False)


def test_a_server_in_the_nodes_own_network_is_asked_only_by_leave(
    tmp_path: Path, web: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.tokens").write_bytes(CONTENT)
    with pytest.raises(StoreRefused, match=r"own network \(127.0.0.1 is at 127.0.0.1\), .* has files=true"):
        open_store(web.url, files=False, lan=False).read("a.tokens", 0, 10)
    assert not web.requests
    assert open_store(web.url, files=True, lan=False).read("a.tokens", 0, 10) == CONTENT[:10]
    assert open_store(web.url, files=False, lan=True).read("a.tokens", 0, 10) == CONTENT[:10]
    for host in ("169.254.169.254", "[fd00:ec2:0:0:0:0:0:254]", "[64:ff9b:0:0:0:0:a9fe:a9fe]"):
        with pytest.raises(StoreRefused, match=r"is at \S*(169.254|fd00|a9fe)"):
            open_store(f"http://{host}/latest", files=False, lan=True).read("a.tokens", 0, 10)


def test_a_redirect_into_the_nodes_own_network_is_not_followed(
    tmp_path: Path, web: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.tokens").write_bytes(CONTENT)
    web.redirect = web.url.replace("127.0.0.1", "127.0.0.2")
    monkeypatch.setattr(network, "may_dial", lambda ip, private: ip == "127.0.0.1")
    with pytest.raises(StoreRefused, match=r"own network \(127.0.0.2 is at 127.0.0.2\)"):
        open_store(web.url, files=False, lan=False).read("a.tokens", 0, 10)
    assert len(web.requests) == 1


def test_without_the_package_of_a_store_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.comm.extras.find_spec", lambda name: None)
    with pytest.raises(ResourceError, match=r'needs huggingface_hub, .*pip install ".\[hub\]"'):
        open_store("hf://datasets/org/name", files=False)
    with pytest.raises(ResourceError, match=r'pip install ".\[s3\]"'):
        open_store("s3://bucket/corpus", files=False)


def test_a_file_system_that_cannot_be_made_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_credentials(url: str, **options: object) -> None:
        raise RuntimeError("no credentials")

    monkeypatch.setattr("fsspec.core.url_to_fs", without_credentials)
    with pytest.raises(ConfigError, match="gs://bucket/corpus cannot be used: RuntimeError: no credentials; see"):
        open_store("gs://bucket/corpus", files=False)


FROM_HUB = """
from atoll.node.data.store import StoreError, open_store

store, content = open_store("hf://org/name", files=False), bytes(range(256)) * 40
assert store.read("a.tokens", 1000, 77) == content[1000:1077]
assert store.read_whole("a.tokens", len(content)) == content
for name, start in (("a.tokens", len(content) - 3), ("b.tokens", 0)):
    try:
        store.read(name, start, 10)
    except StoreError as error:
        print(type(error).__name__, error)
"""


def test_a_data_set_may_be_on_the_hub(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a.tokens").write_bytes(CONTENT)
    with hub_of(tmp_path / "set") as endpoint:
        settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
        command = [sys.executable, "-P", "-c", FROM_HUB]
        done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "CutShort hf://org/name/a.tokens ends at byte 10240, before 10247",
        "StoreRefused hf://org/name/b.tokens: org/name/b.tokens",
    ]
