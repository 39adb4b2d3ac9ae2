import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
import pytest

from atoll.comm.byte_view import U8
from atoll.comm.ids import Epoch, Incarnation, NodeId, Pin, Round, RunId
from atoll.comm.plan import Fence, PlanMember
from atoll.comm.transport import frames, link_policy
from atoll.comm.transport import peer_links as module
from atoll.comm.transport.connection import ByteCounter, Link, LinkBroken
from atoll.comm.transport.data_plane import DataPlane
from atoll.comm.transport.fetch_client import FetchItem
from atoll.comm.transport.frames import FrameKind, Header
from atoll.comm.transport.link_policy import LinkTimes
from atoll.comm.transport.peer import Peer
from atoll.comm.transport.peer_links import PeerLinks
from atoll.comm.transport.reassembly import MAX_FORMS
from atoll.comm.transport.send_queue import QueuedFrame, SendQueue

DEADLINE = 60.0  # seconds; nothing here takes longer than a moment on an idle machine
A, B = NodeId("a"), NodeId("b")
LARGE = bytes(range(256)) * (1 << 15)  # 8 MiB: more than the buffers of a connection hold
NOISE = os.urandom(1 << 20)


class Empty:
    async def sealed(self, round: Round, chunk: int) -> None: ...
    async def state(self, round: Round, chunk: int) -> None: ...
    async def digests(self, round: Round) -> None: ...


class Notes:
    """A reduce that sends what `payloads` says of a chunk and notes what happens to it."""

    def __init__(self, round: int = 1, payloads: dict[int, bytes] | None = None) -> None:
        self.round = Round(round)
        self.payloads = payloads or {}
        self.seen: list[tuple[NodeId, FrameKind, int]] = []  # headers
        self.came: list[tuple[FrameKind, int, bytes]] = []
        self.rejoined: list[NodeId] = []
        self.sentences: list[str] = []
        self.changed = asyncio.Event()

    async def buffer_for(self, node: NodeId, header: Header) -> U8 | None:
        self.seen.append((node, header.kind, header.chunk))
        if header.length > 1 << 24:
            raise LinkBroken("too long for this reduce")
        return np.empty(header.length, np.uint8)

    def arrived(self, node: NodeId, header: Header, payload: U8) -> None:
        self.came.append((header.kind, header.chunk, payload.tobytes()))
        self.changed.set()

    async def frame(self, node: NodeId, queued: QueuedFrame) -> tuple[Header, memoryview] | None:
        kind, c, since = queued
        fence = Fence(Incarnation(1), Epoch(1), self.round, since)
        payload = self.payloads.get(c)
        if payload is None:
            return None
        return Header(kind, fence, c, len(payload)), memoryview(payload)

    def joined(self, node: NodeId) -> None:
        self.rejoined.append(node)
        self.changed.set()

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
    before = len(os.listdir("/proc/self/fd"))

    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE):
            await body
        assert asyncio.all_tasks() == {asyncio.current_task()}, "tasks are left"

    asyncio.run(bounded())
    assert len(os.listdir("/proc/self/fd")) == before, "sockets are left"


async def plane_of(node: NodeId, streams: int = 1, key: bytes = b"k" * 32) -> DataPlane:
    return await DataPlane.start("127.0.0.1:0", RunId("run"), node, key, Empty(), streams=streams)


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


def test_what_is_posted_goes_over_all_links_to_the_peer() -> None:
    async def body() -> None:
        async with pair(streams=3) as (a, b):
            payloads = {c: bytes([c]) * 1_000_000 for c in range(30)}
            here, there = Notes(1, payloads), Notes()
            meet(a, b, here, there)
            await until(lambda: len(a.peers.links()) == len(b.peers.links()) == 3)
            post(a, B, *payloads)
            await there.until(lambda: len(there.came) == 30)
            assert {c: data for _, c, data in there.came} == payloads
            assert all(link.moved > 1_000_000 for _, link in a.peers.links())

    run(body())


def test_what_is_posted_twice_before_its_turn_is_sent_once() -> None:
    async def body() -> None:
        async with pair() as (a, b):
            here, there = Notes(1, {0: b"zero", 1: b"one"}), Notes()
            a.peers.begin(here)
            post(a, B, 0, 0, 1, 0)
            b.peers.begin(there)
            expect(a, b, primary=True)
            expect(b, a, primary=False)
            await there.until(lambda: len(there.came) == 2)
            assert there.came == [(FrameKind.SEALED, 0, b"zero"), (FrameKind.SEALED, 1, b"one")]

    run(body())


