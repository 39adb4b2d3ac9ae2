"""Bring the outer state to the committed round with the peers' help.

Chunks come over several streams from several donors at once, each of which gets work as fast as it answers
(`errands`). A donor that fails, or whose bytes are not what the run's digests say, is left out. A chunk that lags
some rounds of its fragment is brought forward with their sealed bytes (about 1 byte a parameter and round) where
these are fewer than those of the whole chunk (8 bytes a parameter). A donor that has moved on to the next round
answers that it does not have the old one; whatever was fetched by then is kept and brought forward. Every chunk is
checked against the donors' digest list, and the list against the digest that the coordinator recorded.
"""

import asyncio
import logging
from asyncio import FIRST_COMPLETED
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import TypeVar

from atoll.comm.codecs.codec import Malformed
from atoll.comm.digest import DIGEST_SIZE, digest, root
from atoll.comm.errors import Unreachable
from atoll.comm.ids import NO_PIN, NodeId, Pin, Round
from atoll.comm.transport.data_plane import DataPlane
from atoll.comm.transport.fetch_client import PART, DonorLost, FetchClient, FetchItem, NotAvailable
from atoll.comm.transport.stream_policy import streams
from atoll.node.outer.state import OuterState
from atoll.node.recovery.chunk_assembly import ChunkAssembly
from atoll.node.recovery.chunk_scheduler import ChunkRequest, ChunkScheduler

T = TypeVar("T")
log = logging.getLogger("atoll.node")
DONORS = 8  # at the same time; the others stand by
LEAST = 2  # streams to a donor: while a chunk of one is checked, the other one's comes
DEADLINE = 300.0  # seconds for one chunk
LOOK = 0.1  # seconds after which a stream without work looks whether another donor is late
SILENT = 1.0  # seconds after which another donor is asked what the state is, too
MOST = 4096  # contributions in sealed bytes that hold them
TELL = 5.0  # seconds between two lines of the log
TAIL = 2  # missed rounds whose sealed bytes, 1 byte a parameter each, are kept for the log


Lines = dict[NodeId, list[FetchClient]]  # connections to each donor that are of use at once


class RoundMovedOn(Unreachable):
    """No donor holds the round any more, or none answers; a newer view tells what to fetch."""


class DonorsSilent(RoundMovedOn):
    """None of them answers: the same as long as the view names the same ones."""


@dataclass(frozen=True, slots=True)
class Donor:
    node: NodeId
    address: str
    pin: Pin = NO_PIN  # of its certificate
    name: str = ""


@dataclass(frozen=True, slots=True)
class Target:
    round: Round
    digest: bytes  # of the state after the round, from the coordinator
    donors: tuple[Donor, ...]


@dataclass(frozen=True, slots=True)
class SealedChunk:
    """A chunk's sealed bytes."""

    payload: bytes
    digest: bytes


@dataclass(slots=True)
class RecoveryProgress:
    """How far a recovery is; as text, for people."""

    of: int  # chunks of the state
    done: int = 0  # chunks that are here
    fetched: int = 0  # chunks, of these
    seconds: float = 0.0  # since it began
    donors: dict[NodeId, int] = field(default_factory=dict)  # bytes of chunks that each gave
    names: dict[NodeId, str] = field(default_factory=dict)  # of donors, for people
    sealed: dict[Round, tuple[SealedChunk, ...]] = field(
        default_factory=dict
    )  # of all missed rounds, if they were few

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return sum(self.donors.values()) / self.seconds if self.seconds else 0.0

    @property
    def seconds_left(self) -> float:
        return self.seconds * (self.of - self.done) / self.fetched if self.fetched else 0.0

    @property
    def givers(self) -> list[str]:
        """Who gave chunks."""
        return sorted(self.names.get(node) or node for node in self.donors)

    def __str__(self) -> str:
        so_far = f"{self.done} of {self.of} chunks"
        if not self.donors:
            return so_far
        names = ", ".join(self.givers)
        return f"{so_far}, {self.rate / 1e6:.1f} MB/s, {self.seconds_left:.0f} s left, from {names}"


