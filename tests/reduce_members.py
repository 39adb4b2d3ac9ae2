"""Members of a reduce: real planes in one process over loopback TCP; their reports, and what they must hold.

`Member` runs a `Reduction` on a `DataPlane`; `reference` and `gathered` are the sealed bytes as the docstrings of
reduction.py and sealing.py define them, to be equal bit for bit.
"""

import asyncio
import struct
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import numpy as np
from encoders import at_once

from atoll.comm.allreduce.delta_encoder import DeltaEncoder, EncodedVector
from atoll.comm.allreduce.delta_samples import DeltaSamples
from atoll.comm.allreduce.input_signer import InputSigner
from atoll.comm.allreduce.listener import SealReport
from atoll.comm.allreduce.reduction import Reduction
from atoll.comm.allreduce.sealing import GatheredSeal, SealFormat, WeightedMean
from atoll.comm.buffers import BufferPool
from atoll.comm.byte_view import U8
from atoll.comm.chunks import Chunks
from atoll.comm.codecs.codec import F32, Codec
from atoll.comm.codecs.factory import make_codec
from atoll.comm.config.run import CodecName
from atoll.comm.digest import digest, root
from atoll.comm.ids import Epoch, Incarnation, NodeId, Round, RunId
from atoll.comm.plan import Plan, PlanMember
from atoll.comm.replace import replace
from atoll.comm.signatures import SIGNATURE_BYTES
from atoll.comm.transport import frames
from atoll.comm.transport.connection import Link
from atoll.comm.transport.data_plane import DataPlane
from atoll.comm.transport.frames import FrameKind
from atoll.comm.transport.tls import TlsContexts

CHUNKS = Chunks(10_000, 1024)  # 10 chunks, the last one shorter
CODEC = make_codec(CodecName.INT8, 128)
SIZE = CODEC.size(1024)  # bytes of an encoded chunk that is not the last
VECTORS = [np.random.default_rng(i).standard_normal(CHUNKS.numel, dtype=np.float32) for i in range(6)]


class EmptyStore:
    """A node that has nothing to serve."""

    async def sealed(self, round: Round, chunk: int) -> None: ...
    async def state(self, round: Round, chunk: int) -> None: ...
    async def digests(self, round: Round) -> None: ...


def encode(x: F32, codec: Codec = CODEC) -> tuple[U8, ...]:
    return at_once(DeltaEncoder(np.asarray(x), np.zeros_like(x), codec, CHUNKS)).whole


def pooled_vector(payloads: Sequence[U8], buffers: BufferPool) -> EncodedVector:
    """An encoded vector in memory that is used again, as a node's is."""

    def copy(c: int) -> U8:
        largest = payloads[0].size + SIGNATURE_BYTES
        part = buffers.take(payloads[c].size + SIGNATURE_BYTES, largest)[: payloads[c].size]
        part[:] = payloads[c]
        return part

    async def again(c: int) -> U8:
        return copy(c)

    return EncodedVector([copy(c) for c in range(len(payloads))], len(payloads), again)


ENCODED = [encode(x) for x in VECTORS]


def name(i: int) -> NodeId:
    return NodeId(f"n{i}")


def reference(
    c: int, inputs: Sequence[int], weights: Sequence[float], codec: Codec = CODEC, scales: Sequence[float] = ()
) -> bytes:
    """The sealed bytes of a chunk, as reduction.py's docstring defines them; `inputs` are numbers of vectors."""
    span, n = CHUNKS.span(c), CHUNKS.size(c)
    mean, x, payload = np.zeros(n, np.float32), np.empty(n, np.float32), np.empty(codec.size(n), np.uint8)
    for i, weight, scale in zip(inputs, weights, scales or [1.0] * len(inputs), strict=True):
        codec.encode(np.ascontiguousarray(VECTORS[i][span]), payload)
        codec.decode(payload, x)
        mean = mean + np.float32(weight / sum(weights) * scale) * x
    codec.encode(mean, payload)
    return payload.tobytes()


