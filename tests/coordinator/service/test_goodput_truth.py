"""The goodput meter against the truth: a node's life with everything that happens to one, told to the meter as the
coordinator would hear of it, late and in part. What is done to it is found in its bucket, to 95 % at least."""

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import pytest

from atoll.comm.ids import NodeId
from atoll.coordinator.service.goodput import BUCKETS, GoodputMeter
from atoll.node.daemon.phase_clock import PhaseClock

A = NodeId("n1")
PACE = 0.5  # seconds an inner step
COMPILING = 40.0  # seconds that a trainer's first inner step takes beyond
HEARTBEAT = 3.0  # seconds
SAVE = 1.0  # seconds between two saves of the meter
LATENCY = 0.2  # seconds that a message takes at most
LEASE = 20.0  # seconds of silence
LOSS = 0.02  # of heartbeats


@dataclass
class Stretch:
    """A stretch of the node's life."""

    begin: float
    end: float
    bucket: str  # that it belongs to, in truth
    phase: str  # that the node says it is in; empty: it is gone
    round: int
    step: int  # at its beginning
    moving: bool = False  # steps are taken


class Life:
    """A life that is made up, and what the coordinator hears of it."""

    def __init__(self, seed: int, rounds: int) -> None:
        self.rng, self.now, self.round, self.compiles = random.Random(seed), 0.0, 0, False
        self.stretches, self.open = list[Stretch](), list[Stretch]()
        self.told = 0, 0  # round and step, by the latest heartbeat
        self.events, self.outages = list[tuple[float, int, Callable[[float], None]]](), list[tuple[float, float]]()
        self.meter, self.saved = GoodputMeter(), b""
        self.at(0.0, lambda now: self.meter.enter(A, now))
        self.come_up()
        kinds = ("good", "left_out", "kill", "power", "late_kill", "pause", "outage", "trainer", "hang")
        for kind in self.rng.choices(kinds, weights=(6, *[1] * (len(kinds) - 1)), k=rounds):
            self.round += 1
            getattr(self, kind)()
            assert self.stretches[-1].end == self.now

    # What happens

    def at(self, when: float, what: Callable[[float], None]) -> None:
        heapq.heappush(self.events, (when, len(self.events), what))

    def spend(self, seconds: float, bucket: str, phase: str, step: int = 0, moving: bool = False) -> Stretch:
        stretch = Stretch(self.now, self.now + seconds, bucket, phase, self.round, step, moving)
        self.stretches.append(stretch)
        self.now = stretch.end
        return stretch

    def train(self, seconds: float, step: int = 0) -> int:
        """Inner steps for so long; returns the step that comes next."""
        if self.compiles:
            self.compiles = False
            self.open.append(self.spend(COMPILING, "lost", "inner"))
        self.open.append(self.spend(seconds, "lost", "inner", step, moving=True))
        return step + int(seconds / PACE)

    def contribute(self) -> None:
        k, carries = self.round, any(stretch.round < self.round for stretch in self.open)
        self.at(self.later(), lambda now: self.heard(now, lambda: self.meter.record_contribution(A, k, carries)))

    def commit(self, included: bool) -> None:
        k, parts = self.round, {A: 1.0} if included else {}
        self.at(self.later(), lambda now: self.meter.record_commit(k, parts, now))
        if included:
            for stretch in self.open:
                stretch.bucket = "inner"
            self.open = []

    def heard(self, now: float, what: Callable[[], None]) -> None:
        self.meter.record_sign(A, now)
        what()

    def later(self) -> float:
        return self.now + self.rng.random() * LATENCY

    def exchange(self, included: bool = True) -> None:
        self.contribute()
        self.spend(self.rng.uniform(0, 5), "waiting", "waiting")
        self.spend(self.rng.uniform(2, 10), "sync", "sync")
        self.commit(included)

    def come_up(self) -> None:
        self.compiles = True
        self.spend(self.rng.uniform(5, 15), "starting", "starting")
        self.spend(self.rng.uniform(2, 10), "recovering", "recovering")
        self.spend(self.rng.uniform(0, 20), "waiting", "waiting")

    def go_down(self, noticed: float) -> None:
        """Down from now on, which the coordinator decides upon after `noticed` seconds; then it is back."""
        self.open = []
        self.at(self.now + noticed, lambda now: self._gone(now))
        self.spend(noticed + self.rng.uniform(10, 200), "down", "")
        self.at(self.now, lambda now: self.meter.enter(A, now))
        self.come_up()

    def _gone(self, now: float) -> None:
        self.meter.record_departure(A, left=False, now=now)

    # The kinds of rounds

    def length(self) -> float:
        return self.rng.uniform(40, 80)

    def good(self) -> None:
        self.train(self.length())
        self.exchange()

    def left_out(self) -> None:
        self.train(self.length())
        self.exchange(included=False)

    def kill(self) -> None:
        """Its connection breaks at once, and it is out a little later."""
        self.train(self.length() * self.rng.uniform(0.2, 1))
        self.at(self.now, lambda now: self.meter.record_sign(A, now))
        self.go_down(2.0)

    def power(self) -> None:
        """Nothing is heard of it any more."""
        self.train(self.length() * self.rng.uniform(0.2, 1))
        self.go_down(LEASE)

    def late_kill(self) -> None:
        """It dies in an exchange that has its delta."""
        self.train(self.length())
        self.contribute()
        self.spend(3.0, "sync", "sync")
        self.at(self.now, lambda now: self.meter.record_sign(A, now))
        for stretch in self.open:
            stretch.bucket = "inner"
        k = self.round
        self.at(self.now + 4.0, lambda now: self.meter.record_commit(k, {A: 1.0}, now))
        self.go_down(2.0)

    def pause(self) -> None:
        self.train(self.length() / 2)
        self.exchange()
        self.spend(self.rng.uniform(20, 100), "paused", "paused")

    def outage(self) -> None:
        """The coordinator is killed, and comes up again with what it had saved."""
        step = self.train(self.length() / 2)
        begin, seconds = self.now, self.rng.uniform(10, 60)
        self.at(begin, self._restore)
        self.outages.append((begin, begin + seconds))
        step = self.train(seconds / 2, step)
        self.spend(seconds / 2, "waiting", "waiting", step)  # at the ceiling
        self.train(10.0, step)
        self.exchange()

    def _restore(self, now: float) -> None:
        self.meter = msgspec.json.decode(self.saved, type=GoodputMeter)

    def trainer(self) -> None:
        """Its trainer dies, and goes on from a copy. The steps before were about as long as each other."""
        if self.compiles:
            self.good()
            self.round += 1
        copied = self.rng.uniform(5, 30)
        step = self.train(copied)
        again = self.spend(self.rng.uniform(5, 30), "lost", "inner", step, moving=True)
        assert again.bucket == "lost"
        self.spend(8.0, "starting", "starting", step + int((again.end - again.begin) / PACE))
        self.compiles = True
        self.train(self.length(), step)
        self.exchange()

    def hang(self) -> None:
        step = self.train(self.length() / 2)
        self.spend(self.rng.uniform(20, 60), "waiting", "inner", step)
        self.train(self.length() / 2, step)
        self.exchange()

    # What is heard of it

    def tell(self) -> None:
        """Give the meter everything, in the order in which the coordinator hears it."""
        clock, sent = PhaseClock(0.0, "starting"), 0.0
        for stretch in self.stretches:
            if not stretch.phase:
                self.told, sent = (0, 0), stretch.end
                clock = PhaseClock(stretch.end, "starting")
                continue
            clock.enter(stretch.phase, stretch.begin)
            moments = [stretch.begin]
            while (sent := max(sent, stretch.begin) + HEARTBEAT) < stretch.end:
                moments.append(sent)
            sent = moments[-1]
            if stretch.moving:
                moments.append(stretch.begin + PACE)  # the first step is told at once
            for moment in sorted(m for m in moments if m < stretch.end):
                self._beat(clock, stretch, moment)
        for k in range(int(self.now / SAVE)):
            self.at(k * SAVE, self._save)
        while self.events:
            now, _, what = heapq.heappop(self.events)
            what(now)
        self.meter.record_phase(A, "waiting", self.now)

    def _beat(self, clock: PhaseClock, stretch: Stretch, moment: float) -> None:
        step = stretch.step + int((moment - stretch.begin) / PACE + 1e-6) * stretch.moving
        if step > stretch.step * stretch.moving:  # until it takes one, a node tells of the latest
            self.told = stretch.round, step
        at, told = self.told, clock.beat(moment)
        away = any(begin <= moment < end for begin, end in self.outages)
        answered = not away and self.rng.random() > LOSS
        clock.heard(answered)
        if answered:

            def arrives(now: float) -> None:
                self.meter.record_phase(A, stretch.phase, now, told)
                self.meter.record_progress(A, *at)

            self.at(moment + self.rng.random() * LATENCY, arrives)

    def _save(self, now: float) -> None:
        self.saved = msgspec.json.encode(self.meter)

    @property
    def truth(self) -> Counter[str]:
        found = Counter[str]()
        for stretch in self.stretches:
            open_ = stretch in self.open and stretch.bucket == "lost"
            found["open" if open_ else stretch.bucket] += stretch.end - stretch.begin  # type: ignore[assignment]
        return found


@pytest.mark.parametrize("seed", range(8))
def test_each_second_is_in_the_bucket_that_it_belongs_to(seed: int) -> None:
    life = Life(seed, rounds=60)
    life.tell()
    found, truth = life.meter.of_node(A, life.now), life.truth
    assert sum(found.values()) == pytest.approx(life.now, rel=0.001)
    for bucket in BUCKETS:
        assert found.get(bucket, 0.0) == pytest.approx(truth[bucket], rel=0.05, abs=3.0), (bucket, found, truth)
