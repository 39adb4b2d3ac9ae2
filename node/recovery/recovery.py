"""Bring the outer state to the committed round with the peers' help.

Chunks come over several streams from several donors at once, each of which gets work as fast as it answers
(`chunk_scheduler`). A donor that fails, or whose bytes are not what the run's digests say, is left out. A chunk
that lags some rounds of its fragment is brought forward with their sealed bytes (about 1 byte a parameter and
round) where these are fewer than those of the whole chunk (8 bytes a parameter). A donor that has moved on to the
next round answers that it does not have the old one; whatever was fetched by then is kept and brought forward.
Every chunk is checked against the donors' digest list, and the list against the digest that the coordinator
recorded.
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
from atoll.comm.transport.fetch_client import PART_BYTES, DonorLost, FetchClient, FetchItem, NotAvailable
from atoll.comm.transport.stream_policy import stream_count
from atoll.node.outer.state import OuterState
from atoll.node.recovery.chunk_assembly import ChunkAssembly
from atoll.node.recovery.chunk_scheduler import ChunkRequest, ChunkScheduler

T = TypeVar("T")
log = logging.getLogger("atoll.node")
DONORS_AT_ONCE = 8  # the others stand by
MIN_STREAMS = 2  # to a donor: while a chunk of one is checked, the other one's comes
CHUNK_DEADLINE = 300.0  # seconds
IDLE_POLL = 0.1  # seconds after which a stream without work looks whether another donor is late
HEDGE_DELAY = 1.0  # seconds after which another donor is asked for the digests, too
MAX_CONTRIBUTIONS = 4096  # in sealed bytes that hold them
LOG_INTERVAL = 5.0  # seconds between two lines of the log
RETAINED_ROUNDS = (
    2  # missed rounds, at most, whose sealed bytes, 1 byte a parameter each, are returned for the log
)


Connections = dict[NodeId, list[FetchClient]]  # to each donor, of use at once


class RoundMovedOn(Unreachable):
    """No donor holds the round any more, or none answers; a newer view tells what to fetch."""


class DonorsSilent(RoundMovedOn):
    """No donor that the view names answers. Another try helps only when one of them comes back or a view names
    others."""


@dataclass(frozen=True, slots=True)
class Donor:
    """A member that holds the state."""

    node: NodeId
    address: str
    pin: Pin = NO_PIN  # of its certificate
    name: str = ""


@dataclass(frozen=True, slots=True)
class Target:
    """The state to reach, and who has it."""

    round: Round
    digest: bytes  # of the state after the round, from the coordinator
    donors: tuple[Donor, ...]


@dataclass(frozen=True, slots=True)
class SealedChunk:
    """A chunk's sealed bytes."""

    payload: bytes
    digest: bytes


@dataclass(frozen=True, slots=True)
class RecoveryStats:
    """The cost of a recovery that succeeded: chunks, seconds, and bytes by donor."""

    chunks: int  # of the state
    fetched: int  # chunks, of these
    seconds: float
    bytes_from: dict[NodeId, int]  # of chunks, by the donor that gave them
    # Of every missed round, for the log; empty if they were more than `RETAINED_ROUNDS`, or one lacks a chunk.
    sealed_rounds: dict[Round, tuple[SealedChunk, ...]]


@dataclass(slots=True)
class RecoveryProgress:
    """The progress of a recovery; `str` gives it as text for people."""

    chunks: int  # of the state
    present: int = 0  # chunks that are here
    fetched: int = 0  # chunks, of these
    seconds: float = 0.0  # since it began
    bytes_from: dict[NodeId, int] = field(default_factory=dict)  # of chunks, by the donor that gave them
    names: dict[NodeId, str] = field(default_factory=dict)  # of donors, for people

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return sum(self.bytes_from.values()) / self.seconds if self.seconds else 0.0

    @property
    def seconds_left(self) -> float:
        """Seconds until all chunks are here at the rate so far; 0 while nothing was fetched."""
        return self.seconds * (self.chunks - self.present) / self.fetched if self.fetched else 0.0

    @property
    def donors(self) -> list[str]:
        """Names of those who gave chunks, sorted; the ids of the nameless."""
        return sorted(self.names.get(node) or node for node in self.bytes_from)

    def __str__(self) -> str:
        so_far = f"{self.present} of {self.chunks} chunks"
        if not self.bytes_from:
            return so_far
        names = ", ".join(self.donors)
        return f"{so_far}, {self.rate / 1e6:.1f} MB/s, {self.seconds_left:.0f} s left, from {names}"