SPARSE_CODEC = make_codec(CodecName.SPARSE, 128)
SPARSE = [encode(x, SPARSE_CODEC) for x in VECTORS]
GATHERED = GatheredSeal(SPARSE_CODEC, WeightedMean(SPARSE_CODEC))


def gathered(c: int, inputs: Sequence[int], weights: Sequence[float]) -> bytes:
    """The sealed bytes of a chunk of sparse vectors, as sealing.py's docstring defines them."""
    shares = [weight / sum(weights) for weight in weights]
    head = struct.pack(f"<I{len(inputs)}d", len(inputs), *shares)
    return head + b"".join(SPARSE[i][c].tobytes() for i in inputs)


class Reports:
    """What the coordinator would be told by one member."""

    def __init__(self) -> None:
        self.seals: dict[int, tuple[Plan, SealReport]] = {}
        self.sums: dict[int, SealReport] = {}
        self.orphaned: dict[int, bytes] | None = None
        self.blamed: list[tuple[NodeId, str]] = []
        self.root, self.proven = b"", False
        self.forgers: list[tuple[NodeId, int]] = []
        self.spoilers: list[NodeId] = []
        self.too_long: list[tuple[int, int, bytes, float]] = []  # chunk, since, digest, times
        self.lacks: tuple[int, ...] = ()
        self.changed = asyncio.Event()

    def sealed(self, plan: Plan, seal: SealReport, more: bool) -> None:
        self.seals[seal.chunk] = plan, seal
        self.changed.set()

    def summed(self, plan: Plan, sum_: SealReport, more: bool) -> None:
        self.sums[sum_.chunk] = sum_
        self.changed.set()

    def orphans(self, plan: Plan, here: tuple[tuple[int, bytes], ...]) -> None:
        self.orphaned = dict(here)
        self.changed.set()

    def lost(self, plan: Plan, node: NodeId, sentence: str) -> None:
        self.blamed.append((node, sentence))
        self.changed.set()

    def spoiled(self, plan: Plan, node: NodeId, sentence: str) -> None:
        self.spoilers.append(node)

    def held(self, plan: Plan, root: bytes, proven: bool) -> None:
        self.root, self.proven = root, proven
        self.changed.set()

    def forged(self, plan: Plan, node: NodeId, chunk: int) -> None:
        self.forgers.append((node, chunk))
        self.changed.set()

    def outsized(self, plan: Plan, chunk: int, since: int, digest: bytes, times: float) -> None:
        assert not self.root, "it is said before the member holds everything"
        self.too_long.append((chunk, since, digest, times))
        self.changed.set()

    def lacking(self, plan: Plan, chunks: tuple[int, ...]) -> None:
        self.lacks = chunks
        self.changed.set()

    async def until(self, condition: Callable[["Reports"], bool]) -> None:
        while not condition(self):
            self.changed.clear()
            await self.changed.wait()


class Member:
    """A reduction that runs, and what it told."""

    def __init__(
        self,
        plane: DataPlane,
        encoded: Sequence[U8] | None,
        plan: Plan,
        codec: Codec = CODEC,
        sealing: SealFormat | None = None,
        signer: InputSigner | None = None,
        samples: DeltaSamples | None = None,
    ) -> None:
        self.plane, self.reports = plane, Reports()
        self.latest: dict[int, U8] = {}  # the latest of each sealed chunk
        terms = codec, CHUNKS, plan, self.reports, sealing, self.latest.__setitem__
        self.vector = None if encoded is None else pooled_vector(encoded, plane.peers.buffers)
        self.reduction = Reduction(
            plane.peers, plane.node, self.vector, *terms, signer, samples.get if samples else None
        )
        self.task = asyncio.create_task(self.reduction.run())

    def vector_of(self, payloads: Sequence[U8]) -> EncodedVector:
        """Another one, in this member's memory."""
        return pooled_vector(payloads, self.plane.peers.buffers)

    async def holds_all(self) -> list[bytes]:
        """The sealed bytes, when they are here."""
        await first(self.reports.until(lambda reports: bool(reports.root)), self.task)
        result = self.reduction.result
        assert root(result.digests) == self.reports.root
        assert self.reduction.holds(self.reports.root) and not self.reduction.holds(root(result.digests[:-1]))
        assert [digest(chunk) for chunk in result.chunks] == list(result.digests)
        assert all(self.latest[c] is chunk for c, chunk in enumerate(result.chunks))
        return [chunk.tobytes() for chunk in result.chunks]

    async def stop(self) -> None:
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task


