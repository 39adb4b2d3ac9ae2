"""Checkpoints in a remote store: on a disk, in memory, and on a server that speaks S3."""

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest
from safetensors.numpy import load_file
from states import MARK, RUN, TINY, Node, filled

from atoll.comm.config.run import CheckpointConfig
from atoll.comm.errors import ResourceError
from atoll.node.checkpoint import guarded_web, saved_run, uploader
from atoll.node.checkpoint import remote_store as store_
from atoll.node.checkpoint.initial_state import InitialStateLoader
from atoll.node.checkpoint.remote_store import (
    ANCHOR,
    MANIFEST,
    MOMENTUM,
    CheckpointFacts,
    RemoteStore,
    StatePiece,
    folder_of,
    state_digest,
)
from atoll.node.checkpoint.uploader import Uploader

DEADLINE = 60.0  # seconds


@pytest.fixture(params=["file", "memory", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of an empty store."""
    match request.param:
        case "file":
            return f"file://{tmp_path}/store"
        case "memory":
            return f"memory://{tmp_path.name}"
        case _:
            environment = {
                "AWS_ENDPOINT_URL": request.getfixturevalue("s3"),
                "AWS_ACCESS_KEY_ID": "key",
                "AWS_SECRET_ACCESS_KEY": "secret",
                "AWS_DEFAULT_REGION": "us-east-1",
            }
            for name, value in environment.items():
                monkeypatch.setenv(name, value)
            fsspec.filesystem("s3").mkdir(bucket := tmp_path.name.replace("_", "-")[:60].strip("-"))
            return f"s3://{bucket}/runs"


def state(node: Node) -> tuple[CheckpointFacts, Callable[[], Iterator[StatePiece]]]:
    """The newest state of a node's disk, to be written."""
    kept = saved_run.open_run(node.folder)
    assert kept is not None
    round_ = kept.rounds[0]
    facts = CheckpointFacts(RUN.name, kept.run_id, round_, 10 * round_, round_, kept.chunks, kept.layout)
    return facts, lambda: (StatePiece(*found[1:]) for found in saved_run.replay_state(kept, round_))


def test_a_checkpoint_is_the_state_and_loads_without_atoll(url: str, tmp_path: Path) -> None:
    node, sent = filled(tmp_path / "node", 5), list[int]()
    facts, pieces = state(node)
    store = RemoteStore(folder_of(url, "my run/1", MARK.hex()))
    assert store.url == f"{url}/my-run-1-72727272"
    assert store.rounds() == [] and store.manifest() is None
    manifest = store.write(facts, pieces(), sent.append)
    assert store.rounds() == [5] and store.manifest("round-000000000005") == manifest
    assert sum(sent) == sum(file.size for file in manifest.files.values())
    vectors = node.outer.vectors
    assert manifest.state_digest == state_digest(vectors.anchor, vectors.momentum, node.chunks)
    for name, vector in ((ANCHOR, vectors.anchor), (MOMENTUM, vectors.momentum)):
        store.fs.get_file(f"{store.path}/round-000000000005/{name}", str(tmp_path / name))
        tensors = load_file(tmp_path / name)
        assert b"".join(tensor.tobytes() for _, tensor in sorted(tensors.items())) == vector.tobytes()
    read = np.zeros((2, facts.chunks.numel), np.float32)
    begun = InitialStateLoader(facts.layout, TINY, read[0], read[1]).load(store.url, with_momentum=True)
    assert begun.momentum and "round 5" in begun.what, "a run can begin with it"
    assert read.tobytes() == vectors.anchor.tobytes() + vectors.momentum.tobytes()


def test_the_newest_checkpoints_stay_and_what_was_not_finished_goes(url: str, tmp_path: Path) -> None:
    facts, pieces = state(filled(tmp_path / "node", 1))
    store = RemoteStore(folder_of(url, "run", MARK.hex()))

    def breaks() -> Iterator[StatePiece]:
        yield next(pieces())
        raise ConnectionError("the line is dead")

    for round_ in (1, 2, 3, 4, 5):
        of = CheckpointFacts(facts.run, facts.run_id, round_, 0, round_, facts.chunks, facts.layout)
        if round_ in (2, 5):
            with pytest.raises(ConnectionError):
                store.write(of, breaks(), lambda _: None)
        else:
            store.write(of, pieces(), lambda _: None)
    assert store.rounds() == [4, 3, 1]
    store.retain(2)
    assert store.rounds() == [4, 3]
    store.fs.invalidate_cache()
    left = {path.removeprefix(store.path + "/") for path in store.fs.find(store.path)}
    whole = {f"round-{k:012d}/{name}" for k in (3, 4) for name in (MANIFEST, ANCHOR, MOMENTUM)}
    assert whole <= left and {path.split("/")[0] for path in left - whole} <= {"round-000000000005"}


def test_a_file_of_any_size_is_sent_in_no_more_blocks_than_a_store_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As 100 GB would be: S3 takes 10,000 blocks."""
    monkeypatch.setattr(store_, "BLOCK_SIZE", 64)
    monkeypatch.setattr(store_, "MAX_BLOCKS", 5)
    facts, pieces = state(filled(tmp_path / "node", 1))
    store, blocks = RemoteStore(f"memory://{tmp_path.name}"), list[int]()
    opened = store.fs.open

    def opening(path: str, mode: str, **options: Any) -> Any:
        if not path.endswith(MANIFEST):
            blocks.append(options["block_size"])
        return opened(path, mode, **options)

    monkeypatch.setattr(store.fs, "open", opening)
    files = store.write(facts, pieces(), lambda _: None).files.values()
    assert all(64 * 5 < file.size <= 5 * block < 2 * file.size for file, block in zip(files, blocks, strict=True))


def test_a_checkpoint_whose_manifest_was_cut_short_is_none_and_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts, pieces = state(filled(tmp_path / "node", 2))
    store = RemoteStore(f"memory://{tmp_path.name}")
    pipe = store.fs.pipe_file
    store.write(replace(facts, round=1), pieces(), lambda _: None)

    def breaks(path: str, data: bytes) -> None:
        pipe(path, data[: parts.pop()])
        raise ConnectionError("the line is dead")

    parts = [0, 40]
    while parts:
        with monkeypatch.context() as patch, pytest.raises(ConnectionError):
            patch.setattr(store.fs, "pipe_file", breaks)
            store.write(facts, pieces(), lambda _: None)
        assert store.rounds() == [1]
    store.write(facts, pieces(), lambda _: None)
    assert store.rounds() == [2, 1]


def test_on_a_disk_a_checkpoint_is_there_only_when_all_of_it_would_outlive_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts, pieces = state(filled(tmp_path / "node", 1))
    store, synced, sync = RemoteStore(f"file://{tmp_path}/store"), list[str](), os.fsync

    def syncing(file: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{file}")).name)
        if fails_at and len(synced) == fails_at[0]:
            raise OSError(5, "Input/output error")
        sync(file)

    monkeypatch.setattr(os, "fsync", syncing)
    fails_at = [1, 2, 3]
    while fails_at:
        with pytest.raises(OSError, match="Input/output"):
            store.write(facts, pieces(), lambda _: None)
        assert store.rounds() == []
        synced.clear()
        fails_at.pop(0)
    store.write(facts, pieces(), lambda _: None)
    assert store.rounds() == [1]
    unfinished = synced.pop(2)
    assert unfinished.startswith(f"{MANIFEST}.") and unfinished.endswith(".new")
    assert synced == [ANCHOR, MOMENTUM, "round-000000000001", "store"]


async def free(_: int) -> None:
    """The link has room."""


async def settled(sending: Uploader, node: Node, rounds: range) -> None:
    """Commit rounds one by one; after each the upload that may follow is over, or failed."""
    for round_ in rounds:
        await node.commit(round_)
        sending.snapshot_taken()
        await sending.idle()


def test_who_is_first_sends_a_checkpoint_when_it_is_due_and_the_next_where_the_first_fails(
    url: str, tmp_path: Path
) -> None:
    config = CheckpointConfig(remote=url, remote_every=2, remote_keep=2)
    node = filled(tmp_path / "node", 0)
    store = RemoteStore(folder_of(url, RUN.name, MARK.hex()))

    async def story() -> None:
        sending = Uploader(node.folder, config, free)
        task = asyncio.create_task(sending.run())
        await settled(sending, node, range(1, 4))
        assert store.rounds() == []  # it is not its turn
        sending.turn = 3
        await settled(sending, node, range(4, 6))
        assert store.rounds() == []  # those before it may yet
        await settled(sending, node, range(6, 7))
        assert store.rounds() == [6]  # they did not
        sending.turn = 1
        await settled(sending, node, range(7, 13))
        assert store.rounds() == [12, 10]
        assert sending.newest == 12 and not sending.trouble
        task.cancel()

    asyncio.run(story())
    assert not (node.folder / uploader.LINKS_FOLDER).exists()


def test_a_store_that_fails_is_a_sentence_and_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploader, "RETRY_INTERVAL", 0.01)
    node, blocked = filled(tmp_path / "node", 1), tmp_path / "store"
    blocked.write_text("a file where the folder should be")
    config = CheckpointConfig(remote=f"file://{blocked}", remote_every=1)

    async def story() -> None:
        sending = Uploader(node.folder, config, free, turn=1)
        task = asyncio.create_task(sending.run())
        sending.snapshot_taken()
        await sending.idle()
        assert "NotADirectoryError" in sending.trouble or "FileExistsError" in sending.trouble
        blocked.unlink()
        async with asyncio.timeout(DEADLINE):
            while sending.newest < 1 or sending.trouble:
                await asyncio.sleep(0.01)
        task.cancel()

    with caplog.at_level(logging.WARNING, "atoll.node"):
        asyncio.run(story())
    [said] = [r.message for r in caplog.records]
    assert said.startswith(f"this node sends no checkpoint to file://{blocked}: ") and said.endswith(
        "; it is tried again"
    )


def test_a_state_that_is_not_the_runs_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a node whose memory was wrong when it took its snapshot."""
    monkeypatch.setattr(uploader, "RETRY_INTERVAL", 0.01)
    node = filled(tmp_path / "node", 2)
    config = CheckpointConfig(remote=f"file://{tmp_path}/store", remote_every=1)
    store = RemoteStore(folder_of(config.remote, RUN.name, MARK.hex()))

    async def story() -> None:
        sending = Uploader(node.folder, config, free, turn=1)
        task = asyncio.create_task(sending.run())
        sending.record_digest(2, bytes(16))
        sending.snapshot_taken()
        await sending.idle()
        assert "the state of round 2 on its disk is not the run's" in sending.trouble and store.rounds() == []
        sending.record_digest(2, node.outer.finalize())
        async with asyncio.timeout(DEADLINE):
            while sending.newest < 2 or sending.trouble:
                await asyncio.sleep(0.01)
        assert store.rounds() == [2]
        task.cancel()

    asyncio.run(story())


def test_a_store_that_does_not_answer_is_a_sentence_and_is_tried_again_when_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploader, "STORE_TIMEOUT", 0.2)
    monkeypatch.setattr(uploader, "RETRY_INTERVAL", 0.01)
    node, config = (
        filled(tmp_path / "node", 1),
        CheckpointConfig(remote=f"file://{tmp_path}/store", remote_every=1),
    )
    mute = (
        Path(folder_of(config.remote, RUN.name, MARK.hex()).removeprefix("file://"))
        / "round-000000000001"
        / ANCHOR
    )
    mute.parent.mkdir(parents=True)
    os.mkfifo(mute)  # who opens it to write waits for a reader

    async def story() -> None:
        sending = Uploader(node.folder, config, free, turn=1)
        task = asyncio.create_task(sending.run())
        sending.snapshot_taken()
        await sending.idle()
        assert sending.trouble.startswith("the store has not answered for 0.2 s") and sending.newest < 1
        reader = os.open(mute, os.O_RDONLY | os.O_NONBLOCK)
        mute.unlink()
        async with asyncio.timeout(DEADLINE):
            while sending.newest < 1 or sending.trouble:
                await asyncio.sleep(0.01)
        os.close(reader)
        task.cancel()

    asyncio.run(story())


def test_a_checkpoint_waits_for_the_link_and_outlives_the_files_that_the_node_removes(tmp_path: Path) -> None:
    node = filled(tmp_path / "node", 1)
    config = CheckpointConfig(remote=f"file://{tmp_path}/store", remote_every=1)
    asked, may = asyncio.Event(), asyncio.Event()

    async def reduce_first(_: int) -> None:
        asked.set()
        await may.wait()

    async def story() -> None:
        sending = Uploader(node.folder, config, reduce_first, turn=1)
        task = asyncio.create_task(sending.run())
        sending.snapshot_taken()
        await asyncio.wait_for(asked.wait(), DEADLINE)
        before = {path.name for path in node.folder.glob("s*-*")}
        await node.commit(*range(2, 12))
        assert not before & {path.name for path in node.folder.glob("s*-*")}
        may.set()
        await sending.idle()
        assert sending.newest == 1
        task.cancel()

    asyncio.run(story())
    assert RemoteStore(folder_of(config.remote, RUN.name, MARK.hex())).rounds() == [1]


def test_a_run_uses_this_machines_files_only_if_its_owner_lets_it(tmp_path: Path) -> None:
    for url in (str(tmp_path), f"file://{tmp_path}", f"local://{tmp_path}"):
        with pytest.raises(ResourceError, match="only where the node has files=true"):
            RemoteStore(url, files=False)
    for url in (f"simplecache::file://{tmp_path}", f"dir::{tmp_path}", f"asyncwrapper::{tmp_path}", "zip::/a.zip"):
        with pytest.raises(ResourceError, match="only where the node has files=true"):
            RemoteStore(url, files=False)
    for url in ("sftp://nas/a", "ftp://192.168.1.1/a", "git:///home/me/a", "memory://a", "smb://nas/a"):
        with pytest.raises(ResourceError, match="only where the node has files=true"):
            RemoteStore(url, files=False)
    assert RemoteStore("memory://a", files=True).rounds() == []


class Asked(BaseHTTPRequestHandler):
    """Notes what it is asked, and sends everybody on to another address of this machine."""

    paths: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.paths.append(self.path)
        if self.path.startswith("/on"):
            self.send_response(302)
            port = self.connection.getsockname()[1]
            self.send_header("Location", f"http://127.0.0.2:{port}/secret")
        else:
            self.send_response(200)
            self.send_header("Content-Length", "2")
        self.end_headers()
        if not self.path.startswith("/on"):
            self.wfile.write(b"ok")

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_a_runs_store_leads_no_node_into_its_own_network(monkeypatch: pytest.MonkeyPatch) -> None:
    server = ThreadingHTTPServer(("0.0.0.0", 0), Asked)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    port = server.server_address[1]
    try:
        for host in (f"127.0.0.1:{port}", f"localhost:{port}"):
            store = RemoteStore(f"http://{host}/folder", files=False, private=False)
            with pytest.raises(OSError, match=r"private network|Cannot connect"):
                store.fs.cat_file(f"{store.path}/on")
        assert Asked.paths == []
        lan = RemoteStore(f"http://127.0.0.1:{port}/folder", files=False, private=True)
        assert lan.fs.cat_file(f"{lan.path}/a") == b"ok" and Asked.paths.pop() == "/folder/a"
        # A redirect is followed only to where the URL could have led itself: here 127.0.0.1 is taken for public.
        monkeypatch.setattr(guarded_web, "may_dial", lambda ip, private: ip == "127.0.0.1")
        public = RemoteStore(f"http://127.0.0.1:{port}/on", files=False, private=False)
        with pytest.raises(OSError, match="private network"):
            public.fs.cat_file(f"{public.path}/a")
        assert Asked.paths == ["/on/a"]
    finally:
        server.shutdown()
        server.server_close()
        Asked.paths.clear()


def test_a_store_that_this_machine_has_no_client_for_is_a_sentence() -> None:
    with pytest.raises(ResourceError, match="nowhere://a/b cannot be used: Protocol not known: nowhere"):
        RemoteStore("nowhere://a/b")
