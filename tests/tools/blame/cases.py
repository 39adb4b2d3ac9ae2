"""What is made to go wrong, by kind: each case does it to a `Fleet`, says who is to blame, and undoes it.

A case is a generator: it yields once, when the harm is done, with the names of the culprit and its peer; what
follows undoes it. Where there are several ways to do it, the repetition's number says which.
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from blame.fleet import DISK, NAMES, Fleet, duty, memory_limit
from e2e.harness import flip, until

from atoll.coordinator.causes.explanation import COORDINATOR, DATA_STORE, Kind

ADA, BO, CY = NAMES
NUMBER = {name: number for number, name in enumerate(NAMES, 1)}  # in the network


@dataclass(frozen=True)
class Culprit:
    """Who is to be named."""

    name: str
    peer: str | None = ""  # None: any other


Harm = Iterator[Culprit]
Case = Callable[[Fleet, int], Harm]


def dead(fleet: Fleet, repetition: int) -> Harm:
    """A whole node is killed; it comes back on its disk."""
    fleet.kill(BO)
    yield Culprit(BO)
    fleet.nodes[BO].wait()
    fleet.add(BO)


def hung_trainer(fleet: Fleet, repetition: int) -> Harm:
    """A trainer stands still under a living daemon."""
    ranks = fleet.ranks(BO)
    for rank in ranks:
        rank.suspend()
    yield Culprit(BO)
    for rank in ranks:
        rank.resume()


def slow_compute(fleet: Fleet, repetition: int) -> Harm:
    """A trainer gets its processor for a fifth of the time."""
    with duty(fleet.ranks(CY), 0.4, 0.1):
        yield Culprit(CY)


def slow_link(fleet: Fleet, repetition: int) -> Harm:
    """A node's link up carries a thirtieth; or its link down; or the path from one to another."""
    match repetition % 3:
        case 0:
            fleet.wan.set(NUMBER[BO], up=3)
            yield Culprit(BO, None)
            fleet.wan.set(NUMBER[BO], up=100)
        case 1:
            fleet.wan.pair(NUMBER[ADA], NUMBER[CY], rate=2)
            yield Culprit(ADA, CY)
            fleet.wan.pair(NUMBER[ADA], NUMBER[CY], rate=0)
        case _:
            fleet.wan.set(NUMBER[CY], down=3)
            yield Culprit(CY, None)
            fleet.wan.set(NUMBER[CY], down=100)


def limited(fleet: Fleet, repetition: int) -> Harm:
    """A node's owner lets it send, or take in, a hundredth of what its link carries."""
    way = ("upload", "download")[repetition % 2]
    fleet.limit(CY, f"{way}=1")
    yield Culprit(CY)
    fleet.limit(CY, f"{way}=")


def one_way_partition(fleet: Fleet, repetition: int) -> Harm:
    """What one node sends to another is lost, and nothing else."""
    a, b = ((ADA, BO), (BO, ADA), (CY, BO))[repetition % 3]
    fleet.wan.pair(NUMBER[a], NUMBER[b], cut=1)
    yield Culprit(a, b)
    fleet.wan.pair(NUMBER[a], NUMBER[b], cut=0)


def packet_loss(fleet: Fleet, repetition: int) -> Harm:
    """A node's link up loses three segments in ten."""
    fleet.wan.set(NUMBER[BO], loss=30)
    yield Culprit(BO, None)
    fleet.wan.set(NUMBER[BO], loss=0)


def diverged_state(fleet: Fleet, repetition: int) -> Harm:
    """A bit flips in a node's memory: of one that keeps nothing on disk, or of one that can mend it."""
    name = (ADA, BO)[repetition % 2]
    flip(fleet, name, "anchor", 21, repetition)
    yield Culprit(name)


def corrupt_bytes(fleet: Fleet, repetition: int) -> Harm:
    """On one path bytes are changed, so that no checksum tells."""
    fleet.wan.pair(NUMBER[ADA], NUMBER[BO], spoil=3)
    yield Culprit(ADA, BO)
    fleet.wan.pair(NUMBER[ADA], NUMBER[BO], spoil=0)


def disk_full(fleet: Fleet, repetition: int) -> Harm:
    """A node's disk is filled by something else."""
    ballast = fleet.disk / "ballast"
    with open(ballast, "wb", buffering=0) as file:
        try:
            for _ in range(int(DISK.removesuffix("m")) << 4):
                file.write(bytes(1 << 16))
        except OSError:
            pass
    yield Culprit(CY)
    ballast.unlink()


def clock(fleet: Fleet, repetition: int) -> Harm:
    """A node's clock is set an hour ahead."""
    fleet.clock_flag.touch()
    yield Culprit(BO)
    fleet.clock_flag.unlink()


def out_of_memory(fleet: Fleet, repetition: int) -> Harm:
    """The kernel ends a trainer for want of memory in its control group."""
    with memory_limit(fleet.ranks(BO), 1 << 16):
        yield Culprit(BO)


def slow_data_store(fleet: Fleet, repetition: int) -> Harm:
    """The store takes its time with each answer: to one node, or to all."""
    hosts = [fleet.wan.host(NUMBER[name]) for name in NAMES]
    fleet.store.delays |= dict.fromkeys(hosts[1:2] if repetition % 2 == 0 else hosts, 4.0)
    yield Culprit(BO if repetition % 2 == 0 else DATA_STORE)
    fleet.store.delays.clear()


def coordinator_restarted(fleet: Fleet, repetition: int) -> Harm:
    """The coordinator is killed, and started again."""
    fleet.coordinator.send_signal(signal.SIGKILL)
    fleet.coordinator.wait()
    fleet.restart()
    until("the coordinator", fleet.run, 60)
    yield Culprit(COORDINATOR)


CASES: dict[Kind, Case] = {
    Kind.CLOCK: clock,
    Kind.DISK_FULL: disk_full,
    Kind.SLOW_COMPUTE: slow_compute,
    Kind.SLOW_LINK: slow_link,
    Kind.LIMITED: limited,
    Kind.PACKET_LOSS: packet_loss,
    Kind.SLOW_DATA_STORE: slow_data_store,
    Kind.HUNG_TRAINER: hung_trainer,
    Kind.COORDINATOR_RESTARTED: coordinator_restarted,
    Kind.DIVERGED_STATE: diverged_state,
    Kind.CORRUPT_BYTES: corrupt_bytes,
    Kind.OUT_OF_MEMORY: out_of_memory,
    Kind.ONE_WAY_PARTITION: one_way_partition,
    Kind.DEAD: dead,
}


@contextmanager
def harmed(fleet: Fleet, kind: Kind, repetition: int) -> Iterator[Culprit]:
    """A fleet in which it has gone wrong, while the context lasts."""
    harm = CASES[kind](fleet, repetition)
    try:
        yield next(harm)
    finally:
        for _ in harm:
            pass