async def first(wanted: Coroutine[Any, Any, None], task: "asyncio.Task[None]") -> None:
    """Wait for `wanted`; `task` is not to end before."""
    waiting = asyncio.ensure_future(wanted)
    await asyncio.wait([waiting, task], return_when=asyncio.FIRST_COMPLETED)
    if not waiting.done():
        waiting.cancel()
        task.result()
    await waiting


async def plane_of(node: NodeId, streams: int = 1, tls: TlsContexts | None = None) -> DataPlane:
    return await DataPlane.start(
        "127.0.0.1:0", RunId("run"), node, b"k" * 32, EmptyStore(), streams=streams, tls=tls
    )


@asynccontextmanager
async def fleet(n: int, streams: int = 1, tls: TlsContexts | None = None) -> AsyncIterator[list[DataPlane]]:
    planes = [await plane_of(name(i), streams, tls) for i in range(n)]
    try:
        yield planes
    finally:
        for plane in planes:
            await plane.close()


@asynccontextmanager
async def reducing(*members: Member) -> AsyncIterator[None]:
    try:
        yield
    finally:
        for member in members:
            await member.stop()


def plan_for(
    planes: Sequence[DataPlane],
    weights: Sequence[float] | None = None,
    owners: Sequence[int] | None = None,
    attempt: int = 1,
    round: int = 1,
    **rest: Any,
) -> Plan:
    weights = weights or [1.0] * len(planes)
    members = tuple(PlanMember(p.node, p.address, w, pin=p.pin) for p, w in zip(planes, weights, strict=True))
    owners = owners or [c % len(planes) for c in range(CHUNKS.count)]
    return Plan(Incarnation(1), Epoch(1), Round(round), attempt, members, tuple(owners), **rest)


def run(body: Coroutine[Any, Any, None], seconds: float = 60.0) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(seconds):
            await body
        assert asyncio.all_tasks() == {asyncio.current_task()}, "tasks are left"

    asyncio.run(bounded())


def survive(plan: Plan, gone: int, ledger: dict[int, SealReport], attempt: int = 2) -> Plan:
    """What the coordinator makes of a death, by what it had been told."""
    members = tuple(
        PlanMember(m.node, m.address, m.weight, gone=m.gone or i == gone) for i, m in enumerate(plan.members)
    )
    here = [i for i, m in enumerate(members) if not m.gone]
    owners, since = list(plan.owners), list(plan.since or [plan.attempt] * len(plan.owners))
    for c, owner in enumerate(plan.owners):
        if owner == gone:
            owners[c] = here[c % len(here)]
            since[c] = attempt
    lost = {c for c in plan.layered if owners[c] != plan.owners[c] or any(row[c] == gone for row in plan.relays)}
    for c in lost:
        since[c] = attempt
    kept = frozenset(ledger)
    plan = replace(plan, attempt=attempt, members=members, owners=tuple(owners), since=tuple(since), kept=kept)
    return replace(plan, layered=plan.layered - lost)


async def linked(plane: DataPlane, to: DataPlane) -> Link:
    """A link that the test speaks on."""
    link = await plane.dial(to.node, to.address)
    await frames.send(link, frames.unfenced(FrameKind.LINK))
    return link
