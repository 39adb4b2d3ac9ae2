"""Links between peers: what is posted arrives, urgent first, in its own round, and links stay for the next one."""

import asyncio
from functools import partial

import pytest
from linked_pair import DEADLINE, LARGE, A, B, Notes, expect, meet, pair, part, post, run, until

from atoll.comm.ids import NodeId
from atoll.comm.plan import PlanMember
from atoll.comm.transport import frames
from atoll.comm.transport import peer_links as module
from atoll.comm.transport.connection import Link, LinkBroken
from atoll.comm.transport.frames import FrameKind
from atoll.comm.transport.link_policy import LinkTimes
from atoll.comm.transport.send_queue import SendQueue


def test_what_is_posted_goes_over_all_links_to_the_peer() -> None:
    async def body() -> None:
        async with pair(streams=3) as (a, b):
            payloads = {c: bytes([c]) * 1_000_000 for c in range(30)}
            here, there = Notes(1, payloads), Notes()
            meet(a, b, here, there)
            await until(lambda: len(a.peers.links()) == len(b.peers.links()) == 3)
            post(a, B, *payloads)
            await there.until(lambda: len(there.arrivals) == 30)
            assert {c: data for _, c, data in there.arrivals} == payloads
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
            await there.until(lambda: len(there.arrivals) == 2)
            assert there.arrivals == [(FrameKind.SEALED, 0, b"zero"), (FrameKind.SEALED, 1, b"one")]

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


def test_links_stay_for_the_next_round() -> None:
    async def body() -> None:
        async with pair(streams=2) as (a, b):
            before: list[tuple[NodeId, Link]] = []
            for number in range(1, 5):
                here, there = Notes(number, {0: b"zero"}), Notes(number, {1: b"one"})
                meet(a, b, here, there)
                post(a, B, 0)
                post(b, A, 1)
                await there.until(partial(bool, there.arrivals))
                await here.until(partial(bool, here.arrivals))
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
            assert not there.headers
            b.peers.end(there)
            late = Notes(2)
            b.peers.begin(late)
            await late.until(lambda: bool(late.arrivals))
            assert late.arrivals == [(FrameKind.SEALED, 0, b"zero")]

    run(body())


def test_a_frame_of_a_round_that_does_not_begin_in_time_breaks_its_link_and_the_sender_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "ROUND_BEGINS_WITHIN", 0.02)
    monkeypatch.setattr("atoll.comm.transport.link_policy.LINK_TIMES", LinkTimes(redial=(0.001,)))

    async def body() -> None:
        async with pair() as (a, b):
            here, there = Notes(9, {0: b"zero"}), Notes(1)
            meet(a, b, here, there)
            post(a, B, 0)
            await here.until(lambda: here.rejoined == [B])
            assert not there.headers

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
            await there.until(lambda: bool(there.arrivals))
            assert there.headers == [(A, FrameKind.SEALED, 1)] and b.peers.links()[0][1] is link

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
            assert not b.peers.links() and not there.arrivals
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
            await there.until(lambda: bool(there.arrivals))
            heard = b.peers.heard(A)
            assert heard is not None and began <= heard <= asyncio.get_running_loop().time()
            async with asyncio.timeout(DEADLINE):
                while not a.peers.round_trips():  # until the kernel has measured one
                    await asyncio.sleep(0.01)
            assert set(a.peers.round_trips()) == {B}

    run(body())