async def recover(
    state: OuterState,
    target: Target,
    plane: DataPlane,
    worker: Executor,
    on_progress: Callable[[RecoveryProgress], None],
) -> RecoveryStats:
    """Make `state` the one of `target`, with bytes that its donors send over `plane`; returns what that took.
    `worker` is the one thread that may touch the state's arithmetic. Raises `RoundMovedOn` where no donor has all
    of it any more, though what came stays; `DonorsSilent` where that will not pass with the round."""
    if not target.donors:
        raise RoundMovedOn(f"no member holds the state of round {target.round}")
    streams_ = plane.peers.fixed_streams or MIN_STREAMS
    connections = {d.node: [_connection(plane, d) for _ in range(streams_)] for d in target.donors}
    async with AsyncExitStack() as opened:
        for k, donor in enumerate(target.donors):
            for connection in connections[donor.node]:
                await opened.enter_async_context(connection)
                if k < DONORS_AT_ONCE:
                    connection.dial()
        digests, donors = await _fetch_digests(connections, state, target)
        run = _RecoveryRun(plane, state, target.round, digests, donors, connections, worker, on_progress)
        return await run.run()


def _connection(plane: DataPlane, donor: Donor) -> FetchClient:
    return FetchClient(plane, donor.node, donor.address, donor.pin)


async def _fetch_digests(
    connections: Connections, outer: OuterState, target: Target
) -> tuple[list[bytes], list[Donor]]:
    """The chunks' digests as the run's digest proves them, and the donors that may have them."""
    waiting, failures = deque(target.donors), dict[Donor, Exception]()
    asked: dict[asyncio.Task[list[bytes]], Donor] = {}
    try:
        while waiting or asked:
            if waiting:
                donor = waiting.popleft()
                asked[asyncio.create_task(_digests_of(connections[donor.node][0], outer, target))] = donor
            done, _ = await asyncio.wait(
                asked, timeout=HEDGE_DELAY if waiting else None, return_when=FIRST_COMPLETED
            )
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


