"""Caps on the bytes a second of a node, a link, or both."""

import asyncio
import socket
from collections.abc import Coroutine
from typing import Any

import pytest
from socket_pairs import DEADLINE, NOISE, between, run, tcp, unix

from atoll.comm.transport.connection import (
    CAPPED_PIECE_BYTES,
    MIN_CAPPED_PIECE_BYTES,
    ByteCounter,
    Link,
    RateLimiter,
)


class Clock:
    """A loop's time that passes by sleeping."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(asyncio, "get_running_loop", lambda: self)
        monkeypatch.setattr(asyncio, "sleep", self.sleep)

    def time(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


def spend(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run what never waits."""
    with pytest.raises(StopIteration):
        coroutine.send(None)


def test_a_cap_lets_its_rate_through_after_a_quarter_of_a_second_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, cap = Clock(monkeypatch), RateLimiter(1000.0)
    spend(cap.take(250))
    assert clock.now == 1000.0
    for _ in range(100):
        spend(cap.take(100))
    assert clock.now == pytest.approx(1010.0)
    clock.now += 60  # what was not used is not saved up
    spend(cap.take(250))
    assert clock.now == pytest.approx(1070.0)
    spend(cap.take(500))
    assert clock.now == pytest.approx(1070.5)


def test_a_cap_within_another_keeps_to_both(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    outer = RateLimiter(1000.0)
    inner = RateLimiter(0, within=outer)
    assert inner.limits and not RateLimiter(0, within=RateLimiter(0)).limits
    for _ in range(10):
        spend(inner.take(1000))
    assert clock.now == pytest.approx(1009.75)
    inner.change(100.0)
    for _ in range(10):
        spend(inner.take(100))
    assert clock.now == pytest.approx(1019.5, abs=0.25)


def test_what_waits_for_a_cap_is_let_through_when_the_cap_is_lifted() -> None:
    async def body() -> None:
        cap = RateLimiter(1.0)
        async with asyncio.timeout(DEADLINE), asyncio.TaskGroup() as group:
            waiting = [group.create_task(cap.take(1000)) for _ in range(3)]  # 3000 seconds
            await asyncio.sleep(0)
            cap.change(0)
        assert all(task.done() for task in waiting)

    asyncio.run(body())


def test_without_a_rate_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, cap = Clock(monkeypatch), RateLimiter(0)
    spend(cap.take(1 << 40))
    assert clock.now == 1000.0


@pytest.mark.parametrize("side", ["up", "down"])
@pytest.mark.parametrize("pair", [unix, tcp])
def test_a_capped_link_asks_for_every_byte_once_and_in_pieces(pair: Any, side: str) -> None:
    asked: list[int] = []

    class Counting(RateLimiter):
        async def take(self, size: int) -> None:
            asked.append(size)

    async def talk(here: Link, there: Link) -> None:
        source, sink = (here, there) if side == "up" else (there, here)
        source._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)  # it takes a piece in many parts
        sending = asyncio.create_task(source.write(b"head", NOISE))
        assert await sink.read(4 + len(NOISE)) == b"head" + NOISE
        await sending
        assert max(asked) <= CAPPED_PIECE_BYTES and sum(asked) == 4 + len(NOISE)

    caps = {side: Counting(1.0)}
    between(talk, pair, up=caps.get("up"), down=caps.get("down"))


def test_the_pieces_of_a_capped_link_suit_its_rate_and_that_of_what_it_is_within() -> None:
    """A quarter of a second's bytes pass at once: many pieces of them, so that what passes is even."""
    for rate, piece in ((1e4, MIN_CAPPED_PIECE_BYTES), (1e6, 50_000), (1e9, CAPPED_PIECE_BYTES)):
        assert RateLimiter(rate).piece == piece == RateLimiter(0, within=RateLimiter(rate)).piece
    assert RateLimiter(0).piece == CAPPED_PIECE_BYTES
    assert RateLimiter(1e9, within=RateLimiter(1e6)).piece == 50_000


def test_a_cap_that_is_adjusted_lets_nothing_through_that_waits() -> None:
    async def body() -> None:
        clock = asyncio.get_running_loop().time
        cap = RateLimiter(1e6, burst=0.0)
        await cap.take(1)
        began = clock()
        waiting = asyncio.create_task(cap.take(100_000))
        await asyncio.sleep(0)
        cap.adjust(1e9)
        await waiting
        assert clock() - began >= 0.09

    run(body())


def test_nothing_passes_while_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, cap = Clock(monkeypatch), RateLimiter(0)
    assert not cap.limits
    cap.room = lambda: 0 if clock.now < 1007.0 else 1e9
    assert cap.limits and RateLimiter(0, within=cap).limits
    spend(cap.take(1))
    assert 1007.0 <= clock.now < 1008.0
    before = clock.now
    spend(cap.take(10**9))
    assert clock.now == before


@pytest.mark.parametrize("side", ["up", "down"])
@pytest.mark.parametrize("pair", [unix, tcp])
def test_not_a_byte_more_passes_than_there_is_room_for_over_all_links_together(pair: Any, side: str) -> None:
    """Two links at a time, each of which could take all that is left, and none when it is gone."""
    budget, meter, limiter = CAPPED_PIECE_BYTES + 12_345, ByteCounter(), RateLimiter(0)

    def passed() -> int:
        return meter.up if side == "up" else meter.down

    limiter.room = lambda: budget - passed()

    async def body() -> None:
        links = [pair() for _ in range(2)]
        for end in (end for ends in links for end in ends):
            end.setblocking(False)
        mine = [Link(a, meter, *((limiter, None) if side == "up" else (None, limiter))) for a, _ in links]
        theirs = [Link(b, ByteCounter()) for _, b in links]
        sources, sinks = (mine, theirs) if side == "up" else (theirs, mine)
        work: list[asyncio.Task[Any]] = [asyncio.create_task(source.write(NOISE)) for source in sources]
        work += [asyncio.create_task(sink.read(len(NOISE))) for sink in sinks]
        async with asyncio.timeout(DEADLINE):
            while passed() < budget:
                await asyncio.sleep(0)
        for _ in range(100):
            await asyncio.sleep(0)
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        for link in (*mine, *theirs):
            link.close()

    run(body())
    assert passed() == budget