def test_the_urgent_goes_first_and_contributions_before_results() -> None:
    async def body() -> None:
        queue = SendQueue()
        order = [FrameKind.SEALED, FrameKind.CONTRIBUTION, FrameKind.MERGED, FrameKind.SEALED, FrameKind.WANT]
        for c, kind in enumerate(order):
            queue.post((kind, c, 1))
        queue.put_back((FrameKind.SEALED, 3, 1))
        taken = [await queue.next() for _ in order]
        assert [w[1] for w in taken if isinstance(w, tuple)] == [2, 4, 1, 3, 0]

    run(body())


def test_a_link_that_is_cancelled_while_it_waits_leaves_its_turn_to_another() -> None:
    async def body() -> None:
        queue = SendQueue()
        first, second = (asyncio.create_task(queue.next()) for _ in range(2))
        await asyncio.sleep(0)
        queue.post((FrameKind.SEALED, 0, 1))
        first.cancel()
        assert await second == (FrameKind.SEALED, 0, 1)

    run(body())


@pytest.mark.parametrize("side", [A, B])
@pytest.mark.parametrize("streams", [1, 3])
def test_a_link_that_breaks_in_the_middle_of_a_frame_is_replaced_and_nothing_is_lost(
    side: NodeId, streams: int
) -> None:
    async def body() -> None:
        async with pair(streams) as (a, b):
            payloads = {c: LARGE[c:] for c in range(4)}
            here, there = Notes(1, payloads), Notes()
            meet(a, b, here, there)
            await until(lambda: len(a.peers.links()) == len(b.peers.links()) == streams)
            post(a, B, *payloads)
            await there.until(lambda: True)
            broken = (a if side == A else b).peers.links()[0][1]
            await until(lambda: broken.moved > 500_000)
            broken.close()
            # What the sender's kernel had taken is lost: that it is asked for again is the reduce's affair.
            await there.until(lambda: bool(there.rejoined))
            await here.until(lambda: bool(here.rejoined))
            post(a, B, *(c for c in payloads if c not in {c for _, c, _ in there.came}))
            await there.until(lambda: {c for _, c, _ in there.came} == set(payloads))
            assert all(data == payloads[c] for _, c, data in there.came)
            await until(lambda: len(a.peers.links()) == streams)

    run(body())


def test_what_a_link_could_not_send_is_the_next_that_is_sent() -> None:
    async def body() -> None:
        async with pair() as (a, b):
            here, there = Notes(1, {0: LARGE, 1: b"one"}), Notes()
            meet(a, b, here, there)
            await until(lambda: bool(a.peers.links()))
            post(a, B, 0, 1)
            broken = a.peers.links()[0][1]
            await until(lambda: broken.moved > 500_000)
            broken.close()
            await there.until(lambda: len(there.came) == 2)
            assert [c for _, c, _ in there.came] == [0, 1] and there.came[0][2] == LARGE

    run(body())


def test_what_a_link_could_not_send_of_an_old_round_is_not_sent_of_the_next() -> None:
    """A chunk would go where nobody waits for it; that one is merged, or is not here, would be believed."""

    async def body() -> None:
        async with pair() as (a, b):
            late, here, there = Notes(1, {0: LARGE}), Notes(2, {0: b"zero", 1: b"one"}), Notes(2)
            a.peers.begin(late)
            expect(a, b, primary=True)
            post(a, B, 0)
            await until(lambda: a.bytes_up > 1 << 16)  # and there nobody reads it
            a.peers.end(late)
            a.peers.begin(here)
            a.peers.links()[0][1].close()
            await until(lambda: not a.peers.links())
            expect(a, b, primary=True)
            post(a, B, 1)
            b.peers.begin(there)
            await there.until(lambda: bool(there.came))
            assert there.came == [(FrameKind.SEALED, 1, b"one")]
            part(a, b, here, there)

    run(body())


def test_the_other_side_dials_when_nothing_comes_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_policy, "LINK_TIMES", LinkTimes(other_side=0.02))

    async def body() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            nowhere = frames.format_address(*server.getsockname())
        async with pair() as (a, b):
            here, there = Notes(1, {0: b"zero"}), Notes()
            a.peers.begin(here)
            b.peers.begin(there)
            expect(a, b, primary=True, address=nowhere)
            expect(b, a, primary=False)
            post(a, B, 0)
            await there.until(lambda: bool(there.came))
            assert any("connection refused" in s for s in here.sentences)

    run(body())


