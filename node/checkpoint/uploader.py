"""Sends this node's checkpoints to the run's remote store, from what it has on its disk.

    a snapshot is taken --> is a checkpoint due? --> the snapshot's and the log's files are held --> the store

All nodes have the same state, and one is enough to send it: the coordinator numbers a few (`View.upload`), and
each sends only when the store's newest checkpoint is so old that all before it must have failed. Pieces pass
through the cap that what is not the reduce's gets of the link. It works in a thread of its own; whatever fails
there is a sentence, is tried again later, and holds nothing up.
"""

import asyncio
import logging
import math
import os
import shutil
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from atoll.comm.config.run import CheckpointConfig
from atoll.comm.digest import root
from atoll.comm.errors import AtollError
from atoll.node.checkpoint import saved_run, snapshots
from atoll.node.checkpoint.remote_store import CheckpointFacts, RemoteStore, StatePiece, folder_of
from atoll.node.checkpoint.saved_run import SavedRun, StateMissing
from atoll.node.checkpoint.sealed_log import SealedLog

log = logging.getLogger("atoll.node")
LINKS_FOLDER = "upload"  # folder, in the run's
RETRY_INTERVAL, RETRY_INTERVAL_LIMIT = 30.0, 1800.0  # seconds until the next try: at first, and at most
REMEMBERED_DIGESTS = 1000  # rounds
STORE_TIMEOUT = 300.0  # seconds without a word of the store, or a piece taken by it, after which a try is given up


class _Closing(Exception):
    """The node stops, or has given this try up."""


class StateDiffers(AtollError):
    """The state on the disk is not the run's: its digest differs."""


class StoreSilent(AtollError):
    """The store does not answer."""


