"""Links that break or cannot be made: they are replaced, at growing intervals, and nothing is lost."""

import asyncio
import socket

import pytest
from linked_pair import LARGE, A, B, Notes, expect, meet, pair, part, post, run, until

from atoll.comm.ids import NodeId, Pin
from atoll.comm.plan import PlanMember
from atoll.comm.transport import frames
from atoll.comm.transport.connection import ByteCounter, Link, LinkBroken
from atoll.comm.transport.frames import FrameKind
from atoll.comm.transport.link_policy import LinkTimes
from atoll.comm.transport.peer import Peer
from atoll.comm.transport.peer_links import PeerLinks
from atoll.comm.transport.send_queue import SendQueue


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
            post(a, B, *(c for c in payloads if c not in {c for _, c, _ in there.arrivals}))
            await there.until(lambda: {c for _, c, _ in there.arrivals} == set(payloads))
            assert all(data == payloads[c] for _, c, data in there.arrivals)
            await until(lambda: len(a.peers.links()) == streams)

    run(body())


def test_whose_link_brings_what_nobody_can_have_sent_is_told() -> None:
    async def body() -> None:
        async with pair() as (a, b):
            here, there = Notes(), Notes(1, {0: b"one"})
            meet(a, b, here, there)
            await until(lambda: bool(a.peers.links()) and bool(b.peers.links()))
            await b.peers.links()[0][1].write(b"\xff" * frames.HEADER.size)
            await until(lambda: bool(here.spoilers))
            assert here.spoilers == [B] and there.spoilers == []
            await here.until(lambda: bool(here.rejoined))
            post(b, A, 0)
            await here.until(lambda: bool(here.arrivals))

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
            await there.until(lambda: len(there.arrivals) == 2)
            assert [c for _, c, _ in there.arrivals] == [0, 1] and there.arrivals[0][2] == LARGE

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
            await there.until(lambda: bool(there.arrivals))
            assert there.arrivals == [(FrameKind.SEALED, 1, b"one")]
            part(a, b, here, there)

    run(body())


def test_the_other_side_dials_when_nothing_comes_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.comm.transport.link_policy.LINK_TIMES", LinkTimes(other_side=0.02))

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
            await there.until(lambda: bool(there.arrivals))
            assert any("connection refused" in s for s in here.sentences)

    run(body())


def test_nobody_dials_a_leaf_and_one_that_does_not_come_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.comm.transport.link_policy.LINK_TIMES", LinkTimes(leaf=0.02))

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