def test_nobody_dials_a_leaf_and_one_that_does_not_come_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_policy, "LINK_TIMES", LinkTimes(leaf=0.02))

    async def body() -> None:
        async with pair() as (a, b):
            here = Notes()
            a.peers.begin(here)
            expect(a, b, primary=False, leaf=True)
            await here.until(lambda: bool(here.sentences))
            assert here.sentences == ["it is a leaf and did not dial within 0.02 s"] and not b._accepted
            a.peers.end(here)

    run(body())


class Pauses:
    """Instead of the pauses between two tries: notes how long they would be."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds: list[float] = []
        monkeypatch.setattr(PeerLinks, "_pause", self.pause)

    async def pause(self, peer: Peer, seconds: float) -> None:
        self.seconds.append(seconds)
        await asyncio.sleep(0)


def test_tries_in_vain_come_at_growing_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = Pauses(monkeypatch)

    async def body() -> None:
        async def nobody(node: NodeId, address: str, pin: Pin) -> Link:
            raise LinkBroken("nobody is there")

        peers, here = PeerLinks(nobody, ByteCounter()), Notes()
        peers.begin(here)
        peers.expect([(PlanMember(B, "b:1", 1.0), True)])
        await until(lambda: len(pauses.seconds) >= 7)
        assert pauses.seconds[:7] == [0.2, 0.5, 1.0, 2.0, 5.0, 5.0, 5.0]
        assert set(here.sentences) == {"nobody is there"}
        peers.expect([(PlanMember(B, "b:2", 1.0), True)])  # it is another process
        count = len(pauses.seconds)
        await until(lambda: len(pauses.seconds) > count)
        assert pauses.seconds[count] == 0.2
        peers.end(here)
        await peers.close()

    run(body())


def test_a_refusal_is_a_try_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = Pauses(monkeypatch)

    async def body() -> None:
        async with pair(key_of_b=b"x" * 32) as (a, b):
            here = Notes()
            a.peers.begin(here)
            expect(a, b, primary=True)
            await until(lambda: len(pauses.seconds) >= 3)
            assert pauses.seconds[:3] == [0.2, 0.5, 1.0]
            a.peers.end(here)

    run(body())


def test_a_link_that_was_dialled_when_the_dial_of_another_is_given_up_is_closed() -> None:
    async def body() -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        links = [Link(ours, ByteCounter())]

        async def dial(node: NodeId, address: str, pin: Pin) -> Link:
            if not links:
                await asyncio.Event().wait()
            return links.pop()

        link, peers, talk = links[0], PeerLinks(dial, ByteCounter(), fixed_streams=2), Notes()
        peers.begin(talk)
        peers.expect([(PlanMember(B, "there:7", 1.0), True)])
        await until(lambda: not links)
        peers.end(talk)
        await until(lambda: link._closed)
        theirs.close()

    run(body())


def test_links_stay_for_the_next_round() -> None:
    async def body() -> None:
        async with pair(streams=2) as (a, b):
            before: list[tuple[NodeId, Link]] = []
            for number in range(1, 5):
                here, there = Notes(number, {0: b"zero"}), Notes(number, {1: b"one"})
                meet(a, b, here, there)
                post(a, B, 0)
                post(b, A, 1)
                await there.until(partial(bool, there.came))
                await here.until(partial(bool, here.came))
                await until(lambda: len(a.peers.links()) == 2)
                assert before in ([], a.peers.links())
                before = a.peers.links()
                part(a, b, here, there)

    run(body())


def test_a_frame_of_a_round_to_come_waits_until_it_begins() -> None:
    async def body() -> None:
        async with pair() as (a, b):
            here, there = Notes(1), Notes(1)
            meet(a, b, here, there)
            await until(lambda: bool(a.peers.links()))
            a.peers.end(here)
            early = Notes(2, {0: b"zero"})
            a.peers.begin(early)
            expect(a, b, primary=True)
            post(a, B, 0)
            await until(lambda: b.bytes_down >= a.bytes_up)
            assert not there.seen
            b.peers.end(there)
            late = Notes(2)
            b.peers.begin(late)
            await late.until(lambda: bool(late.came))
            assert late.came == [(FrameKind.SEALED, 0, b"zero")]

    run(body())


def test_a_frame_of_a_round_that_does_not_begin_in_time_breaks_its_link_and_the_sender_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "ROUND_BEGINS_WITHIN", 0.02)
    monkeypatch.setattr(link_policy, "LINK_TIMES", LinkTimes(redial=(0.001,)))

    async def body() -> None:
        async with pair() as (a, b):
            here, there = Notes(9, {0: b"zero"}), Notes(1)
            meet(a, b, here, there)
            post(a, B, 0)
            await here.until(lambda: here.rejoined == [B])
            assert not there.seen

    run(body())


def test_frames_of_an_old_round_are_skipped_and_the_link_stays() -> None:
    async def body() -> None:
        async with pair() as (a, b):
            late, there = Notes(1, {0: LARGE}), Notes(2)
            meet(a, b, late, there)
            post(a, B, 0)
            await until(lambda: a.bytes_up > len(LARGE) and b.bytes_down >= a.bytes_up)
            link = b.peers.links()[0][1]
            a.peers.end(late)
            here = Notes(2, {1: b"one"})
            a.peers.begin(here)
            post(a, B, 1)
            await there.until(lambda: bool(there.came))
            assert there.seen == [(A, FrameKind.SEALED, 1)] and b.peers.links()[0][1] is link

    run(body())


@pytest.mark.parametrize("round", [1, 2])
def test_a_frame_that_is_too_long_breaks_its_link_before_memory_is_taken(round: int) -> None:
    async def body() -> None:
        async with pair() as (a, b):
            there = Notes(2)
            b.peers.begin(there)
            link = await a.dial(B, b.address)
            await frames.send(link, frames.unfenced(FrameKind.LINK))
            await link.write(frames.unfenced(FrameKind.SEALED, round, 0, 0xFFFFFFFF).pack())
            with pytest.raises(LinkBroken):
                await link.read(1, 5.0)
            assert not b.peers.links() and not there.came
            link.close()
            b.peers.end(there)

    run(body())


def test_links_to_members_that_are_gone_are_closed() -> None:
    async def body() -> None:
        async with pair() as (a, b):
            here, there = Notes(), Notes()
            meet(a, b, here, there)
            await until(lambda: bool(a.peers.links()) and bool(b.peers.links()))
            expect(a, primary=True)
            expect(b, primary=True)
            await until(lambda: not a.peers.links() and not b.peers.links())
            assert a.peers.heard(B) is None

    run(body())


def test_of_nodes_that_are_gone_nothing_is_kept_from_round_to_round() -> None:
    """A run of months meets thousands."""

    async def body() -> None:
        async with pair() as (a, b):
            for number in range(1, 4):
                here, there = Notes(number), Notes(number)
                meet(a, b, here, there)
                gone = PlanMember(NodeId(f"gone {number}"), "127.0.0.1:1", 1.0)
                a.peers.expect([(PlanMember(B, b.address, 1.0), True), (gone, True)])
                await until(lambda: bool(a.peers.links()))
                part(a, b, here, there)
            a.peers.begin(here)
            assert set(a.peers._peers) == {B}
            a.peers.end(here)

    run(body())


def test_it_is_known_when_bytes_last_came_and_how_far_a_peer_is() -> None:
    async def body() -> None:
        async with pair() as (a, b):
            here, there = Notes(1, {0: b"zero"}), Notes()
            began = asyncio.get_running_loop().time()
            assert b.peers.heard(A) is None
            meet(a, b, here, there)
            post(a, B, 0)
            await there.until(lambda: bool(there.came))
            heard = b.peers.heard(A)
            assert heard is not None and began <= heard <= asyncio.get_running_loop().time()
            async with asyncio.timeout(DEADLINE):
                while not a.peers.round_trips():  # until the kernel has measured one
                    await asyncio.sleep(0.01)
            assert set(a.peers.round_trips()) == {B}

    run(body())


# Pieces: over a long path several links carry one payload.


def in_pieces(planes: Sequence[DataPlane], size: int) -> None:
    for plane in planes:
        for peer in plane.peers._peers.values():
            peer.queue.piece_size = size


def test_a_payload_in_pieces_travels_over_all_links_and_arrives_whole() -> None:
    async def body() -> None:
        async with pair(streams=4) as (a, b):
            payloads = {0: LARGE, 1: LARGE[1:], 2: b"short"}
            here, there = Notes(1, payloads), Notes()
            meet(a, b, here, there)
            await until(lambda: len(a.peers.links()) == len(b.peers.links()) == 4)
            in_pieces([a, b], 1 << 16)
            post(a, B, *payloads)
            await there.until(lambda: len(there.came) == 3)
            assert {c: data for _, c, data in there.came} == payloads
            assert all(link.moved > 1 << 16 for _, link in a.peers.links())
            assert a.bytes_up < 2 * len(LARGE) * 1.01, "a piece was sent twice"

    run(body())


@pytest.mark.parametrize("then", [0, 3 << 15, 1 << 16])
def test_pieces_that_were_lost_with_a_link_come_again_even_if_they_are_cut_otherwise(then: int) -> None:
    async def body() -> None:
        async with pair(streams=2) as (a, b):
            here, there = Notes(1, {0: LARGE}), Notes()
            meet(a, b, here, there)
            await until(lambda: len(a.peers.links()) == len(b.peers.links()) == 2)
            in_pieces([a, b], 1 << 16)
            post(a, B, 0)
            broken = a.peers.links()[0][1]
            await until(lambda: broken.moved > 1 << 20)
            broken.close()
            await there.until(lambda: bool(there.rejoined))
            in_pieces([a, b], then)
            while not there.came:
                post(a, B, 0)
                await until(lambda: a.peers.peer(B).queue.empty)
                await asyncio.sleep(0.001)
            assert all(data == LARGE for _, _, data in there.came)

    run(body())


def test_nobody_makes_a_node_take_memory_by_first_pieces_of_ever_other_lengths() -> None:
    async def body() -> None:
        async with pair() as (a, b):
            there = Notes(1)
            b.peers.begin(there)
            link = await a.dial(B, b.address)
            await frames.send(link, frames.unfenced(FrameKind.LINK))
            fence = Fence(Incarnation(1), Epoch(1), Round(1), 1)
            with pytest.raises(LinkBroken):
                for whole in range(2 * len(NOISE), 2 * len(NOISE) + 100):
                    header = Header(FrameKind.SEALED, fence, 0, len(NOISE), packed=True, whole=whole)
                    await frames.send(link, header, NOISE)
                await link.read(1, 5.0)
            await until(lambda: not b.peers.links())
            assert len(b.peers._reassembly) == MAX_FORMS
            link.close()
            b.peers.end(there)

    run(body())


@pytest.mark.parametrize(
    ("kind", "length", "offset", "whole"),
    [
        (FrameKind.SEALED, 1, 0, 1 << 20),
        (FrameKind.SEALED, 0, 1 << 19, 1 << 20),
        (FrameKind.SEALED, 0, 1 << 20, 1 << 20),
        (FrameKind.RESYNC, 1, 2, 3),
        (FrameKind.RESYNC, 1 << 16, 0, 1 << 20),
    ],
)
def test_a_piece_that_none_would_cut_is_refused(kind: FrameKind, length: int, offset: int, whole: int) -> None:
    """A million pieces of a byte would take a hundred times the memory of their payload, and look for each other
    a million times; every attempt and chunk that a RESYNC names would be a payload of its own."""

    async def body() -> None:
        async with pair() as (a, b):
            there = Notes(1)
            b.peers.begin(there)
            link = await a.dial(B, b.address)
            await frames.send(link, frames.unfenced(FrameKind.LINK))
            fence = Fence(Incarnation(1), Epoch(1), Round(1), 1)
            with suppress(LinkBroken):
                await link.write(Header(kind, fence, 7, length, offset=offset, whole=whole).pack() + bytes(length))
            with pytest.raises(LinkBroken):
                await link.read(1, 5.0)
            assert not there.seen and not b.peers._reassembly
            await until(lambda: not b.peers.links())
            link.close()
            b.peers.end(there)

    run(body())


class Full(Empty):
    async def state(self, round: Round, chunk: int) -> bytes:  # type: ignore[override]
        return NOISE


def test_a_fetch_gives_way_to_a_reduce_and_goes_on_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MIN_SPARE_RATE", 1000.0)  # bytes a second: hours

    async def body() -> None:
        start = partial(DataPlane.start, "127.0.0.1:0", RunId("run"))
        a, b = await start(A, b"k" * 32, Full()), await start(B, b"k" * 32, Full())
        here = Notes()
        a.peers.begin(here)
        slow = asyncio.create_task(b.fetch(A, a.address, FetchItem.STATE, Round(1), 0, len(NOISE)))
        for _ in range(20):
            assert await a.fetch(B, b.address, FetchItem.STATE, Round(1), 0, len(NOISE)) == NOISE
        assert not slow.done()
        a.peers.end(here)
        assert await slow == NOISE
        await a.close()
        await b.close()

    run(body())
