"""Two data planes that meet in a reduce, and a reduce that notes what its peers' links bring."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

import numpy as np

from atoll.comm.byte_view import U8
from atoll.comm.ids import Epoch, Incarnation, NodeId, Round, RunId
from atoll.comm.plan import Fence, PlanMember
from atoll.comm.transport.connection import LinkBroken
from atoll.comm.transport.data_plane import DataPlane
from atoll.comm.transport.frames import FrameKind, Header, QueuedFrame

DEADLINE = 60.0  # seconds; nothing here takes longer than a moment on an idle machine
A, B = NodeId("a"), NodeId("b")
LARGE = bytes(range(256)) * (1 << 15)  # 8 MiB: more than the buffers of a connection hold
NOISE = os.urandom(1 << 20)


class EmptyStore:
    async def sealed(self, round: Round, chunk: int) -> None: ...
    async def state(self, round: Round, chunk: int) -> None: ...
    async def digests(self, round: Round) -> None: ...


class Notes:
    """A reduce that sends what `payloads` says of a chunk and notes what happens to it."""

    def __init__(self, round: int = 1, payloads: dict[int, bytes] | None = None) -> None:
        self.round = Round(round)
        self.payloads = payloads or {}
        self.headers: list[tuple[NodeId, FrameKind, int]] = []  # headers
        self.arrivals: list[tuple[FrameKind, int, bytes]] = []
        self.rejoined: list[NodeId] = []
        self.sentences: list[str] = []
        self.spoilers: list[NodeId] = []
        self.changed = asyncio.Event()

    async def buffer_for(self, node: NodeId, header: Header) -> U8 | None:
        self.headers.append((node, header.kind, header.chunk))
        if header.length > 1 << 24:
            raise LinkBroken("too long for this reduce")
        return np.empty(header.length, np.uint8)

    def arrived(self, node: NodeId, header: Header, payload: U8) -> None:
        self.arrivals.append((header.kind, header.chunk, payload.tobytes()))
        self.changed.set()

    async def frame(self, node: NodeId, queued: QueuedFrame) -> tuple[Header, memoryview] | None:
        kind, c, since = queued
        fence = Fence(Incarnation(1), Epoch(1), self.round, since)
        payload = self.payloads.get(c)
        if payload is None:
            return None
        return Header(kind, fence, c, len(payload)), memoryview(payload)

    async def evidence(self, node: NodeId, kind: FrameKind, c: int) -> None: ...

    async def ask(self, node: NodeId, kind: FrameKind, c: int, size: int, exact: bool) -> None: ...

    def joined(self, node: NodeId) -> None:
        self.rejoined.append(node)
        self.changed.set()

    def spoiled(self, node: NodeId, sentence: str) -> None:
        self.spoilers.append(node)

    def lost(self, node: NodeId, sentence: str) -> None:
        self.sentences.append(sentence)
        self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.changed.clear()
            await self.changed.wait()


async def until(condition: Callable[[], bool]) -> None:
    """For what nobody is told of."""
    while not condition():
        await asyncio.sleep(0)


def run(body: Coroutine[Any, Any, None]) -> None:
    before = sockets()

    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE):
            await body
        assert asyncio.all_tasks() == {asyncio.current_task()}, "tasks are left"

    asyncio.run(bounded())
    assert not sockets() - before, "sockets are left"


def sockets() -> set[str]:
    """The open sockets of this process. What another test has left may be closed at any time, by the garbage
    collector."""
    found = set[str]()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the folder's own
            found.add(os.readlink(f"/proc/self/fd/{name}"))
    return {link for link in found if link.startswith("socket:")}


async def plane_of(node: NodeId, streams: int = 1, key: bytes = b"k" * 32) -> DataPlane:
    return await DataPlane.start("127.0.0.1:0", RunId("run"), node, key, EmptyStore(), streams=streams)


@asynccontextmanager
async def pair(streams: int = 1, key_of_b: bytes = b"k" * 32) -> AsyncIterator[tuple[DataPlane, DataPlane]]:
    a, b = await plane_of(A, streams), await plane_of(B, streams, key_of_b)
    try:
        yield a, b
    finally:
        await a.close()
        await b.close()


def expect(plane: DataPlane, *others: DataPlane, primary: bool, address: str = "", leaf: bool = False) -> None:
    members = [PlanMember(o.node, address or o.address, 1.0, leaf=leaf) for o in others]
    plane.peers.expect([(member, primary) for member in members])


def meet(a: DataPlane, b: DataPlane, to_a: Notes, to_b: Notes) -> None:
    """Both begin a reduce; a dials."""
    a.peers.begin(to_a)
    b.peers.begin(to_b)
    expect(a, b, primary=True)
    expect(b, a, primary=False)


def part(a: DataPlane, b: DataPlane, to_a: Notes, to_b: Notes) -> None:
    a.peers.end(to_a)
    b.peers.end(to_b)


def post(plane: DataPlane, to: NodeId, *chunks: int, kind: FrameKind = FrameKind.SEALED) -> None:
    for c in chunks:
        plane.peers.peer(to).queue.post((kind, c, 1))