async def recover(
    plane: DataPlane,
    outer: OuterState,
    target: Target,
    worker: Executor,
    on_progress: Callable[[RecoveryProgress], None],
) -> RecoveryProgress:
    """Make `outer` the state of `target.round`; returns what that took. Raises `RoundMovedOn`; `DonorsSilent`
    where that will not pass with the round.

    `worker` is the one thread that may touch `outer`'s arithmetic.
    """
    if not target.donors:
        raise RoundMovedOn(f"no member holds the state of round {target.round}")
    streams_ = plane.peers.fixed or LEAST
    lines = {d.node: [_line(plane, d) for _ in range(streams_)] for d in target.donors}
    async with AsyncExitStack() as opened:
        for k, donor in enumerate(target.donors):
            for line in lines[donor.node]:
                await opened.enter_async_context(line)
                if k < DONORS:
                    line.dial()
        wanted, donors = await _digest_list(lines, outer, target)
        return await _Recovery(plane, outer, target.round, wanted, donors, lines, worker, on_progress).run()


def _line(plane: DataPlane, donor: Donor) -> FetchClient:
    return FetchClient(plane, donor.node, donor.address, donor.pin)


async def _digest_list(lines: Lines, outer: OuterState, target: Target) -> tuple[list[bytes], list[Donor]]:
    """The chunks' digests as the run's digest proves them, and the donors that may have them."""
    waiting, failures = deque(target.donors), dict[Donor, Exception]()
    asked: dict[asyncio.Task[list[bytes]], Donor] = {}
    try:
        while waiting or asked:
            if waiting:
                donor = waiting.popleft()
                asked[asyncio.create_task(_digests_of(lines[donor.node][0], outer, target))] = donor
            done, _ = await asyncio.wait(asked, timeout=SILENT if waiting else None, return_when=FIRST_COMPLETED)
            for task in done:
                donor = asked.pop(task)
                try:
                    digests = task.result()
                except (DonorLost, NotAvailable) as error:
                    failures[donor] = error
                    continue
                for other, failure in failures.items():
                    log.warning(f"recovering without {other.node}: {failure}")
                return digests, [donor, *waiting, *asked.values()]
    finally:
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
    why = "; ".join(str(failure).partition(" (digests")[0] for failure in failures.values())
    if all(isinstance(failure, DonorLost) for failure in failures.values()):
        raise DonorsSilent(f"nobody gives it the state: {why}")
    raise RoundMovedOn(f"no donor has the state of round {target.round} any more: {why}")


async def _digests_of(donor: FetchClient, outer: OuterState, target: Target) -> list[bytes]:
    """What it says the chunks' digests are, if the run's digest proves that."""
    size = DIGEST_SIZE * outer.chunks.count
    packed = await donor.fetch(FetchItem.DIGESTS, target.round, 0, size)
    digests = [packed[k : k + DIGEST_SIZE] for k in range(0, size, DIGEST_SIZE)]
    if root(digests) != target.digest:
        raise DonorLost(donor.node, "its state is not the run's")
    return digests


