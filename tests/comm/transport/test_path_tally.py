"""What is told of a path follows from the kernel's counters of its connections."""

import asyncio
import socket

from atoll.comm.ids import NodeId, Round
from atoll.comm.transport.connection import ByteCounter, Link, PathStats
from atoll.comm.transport.path_tally import ROUNDS, PathMove, PathTallies, PathTally

A = NodeId("n1")
IDLE = PathMove(0.5, 0, 0, 0, 0, 0, 0.0, False, 0.02, 0.02)


def move(**changes: float) -> PathMove:
    return PathMove(**({name: getattr(IDLE, name) for name in IDLE.__slots__} | changes))


def tally(*samples: list[PathMove]) -> PathTally:
    found = PathTally()
    for k, moves in enumerate(samples):
        found.add(10.0 + k / 2, moves)
    return found


def test_bytes_and_segments_add_up_over_connections_and_seconds_do_not() -> None:
    one = move(acked=1000, received=10, sent=3, resent=1, busy=0.4, flying=True, smoothed=0.05)
    found = tally([one, one], [one, move()])
    assert (found.sent, found.received, found.segments, found.resent) == (3000, 30, 9, 3)
    assert found.busy == 0.8
    assert found.rtt == 0.02 and abs(found.queue - 0.03) < 1e-9


def test_an_idle_path_is_neither_mute_nor_deaf() -> None:
    assert (tally(*[[move()]] * 20).mute, tally(*[[move()]] * 20).deaf) == (0.0, 0.0)


def test_a_path_that_loses_all_it_is_given_is_mute_and_hears_the_other_side() -> None:
    flying = move(flying=True, heard=1)
    found = tally(*[[flying]] * 13)
    assert (found.mute, found.deaf) == (6.0, 0.0)


def test_a_path_by_which_nothing_comes_is_deaf() -> None:
    found = tally([move(flying=True, acked=10, heard=2)], *[[move(flying=True)]] * 12)
    assert (found.mute, found.deaf) == (6.0, 6.0)


def test_one_connection_of_several_that_goes_on_is_enough() -> None:
    stuck, going = move(flying=True), move(flying=True, acked=10, heard=1)
    assert tally(*[[stuck, going]] * 13).mute == 0.0


def test_acknowledgements_end_a_silence_and_begin_another() -> None:
    stuck, going = [move(flying=True)], [move(flying=True, acked=10, heard=1)]
    found = tally(*[stuck] * 5, going, *[stuck] * 3)
    assert found.mute == 2.0


class Connection:
    """Stands for a link: the tallies only tell one from another."""


def sample(acked: int, busy: float) -> PathStats:
    return PathStats(0.02, 0.02, acked, 0, 0.0, acked // 1000, 0, 0.0, 5, busy, True)


def test_a_round_has_what_its_samples_differ_by_and_the_rates_before_are_usual() -> None:
    tallies, link = PathTallies(), Connection()
    for k in range(1, 8):
        tallies.begin(Round(k))
        for step in range(3):
            stats = sample(k * 10**8 + step * 10**6, 100.0 * k + step * (0.1 if k < 7 else 1.0))
            tallies.add(float(step), A, link, stats)  # type: ignore[arg-type]
            tallies.end_sample(float(step))
    latest = tallies.rounds[Round(7)][A]
    assert latest.sent == 2 * 10**6 and abs(latest.rate - 1e6) < 1 and abs(tallies.usual[A] - 1e7) < 1e3
    assert len(tallies.rounds) == ROUNDS
    tallies.begin(Round(7))  # its next attempt's
    assert tallies.rounds[Round(7)][A].sent == 2 * 10**6


def test_the_kernel_tells_what_a_tally_needs() -> None:
    async def body() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            here = socket.create_connection(server.getsockname())
            there, _ = server.accept()
        here.setblocking(False)
        link = Link(here, ByteCounter())
        before = link.path()
        await link.write(bytes(100_000))
        there.recv(1)
        while link.path().flying:  # type: ignore[union-attr]
            there.recv(1 << 16)
            await asyncio.sleep(0)
        after = link.path()
        assert before is not None and after is not None
        assert not before.flying and after.acked - before.acked == 100_000
        assert after.heard > before.heard and after.busy >= before.busy  # the kernel counts in milliseconds
        link.close()
        there.close()

    asyncio.run(body())