@dataclass
class Uploader:
    """Sends checkpoints to the run's remote store while `run` is awaited; `snapshot_taken` tells it of a new
    snapshot."""

    folder: Path  # of the run's snapshots and log
    checkpoint: CheckpointConfig
    allow: Callable[[int], Awaitable[None]]  # returns when so many bytes may be sent
    files: bool = True  # the store may be among this machine's own
    private: bool = True  # or at a server in a private network
    turn: int = 0  # as the coordinator says; 0: others send
    trouble: str = ""  # why the last try failed
    newest: int = -1  # round of the newest checkpoint that this node has sent

    def __post_init__(self) -> None:
        self._new, self._idle = asyncio.Event(), asyncio.Event()
        self._closing = threading.Event()
        self._digests: dict[int, bytes] = {}  # digests of the run's newest states, by round
        self._last_answer = math.inf  # seconds; when the store answered; inf: nothing is asked
        shutil.rmtree(self.folder / LINKS_FOLDER, ignore_errors=True)  # of a daemon that was killed

    def snapshot_taken(self) -> None:
        """Take note of a new snapshot: a checkpoint is sent, if one is due."""
        self._new.set()
        self._idle.clear()

    def record_digest(self, round_: int, digest: bytes) -> None:
        """Note the digest of the run's state after `round_`: a checkpoint of that round must have it."""
        self._digests[round_] = digest
        if len(self._digests) > REMEMBERED_DIGESTS:
            del self._digests[min(self._digests)]

    async def run(self) -> None:
        """Send a checkpoint whenever one is due, until cancelled."""
        pause = RETRY_INTERVAL
        try:
            while True:
                await self._new.wait()
                self._new.clear()
                if not self.turn or self._succeeded(await self._in_thread()):
                    pause = RETRY_INTERVAL
                else:
                    asyncio.get_running_loop().call_later(pause, self.snapshot_taken)
                    pause = min(2 * pause, RETRY_INTERVAL_LIMIT)
                if not self._new.is_set():
                    self._idle.set()
        finally:
            self._closing.set()

    async def idle(self) -> None:
        """Wait until the newest snapshot is sent, need not be, or failed."""
        await self._idle.wait()

    def _succeeded(self, error: Exception | None) -> bool:
        """Whether a try went well; if not, the reason is logged once for as long as it lasts."""
        if error is None:
            self.trouble = ""
        else:
            why = (
                str(error) if isinstance(error, AtollError | StateMissing) else f"{type(error).__name__}: {error}"
            )
            if not self.trouble:
                lacks = "could not stand in to send a" if self.turn > 1 else "sends no"
                log.warning(f"this node {lacks} checkpoint to {self.checkpoint.remote}: {why}; it is tried again")
            self.trouble = why
        return error is None

    async def _in_thread(self) -> Exception | None:
        """In one that ends with the process, if the store does not answer. Told that, a try is over only when the
        store answers or fails after all, so that there is never more than one."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Exception | None] = loop.create_future()
        given_up = threading.Event()

        def tell(error: Exception | None) -> None:
            if not done.done():
                done.set_result(error)

        def allow(size: int) -> None:
            self._last_answer = math.inf
            if given_up.is_set() or self._closing.is_set():
                raise _Closing
            asyncio.run_coroutine_threadsafe(_awaited(self.allow(size)), loop).result()
            self._last_answer = time.monotonic()

        def work() -> None:
            error: Exception | None = None
            try:
                self._send_if_due(allow)
            except _Closing:
                error = silent
            except Exception as failed:  # each kind of store raises its own
                error = failed
            if not self._closing.is_set():
                loop.call_soon_threadsafe(tell, error)

        self._last_answer = time.monotonic()
        silent = StoreSilent(
            f"the store has not answered for {STORE_TIMEOUT:g} s: is it reachable from here, and well?"
        )
        threading.Thread(target=work, name="upload", daemon=True).start()
        while not done.done():
            left = self._last_answer + STORE_TIMEOUT - time.monotonic()
            if left <= 0 and not given_up.is_set():
                given_up.set()
                self._succeeded(silent)
                self._idle.set()
            await asyncio.wait([done], timeout=None if given_up.is_set() else min(max(left, 0.0), STORE_TIMEOUT))
        return done.result()

    def _send_if_due(self, allow: Callable[[int], None]) -> None:
        """In the upload thread."""
        saved = saved_run.open_run(self.folder)
        if saved is None or not saved.rounds:
            return
        store = RemoteStore(
            folder_of(self.checkpoint.remote, saved.manifest.run.name, saved.run_id), self.files, self.private
        )
        there = max(store.rounds(), default=0)
        if saved.rounds[0] - there < self.turn * self.checkpoint.remote_every * saved.chunks.fragment_count:
            return
        with link_files(self.folder, saved) as linked:
            round_ = linked.rounds[0]
            newest = next(s for s in linked.snapshots if s.first <= round_)
            facts = CheckpointFacts(
                linked.manifest.run.name,
                linked.run_id,
                round_,
                newest.tokens,
                newest.first,
                linked.chunks,
                linked.layout,
            )
            sent = store.write(facts, self._pieces(linked, round_), allow)
        self.newest = round_
        mega = sum(file.size for file in sent.files.values()) / 1e6
        log.info(f"sent the checkpoint of round {round_}, {mega:,.1f} MB, to {store.url}")
        store.retain(self.checkpoint.remote_keep)

    def _pieces(self, linked: SavedRun, round_: int) -> Iterator[StatePiece]:
        """The chunks of the state; raises `StateDiffers` behind the last if it was found not to be the run's
        meanwhile."""
        digests = list[bytes]()
        for _, anchor, momentum, chunk_digest in saved_run.replay_state(linked, round_):
            digests.append(chunk_digest)
            yield StatePiece(anchor, momentum, chunk_digest)
        if root(digests) != self._digests.get(round_, root(digests)):
            raise StateDiffers(f"the state of round {round_} on its disk is not the run's")


@contextmanager
def link_files(folder: Path, saved: SavedRun) -> Iterator[SavedRun]:
    """Link the saved run's files into a folder of their own, so that the daemon cannot remove them meanwhile, and
    yield the run that the links are. Raises `StateMissing`, `OSError`."""
    links = folder / LINKS_FOLDER
    shutil.rmtree(links, ignore_errors=True)
    links.mkdir()
    try:
        for path in (*saved.files, *folder.glob("sealed-*[0-9]")):
            try:
                os.link(path, links / path.name)
            except FileNotFoundError:  # removed by now
                continue
        run = bytes.fromhex(saved.run_id)
        found = tuple(snapshots.find(links, run, saved.layout, saved.chunks))
        log_ = SealedLog(links, run, saved.chunks)
        linked = SavedRun(saved.manifest, saved.run_id, saved.layout, saved.chunks, found, log_)
        if not linked.rounds:
            raise StateMissing(0, "its snapshots were replaced meanwhile")
        yield linked
    finally:
        shutil.rmtree(links, ignore_errors=True)


async def _awaited(work: Awaitable[None]) -> None:
    await work