class _RecoveryRun:
    """One try, with the donors that there are: a stream each to several, which take chunks from one scheduler."""

    def __init__(
        self,
        plane: DataPlane,
        outer: OuterState,
        round_: Round,
        digests: list[bytes],
        donors: list[Donor],
        connections: Connections,
        worker: Executor,
        on_progress: Callable[[RecoveryProgress], None],
    ) -> None:
        self._plane, self._outer, self._worker = plane, outer, worker
        self._round, self._digests, self._on_progress = round_, digests, on_progress
        self._reserve, self._connections = deque(donors), connections
        self._parallel_donors = min(len(donors), DONORS_AT_ONCE)
        self._clock = asyncio.get_running_loop().time
        self._began = self._logged_at = self._clock()
        self._progress = RecoveryProgress(outer.chunks.count, names={d.node: d.name for d in donors})
        self._assemblies: dict[int, ChunkAssembly] = {}  # of chunks under way
        self._timeouts: dict[ChunkRequest, asyncio.Timeout] = {}  # to end a request that is of no more use
        self._changed = asyncio.Event()  # set, and replaced, when a stream without work should look again
        self._start_round = outer.round
        self._whole_only = set[NodeId]()  # donors whose sealed bytes did not come to the round's state
        self._sealed_chunks: dict[int, list[SealedChunk]] = {}  # by chunk: what brought it forward from there

    async def run(self) -> RecoveryStats:
        self._requests = ChunkScheduler(await self._missing_chunks())
        progress = self._progress
        progress.present = progress.chunks - self._requests.remaining
        async with asyncio.TaskGroup() as self._group:
            for _ in range(self._parallel_donors):
                self._next_donor()
        if left := self._requests.remaining:
            raise RoundMovedOn(f"{left} of {progress.chunks} chunks of round {self._round} could not be had")
        seconds = self._clock() - self._began
        return RecoveryStats(
            progress.chunks, progress.fetched, seconds, progress.bytes_from, self._sealed_rounds()
        )

    def _sealed_rounds(self) -> dict[Round, tuple[SealedChunk, ...]]:
        """Of all missed rounds; empty if one lacks a chunk, or they were many."""
        schedule, chunks = self._outer.fragment_schedule, self._outer.chunks
        missed = range(self._start_round + 1, self._round + 1)
        if self._start_round < 0 or len(missed) > RETAINED_ROUNDS:
            return {}
        found: dict[Round, tuple[SealedChunk, ...]] = {}
        for k in missed:
            fragment = schedule.fragment(k)
            first = schedule.next(fragment, self._start_round)
            nth = schedule.turn(k) - schedule.turn(first)  # of the fragment's missed rounds
            histories = [self._sealed_chunks.get(c, ()) for c in chunks.fragment_range(fragment)]
            if any(len(sealed) <= nth for sealed in histories):
                return {}
            found[Round(k)] = tuple(sealed[nth] for sealed in histories)
        return found

    async def _missing_chunks(self) -> list[int]:
        """Chunks that are not what the round's digests say."""
        outer = self._outer
        await self._compute(outer.advance_unchanged, self._round)
        candidates = [outer.chunk_rounds[c] == self._round for c in range(outer.chunks.count)]
        return [
            c
            for c, candidate in enumerate(candidates)
            if not candidate or await self._compute(outer.chunk_digest, c) != self._digests[c]
        ]

    def _next_donor(self) -> None:
        if self._reserve:
            self._group.create_task(self._fetch_from(self._reserve.popleft()))

    async def _fetch_from(self, donor: Donor) -> None:
        """Fetch over as many streams as suit the path until nothing is left. A donor that fails does so once:
        another one takes its place."""
        opened = 0

        def open_another() -> None:
            nonlocal opened
            opened += 1
            group.create_task(stream())

        async def stream() -> None:
            ready = self._connections[donor.node]
            async with ready.pop() if ready else _connection(self._plane, donor) as fetcher:
                while self._requests.remaining:
                    await self._fetch_next(fetcher)
                    if opened < self._streams_wanted(fetcher):
                        open_another()

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(len(self._connections[donor.node])):
                    open_another()
        except* (DonorLost, NotAvailable) as errors:
            log.warning(f"recovering without {donor.node}: {errors.exceptions[0]}")
            self._next_donor()

    def _streams_wanted(self, fetcher: FetchClient) -> int:
        """Streams to a donor."""
        if fixed := self._plane.peers.fixed_streams:
            return fixed
        path = fetcher.path
        if path is None:
            return MIN_STREAMS
        return max(MIN_STREAMS, stream_count(path.rtt, self._progress.rate, self._parallel_donors, slowed=False))

    async def _fetch_next(self, fetcher: FetchClient) -> None:
        """Fetch a chunk; or wait a moment for one to fetch."""
        request = self._requests.assign(fetcher.node, self._clock(), self._unrequested)
        if request is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(IDLE_POLL):
                    await self._changed.wait()
            return
        try:
            async with asyncio.timeout(None) as timeout:
                self._timeouts[request] = timeout
                store = await self._fetch_chunk(fetcher, request)
            duplicates = self._requests.complete(request, self._clock()) if store is not None else None
        except TimeoutError:
            store = duplicates = None
        finally:
            del self._timeouts[request]
            self._requests.abandon(request)
            self._wake()
        if store is None or duplicates is None:
            return  # another donor has the rest of it, or was first
        for duplicate in duplicates:
            self._timeouts[duplicate].reschedule(self._clock())
        # What is here is used, even if the donor fails at another chunk meanwhile.
        await asyncio.shield(self._group.create_task(self._finish(request, store)))

    def _unrequested(self, c: int) -> int:
        return self._assemblies[c].unrequested if c in self._assemblies else 0

    async def _fetch_chunk(self, fetcher: FetchClient, request: ChunkRequest) -> Callable[[], None] | None:
        """The bytes of a chunk; returns what brings the chunk to the round with them; None: others bring some."""
        return await self._fetch_sealed(fetcher, request.chunk) or await self._fetch_whole(fetcher, request)

    async def _fetch_sealed(self, fetcher: FetchClient, c: int) -> Callable[[], None] | None:
        """The sealed bytes of the rounds that a lagging chunk has missed. None: there is nothing to bring forward,
        the whole chunk is fewer bytes, or the donor keeps fewer rounds."""
        outer = self._outer
        sealed, whole = outer.sealing.size(outer.chunks.size(c), 1), 8 * outer.chunks.size(c)  # bytes
        fragment, i = outer.chunks.place(c)
        missed = outer.fragment_schedule.rounds(fragment, outer.chunk_rounds[c], self._round)
        if outer.chunk_rounds[c] < 0 or not 0 < len(missed) * sealed < whole or fetcher.node in self._whole_only:
            return None
        try:
            payloads = [
                await fetcher.fetch(FetchItem.SEALED, Round(k), i, sealed, CHUNK_DEADLINE, self._fits(c))
                for k in missed
            ]
        except NotAvailable:
            return None
        self._credit(fetcher, sum(map(len, payloads)))
        return lambda: self._replay(c, payloads, fetcher.node)

    async def _fetch_whole(self, fetcher: FetchClient, request: ChunkRequest) -> Callable[[], None] | None:
        """Anchor and momentum of a chunk, which several donors may give together. None: others have the rest."""
        outer, c = self._outer, request.chunk
        whole, partial = 8 * outer.chunks.size(c), outer.partial_chunks  # bytes
        if c not in self._assemblies:
            self._assemblies[c] = ChunkAssembly(whole, PART_BYTES, partial.read(c, self._digests[c]))
        elif self._assemblies[c].single_donor:  # whoever gives it is late, and to be known by what it gives
            self._assemblies[c] = ChunkAssembly(whole, PART_BYTES, single_donor=True)
        assembly = self._assemblies[c]
        if not await self._fetch_parts(fetcher, request, assembly):
            return None
        right = await self._has_digest(c, assembly)
        if not right:
            partial.discard(c)
        if not right and (assembly.resumed or assembly.streams > 1):  # who gave the wrong bytes cannot be told
            assembly = self._assemblies[c] = ChunkAssembly(whole, PART_BYTES, single_donor=True)
            right = await self._fetch_parts(fetcher, request, assembly) and await self._has_digest(c, assembly)
        self._assemblies.pop(c, None)
        if not right:
            partial.discard(c)
            raise DonorLost(fetcher.node, f"chunk {c} of round {self._round} is not what the run's digest says")
        return lambda: outer.replace_chunk(c, self._round, assembly.data)

    async def _fetch_parts(self, fetcher: FetchClient, request: ChunkRequest, assembly: ChunkAssembly) -> bool:
        """Fetch parts of the chunk; whether all are here."""
        c, partial, stream = request.chunk, self._outer.partial_chunks, assembly.join()
        digest_ = self._digests[c]

        def store(at: int, part: bytes) -> None:
            assembly.add(stream, at, part)
            partial.append(c, digest_, at, part)
            if 0 < (stored := partial.size(c, digest_)) < assembly.front:  # what follows on it came before
                partial.append(c, digest_, stored, bytes(assembly.data[stored : assembly.front]))
            self._credit(fetcher, len(part))
            self._requests.record_progress(c, self._clock())

        def following() -> tuple[int, int] | None:
            return assembly.next(stream, request.late)

        try:
            await fetcher.fetch_state(self._round, c, following, store, CHUNK_DEADLINE)
        finally:
            assembly.leave(stream)
        return assembly.complete

    async def _has_digest(self, c: int, assembly: ChunkAssembly) -> bool:
        return await self._compute(digest, assembly.data) == self._digests[c]

    def _fits(self, c: int) -> Callable[[int], bool]:
        """Whether chunk `c` may have so many sealed bytes."""
        sealing, numel = self._outer.sealing, self._outer.chunks.size(c)
        return lambda size: sealing.fits(size, numel, MAX_CONTRIBUTIONS)

    def _replay(self, c: int, payloads: list[bytes], donor: NodeId) -> None:
        """In the worker. Whether the payloads were wrong, or what was here, the whole chunk tells; the donor gives
        such ones from then on."""
        outer = self._outer
        try:
            for payload in payloads:
                outer.apply(c, payload)
            outer.advance_unchanged(self._round, [c])
            right = outer.chunk_digest(c) == self._digests[c]
        except Malformed:
            right = False
        if not right:
            log.warning(
                f"chunk {c} of round {self._round} does not come of the sealed bytes that {donor} has of it"
            )
            self._whole_only.add(donor)
            outer.mark_missing(c)
            return
        missed = outer.fragment_schedule.rounds(outer.chunks.place(c)[0], self._start_round, self._round)
        if len(payloads) == len(missed) <= RETAINED_ROUNDS:
            self._sealed_chunks[c] = [SealedChunk(payload, digest(payload)) for payload in payloads]

    def _credit(self, fetcher: FetchClient, size: int) -> None:
        progress = self._progress
        progress.bytes_from[fetcher.node] = progress.bytes_from.get(fetcher.node, 0) + size
        progress.seconds = self._clock() - self._began

    async def _finish(self, request: ChunkRequest, store: Callable[[], None]) -> None:
        await self._compute(store)
        if self._outer.chunk_rounds[request.chunk] != self._round:
            self._requests.requeue(request.chunk)
            self._wake()
            return
        progress, now = self._progress, self._clock()
        progress.present += 1
        progress.fetched += 1
        self._on_progress(progress)
        if now - self._logged_at > LOG_INTERVAL:
            self._logged_at = now
            log.info(f"recovering: {progress}")

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _compute(self, work: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._worker, lambda: work(*args))