class _Recovery:
    """One try, with the donors that there are."""

    def __init__(
        self,
        plane: DataPlane,
        outer: OuterState,
        round_: Round,
        wanted: list[bytes],
        donors: list[Donor],
        lines: Lines,
        worker: Executor,
        on_progress: Callable[[RecoveryProgress], None],
    ) -> None:
        self._plane, self._outer, self._worker = plane, outer, worker
        self._round, self._wanted, self._on_progress = round_, wanted, on_progress
        self._standing_by, self._lines = deque(donors), lines
        self._abreast = min(len(donors), DONORS)
        self._clock = asyncio.get_running_loop().time
        self._began = self._told = self._clock()
        self._progress = RecoveryProgress(outer.chunks.count, names={d.node: d.name for d in donors})
        self._parts: dict[int, ChunkAssembly] = {}  # of chunks under way
        self._limits: dict[ChunkRequest, asyncio.Timeout] = {}  # to end an errand that is of no more use
        self._changed = asyncio.Event()  # set, and replaced, when a stream without work should look again
        self._from = outer.round
        self._tail: dict[int, list[SealedChunk]] = {}  # by chunk: what brought it from there

    async def run(self) -> RecoveryProgress:
        self._errands = ChunkScheduler(await self._lacking())
        self._progress.done = self._progress.of - self._errands.left
        async with asyncio.TaskGroup() as self._group:
            for _ in range(self._abreast):
                self._next_donor()
        if left := self._errands.left:
            raise RoundMovedOn(f"{left} of {self._progress.of} chunks of round {self._round} could not be had")
        self._progress.sealed = self._sealed_rounds()
        return self._progress

    def _sealed_rounds(self) -> dict[Round, tuple[SealedChunk, ...]]:
        """Of all missed rounds; empty if one lacks a chunk, or they were many."""
        turns, chunks, found = self._outer.turns, self._outer.chunks, dict[Round, tuple[SealedChunk, ...]]()
        missed = range(self._from + 1, self._round + 1)
        for k in missed if 0 <= self._from and len(missed) <= TAIL else ():
            at = turns.turn(k) - turns.turn(turns.next(turns.fragment(k), self._from))  # of its fragment's rounds
            of = [self._tail.get(c, ()) for c in chunks.fragment_range(turns.fragment(k))]
            if any(len(sealed) <= at for sealed in of):
                return {}
            found[Round(k)] = tuple(sealed[at] for sealed in of)
        return found

    async def _lacking(self) -> list[int]:
        outer = self._outer
        await self._compute(outer.pass_over, self._round)
        here = [outer.at[c] == self._round for c in range(outer.chunks.count)]
        return [
            c
            for c, may_be in enumerate(here)
            if not may_be or await self._compute(outer.chunk_digest, c) != self._wanted[c]
        ]

    def _next_donor(self) -> None:
        if self._standing_by:
            self._group.create_task(self._ask(self._standing_by.popleft()))

    async def _ask(self, donor: Donor) -> None:
        """Fetch over as many streams as suit the path until nothing is left. A donor that fails does so once:
        another one takes its place."""
        opened = 0

        def open_another() -> None:
            nonlocal opened
            opened += 1
            group.create_task(stream())

        async def stream() -> None:
            ready = self._lines[donor.node]
            async with ready.pop() if ready else _line(self._plane, donor) as fetcher:
                while self._errands.left:
                    await self._step(fetcher)
                    if opened < self._suiting(fetcher):
                        open_another()

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(len(self._lines[donor.node])):
                    open_another()
        except* (DonorLost, NotAvailable) as errors:
            log.warning(f"recovering without {donor.node}: {errors.exceptions[0]}")
            self._next_donor()

    def _suiting(self, fetcher: FetchClient) -> int:
        """Streams to a donor."""
        if fixed := self._plane.peers.fixed:
            return fixed
        path = fetcher.path
        if path is None:
            return LEAST
        return max(LEAST, streams(path.rtt, self._progress.rate, self._abreast, slowed=False))

    async def _step(self, fetcher: FetchClient) -> None:
        """Fetch a chunk; or wait a moment for one to fetch."""
        errand = self._errands.take(fetcher.node, self._clock(), self._open)
        if errand is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK):
                    await self._changed.wait()
            return
        try:
            async with asyncio.timeout(None) as limit:
                self._limits[errand] = limit
                work = await self._fetch(fetcher, errand)
            rivals = self._errands.done(errand, self._clock()) if work is not None else None
        except TimeoutError:
            work = rivals = None
        finally:
            del self._limits[errand]
            self._errands.drop(errand)
            self._wake()
        if work is None or rivals is None:
            return  # another donor has the rest of it, or was first
        for rival in rivals:
            self._limits[rival].reschedule(self._clock())
        # What is here is used, even if the donor fails at another chunk meanwhile.
        await asyncio.shield(self._group.create_task(self._take(errand, work)))

    def _open(self, c: int) -> int:
        return self._parts[c].open if c in self._parts else 0

    async def _fetch(self, fetcher: FetchClient, errand: ChunkRequest) -> Callable[[], None] | None:
        """The bytes of a chunk; returns what brings the chunk to the round with them; None: others bring some."""
        outer, round_, c = self._outer, self._round, errand.chunk
        sealed, whole = outer.sealing.size(outer.chunks.size(c), 1), 8 * outer.chunks.size(c)  # bytes
        fragment, i = outer.chunks.place(c)
        missed = outer.turns.rounds(fragment, outer.at[c], round_)
        if outer.at[c] >= 0 and 0 < len(missed) * sealed < whole:
            with suppress(NotAvailable):  # the donor keeps fewer rounds: the whole chunk follows
                ask = [(FetchItem.SEALED, Round(k), i, sealed, DEADLINE, self._sealed(c)) for k in missed]
                payloads = [await fetcher.fetch(*what) for what in ask]
                self._credit(fetcher, sum(map(len, payloads)))
                return lambda: self._bring_forward(c, payloads)
        if c not in self._parts:
            self._parts[c] = ChunkAssembly(whole, PART, outer.landed(c, self._wanted[c]))
        elif self._parts[c].alone:  # whoever gives it is late, and to be known by what it gives
            self._parts[c] = ChunkAssembly(whole, PART, alone=True)
        parts = self._parts[c]
        if not await self._get(fetcher, errand, parts):
            return None
        right = await self._right(c, parts)
        if not right:
            outer.unland(c)
        if not right and (parts.earlier or parts.givers > 1):  # who gave the wrong bytes cannot be told
            parts = self._parts[c] = ChunkAssembly(whole, PART, alone=True)
            right = await self._get(fetcher, errand, parts) and await self._right(c, parts)
        self._parts.pop(c, None)
        if not right:
            outer.unland(c)
            raise DonorLost(fetcher.node, f"chunk {c} of round {round_} is not what the run's digest says")
        return lambda: outer.put(c, round_, parts.data)

    async def _get(self, fetcher: FetchClient, errand: ChunkRequest, parts: ChunkAssembly) -> bool:
        """Fetch parts of the chunk; whether all are here."""
        c, outer, stream = errand.chunk, self._outer, parts.join()

        def take(at: int, part: bytes) -> None:
            parts.came(stream, at, part)
            outer.land(c, self._wanted[c], at, part)
            outer.land_more(c, self._wanted[c], parts.data, parts.front)
            self._credit(fetcher, len(part))
            self._errands.moved(c, self._clock())

        def following() -> tuple[int, int] | None:
            return parts.next(stream, errand.late)

        try:
            await fetcher.fetch_state(self._round, c, following, take, DEADLINE)
        finally:
            parts.leave(stream)
        return parts.complete

    async def _right(self, c: int, parts: ChunkAssembly) -> bool:
        return await self._compute(digest, parts.data) == self._wanted[c]

    def _sealed(self, c: int) -> Callable[[int], bool]:
        """Whether chunk `c` may have so many sealed bytes."""
        sealing, numel = self._outer.sealing, self._outer.chunks.size(c)
        return lambda size: sealing.fits(size, numel, MOST)

    def _bring_forward(self, c: int, payloads: list[bytes]) -> None:
        """In the worker. Whether the payloads were wrong, or what was here, the whole chunk tells."""
        outer = self._outer
        try:
            for payload in payloads:
                outer.apply(c, payload)
            outer.pass_over(self._round, [c])
            good = outer.chunk_digest(c) == self._wanted[c]
        except Malformed:
            good = False
        if not good:
            outer.at[c] = -1
        elif len(payloads) == len(outer.turns.rounds(outer.chunks.place(c)[0], self._from, self._round)) <= TAIL:
            self._tail[c] = [SealedChunk(payload, digest(payload)) for payload in payloads]

    def _credit(self, fetcher: FetchClient, size: int) -> None:
        progress = self._progress
        progress.donors[fetcher.node] = progress.donors.get(fetcher.node, 0) + size
        progress.seconds = self._clock() - self._began

    async def _take(self, errand: ChunkRequest, work: Callable[[], None]) -> None:
        await self._compute(work)
        if self._outer.at[errand.chunk] != self._round:
            self._errands.again(errand.chunk)
            self._wake()
            return
        progress, now = self._progress, self._clock()
        progress.done += 1
        progress.fetched += 1
        self._on_progress(progress)
        if now - self._told > TELL:
            self._told = now
            log.info(f"recovering: {progress}")

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _compute(self, work: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._worker, lambda: work(*args))
